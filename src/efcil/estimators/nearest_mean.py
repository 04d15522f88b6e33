"""Incremental nearest class mean with cosine similarity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from efcil.core.nearest_mean import cosine_scores
from efcil.estimators.base import IncrementalEstimator
from efcil.estimators.sums import FeatureSums


class NearestMeanClassifier(IncrementalEstimator):
    """Nearest class mean by cosine similarity, with incremental updates that do not need old rows.

    It stores weight and mean of each class, and `partial_fit` in any batches gives the means of a single `fit`. Angles
    are measured at the origin, so features should be centered (``StandardScaler``) or non-negative, as after a ReLU.
    Unlike scikit-learn's ``NearestCentroid`` it ignores the norm of features.

    There is no `predict_proba`: cosine similarities are not probabilities, and a temperature would have to be fitted on
    held-out rows, as ``CalibratedClassifierCV`` does.

    Attributes
    ----------
    classes_ : array (n_classes,)
        Labels, sorted.
    class_count_ : array (n_classes,)
        Sum of the sample weights of each class.
    means_ : array (n_classes, n_features)
        Weighted means; zero for classes without rows.
    n_features_in_, feature_names_in_
        As in scikit-learn.

    Examples
    --------
    >>> from efcil import NearestMeanClassifier
    >>> model = NearestMeanClassifier().partial_fit([[1, 0], [3, 0]], ["east", "east"]).partial_fit([[0, 9]], ["north"])
    >>> model.means_.tolist(), model.predict([[5, 1], [1, 5]]).tolist()
    ([[2.0, 0.0], [0.0, 9.0]], ['east', 'north'])
    """

    _scatter = False

    means_: NDArray[np.float64]

    def _solved(self, sums: FeatureSums) -> Mapping[str, Any]:
        return {"means_": sums.mean.numpy().copy()}

    def _scores(self, rows: NDArray[Any]) -> NDArray[np.float64]:
        contiguous = np.array(
            rows, dtype=np.float64, order="C"
        )  # torch supports neither negative strides nor read-only memory
        return cosine_scores(torch.from_numpy(contiguous), torch.tensor(self.means_)).numpy()
