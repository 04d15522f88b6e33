"""Validation of class names."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from efcil.errors import DataError

MAX_LENGTH = 200  # characters of a class name


def check_name(name: str) -> str:
    """Return a class name, or raise DataError unless it is printable and a valid folder name.

    >>> check_name("a/b")
    Traceback (most recent call last):
    efcil.errors.DataError: class name 'a/b' contains '/'; use another character
    """
    if not name:
        raise DataError("a class name is empty; give every class a name")
    if name != name.strip():
        raise DataError(f"class name {name!r} begins or ends with a space; remove it")
    if len(name) > MAX_LENGTH:
        raise DataError(f"class name {name[:20]!r}... has {len(name):,} characters; use at most {MAX_LENGTH}")
    for character in name:
        if character in "/\\":
            raise DataError(f"class name {name!r} contains {character!r}; use another character")
        if not character.isprintable():
            raise DataError(f"class name {name!r} contains the unprintable {character!r}; remove it")
    if name in (".", ".."):
        raise DataError(f"class name {name!r} is reserved by the file system; use another name")
    return name


def normalized(name: str) -> str:
    """Return a normalized form that ignores case and Unicode composition.

    >>> normalized("Caf\\u00e9") == normalized("cafe\\u0301")
    True
    """
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def check_names(new: Iterable[str], known: Sequence[str] = ()) -> None:
    """Raise DataError for invalid names, and for names, new or known, that differ only in case or Unicode form.

    >>> check_names(["Cat"], ["cat"])
    Traceback (most recent call last):
    efcil.errors.DataError: class names 'cat' and 'Cat' differ only in case or Unicode form; use one spelling
    """
    seen = {normalized(name): name for name in known}
    for name in new:
        other = seen.setdefault(normalized(check_name(name)), name)
        if other != name:
            raise DataError(f"class names {other!r} and {name!r} differ only in case or Unicode form; use one spelling")


def as_names(labels: Any) -> list[str]:
    """Convert labels to class names: text unchanged, integers as text.

    >>> as_names(np.array([3, 7])), as_names(["cat", 4])
    (['3', '7'], ['cat', '4'])
    """
    if isinstance(labels, str | bytes):
        raise DataError(f"labels are a single string, {labels!r}; give a list with one label for each image")
    if hasattr(labels, "detach"):
        labels = labels.detach().cpu().numpy()
    names = []
    for place, label in enumerate(labels):
        value = label.item() if isinstance(label, np.generic) else label
        if isinstance(value, str):
            names.append(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            names.append(str(value))
        else:
            raise DataError(
                f"label {value!r} at position {place} is {type(value).__name__}; wanted strings or integers"
            )
    return names
