"""A model that people keep teaching: learn, predict, save; the pictures it learned from are gone."""

from efcil.model.classifier import IncrementalClassifier
from efcil.model.progress import Progress

__all__ = ["IncrementalClassifier", "Progress"]
