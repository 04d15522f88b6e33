"""A method and a data set of another package: one object each, and two lines of packaging.

pyproject.toml of that package:

    [project.entry-points."efcil.methods"]
    median-ncm = "my_method:METHOD"
    [project.entry-points."efcil.datasets"]
    stripes = "my_method:STRIPES"

Then `efcil compare median-ncm,dpcr stripes --tasks 2` knows both.
"""

import numpy as np
import torch

from efcil.classifiers import Classifier
from efcil.core.nearest_mean import cosine_scores
from efcil.data import DatasetSpec
from efcil.data.dataset import DataSet, ImageSet
from efcil.methods import Method


class NearestMedian(Classifier):
    """The nearest class median: what a few odd images cannot move."""

    needs = "features"  # of each task, with a frozen backbone: class statistics hold no medians
    supports = frozenset()  # a saved model cannot update, forget or merge classes
    medians = None  # (classes, dim)

    def fit_features(self, features):
        x, labels = features.new(), features.labels
        new = torch.stack([x[labels == c].median(0).values for c in labels.unique()])
        self.medians = new if self.medians is None else torch.cat([self.medians, new])

    def logits(self, features):
        return cosine_scores(features, self.medians)

    def state_dict(self):
        return {"medians": self.medians}

    def load_state_dict(self, state, *stats):
        self.medians = state["medians"]


def stripes():
    """Four classes of stripes, told apart by their width and direction."""
    parts = []
    for seed, count in ((0, 40), (1, 10)):
        labels = np.repeat(np.arange(4), count)
        wave = np.sin(np.arange(16)[None] * (0.8 + labels[:, None] % 2))[:, None, :].repeat(16, 1)
        wave = np.where(labels[:, None, None] < 2, wave, wave.transpose(0, 2, 1))
        noise = np.random.default_rng(seed).normal(0, 20, wave.shape)
        parts.append(ImageSet((128 + 90 * wave + noise).clip(0, 255).astype(np.uint8)[:, None], labels))
    return DataSet("stripes", ("thin", "wide", "thin lying", "wide lying"), *parts, mean=(0.5,), std=(0.25,))


METHOD = Method("median-ncm", "first-task", None, NearestMedian, "Nearest median", "this example", "d")
STRIPES = DatasetSpec("stripes", "synthetic stripes, 4 classes", "MIT", "this example", loader=stripes)
