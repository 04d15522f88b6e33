"""ImageNet-R (Hendrycks et al., ICCV 2021): renditions of 200 classes of ImageNet, in either of two layouts.

    imagenet-r/<wnid>/*.jpg                    as released, split automatically
    train/<wnid>/*.jpg, test/<wnid>/*          with a split, as LAMDA-PILOT gives it (24,000 + 6,000 images)

Labels follow the sorted wnids. Files beside the class folders (README.txt) are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from efcil.data import folder
from efcil.data.cache import GivenSplit, Tree, load_decoded
from efcil.data.dataset import DataSet, Official, format_list
from efcil.data.layout import find_folder, folders, read_errors
from efcil.errors import DataError
from efcil.files import StrPath

NAME = "imagenet-r"
OFFICIAL = Official(200, 24_000, 6_000)  # of the split of LAMDA-PILOT

_WNID = re.compile(r"n\d{8}")


def make_loader(name: str, official: Official) -> Callable[..., DataSet]:
    """Return the `load` function of a set of wnid folders with or without a split."""

    def load(
        directory: StrPath,
        *,
        size: int = 256,
        test_share: float = 0.2,
        seed: int = 0,
        skip_bad: bool = False,
        lazy: bool | None = None,
        keep_aspect: bool | None = None,
        progress: Callable[[int, int | None], None] | None = None,
    ) -> DataSet:
        """Load the set; a share `test_share` of each class becomes test images where there is no test/ folder."""
        tree = scan(name, official, directory, test_share, seed)
        return load_decoded(
            tree, name, size=size, skip_bad=skip_bad, lazy=lazy, keep_aspect=keep_aspect, progress=progress
        )

    return load


def scan(name: str, official: Official, directory: StrPath, test_share: float, seed: int) -> Tree:
    """Find the images and their labels."""
    with read_errors(name):
        root = find_folder(name, directory, "folders of wnids, or train/ and test/", [name], _is_it)
    tree = folder.scan(root, test_share=test_share, seed=seed)
    if odd := [own for own in tree.class_names if not _WNID.fullmatch(own)]:
        raise DataError(f"{name}: {root} has folders that are no wnids such as n01443537: {format_list(odd)}")
    if isinstance(tree.split, GivenSplit):
        tree.official = official
    elif len(tree.class_names) != official.classes:
        tree.notes.append(f"{len(tree.class_names)} classes, the official {name} has {official.classes}")
    return tree


def _is_it(root: Path) -> bool:
    inside = folders(root)
    return "train" in inside or any(_WNID.fullmatch(own) for own in inside)


load = make_loader(NAME, OFFICIAL)
