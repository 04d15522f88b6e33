"""ImageNet-1k (ILSVRC 2012) as class folders: train/<wnid>/*.JPEG and val/<wnid>/*.JPEG.

Images are stored as center crops with short side `size`; training crops 224 from 256. Labels follow the sorted wnids,
as in torchvision's ImageFolder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from efcil.data.cache import GivenSplit, Tree, loader
from efcil.data.dataset import Official
from efcil.data.layout import add_part, find_folder, folders, is_image, read_errors
from efcil.errors import DataError
from efcil.files import StrPath

NAME = "imagenet1k"
OFFICIAL = Official(1000, 1_281_167, 50_000, test_each=50)

_INNER = ("ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "imagenet")  # Kaggle's archive and a common name
_VALPREP = "https://raw.githubusercontent.com/soumith/imagenetloader.torch/master/valprep.sh"


def scan(directory: StrPath) -> Tree:
    """Find the images and their labels."""
    with read_errors(NAME):
        root = parts(NAME, directory)
        return tree_of(NAME, root, class_folders(root), NAME, OFFICIAL)


load = loader(NAME, scan, 256)


def parts(name: str, directory: StrPath) -> Path:
    """Return the folder with train/ and val/, or raise DataError."""
    root = find_folder(name, directory, "train/ and val/ with class folders", _INNER, lambda f: (f / "train").is_dir())
    if not (root / "val").is_dir():
        raise DataError(f"{name}: {root} has train/ but no val/ with the test images; extract them to val/<wnid>/")
    for part in ("train", "val"):
        if folders(root / part):
            continue
        loose = os.listdir(root / part)
        images, archives = (sum(map(test, loose)) for test in (is_image, lambda n: n.endswith(".tar")))
        if images and part == "val":
            raise DataError(
                f"{name}: {root / part} has {images:,} images but no class folders; "
                f"sort them into val/<wnid>/: run {_VALPREP} inside val/"
            )
        what = f"{archives:,} archives" if archives else f"{images:,} images" if images else "nothing"
        raise DataError(
            f"{name}: {root / part} has {what} but no class folders; extract each class into {part}/<wnid>/"
        )
    return root


def class_folders(root: Path) -> list[str]:
    """Return the classes with a folder in train/ or val/."""
    return sorted({*folders(root / "train"), *folders(root / "val")})


def tree_of(name: str, root: Path, classes: Sequence[str], key: str, official: Official) -> Tree:
    """Collect the images of the given classes from train/ and val/."""
    tree = Tree(root, tuple(sorted(classes)), split=GivenSplit(test="val", key=key), official=official)
    add_part(name, tree, "train", "train")
    add_part(name, tree, "val", "test")
    return tree
