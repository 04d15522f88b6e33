"""Verify a copy of a data set: decode every image and compare the counts with the official ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from efcil import data as datasets
from efcil.config import Options
from efcil.data.cache import Tree, home, unreadable
from efcil.errors import DataError

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Findings:
    """Result of a verification: summary line, problems and notes."""

    summary: str
    problems: list[str]
    notes: list[str]


def verify(name: str, directory: Path | None, options: Options, progress: datasets.Progress | None = None) -> Findings:
    """Decode every image of a data set; raise DataError if it cannot be scanned."""
    spec = datasets.find(name)
    name = spec.name
    datasets.check_directory(spec, directory)
    if isinstance(options, datasets.FilesOptions) and spec.loader is None:
        chosen = options.model_dump(exclude={"short_side", "train_short_side", "skip_bad", "lazy", "keep_aspect"})
        tree: Tree = datasets.module(name).scan(directory, **chosen)
        return _of_tree(name, tree, options.skip_bad, progress)
    data = datasets.load(name, directory, options, progress)
    train, test = (np.bincount(part.labels, minlength=len(data.class_names)) for part in (data.train, data.test))
    official = getattr(datasets.module(name), "OFFICIAL", None) if spec.loader is None else None
    problems = official.differences(data.class_names, train, test) if official is not None else []
    return Findings(_summary(name, train, test, official), problems, list(data.notes))


def _of_tree(name: str, tree: Tree, skip_bad: bool, progress: Any) -> Findings:
    bad = unreadable(tree, progress=progress)
    unusable = [*tree.strays, *bad.values()]
    problems, notes = ([], [*tree.notes, *unusable]) if skip_bad else (unusable, tree.notes)
    good = [file for file in tree.files if file.name not in bad]
    try:
        tree.split.check(tree, good)
        sides = tree.split.split_of(tree, good, home(tree))
    except DataError as error:
        return Findings("", [*problems, str(error)], notes)
    labels = {side: [file.label for file in good if sides[file.name] == side] for side in ("train", "test")}
    train, test = (np.bincount(labels[side], minlength=len(tree.class_names)) for side in ("train", "test"))
    if tree.official is not None:
        problems = [*problems, *tree.official.differences(tree.class_names, train, test)]
    return Findings(_summary(name, train, test, tree.official), problems, notes)


def _summary(name: str, train: Counts, test: Counts, official: object | None) -> str:
    counts = f"{len(train):,} classes, {train.sum():,} training and {test.sum():,} test images"
    end = ", as in the official set" if official is not None else ""
    return f"{name}: {counts} ({_each(train)} and {_each(test)} per class), all readable{end}"


def _each(counts: Sequence[int] | Counts) -> str:
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low} to {high}"
