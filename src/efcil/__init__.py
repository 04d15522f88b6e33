"""Exemplar-free class-incremental learning: train image classifiers on new classes without images of old ones."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from efcil.classifiers import register_classifier
    from efcil.classifiers.cross_validated_ridge import CrossValidatedRidge, RandomProjection
    from efcil.classifiers.dual_stream import DualStreamRidge
    from efcil.classifiers.gaussian import Gaussian, RidgeAndGaussian
    from efcil.classifiers.learner_head import LearnerHead
    from efcil.classifiers.mahalanobis import Mahalanobis
    from efcil.classifiers.nearest_mean import NearestMean
    from efcil.classifiers.random_features import RandomFeatureRidge
    from efcil.classifiers.ridge import Ridge
    from efcil.classifiers.shared_covariance import SharedCovariance
    from efcil.data import register_dataset
    from efcil.estimators import NearestMeanClassifier, RidgeReconstructionClassifier
    from efcil.experiment.api import compare, run
    from efcil.learners import register_learner
    from efcil.methods import register_method, register_presets
    from efcil.models import register_backbone
    from efcil.product import IncrementalClassifier
    from efcil.results import Result, Results
    from efcil.session import (
        PASS,
        AdaptFirst,
        Finetune,
        FirstTask,
        Joint,
        LearnerConfig,
        LwF,
        Method,
        Pretrained,
        PseudoReplay,
    )
    from efcil.shift import register_shift
    from efcil.shift.adc import AdversarialDrift
    from efcil.shift.dual_projection import DualProjection, TaskShift
    from efcil.shift.ldc import LearnedMap
    from efcil.shift.sdc import KernelDrift
    from efcil.tasks import TaskStream

__version__ = "0.2.0"
__all__ = [
    "PASS",
    "AdaptFirst",
    "AdversarialDrift",
    "CrossValidatedRidge",
    "DualProjection",
    "DualStreamRidge",
    "Finetune",
    "FirstTask",
    "Gaussian",
    "IncrementalClassifier",
    "Joint",
    "KernelDrift",
    "LearnedMap",
    "LearnerConfig",
    "LearnerHead",
    "LwF",
    "Mahalanobis",
    "Method",
    "NearestMean",
    "NearestMeanClassifier",
    "Pretrained",
    "PseudoReplay",
    "RandomFeatureRidge",
    "RandomProjection",
    "Result",
    "Results",
    "Ridge",
    "RidgeAndGaussian",
    "RidgeReconstructionClassifier",
    "SharedCovariance",
    "TaskShift",
    "TaskStream",
    "__version__",
    "compare",
    "register_backbone",
    "register_classifier",
    "register_dataset",
    "register_learner",
    "register_method",
    "register_presets",
    "register_shift",
    "run",
]

_PUBLIC = {  # module -> its public names
    "classifiers": ("register_classifier",),
    "classifiers.cross_validated_ridge": ("CrossValidatedRidge", "RandomProjection"),
    "classifiers.dual_stream": ("DualStreamRidge",),
    "classifiers.gaussian": ("Gaussian", "RidgeAndGaussian"),
    "classifiers.learner_head": ("LearnerHead",),
    "classifiers.mahalanobis": ("Mahalanobis",),
    "classifiers.nearest_mean": ("NearestMean",),
    "classifiers.random_features": ("RandomFeatureRidge",),
    "classifiers.ridge": ("Ridge",),
    "classifiers.shared_covariance": ("SharedCovariance",),
    "data": ("register_dataset",),
    "estimators": ("NearestMeanClassifier", "RidgeReconstructionClassifier"),
    "experiment.api": ("compare", "run"),
    "learners": ("register_learner",),
    "methods": ("register_method", "register_presets"),
    "models": ("register_backbone",),
    "product": ("IncrementalClassifier",),
    "results": ("Result", "Results"),
    "session": (
        "AdaptFirst",
        "Finetune",
        "FirstTask",
        "Joint",
        "LearnerConfig",
        "LwF",
        "Method",
        "PASS",
        "Pretrained",
        "PseudoReplay",
    ),
    "shift": ("register_shift",),
    "shift.adc": ("AdversarialDrift",),
    "shift.dual_projection": ("DualProjection", "TaskShift"),
    "shift.ldc": ("LearnedMap",),
    "shift.sdc": ("KernelDrift",),
    "tasks": ("TaskStream",),
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import public names lazily, so that `import efcil` is fast."""
    if name in _MODULES:
        return getattr(import_module(f"efcil.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'efcil' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
