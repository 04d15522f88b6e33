"""Exemplar-free class-incremental learning: models that learn new classes while the old images are gone."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from efcil.estimators import NearestMeanClassifier, RidgeReconstructionClassifier

__version__ = "0.1.0"

# Imported when they are asked for: `import efcil` stays instant, without torch.
_WHERE = {
    "NearestMeanClassifier": "efcil.estimators",
    "RidgeReconstructionClassifier": "efcil.estimators",
}

__all__ = ["NearestMeanClassifier", "RidgeReconstructionClassifier", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'efcil' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
