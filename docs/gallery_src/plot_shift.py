"""
How features of old classes move
================================

A small network learns five digits, then the other five. Stored means of the first five no longer fit the features that
these digits have afterwards; shifted means do better. Features are shown in their first two principal components.
"""

import torch
from matplotlib import pyplot as plt

import efcil
from efcil.data import digits

torch.set_num_threads(1)
data = digits.load()
stream = efcil.TaskStream.from_dataset(data, tasks=2, order="identity")
method = efcil.Method(
    learner=efcil.LwF(backbone="resnet10", width=8, epochs=8), shift="dual-projection", classifier="ncm"
)


def means(stats):
    """Return the means of the first five classes."""
    return stats.mean[:5].clone()


first, second = stream
method.learn(first)
stored = means(method.trajectory.stats(method.name))
method.learn(second)
shifted = means(method.trajectory.stats(method.name))

# %%
# The true means can be computed here because the digits of the first task are still at hand.

old = data.train.labels < 5
mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (data.mean, data.std))
pixels = (torch.as_tensor(data.train.images[old]).float() / 255 - mean) / std
backbone = method.trajectory.learner.backbone.eval()
with torch.no_grad():
    features = backbone(pixels).double()
labels = torch.as_tensor(data.train.labels[old])
true = torch.stack([features[labels == c].mean(0) for c in range(5)])

center = features.mean(0)
axes_of_pca = torch.linalg.svd(features - center, full_matrices=False).Vh[:2].T
figure, axes = plt.subplots(figsize=(6, 4.2), layout="constrained")
for c in range(5):
    x, y = ((features[labels == c] - center) @ axes_of_pca).T
    axes.scatter(x, y, s=6, alpha=0.3, color=f"C{c}", label=f"digit {c}")
for name, values, marker in (("stored", stored, "x"), ("shifted", shifted, "P"), ("true", true, "o")):
    x, y = ((values - center) @ axes_of_pca).T
    face = {"facecolor": "none", "edgecolor": "black"} if marker == "o" else {"color": "black"}
    axes.scatter(x, y, s=60, marker=marker, label=f"{name} mean", **face)
axes.legend(fontsize=8)

print("distance to the true means, stored ", (stored - true).norm(dim=1).mean().round(decimals=2).item())
print("distance to the true means, shifted", (shifted - true).norm(dim=1).mean().round(decimals=2).item())
