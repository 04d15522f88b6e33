"""Handwritten digits: 8 x 8 scans included in scikit-learn."""

from __future__ import annotations

import numpy as np

from efcil.data.dataset import DataSet, ImageSet

_TEST_EVERY = 5  # every fifth image of a class is a test image


def load() -> DataSet:
    """Load 1,797 gray images of ten classes, four fifths of each class for training.

    The split is deterministic and independent of any seed.

    >>> data = load()
    >>> data.train.images.shape, data.test.images.shape, data.class_names[3]
    ((1442, 1, 8, 8), (355, 1, 8, 8), '3')
    """
    from sklearn.datasets import load_digits  # import takes half a second

    pixels, labels = load_digits(return_X_y=True)
    images = np.rint(pixels.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)  # values are 0 .. 16
    labels = labels.astype(np.int64)
    rank = np.empty(len(labels), np.int64)  # index of each image within its class
    for label in range(10):
        members = np.flatnonzero(labels == label)
        rank[members] = np.arange(len(members))
    test = rank % _TEST_EVERY == _TEST_EVERY - 1
    train = ImageSet(images[~test], labels[~test])
    return DataSet(
        name="digits",
        class_names=tuple("0123456789"),
        train=train,
        test=ImageSet(images[test], labels[test]),
        mean=(float(train.images.mean() / 255),),
        std=(float(train.images.std() / 255),),
    )
