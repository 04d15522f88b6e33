"""Tiny-ImageNet in its original layout: 200 classes of ImageNet, 500 + 50 images of 64 x 64 each.

    tiny-imagenet-200/wnids.txt                      the classes; words.txt has their names
                      train/<wnid>/images/*.JPEG
                      val/images/*.JPEG              with val/val_annotations.txt, or rearranged: val/<wnid>/[images/]
                      test/                          without labels, not used

Labels follow the sorted wnids, as in torchvision's ImageFolder.
"""

from __future__ import annotations

import os
from pathlib import Path

from efcil.data.cache import GivenSplit, Tree, loader
from efcil.data.dataset import Official, format_list
from efcil.data.layout import add_images, add_part, find_folder, folders, is_image, lines, read_errors
from efcil.errors import DataError
from efcil.files import StrPath

NAME = "tiny-imagenet"
OFFICIAL = Official(200, 100_000, 10_000, train_each=500, test_each=50)

_AGAIN = "unpack tiny-imagenet-200.zip again"


def scan(directory: StrPath) -> Tree:
    """Find the images and their labels."""
    with read_errors(NAME):
        root = find_folder(NAME, directory, "train/ and val/", ["tiny-imagenet-200"], lambda f: (f / "train").is_dir())
        if not (root / "val").is_dir():
            raise DataError(f"{NAME}: {root} has train/ but no val/ with the test images; {_AGAIN}")
        tree = Tree(root, _classes(root), split=GivenSplit(test="val", key=NAME), official=OFFICIAL)
        add_part(NAME, tree, "train", "train")
        if _rearranged(root):
            add_part(NAME, tree, "val", "test")
        else:
            _add_annotated(tree)
    return tree


load = loader(NAME, scan, 64)


def _classes(root: Path) -> tuple[str, ...]:
    class_folders = folders(root / "train")
    if not class_folders:
        raise DataError(f"{NAME}: {root / 'train'} has no class folders; {_AGAIN}")
    listing = root / "wnids.txt"  # missing in some copies
    return tuple(sorted(lines(listing))) if listing.is_file() else tuple(class_folders)


def _rearranged(root: Path) -> bool:
    """Return whether val/ has class folders instead of the images/ of the official layout."""
    images = root / "val" / "images"
    if images.is_dir() and any(is_image(name) for name in os.listdir(images)):
        return False
    if not any(folder != "images" for folder in folders(root / "val")):
        raise DataError(f"{NAME}: {root / 'val'} has neither images/ with images nor class folders; {_AGAIN}")
    return True


def _add_annotated(tree: Tree) -> None:
    path = tree.root / "val" / "val_annotations.txt"
    if not path.is_file():
        raise DataError(f"{NAME}: {path} with the class of each image in val/images is missing; {_AGAIN}")
    classes = {name: label for label, name in enumerate(tree.class_names)}
    labels: dict[str, int] = {}
    for number, line in enumerate(lines(path), 1):
        words = line.split()
        if len(words) < 2 or words[1] not in classes:
            what = f"'{' '.join(words[:2])}' is not an image with one of the {len(classes)} classes"
            raise DataError(f"{NAME}: {path}, line {number}: {what}; {_AGAIN}")
        labels[words[0]] = classes[words[1]]
    add_images(tree, "val/images", "test", labels)
    existing = {os.path.basename(file.name) for file in tree.files if file.side == "test"}
    if missing := sorted(labels.keys() - existing):
        raise DataError(
            f"{NAME}: {len(missing)} images of {path} are not in val/images: {format_list(missing)}; {_AGAIN}"
        )
