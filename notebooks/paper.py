# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The paper in five minutes
#
# *Semantic Shift Estimation via Dual-Projection and Classifier Reconstruction for Exemplar-Free Class-Incremental
# Learning* (He et al., ICML 2025) on the built-in handwritten digits: ten classes in five tasks. Equations have the
# numbers of the paper.

# %%
# In Colab the pinned versions are installed; elsewhere what is installed is used.
import sys

if "google.colab" in sys.modules:
    get_ipython().run_line_magic("pip", "install --quiet efcil==0.2.0")

# %%
import efcil

if efcil.__version__ != "0.2.0":
    raise SystemExit(
        f"this notebook is for efcil 0.2.0, and {efcil.__version__} is installed: pip install efcil==0.2.0"
    )

# %% [markdown]
# ## 1. The problem: features of old classes move
#
# Features of two classes, drawn at random. Learning the second class changes the backbone, here by a linear map: the
# features of the first class move, and a learner without images of it cannot see where to.

# %%
import torch

torch.set_num_threads(1)
torch.manual_seed(0)
dim, images = 32, 200
old_class = torch.randn(images, dim, dtype=torch.float64) + 2 * torch.eye(dim, dtype=torch.float64)[0]
new_class = torch.randn(images, dim, dtype=torch.float64) - 2 * torch.eye(dim, dtype=torch.float64)[1]
drift = torch.eye(dim, dtype=torch.float64) + 0.3 * torch.randn(dim, dim, dtype=torch.float64)  # the backbone changes
moved = (old_class.mean(0) - (old_class @ drift).mean(0)).norm()
print(f"the mean of the old class moves by {moved:.2f}, its length is {old_class.mean(0).norm():.2f}")

# %% [markdown]
# ## 2. TSSP: estimate the shift from the images at hand (Eq. 3-5)
#
# $P = (X'X + \epsilon I)^{-1} X'Y$ with the *new* images' features before ($X$) and after ($Y$) the task.

# %%
from efcil.core.class_stats import ClassStats
from efcil.core.projection import task_shift

shift = task_shift(new_class, new_class @ drift)
stats = ClassStats.from_features(old_class, torch.zeros(images, dtype=torch.int64))
shifted = stats.transform(shift)  # mean and Gram matrix: mu P, P' Phi P (Eq. 16, 17)
error = (shifted.mean[0] - (old_class @ drift).mean(0)).norm()
print(f"without images of the old class, its mean is now off by {error:.1e}")

# %% [markdown]
# ## 3. RRCR and CN: a classifier from statistics (Eq. 11-22)
#
# $W = (\sum_c \Phi_c + \gamma I)^{-1} \sum_c N_c \mu_c' y_c$, then columns of length one.

# %%
from efcil.core.ridge import normalize_columns, ridge_weight

both = shifted.merge(ClassStats.from_features(new_class @ drift, torch.ones(images, dtype=torch.int64)))
weight = normalize_columns(ridge_weight(both, ridge=1.0))
right = ((old_class @ drift) @ weight).argmax(1).eq(0).double().mean()
print(f"{100 * right:.0f} % of the old images are recognized, whose features the classifier never saw")

# %% [markdown]
# ## 4. All parts on handwritten digits
#
# One training run; every row is evaluated on it. `rrcr` has no shift, `rrcr+tssp` estimates it, `rrcr+tssp+cn`
# normalizes, `dpcr` also restricts it to the row space of each class (CIP). `lwf-ncm` is the nearest class mean with
# means that were not shifted.

# %%
methods = ["rrcr", "rrcr+tssp", "rrcr+tssp+cn", "dpcr", "lwf-ncm"]
results = efcil.compare(methods, "digits", tasks=5, orders=[1993], epochs=6, options={"width": 8}, progress=False)
results

# %%
for name in ("rrcr", "dpcr"):
    print(f"{name:5} forgets {results[name].forgetting:.0f} points of what it knew")
results.plot()

# %% [markdown]
# With the paper's data, schedule and class orders: `efcil reproduce table1 --data cifar100=DIR`.
