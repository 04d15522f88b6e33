"""Find the class folders that a person means, and refuse folders at the wrong level with a guess.

pets/may/beagle/1.jpg     `pets/may` is a folder of classes; `pets` holds rounds, `pets/may/beagle` is one class
pets/train/beagle/1.jpg   training images; `pets/test` (or val, ...) holds test images of the same classes
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from efcil.data.cache import SUFFIXES, Tree
from efcil.data.dataset import format_list
from efcil.data.folder import TEST_NAMES, TRAIN_NAMES, is_hidden, natural_key, scan
from efcil.errors import DataError, warn
from efcil.files import StrPath

_DEPTH = 4  # levels that are looked at
_GUESSES = 3  # folders that a message suggests, at most

Split = Literal["train", "test"]


def scan_classes(directory: StrPath, split: Split = "train") -> Tree:
    """List the images of a folder of class folders.

    With train/ and test/ (or val/, ...) in it, only the images of `split` are listed. A folder at the wrong level, and
    for training one with test images, raises DataError that names the folder that was probably meant.
    """
    folder = Path(directory)
    if not folder.is_dir():
        return scan(folder)  # raises
    try:
        level = _survey(folder, _DEPTH)
        part = _part(level, split)
        if part is not None:
            folder, level = folder / part, level.folders[part]
        _check(folder, level, split)
        if split == "train" and part is None:
            _check_not_test(folder, level)
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error
    return scan(folder, whole=True)


@dataclass
class _Level:
    """A folder: whether images lie in it, and the folders in it that lead to images."""

    images: bool = False
    folders: dict[str, _Level] = field(default_factory=dict)

    @property
    def holds_classes(self) -> bool:
        return not self.images and bool(self.folders)


def _survey(folder: Path, depth: int) -> _Level:
    level = _Level()
    found: dict[str, _Level] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_hidden(entry.name):
                continue
            if not entry.is_dir():
                level.images = level.images or os.path.splitext(entry.name)[1].lower() in SUFFIXES
            elif depth > 1:
                with contextlib.suppress(OSError):  # what cannot be listed is reported where images are listed
                    found[entry.name] = _survey(folder / entry.name, depth - 1)
    for name in sorted(found, key=natural_key):
        if found[name].images or found[name].folders:
            level.folders[name] = found[name]
    return level


def _named(level: _Level, names: Sequence[str]) -> list[str]:
    """Return the folders with one of some names, whatever their case, in the order of the names."""
    by_name = {folder.casefold(): folder for folder in level.folders}
    return [by_name[name] for name in names if name in by_name]


def _part(level: _Level, split: Split) -> str | None:
    """Return the folder of a split, if a folder has folders for training and testing."""
    train, test = _named(level, TRAIN_NAMES), _named(level, TEST_NAMES)
    if not train or not level.folders[train[0]].holds_classes:
        return None
    if split == "train":
        return train[0]
    return next((name for name in test if level.folders[name].holds_classes), None)


def _check(folder: Path, level: _Level, split: Split) -> None:
    """Raise DataError if a folder does not hold class folders, or holds more than them."""
    if not level.folders and level.images:
        others = _survey(folder.parent, 3).folders if folder.name else {}
        meant = f"did you mean {folder.parent}?" if len(others) > 1 else "put it into a folder of class folders"
        raise DataError(f"{folder} holds images itself, so it looks like one class, not a folder of classes; {meant}")
    tests = [name for name in _named(level, TEST_NAMES) if level.folders[name].holds_classes]
    tests = tests if len(level.folders) > len(tests) else []
    if tests and split == "test":
        raise DataError(f"{folder} holds more than test images; did you mean {folder / tests[0]}?")
    nested = [name for name, inner in level.folders.items() if inner.holds_classes and name not in tests]
    if nested and not _is_wrapped(level.folders[name] for name in nested):
        _refuse_nested(folder, level, nested)
    if tests:
        inside = format_list(list(level.folders[tests[0]].folders))
        raise DataError(
            f"{folder / tests[0]} holds folders of images ({inside}), so it looks like test images, not a class; "
            f"move it out of {folder} to teach the other folders"
        )


def _is_wrapped(levels: Iterable[_Level]) -> bool:
    """Return whether each class keeps its images in one folder of the same name, as in cat/images/ and dog/images/."""
    inner = [list(level.folders) for level in levels]
    return len(inner) > 1 and all(len(names) == 1 and names == inner[0] for names in inner)


def _refuse_nested(folder: Path, level: _Level, nested: list[str]) -> None:
    guesses = [str(folder / name) for name in nested[:_GUESSES]]
    guess = guesses[0] if len(guesses) == 1 else f"{', '.join(guesses[:-1])} or {guesses[-1]}"
    inside = format_list(list(level.folders[nested[0]].folders))
    if len(nested) > 1:
        why = f"hold folders of images ({nested[0]}: {inside}), so these look like rounds, not classes"
    else:
        why = f"holds folders of images ({inside}), so this looks like a folder of classes, not a class"
    raise DataError(
        f"{folder}: {format_list(nested)} {why}; did you mean {guess}? (images of a class lie directly in its folder)"
    )


def _check_not_test(folder: Path, level: _Level) -> None:
    """Raise DataError for a folder of test images, recognized by its name and the classes of the folders beside it."""
    place = Path(os.path.abspath(folder))
    if place.name.casefold() not in TEST_NAMES:
        return
    beside = _survey(place.parent, 3).folders
    shared = [name for name, inner in beside.items() if name != place.name and {*inner.folders} & {*level.folders}]
    others = [name for name in shared if name.casefold() not in TEST_NAMES]
    if others:
        known = sorted({*beside[others[0]].folders} & {*level.folders}, key=natural_key)
        raise DataError(
            f"{folder} looks like test images: {format_list(known)} {'is' if len(known) == 1 else 'are'} in "
            f"{folder.parent / others[0]} as well; teach that one, and measure on this one with "
            f"`efcil evaluate MODEL {folder}`"
        )


def check_duplicates(
    groups: Sequence[Sequence[int]], files: Sequence[str], names: Sequence[str], *, refuse: bool = True
) -> None:
    """Warn of pictures in several class folders; `refuse` with DataError if all pictures of a class are in another one.

    `groups` are rows of the same picture (`efcil.data.duplicates`).
    """
    mixed = [list(group) for group in groups if len({names[row] for row in group}) > 1]
    shared: Counter[tuple[str, str]] = Counter()  # (class, other class) -> pictures of the class in the other one
    for group in mixed:
        for row in group:
            shared.update((names[row], other) for other in {names[other] for other in group} - {names[row]})
    counts = Counter(names)
    for (name, other), count in shared.items():
        if refuse and count == counts[name]:
            raise DataError(
                f"all {count} pictures of {name} are in {other} as well, so nothing tells the classes apart; "
                "remove one of the folders, or the pictures from one of them"
            )
    if mixed:
        pairs = [_pair(group, files, names) for group in mixed]
        verb = "picture is" if len(pairs) == 1 else "pictures are"
        warn(f"{len(pairs)} {verb} in two classes: {format_list(pairs)}; keep each in the class it belongs to")


def _pair(group: list[int], files: Sequence[str], names: Sequence[str]) -> str:
    first = group[0]
    other = next(row for row in group if names[row] != names[first])
    return f"{files[first]} = {files[other]}"
