"""Folders of images as a data set: `train/<class>/**` with `test/<class>/**`, or `<class>/**` with a recorded split.

The split is stored in the cache with the decoded images (see cache.py):

    <cache>/<folder>-<key>/split-<seed>-<share>.json    side of each image, which never changes
"""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efcil.data.cache import (
    IGNORED,
    NOT_AN_IMAGE,
    SUFFIXES,
    File,
    GivenSplit,
    Progress,
    Tree,
    check_decoding,
    load_decoded,
)
from efcil.data.dataset import DataSet, format_list
from efcil.errors import ConfigError, DataError
from efcil.files import StrPath, read_json, write_json

TRAIN_NAMES = ("train", "training")  # of folders with training images, in any case
TEST_NAMES = ("test", "val", "valid", "validation", "testing")  # of folders with test images; the first found is used
_MAX_PATH = 4096  # characters of a path


def load(
    directory: StrPath,
    *,
    size: int = 64,
    test_share: float = 0.2,
    seed: int = 0,
    workers: int | None = None,
    cache: StrPath | None = None,
    skip_bad: bool = False,
    lazy: bool | None = None,
    keep_aspect: bool | None = None,
    progress: Progress | None = None,
) -> DataSet:
    """Load a tree of class folders as squares of `size` pixels, decoded once and then memory-mapped from the cache.

    With `train/` and `test/` (or `val/`) these folders define the split. Otherwise a fraction `test_share` of each
    class becomes test images, depending on `seed` and the file names. The split is recorded, so that adding images does
    not change it for others. For the other options see `cache.load_decoded`.
    """
    check_decoding(size, workers)
    tree = scan(directory, test_share=test_share, seed=seed)
    name = tree.root.name or "folder"
    return load_decoded(
        tree,
        name,
        size=size,
        workers=workers,
        cache=cache,
        skip_bad=skip_bad,
        lazy=lazy,
        keep_aspect=keep_aspect,
        progress=progress,
    )


def load_parts(train: StrPath, test: StrPath, *, size: int = 64, **options: Any) -> DataSet:
    """Load two folders of class folders, one to learn from and one to test on; the options are those of `load`."""
    check_decoding(size, None)
    for part in (train, test):
        if not os.path.isdir(part):
            raise DataError(f"{os.fspath(part)}: no such directory; give a folder that holds one folder per class")
    parts = [os.path.realpath(part) for part in (train, test)]
    root = Path(os.path.commonpath(parts))
    inside = [os.path.relpath(part, root) for part in parts]
    if "." in inside:
        raise DataError(f"{os.fspath(train)} and {os.fspath(test)} lie in each other; give two folders, or one alone")
    tree = Tree(root, split=GivenSplit(*inside))
    try:
        sides = zip(("train", "test"), inside, strict=True)
        _collect(tree, [(side, part, *_listing(root / part)) for side, part in sides])
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error
    return load_decoded(tree, Path(parts[0]).name or "folder", size=size, **options)


def scan(directory: StrPath, *, test_share: float = 0.2, seed: int = 0, whole: bool = False) -> Tree:
    """List the images of a tree of class folders; with `whole`, each folder is a class, also one called train."""
    if not 0.0 < test_share < 1.0:
        raise ConfigError(f"test_share must lie between 0 and 1, got {test_share}")
    root = Path(directory)
    if not root.exists():
        raise DataError(f"{root}: no such directory; give a folder with one subfolder of images per class")
    if not root.is_dir():
        raise DataError(f"{root}: not a directory; give a folder with one subfolder of images per class")
    root = Path(os.path.realpath(root))
    try:
        folders, loose = _listing(root)
        by_name = {folder.casefold(): folder for folder in folders}
        tests = [by_name[name] for name in TEST_NAMES if name in by_name and not whole]
        trains = [by_name[name] for name in TRAIN_NAMES if name in by_name and not whole]
        if trains and tests:
            return _scan_given(root, trains[0], tests[0], folders, loose)
        if trains and folders == trains:
            raise DataError(
                f"{root} has {folders[0]}/ but neither test/ nor val/; add one of them, or give "
                f"{root / folders[0]} for an automatic split"
            )
        tree = Tree(root, split=_RecordedSplit(seed, test_share))
        _collect(tree, [(None, "", folders, loose)])
        return tree
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error


def _scan_given(root: Path, train: str, test: str, folders: list[str], loose: list[str]) -> Tree:
    tree = Tree(root, split=GivenSplit(train, test))
    if unused := [folder for folder in folders if folder not in (train, test)]:
        tree.notes.append(f"ignored folders beside {train}/ and {test}/: {format_list(unused)}")
    _collect(tree, [("train", train, *_listing(root / train)), ("test", test, *_listing(root / test))])
    _collect_loose(tree, "", loose)
    return tree


def _collect(tree: Tree, parts: Sequence[tuple[str | None, str, list[str], list[str]]]) -> None:
    """Fill the tree from its parts, each a side and the folder with its class folders."""
    # Normalize Unicode: systems encode the same folder name differently.
    names = {unicodedata.normalize("NFC", folder) for _, _, folders, _ in parts for folder in folders}
    tree.class_names = tuple(sorted(names, key=natural_key))
    if not tree.class_names:
        raise DataError(f"{tree.root}: no class folders; put the images of each class into a separate folder")
    labels = {name: label for label, name in enumerate(tree.class_names)}
    for side, part, folders, loose in parts:
        for folder in sorted(folders, key=natural_key):
            label = labels[unicodedata.normalize("NFC", folder)]
            above = frozenset({os.path.realpath(tree.root / part)})
            for name in _files_below(tree, _joined(part, folder), above):
                status = os.stat(tree.root / name)
                tree.files.append(File(name, label, status.st_size, status.st_mtime_ns, side))
        _collect_loose(tree, part, loose)
    tree.files.sort(key=lambda file: (file.label, natural_key(file.name)))


def _collect_loose(tree: Tree, part: str, loose: list[str]) -> None:
    """Report files beside the class folders: images are errors, other files are noted."""
    for name in loose:
        if os.path.splitext(name)[1].lower() in SUFFIXES:
            tree.strays.append(f"{_joined(part, name)} is outside the class folders")
        else:
            tree.notes.append(f"{_joined(part, name)} is not an image and was ignored")


def _files_below(tree: Tree, folder: str, above: frozenset[str]) -> Iterator[str]:
    real = os.path.realpath(tree.root / folder)
    if real in above or tree.root.is_relative_to(real):
        tree.strays.append(f"{folder} is a link to a parent folder")
        return
    folders, files = _listing(tree.root / folder)
    for file in files:
        name = _joined(folder, file)
        if os.path.splitext(file)[1].lower() not in SUFFIXES:
            tree.strays.append(f"{name} {NOT_AN_IMAGE}")
        elif not os.path.isfile(tree.root / name):
            tree.strays.append(f"{name} is a broken link or not a file")
        else:
            yield name
    for inner in folders:
        yield from _files_below(tree, _joined(folder, inner), above | {real})


def _listing(folder: Path) -> tuple[list[str], list[str]]:
    """Return the sorted names of subfolders and of other entries, without hidden ones."""
    folders: list[str] = []
    files: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not is_hidden(entry.name):
                (folders if entry.is_dir() else files).append(entry.name)
    return sorted(folders, key=natural_key), sorted(files, key=natural_key)


def is_hidden(name: str) -> bool:
    """Return whether an entry is hidden or a system file."""
    return name.startswith(".") or name.casefold() in IGNORED


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Return a sort key that compares numbers by value.

    >>> sorted(["dog10", "Cat", "dog9", "dog"], key=natural_key)
    ['Cat', 'dog', 'dog9', 'dog10']
    """
    parts = re.split(r"([0-9]+)", name.casefold())  # text, number, text, ...: comparable element by element
    return [int(part) if place % 2 else part for place, part in enumerate(parts)], name


# ---------------------------------------------------------------------------------------------------------------------
# the split


def split_sides(
    names: Sequence[str],
    labels: Sequence[int],
    recorded: dict[str, str],
    *,
    test_share: float,
    seed: int,
) -> dict[str, str]:
    """Assign each name to "train" or "test".

    Recorded names keep their side. The others of each class are ranked by a hash of seed and name; the first become
    test images up to the share of the class, with at least one image on either side.

    >>> sides = split_sides(["a", "b", "c", "d"], [0, 0, 0, 0], {"a": "test"}, test_share=0.25, seed=0)
    >>> sorted(sides.items())
    [('a', 'test'), ('b', 'train'), ('c', 'train'), ('d', 'train')]
    """
    members: dict[int, list[str]] = {}
    for name, label in zip(names, labels, strict=True):
        members.setdefault(label, []).append(name)
    sides: dict[str, str] = {}
    for group in members.values():
        old = {name: recorded[name] for name in group if name in recorded}
        new = sorted((name for name in group if name not in old), key=lambda name: _rank(name, seed))
        num_test = min(max(round(test_share * len(group)), 1), len(group) - 1)
        missing = max(num_test - sum(side == "test" for side in old.values()), 0)
        sides |= old
        sides |= {name: "test" if place < missing else "train" for place, name in enumerate(new)}
    return sides


def _rank(name: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:".encode() + os.fsencode(name)).digest()


def _is_path(name: object) -> bool:
    return isinstance(name, str) and len(name) <= _MAX_PATH


@dataclass(frozen=True)
class _RecordedSplit:
    """Automatic split, recorded in the cache."""

    seed: int
    test_share: float

    @property
    def key(self) -> str:
        return f"{self.seed}-{self.test_share}"

    def path(self, home: Path) -> Path:
        return home / f"split-{self.key}.json"

    def check(self, tree: Tree, files: Iterable[File]) -> None:
        """Raise DataError if a class has fewer than two images."""
        counts = Counter(file.label for file in files)
        for label, name in enumerate(tree.class_names):
            if (count := counts[label]) < 2:
                has = "no images" if count == 0 else "only one image"
                raise DataError(
                    f"{tree.root}: class '{name}' has {has}, but needs at least two, for training and "
                    f"testing; add images to {name} or remove the folder"
                )

    def split_of(self, tree: Tree, files: Sequence[File], home: Path) -> dict[str, str]:
        """Return the recorded side of each file, and a computed one for new files."""
        names, labels = [file.name for file in files], [file.label for file in files]
        sides = split_sides(names, labels, self.recorded(home), test_share=self.test_share, seed=self.seed)
        present = {(file.label, sides[file.name]) for file in files}
        for label, name in enumerate(tree.class_names):
            for side in ("train", "test"):
                if (label, side) not in present and label in labels:
                    raise DataError(
                        f"{tree.root}: all {side} images of class '{name}' are missing; add images to {name}, or "
                        f"delete {self.path(home)} for a new split (results are then not comparable)"
                    )
        return sides

    def recorded(self, home: Path) -> dict[str, str]:
        """Return the recorded sides."""
        path = self.path(home)
        if not path.exists():
            return {}
        record = read_json(path, error=DataError)
        parts = [record.get(side) if isinstance(record, dict) else None for side in ("train", "test")]
        if not all(isinstance(part, list) and all(_is_path(name) for name in part) for part in parts):
            raise DataError(f"{path} is not a split file; delete it for a new split")
        return {name: side for side in ("train", "test") for name in record[side]}

    def record(self, sides: dict[str, str], home: Path) -> None:
        """Save the split, including removed images, which may be added again."""
        merged = self.recorded(home) | sides
        split = {s: sorted((n for n in merged if merged[n] == s), key=natural_key) for s in ("train", "test")}
        write_json(self.path(home), {"seed": self.seed, "test_share": self.test_share, **split})
