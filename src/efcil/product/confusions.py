"""Estimated confusions of a model: the most frequent pairs, and a matrix of the classes that are confused most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from efcil.product.evidence import ENOUGH
from efcil.product.state import ClassRecord

PAIRS = 10
CLASSES = 20  # in a matrix
LEAST = 0.01  # share of the images of a class that is reported


def most_confused(records: Sequence[ClassRecord], shares: Tensor | None) -> list[list[Any]]:
    """Return the most frequent confusions, (class, predicted class, percent of its images), from shares (k, k)."""
    if shares is None:
        return []
    k, known = len(records), torch.tensor([record.images >= ENOUGH for record in records])
    errors = shares.cpu().clone().fill_diagonal_(0) * known[:, None]
    values, places = errors.flatten().topk(min(PAIRS, k * (k - 1)))
    found = zip(values.tolist(), places.tolist(), strict=True)
    return [[records[i // k].name, records[i % k].name, round(100 * v, 1)] for v, i in found if v >= LEAST]


def confusion_matrix(records: Sequence[ClassRecord], shares: Tensor | None) -> dict[str, Any]:
    """Return the matrix of at most `CLASSES` classes, the most confused first, in percent; rows are true classes.

    Classes of fewer than `ENOUGH` images are left out; `estimated` is the number of the others. `unknown` is the reason
    if there is no matrix.
    """
    known = [place for place, record in enumerate(records) if record.images >= ENOUGH]
    if shares is None or len(known) < 2:
        why = "few classes" if len(records) < 2 else "few images" if len(known) < 2 else "not estimated"
        return {"classes": [], "percent": [], "estimated": 0, "unknown": why}
    part = shares.cpu()[known][:, known]
    pairs = (part + part.T).triu(1).flatten()
    most = pairs.topk(min(len(pairs), CLASSES * (CLASSES - 1) // 2 + 1)).indices.tolist()  # of more classes than that
    ends = (end for pair in most for end in divmod(pair, len(known)))
    order = list(dict.fromkeys((*ends, *range(len(known)))))[:CLASSES]
    return {
        "classes": [records[known[place]].name for place in order],
        "percent": [[round(100 * share, 1) for share in row] for row in part[order][:, order].tolist()],
        "estimated": len(known),
        "unknown": None,
    }
