"""Example plug-in: a data set, `efcil run dpcr stripes --tasks 2` after installation with these lines.

    [project.entry-points."efcil.datasets"]
    stripes = "dataset:STRIPES"

In a script or notebook, `efcil.register_dataset(STRIPES)` has the same effect.
"""

import numpy as np

from efcil.data import DatasetSpec
from efcil.data.dataset import DataSet, ImageSet


def stripes():
    """Return four classes of stripes that differ in width and orientation."""
    parts = []
    for seed, count in ((0, 40), (1, 10)):
        labels = np.repeat(np.arange(4), count)
        wave = np.sin(np.arange(16)[None] * (0.8 + labels[:, None] % 2))[:, None, :].repeat(16, 1)
        wave = np.where(labels[:, None, None] < 2, wave, wave.transpose(0, 2, 1))
        noise = np.random.default_rng(seed).normal(0, 20, wave.shape)
        parts.append(ImageSet((128 + 90 * wave + noise).clip(0, 255).astype(np.uint8)[:, None], labels))
    return DataSet("stripes", ("thin", "wide", "thin lying", "wide lying"), *parts, mean=(0.5,), std=(0.25,))


STRIPES = DatasetSpec("stripes", "synthetic stripes, 4 classes", "MIT", "this example", loader=stripes)
