"""Exemplar-free class-incremental learning: train image classifiers on new classes without images of old ones."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from efcil.classifiers import register_classifier
    from efcil.classifiers.dual_stream import DualStreamRidge
    from efcil.classifiers.gaussian import RidgeAndGaussian
    from efcil.classifiers.learner_head import LearnerHead
    from efcil.classifiers.mahalanobis import Mahalanobis
    from efcil.classifiers.nearest_mean import NearestMean
    from efcil.classifiers.random_features import RandomFeatureRidge
    from efcil.classifiers.ridge import Ridge
    from efcil.data import register_dataset
    from efcil.estimators import NearestMeanClassifier, RidgeReconstructionClassifier
    from efcil.experiment.api import compare, run
    from efcil.learners import register_learner
    from efcil.methods import register_method, register_presets
    from efcil.models import register_backbone
    from efcil.product import IncrementalClassifier
    from efcil.results import Result, Results
    from efcil.session import PASS, Finetune, FirstTask, Joint, LearnerConfig, LwF, Method, PseudoReplay
    from efcil.shift import register_shift
    from efcil.shift.adc import AdversarialDrift
    from efcil.shift.dual_projection import DualProjection, TaskShift
    from efcil.shift.ldc import LearnedMap
    from efcil.shift.sdc import KernelDrift
    from efcil.tasks import TaskStream

__version__ = "0.1.0"
__all__ = [
    "PASS",
    "AdversarialDrift",
    "DualProjection",
    "DualStreamRidge",
    "Finetune",
    "FirstTask",
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
    "PseudoReplay",
    "RandomFeatureRidge",
    "Result",
    "Results",
    "Ridge",
    "RidgeAndGaussian",
    "RidgeReconstructionClassifier",
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

_MODULES = {
    "AdversarialDrift": "shift.adc",
    "DualProjection": "shift.dual_projection",
    "DualStreamRidge": "classifiers.dual_stream",
    "Finetune": "session",
    "FirstTask": "session",
    "IncrementalClassifier": "product",
    "Joint": "session",
    "KernelDrift": "shift.sdc",
    "LearnedMap": "shift.ldc",
    "LearnerConfig": "session",
    "LearnerHead": "classifiers.learner_head",
    "LwF": "session",
    "Mahalanobis": "classifiers.mahalanobis",
    "Method": "session",
    "NearestMean": "classifiers.nearest_mean",
    "NearestMeanClassifier": "estimators",
    "PASS": "session",  # nosec B105 # a method, no password
    "PseudoReplay": "session",
    "RandomFeatureRidge": "classifiers.random_features",
    "Result": "results",
    "Results": "results",
    "Ridge": "classifiers.ridge",
    "RidgeAndGaussian": "classifiers.gaussian",
    "RidgeReconstructionClassifier": "estimators",
    "TaskShift": "shift.dual_projection",
    "TaskStream": "tasks",
    "compare": "experiment.api",
    "register_backbone": "models",
    "register_classifier": "classifiers",
    "register_dataset": "data",
    "register_learner": "learners",
    "register_method": "methods",
    "register_presets": "methods",
    "register_shift": "shift",
    "run": "experiment.api",
}


def __getattr__(name: str) -> Any:
    """Import public names lazily, so that `import efcil` is fast."""
    if name in _MODULES:
        return getattr(import_module(f"efcil.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'efcil' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
