"""Classifiers of plain feature vectors with scikit-learn's interface: what the methods solve, without the network."""

from efcil.estimators.nearest_mean import NearestMeanClassifier
from efcil.estimators.ridge import RidgeReconstructionClassifier

__all__ = ["NearestMeanClassifier", "RidgeReconstructionClassifier"]
