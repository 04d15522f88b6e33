"""Handwritten digits: real 8 x 8 scans that scikit-learn carries, so nothing is downloaded."""

from __future__ import annotations

import numpy as np

from efcil.data.dataset import DataSet, ImageSet

_TEST_EVERY = 5  # of every five scans of a digit, in the file's order, the last one is for testing


def load() -> DataSet:
    """Load 1,797 gray images of ten classes, four fifths of every class for training.

    The split follows a rule, not a random generator: it is the same everywhere and for every seed.

    >>> data = load()
    >>> data.train.images.shape, data.test.images.shape, data.class_names[3]
    ((1442, 1, 8, 8), (355, 1, 8, 8), '3')
    """
    from sklearn.datasets import load_digits  # half a second: not at import time

    pixels, labels = load_digits(return_X_y=True)
    images = np.rint(pixels.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)  # the scans count 0 .. 16
    labels = labels.astype(np.int64)
    rank = np.empty(len(labels), np.int64)  # how many of its class stand before each image
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
