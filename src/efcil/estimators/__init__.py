"""scikit-learn estimators for precomputed features: the incremental classifiers of the methods, without a network."""

from efcil.estimators.nearest_mean import NearestMeanClassifier
from efcil.estimators.ridge import RidgeReconstructionClassifier

__all__ = ["NearestMeanClassifier", "RidgeReconstructionClassifier"]
