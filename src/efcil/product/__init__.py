"""A model that people keep teaching: learn, predict, save; the pictures it learned from are gone."""

from efcil.product.classifier import IncrementalClassifier
from efcil.product.progress import Progress

__all__ = ["IncrementalClassifier", "Progress"]
