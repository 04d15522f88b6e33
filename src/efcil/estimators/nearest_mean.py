"""The nearest class mean by cosine, for plain features."""

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
    """The class whose mean has the smallest angle to the row; it can be taught further without the old rows.

    It keeps weight and mean of each class, and `partial_fit` in any batches gives the means of one `fit` on everything.
    The angle is seen from zero, so features should lie around it (``StandardScaler``) or, as behind a ReLU, tell their
    class by direction. It differs from scikit-learn's ``NearestCentroid`` in that the lengths do not matter.

    There is no `predict_proba`: cosines say which class is nearest, not how probable it is, and a temperature that made
    probabilities of them would have to be fitted on rows kept for it. ``CalibratedClassifierCV`` does just that.

    Attributes
    ----------
    classes_ : array (n_classes,)
        Labels, sorted.
    class_count_ : array (n_classes,)
        Sum of the sample weights of each class.
    means_ : array (n_classes, n_features)
        Weighted means; zero for a class without a row.
    n_features_in_, feature_names_in_
        As in all of scikit-learn.

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
        own = np.array(rows, dtype=np.float64, order="C")  # torch takes neither negative strides nor read-only memory
        return cosine_scores(torch.from_numpy(own), torch.tensor(self.means_)).numpy()
