"""Exemplar-free class-incremental learning: models that learn new classes while the old images are gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from efcil.estimators import NearestMeanClassifier, RidgeReconstructionClassifier
    from efcil.product import IncrementalClassifier

__version__ = "0.1.0"
__all__ = ["IncrementalClassifier", "NearestMeanClassifier", "RidgeReconstructionClassifier", "__version__"]


def __getattr__(name: str) -> Any:
    """Import what is heavy when it is asked for: `import efcil` stays instant."""
    if name == "IncrementalClassifier":
        from efcil.product import IncrementalClassifier

        return IncrementalClassifier
    if name in ("NearestMeanClassifier", "RidgeReconstructionClassifier"):
        from efcil import estimators

        return getattr(estimators, name)
    raise AttributeError(f"module 'efcil' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
