"""Exemplar-free class-incremental learning: train image classifiers on new classes without images of old ones."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from efcil.classifiers import register_classifier
    from efcil.data import register_dataset
    from efcil.estimators import NearestMeanClassifier, RidgeReconstructionClassifier
    from efcil.learners import register_learner
    from efcil.methods import Method, register_method, register_presets
    from efcil.models import register_backbone
    from efcil.product import IncrementalClassifier
    from efcil.results import Result, Results
    from efcil.shift import register_shift
    from efcil.tasks import TaskStream

__version__ = "0.1.0"
__all__ = [
    "IncrementalClassifier",
    "Method",
    "NearestMeanClassifier",
    "Result",
    "Results",
    "RidgeReconstructionClassifier",
    "TaskStream",
    "__version__",
    "register_backbone",
    "register_classifier",
    "register_dataset",
    "register_learner",
    "register_method",
    "register_presets",
    "register_shift",
]

_MODULES = {
    "IncrementalClassifier": "product",
    "Method": "methods",
    "NearestMeanClassifier": "estimators",
    "Result": "results",
    "Results": "results",
    "RidgeReconstructionClassifier": "estimators",
    "TaskStream": "tasks",
    "register_backbone": "models",
    "register_classifier": "classifiers",
    "register_dataset": "data",
    "register_learner": "learners",
    "register_method": "methods",
    "register_presets": "methods",
    "register_shift": "shift",
}


def __getattr__(name: str) -> Any:
    """Import public names lazily, so that `import efcil` is fast."""
    if name in _MODULES:
        return getattr(import_module(f"efcil.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'efcil' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
