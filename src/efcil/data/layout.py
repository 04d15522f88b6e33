"""Helpers of the loaders for official image data sets: find folders, collect images, report problems."""

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
    """Return the folder of a data set: `directory` or one of its known subfolders.

    Args:
        name: name of the data set.
        directory: directory given by the user.
        wanted: description of the expected contents, for the message.
        inner: possible subfolders of `directory`.
        shows: predicate for the folder, complete or not.
    """
    directory = Path(directory)
    remedy = f"unpack it there or give its folder with --data; to get it: {find(name).url}"
    if not directory.is_dir():
        what = "is not a folder" if directory.exists() else "does not exist"
        raise DataError(f"{name}: {directory} {what}; {remedy}")
    for folder in (directory, *(directory / path for path in inner)):
        if folder.is_dir() and shows(folder):
            return Path(os.path.realpath(folder))
    entries = sorted(path.name + ("/" if path.is_dir() else "") for path in directory.iterdir())
    raise DataError(f"{name}: looked for {wanted} in {directory}, found {format_list(entries) or 'nothing'}; {remedy}")


@contextlib.contextmanager
def read_errors(name: str) -> Iterator[None]:
    """Convert read errors to DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{name}: cannot read {error.filename}: {error.strerror}; make it readable") from error


def lines(path: Path) -> list[str]:
    """Return the non-empty lines of a text file."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


def folders(place: Path) -> list[str]:
    """Return the subfolders, sorted like the classes of torchvision's ImageFolder."""
    with os.scandir(place) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not _ignored(e.name))


def is_image(name: str) -> bool:
    """Return whether a file name has an image suffix."""
    return os.path.splitext(name)[1].lower() in SUFFIXES


def add_part(name: str, tree: Tree, part: str, side: str) -> None:
    """Add the class folders of a part to the tree; folders of other classes are ignored."""
    existing = set(folders(tree.root / part))
    if missing := [c for c in tree.class_names if c not in existing]:
        raise DataError(
            f"{name}: {len(missing)} of {len(tree.class_names)} classes have no folder in {tree.root / part}: "
            f"{format_list(missing)}; add their images, or remove these classes from the other part and from the list"
        )
    for label, folder in enumerate(tree.class_names):
        place = f"{part}/{folder}"
        inner = f"{place}/images"  # extra level of Tiny-ImageNet
        add_images(tree, inner if (tree.root / inner).is_dir() else place, side, label)


def add_images(tree: Tree, place: str, side: str, labels: Mapping[str, int] | int) -> None:
    """Add the images of a folder to the tree, with one label for all or a label by file name."""
    with os.scandir(tree.root / place) as entries:
        inside = sorted(entries, key=lambda entry: entry.name)
    for entry in inside:
        path = f"{place}/{entry.name}"
        if _ignored(entry.name) or entry.name.endswith(".txt"):  # annotation files
            continue
        if not is_image(entry.name):
            tree.strays.append(f"{path} is not an image")
        elif not entry.is_file():
            tree.strays.append(f"{path} is a broken link or not a file")
        elif (label := labels if isinstance(labels, int) else labels.get(entry.name)) is None:
            tree.strays.append(f"{path} has no label")
        else:
            status = entry.stat()
            tree.files.append(File(path, label, status.st_size, status.st_mtime_ns, side))


def _ignored(name: str) -> bool:
    return name.startswith(".") or name.casefold() in IGNORED
