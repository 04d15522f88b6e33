"""
Teach a classifier in two steps
===============================

Shapes are drawn by a few lines. The model learns circles and squares, then triangles and crosses without images of the
first two. Its backbone is the default: pretrained on photographs and frozen, so only class statistics are learned.
"""

import numpy as np
import torch
from matplotlib import pyplot as plt
from PIL import Image, ImageDraw

import efcil

torch.set_num_threads(1)
rng = np.random.default_rng(0)


def shape(kind, size=96):
    """Return an image of a shape at a random place, size and color."""
    picture = Image.new("RGB", (size, size), tuple(rng.integers(0, 90, 3).tolist()))
    draw, color = ImageDraw.Draw(picture), tuple(rng.integers(140, 256, 3).tolist())
    radius = int(rng.integers(20, 33))
    x, y = rng.integers(radius + 1, size - radius - 1, 2).tolist()
    box = (x - radius, y - radius, x + radius, y + radius)
    if kind == "circle":
        draw.ellipse(box, fill=color)
    elif kind == "square":
        draw.rectangle(box, fill=color)
    elif kind == "triangle":
        draw.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=color)
    else:
        draw.line((x - radius, y, x + radius, y), fill=color, width=12)
        draw.line((x, y - radius, x, y + radius), fill=color, width=12)
    return np.array(picture)


def shapes(kinds, count):
    """Return images and labels."""
    names = [kind for kind in kinds for _ in range(count)]
    return np.stack([shape(name) for name in names]), names


model = efcil.IncrementalClassifier(progress=False, device="cpu")
model.learn(*shapes(["circle", "square"], 15))
model.learn(*shapes(["triangle", "cross"], 15))
model

# %%
# Twelve new images; a wrong answer would be red.

images, truth = shapes(["circle", "square", "triangle", "cross"], 3)
answers = model.predict(images)
figure, panels = plt.subplots(2, 6, figsize=(7, 2.9), layout="constrained")
for axes, image, answer, name in zip(panels.flat, images, answers, truth, strict=True):
    axes.imshow(image)
    axes.set_title(answer, fontsize=9, color="green" if answer == name else "red")
    axes.axis("off")
