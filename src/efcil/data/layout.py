"""What the loaders of official sets of image files share: find their folders, collect them, tell what is wrong."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from efcil.data import find
from efcil.data.cache import IGNORED, SUFFIXES, File, Tree
from efcil.data.dataset import format_list
from efcil.errors import DataError
from efcil.files import StrPath


def find_folder(
    name: str, directory: StrPath, wanted: str, inner: Sequence[str], shows: Callable[[Path], bool]
) -> Path:
    """Return the folder of a set: `directory`, or the one inside it under a name that the set is unpacked to.

    Args:
        name: of the data set.
        directory: what the user gave.
        wanted: what the folder holds, in words, for the message.
        inner: where it may lie inside `directory`.
        shows: whether a folder is it, complete or not.
    """
    directory = Path(directory)
    remedy = f"unpack it there or give the folder it lies in with --data; to get it: {find(name).url}"
    if not directory.is_dir():
        what = "is no folder" if directory.exists() else "does not exist"
        raise DataError(f"{name}: {directory} {what}; {remedy}")
    for folder in (directory, *(directory / path for path in inner)):
        if folder.is_dir() and shows(folder):
            return Path(os.path.realpath(folder))
    here = sorted(path.name + ("/" if path.is_dir() else "") for path in directory.iterdir())
    raise DataError(f"{name}: looked for {wanted} in {directory}, found {format_list(here) or 'nothing'}; {remedy}")


@contextlib.contextmanager
def read_errors(name: str) -> Iterator[None]:
    """Tell what cannot be read as a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{name}: {error.filename} cannot be read: {error.strerror}; make it readable") from error


def lines(path: Path) -> list[str]:
    """Read the lines of a text file that hold anything."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


def folders(place: Path) -> list[str]:
    """Name the folders in a place, sorted as torchvision's ImageFolder sorts classes."""
    with os.scandir(place) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not _ignored(e.name))


def is_image(name: str) -> bool:
    """Tell an image by its suffix."""
    return os.path.splitext(name)[1].lower() in SUFFIXES


def add_part(name: str, tree: Tree, part: str, side: str) -> None:
    """Add the class folders of a part to the tree, for its classes; folders of other classes are left aside."""
    there = set(folders(tree.root / part))
    if missing := [c for c in tree.class_names if c not in there]:
        raise DataError(
            f"{name}: {len(missing)} of {len(tree.class_names)} classes have no folder in {tree.root / part}: "
            f"{format_list(missing)}; add their images, or remove these classes from the other part and from the list"
        )
    for label, folder in enumerate(tree.class_names):
        place = f"{part}/{folder}"
        inner = f"{place}/images"  # the level that Tiny-ImageNet has
        add_images(tree, inner if (tree.root / inner).is_dir() else place, side, label)


def add_images(tree: Tree, place: str, side: str, labels: Mapping[str, int] | int) -> None:
    """Add the images in a folder to the tree, all with one label or each with that of its name."""
    with os.scandir(tree.root / place) as entries:
        inside = sorted(entries, key=lambda entry: entry.name)
    for entry in inside:
        path = f"{place}/{entry.name}"
        if _ignored(entry.name) or entry.name.endswith(".txt"):  # annotations lie beside the images
            continue
        if not is_image(entry.name):
            tree.strays.append(f"{path} is not an image")
        elif not entry.is_file():
            tree.strays.append(f"{path} is a link to nothing or not a file")
        elif (label := labels if isinstance(labels, int) else labels.get(entry.name)) is None:
            tree.strays.append(f"{path} has no label")
        else:
            status = entry.stat()
            tree.files.append(File(path, label, status.st_size, status.st_mtime_ns, side))


def _ignored(name: str) -> bool:
    return name.startswith(".") or name.casefold() in IGNORED
