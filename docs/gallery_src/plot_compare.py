"""
Compare methods on one training run
===================================

DPCR, LDC and the nearest class mean share LwF's backbone, so it is trained once. Finetuning, the lower bound, is
trained beside it.
"""

import torch
from matplotlib import pyplot as plt

import efcil

torch.set_num_threads(1)
methods = ["dpcr", "ldc", "lwf-ncm", "finetune"]
results = efcil.compare(methods, "digits", tasks=5, epochs=6, options={"width": 8}, progress=False)
results

# %%
# Accuracy on all classes so far, after each task. In a notebook, `results.plot()` draws such a figure in one call.

figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
for method in results:
    axes.plot(range(2, 11, 2), results[method].accuracy_per_task, marker="o", label=method)
axes.set(xlabel="digits learned", ylabel="accuracy (%)", ylim=(0, 102))
axes.legend()
