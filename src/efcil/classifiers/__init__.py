"""Classifiers, which compute scores from class statistics: one short file each."""

from __future__ import annotations

from efcil.classifiers.base import Classifier
from efcil.classifiers.cross_validated_ridge import CrossValidatedRidge, RandomProjection
from efcil.classifiers.dual_stream import DualStreamRidge
from efcil.classifiers.exemplar_means import ExemplarMeans
from efcil.classifiers.gaussian import Gaussian, RidgeAndGaussian
from efcil.classifiers.learner_head import BoostedHead, CompressedHead, LearnerHead, UnrotatedHead
from efcil.classifiers.mahalanobis import Mahalanobis
from efcil.classifiers.nearest_mean import NearestMean
from efcil.classifiers.random_features import RandomFeatureRidge
from efcil.classifiers.ridge import Ridge
from efcil.classifiers.shared_covariance import SharedCovariance
from efcil.config import check_presets, keys
from efcil.errors import ConfigError, nearest
from efcil.plugins import Registry, subclass_of

__all__ = ["CLASSIFIERS", "Classifier", "register_classifier"]

OWN: dict[str, type[Classifier]] = {
    "ncm": NearestMean,
    "ridge": Ridge,
    "ridge-gcv": CrossValidatedRidge,
    "ranpac": RandomProjection,
    "slda": SharedCovariance,
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


CAPABILITIES = frozenset({"update", "forget", "merge"})


def _check(name: str, kind: type[Classifier]) -> None:
    check_presets(kind, keys(kind.options_type), f"classifier '{name}'")
    if unknown := sorted(set(kind.supports) - CAPABILITIES):
        raise ConfigError(
            f"classifier '{name}' supports {', '.join(map(str, unknown))}: {nearest(str(unknown[0]), CAPABILITIES)}"
        )


CLASSIFIERS: Registry[type[Classifier]] = Registry(
    "classifier", "efcil.classifiers", OWN, subclass_of(Classifier), "a subclass of Classifier", check=_check
)


def register_classifier(name: str, kind: type[Classifier]) -> type[Classifier]:
    """Register a classifier by name, like the entry points `efcil.classifiers`; its attribute `presets` holds preset
    values.

    >>> from efcil import NearestMean
    >>> class EuclideanMean(NearestMean):
    ...     "Distance to the class means, with its sign changed."
    ...
    ...     def logits(self, features):
    ...         return -(features[:, None] - self.means).norm(dim=2)
    >>> register_classifier("euclidean-mean", EuclideanMean).needs
    'mean'
    >>> "euclidean-mean" in CLASSIFIERS  # so that `efcil run lwf+ldc+euclidean-mean digits` works
    True
    >>> CLASSIFIERS.reset()
    """
    CLASSIFIERS.register(name, kind)
    return kind
