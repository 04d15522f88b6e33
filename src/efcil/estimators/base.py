"""Base class of the estimators: input validation and class bookkeeping."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted

from efcil.errors import ConfigError
from efcil.estimators.sums import FeatureSums

try:
    from sklearn.utils.validation import validate_data
except ImportError:  # scikit-learn 1.5

    def validate_data(estimator: Any, X: Any, y: Any = "no_validation", **options: Any) -> Any:
        """Provide scikit-learn 1.6's function on older versions."""
        return estimator._validate_data(X=X, y=y, **options)


FLOATS = (np.float64, np.float32)
FAMILY = {"b": "bool", "i": "number", "u": "number", "f": "number", "U": "string", "S": "bytes", "O": "object"}


class ParameterError(ConfigError, ValueError):
    """Invalid parameter or argument; also a ValueError, as in scikit-learn."""


def union(known: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
    """Return the sorted unique labels; raise ParameterError for mixed numbers and strings, which numpy would convert.

    >>> union(np.array(["cat"]), np.array(["horse", "cat"])).tolist()
    ['cat', 'horse']
    >>> union(np.array([1, 2]), np.array(["1"]))
    Traceback (most recent call last):
    efcil.estimators.base.ParameterError: labels are string ('1'), the classes so far number (1, 2); ...
    """
    if len(known) == 0:
        return np.unique(new)
    families = [FAMILY.get(labels.dtype.kind, labels.dtype.kind) for labels in (known, new)]
    if families[0] != families[1] and set(families) != {"object", "string"}:
        raise ParameterError(
            f"labels are {families[1]} ({_some(new)}), the classes so far {families[0]} ({_some(known)}); "
            f"use labels of one kind"
        )
    return np.union1d(known, new)


def _some(labels: NDArray[Any]) -> str:
    shown = ", ".join(repr(label) for label in labels[:5].tolist())
    return shown + (", ..." if len(labels) > 5 else "")


class IncrementalEstimator(ClassifierMixin, BaseEstimator, ABC):  # type: ignore[misc]
    """Classifier computed from `FeatureSums`, so that the result does not depend on the batches.

    Subclasses compute fitted attributes from sums (`_solved`) and scores from attributes (`_scores`).
    """

    _scatter = True  # whether it needs X'X

    classes_: NDArray[Any]
    class_count_: NDArray[np.float64]
    n_features_in_: int

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit to rows X (n, n_features) and labels y (n,), discarding earlier data.

        `sample_weight` (n,) must be non-negative; a row of weight two counts as two rows.
        """
        rows, labels, weight = self._checked(X, y, sample_weight, first=True)
        classes = np.unique(labels)
        self._take(self._sums_of(rows, labels, weight, classes), classes, announced=False)
        return self

    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Update with further rows of old or new classes; the result equals `fit` on all rows so far.

        Without `classes`, unknown labels become new classes. With `classes`, only these labels are allowed, in this and
        later calls; passing it again adds labels. Classes without rows are in `classes_` but never predicted. A failed
        call leaves the estimator unchanged.
        """
        first = not hasattr(self, "_sums")
        rows, labels, weight = self._checked(X, y, sample_weight, first)
        allowed = np.empty(0) if first else self.classes_
        announced = classes is not None or (not first and self._announced)
        if classes is not None:
            allowed = union(allowed, np.atleast_1d(np.asarray(classes)))
        every = union(allowed, labels)
        if announced and len(every) > len(allowed):
            unknown = np.setdiff1d(every, allowed)
            raise ParameterError(
                f"y has labels {_some(unknown)} that are not in classes ({_some(allowed)}); "
                f"pass `classes` with them to partial_fit, or omit `classes` from the first call on"
            )
        sums = self._sums_of(rows, labels, weight, every)
        if not first:
            sums = self._sums.spread(np.searchsorted(every, self.classes_), len(every)).merge(sums)
        self._take(sums, every, announced)
        return self

    def decision_function(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return class scores (n, n_classes), or for two classes the difference of the second and the first, (n,)."""
        scores = self._scores_of(X)
        return scores[:, 1] - scores[:, 0] if len(self.classes_) == 2 else scores

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the class with the highest score, (n,)."""
        scores = self._scores_of(X)
        return self.classes_[np.where(self.class_count_ > 0, scores, -np.inf).argmax(1)]

    # --- for subclasses -------------------------------------------------------------------------------------------

    @abstractmethod
    def _solved(self, sums: FeatureSums) -> Mapping[str, Any]:
        """Compute the fitted attributes from sums."""

    @abstractmethod
    def _scores(self, rows: NDArray[Any]) -> NDArray[np.float64]:
        """Return scores (n, n_classes) of rows (n, n_features)."""

    def _scores_of(self, X: ArrayLike) -> NDArray[np.float64]:
        check_is_fitted(self, "classes_")
        return self._scores(validate_data(self, X, reset=False, dtype=FLOATS))

    def _checked(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, first: bool
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float64]]:
        rows, labels = validate_data(self, X, y, reset=first, dtype=FLOATS)
        check_classification_targets(labels)
        weight = np.asarray(_check_sample_weight(sample_weight, rows, dtype=np.float64))
        if weight.min() < 0 or not weight.any():
            raise ParameterError(
                f"sample_weight is {weight.min():g} to {weight.max():g}; "
                f"wanted zero or more for each row, and not zero for all"
            )
        return rows, labels, weight

    def _sums_of(
        self, rows: NDArray[Any], labels: NDArray[Any], weight: NDArray[np.float64], classes: NDArray[Any]
    ) -> FeatureSums:
        index = np.searchsorted(classes, labels)
        sums = FeatureSums.from_rows(rows, index, weight, len(classes), self._scatter)
        if not (bool(sums.scatter.isfinite().all()) and bool(sums.mean.isfinite().all())):
            raise ParameterError(
                f"X has values up to {np.abs(rows).max():.3g}, whose squares overflow; scale the features first, "
                f"for example with StandardScaler"
            )
        return sums

    def _take(self, sums: FeatureSums, classes: NDArray[Any], announced: bool) -> None:
        solved = self._solved(sums)  # may fail, so solve before changing attributes
        self.classes_, self._sums, self._announced = classes, sums, announced
        self.class_count_ = sums.count.numpy().copy()
        for name, value in solved.items():
            setattr(self, name, value)
