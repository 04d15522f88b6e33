"""CUB-200-2011 (Caltech-UCSD Birds): 200 classes, 5,994 + 5,794 images, in either of two layouts.

    CUB_200_2011/images/<class>/*.jpg      with images.txt, image_class_labels.txt, train_test_split.txt, classes.txt
    train/<class>/*.jpg, test/<class>/*    common rearrangement; val/ is used as test/

Labels follow the official class numbers, which equal the order of the sorted folders (001.Black_footed_Albatross).
"""

from __future__ import annotations

import os
from pathlib import Path

from efcil.data.cache import File, GivenSplit, Tree, loader
from efcil.data.dataset import Official, format_list
from efcil.data.layout import add_part, find_folder, folders, lines, read_errors
from efcil.errors import DataError
from efcil.files import StrPath

NAME = "cub200"
OFFICIAL = Official(200, 5_994, 5_794)

_LISTS = ("images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt")
_AGAIN = "unpack CUB_200_2011.tgz again"


def scan(directory: StrPath) -> Tree:
    """Find the images and their labels."""
    with read_errors(NAME):
        root = find_folder(NAME, directory, "images.txt and images/, or train/ and test/", ["CUB_200_2011"], _is_it)
        return _scan_parts(root) if (root / "train").is_dir() else _scan_official(root)


load = loader(NAME, scan, 256)


def _is_it(folder: Path) -> bool:
    return (folder / "train").is_dir() or any((folder / name).is_file() for name in _LISTS)


def _scan_parts(root: Path) -> Tree:
    test = next((name for name in ("test", "val") if (root / name).is_dir()), None)
    if test is None:
        raise DataError(f"{NAME}: {root} has train/ but neither test/ nor val/; add the test images")
    classes = sorted({*folders(root / "train"), *folders(root / test)})
    tree = Tree(root, tuple(classes), split=GivenSplit(test=test, key=NAME), official=OFFICIAL)
    add_part(NAME, tree, "train", "train")
    add_part(NAME, tree, test, "test")
    return tree


def _scan_official(root: Path) -> Tree:
    if lacking := [name for name in (*_LISTS, "images") if not (root / name).exists()]:
        raise DataError(f"{NAME}: {root} lacks {', '.join(lacking)}; {_AGAIN}")
    images, labels, sides, classes = (_table(root / name) for name in _LISTS)
    for path, table in (("image_class_labels.txt", labels), ("train_test_split.txt", sides)):
        if odd := sorted(images.keys() ^ table.keys()):
            raise DataError(f"{NAME}: {root / path} and images.txt differ in image {format_list(odd)}; {_AGAIN}")
    numbers = sorted(classes, key=int)
    tree = Tree(root, tuple(classes[n] for n in numbers), split=GivenSplit(key=NAME), official=OFFICIAL)
    label_of = {number: label for label, number in enumerate(numbers)}
    missing = []
    for number, name in images.items():
        if labels[number] not in label_of or sides[number] not in ("0", "1"):
            raise DataError(
                f"{NAME}: image {number} has class '{labels[number]}' and side '{sides[number]}', "
                f"not one of the {len(label_of)} classes of classes.txt and 0 or 1; {_AGAIN}"
            )
        if "\0" in name or name.startswith("/") or ".." in name.split("/"):
            raise DataError(f"{NAME}: image {number} is {name[:60]!r}, not a file in images/; {_AGAIN}")
        try:
            status = os.stat(root / "images" / name)
        except FileNotFoundError:
            missing.append(name)
            continue
        side = "train" if sides[number] == "1" else "test"
        tree.files.append(File(f"images/{name}", label_of[labels[number]], status.st_size, status.st_mtime_ns, side))
    if missing:
        raise DataError(
            f"{NAME}: {len(missing)} images of images.txt are not in {root / 'images'}: "
            f"{format_list(missing)}; {_AGAIN}"
        )
    present = {(file.label, file.side) for file in tree.files}
    for label, name in enumerate(tree.class_names):
        for side in ("train", "test"):
            if (label, side) not in present:
                raise DataError(f"{NAME}: class '{name}' has no {side} images in the lists of {root}; {_AGAIN}")
    return tree


def _table(path: Path) -> dict[str, str]:
    """Read lines with a number and a value."""
    table = {}
    for count, line in enumerate(lines(path), 1):
        number, _, value = line.partition(" ")
        if not (number.isascii() and number.isdigit() and len(number) < 10) or not value:
            raise DataError(f"{NAME}: {path}, line {count}: '{line[:60]}' is not a number and a value; {_AGAIN}")
        table[number] = value.strip()
    return table
