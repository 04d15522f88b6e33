"""Incrementally trained image classifiers: learn, predict, save, without storing training images."""

from efcil.product.classifier import IncrementalClassifier
from efcil.product.progress import Progress

__all__ = ["IncrementalClassifier", "Progress"]
