"""How class statistics become scores: one short file per idea."""

from __future__ import annotations

from efcil.classifiers.base import Classifier
from efcil.classifiers.dual_stream import DualStreamRidge
from efcil.classifiers.exemplar_means import ExemplarMeans
from efcil.classifiers.gaussian import Gaussian, RidgeAndGaussian
from efcil.classifiers.learner_head import BoostedHead, CompressedHead, LearnerHead, UnrotatedHead
from efcil.classifiers.mahalanobis import Mahalanobis
from efcil.classifiers.nearest_mean import NearestMean
from efcil.classifiers.random_features import RandomFeatureRidge
from efcil.classifiers.ridge import Ridge

__all__ = ["CLASSIFIERS", "Classifier"]

CLASSIFIERS: dict[str, type[Classifier]] = {
    "ncm": NearestMean,
    "ridge": Ridge,
    "gaussian": Gaussian,
    "ridge-gaussian": RidgeAndGaussian,
    "mahalanobis": Mahalanobis,
    "random-features": RandomFeatureRidge,
    "dual-stream": DualStreamRidge,
    "head": LearnerHead,
    "unrotated-head": UnrotatedHead,
    "compressed-head": CompressedHead,
    "boosted-head": BoostedHead,
    "exemplar-means": ExemplarMeans,
}
