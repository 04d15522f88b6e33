"""Class names: what may be one, and when two of them are too much alike."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from efcil.errors import DataError


def check_name(name: str) -> str:
    """Give a class name back, or say why it cannot be one: it must be printable, and could be a folder's name.

    >>> check_name("a/b")
    Traceback (most recent call last):
    efcil.errors.DataError: class name 'a/b' contains '/': take another character
    """
    if not name:
        raise DataError("a class name is empty; give every class a name")
    if name != name.strip():
        raise DataError(f"class name {name!r} begins or ends with a space; remove it")
    for character in name:
        if character in "/\\":
            raise DataError(f"class name {name!r} contains {character!r}: take another character")
        if not character.isprintable():
            raise DataError(f"class name {name!r} contains {character!r}, which cannot be printed; remove it")
    if name in (".", ".."):
        raise DataError(f"class name {name!r} means a folder of the file system; take another name")
    return name


def normalized(name: str) -> str:
    """What two names have in common that differ only in case or in how Unicode writes them.

    >>> normalized("Caf\\u00e9") == normalized("cafe\\u0301")
    True
    """
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def check_names(new: Iterable[str], known: Sequence[str] = ()) -> None:
    """Refuse names that cannot be, and two that differ only in case or Unicode form, among each other or from known.

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
    """Labels of any kind as class names: text as it is, whole numbers as text.

    >>> as_names(np.array([3, 7])), as_names(["cat", 4])
    (['3', '7'], ['cat', '4'])
    """
    if isinstance(labels, str | bytes):
        raise DataError(f"labels are one text, {labels!r}; give a list with one label for each image")
    if hasattr(labels, "detach"):
        labels = labels.detach().cpu().numpy()
    found = []
    for place, label in enumerate(labels):
        value = label.item() if isinstance(label, np.generic) else label
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            found.append(str(value))
        else:
            raise DataError(
                f"label {value!r} at place {place} is {type(value).__name__}; wanted names (text) or whole numbers"
            )
    return found
