"""
What is forgotten, and when
===========================

The accuracy matrix has the accuracy on task i after task t. Forgetting shows as rows that grow darker to the left.
"""

import torch
from matplotlib import pyplot as plt

import efcil

torch.set_num_threads(1)
short = {"tasks": 5, "epochs": 6, "options": {"width": 8}, "progress": False}
results = efcil.compare(["dpcr", "finetune"], "digits", **short)

figure, panels = plt.subplots(1, 2, figsize=(7, 3.2), layout="constrained")
for axes, method in zip(panels, ("dpcr", "finetune"), strict=True):
    matrix = results[method].accuracy_matrix
    axes.imshow(matrix, cmap="viridis", vmin=0, vmax=100)
    for t in range(5):
        for i in range(t + 1):
            axes.text(
                i, t, f"{matrix[t, i]:.0f}", ha="center", va="center", color="white" if matrix[t, i] < 60 else "black"
            )
    axes.set(
        title=f"{method}: A_f {results[method].final_accuracy:.1f} %", xlabel="task", xticks=range(5), yticks=range(5)
    )
panels[0].set_ylabel("after task")
