"""User-facing errors. Each message is one line that names the thing, the value and the remedy."""

from __future__ import annotations

import difflib
import os
import re
import sys
import warnings
from collections.abc import Iterable

from efcil.platform_support import signal_name

_OPTION = re.compile(r"--([a-z][a-z-]*[a-z])(?: (\d[\d,]*))?(?!\w)")


class EfcilError(Exception):
    """Base class of errors that are reported in one line, without a traceback."""

    exit_code = 2


class ConfigError(EfcilError):
    """An unknown or impossible method, data set, preset, option or value."""


class MissingPackageError(ConfigError):
    """A package that is not installed, or does not fit the others, without which what was asked for cannot be made."""


class DataError(EfcilError):
    """A data set that is missing, incomplete, damaged or unsuitable."""


class DataWarning(UserWarning):
    """Something about images that does not stop the work: files that were skipped, pictures that are there twice."""


class RunError(EfcilError):
    """A run directory that cannot be used."""


class CheckpointError(EfcilError):
    """A checkpoint that is damaged or belongs to another run."""


class ModelError(EfcilError):
    """A model directory that is damaged, exists already or has an unknown format, or an unsupported operation."""


class FileRefusedError(EfcilError):
    """A file or directory that is not ours to write, replace or delete, or a link, FIFO or device in its place."""


class TrainingError(EfcilError):
    """Training that failed: a non-finite loss or lack of memory."""

    exit_code = 3


class NumericalError(EfcilError):
    """Base class of numerical failures of the closed forms."""

    exit_code = 3


class NotFiniteError(NumericalError):
    """A matrix contains NaN or infinity."""


class NotPositiveDefiniteError(NumericalError):
    """A matrix is not numerically positive definite."""


class RunsFailed(EfcilError):
    """Some runs of a grid failed at every attempt; the others are complete."""

    exit_code = 4


class Interrupted(EfcilError):
    """A signal stopped the command; completed work is kept."""

    def __init__(self, number: int, remedy: str):
        super().__init__(f"interrupted by {signal_name(number)}; {remedy}")
        self.exit_code = 128 + number


def describe_exit(code: int, output: str) -> str:
    """Describe how a process failed: by a signal, or with a code and the last line of its output.

    >>> describe_exit(-9, "")
    'was killed by SIGKILL; perhaps out of memory'
    >>> describe_exit(1, "Traceback\\n...\\nValueError: no\\n")
    'failed with code 1: ValueError: no'
    """
    if code < 0:
        name = signal_name(-code)
        return f"was killed by {name}" + ("; perhaps out of memory" if name == "SIGKILL" else "")
    lines = output.strip().splitlines()
    return f"failed with code {code}: {lines[-1].strip() if lines else 'no output'}"


class FailedOnOtherRank(EfcilError):
    """An error of another process of the run, which reports it itself; it has no message here."""

    def __init__(self, exit_code: int):
        super().__init__("")
        self.exit_code = exit_code


def printable(text: str) -> str:
    """Show control characters escaped: a name from a file may hold what a terminal or a log would obey.

    >>> printable("cat\\x1b[2J\\u202e.jpg\\n")
    'cat\\\\x1b[2J\\\\u202e.jpg\\\\n'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def as_keywords(message: str) -> str:
    """Write options of the command line as arguments of a function, for who called one.

    >>> as_keywords("--tasks 3 does not divide the 10 classes: pass --allow-uneven, or use --init-cls")
    'tasks=3 does not divide the 10 classes: pass allow_uneven, or use init_cls'
    """
    return _OPTION.sub(lambda found: found[1].replace("-", "_") + (f"={found[2]}" if found[2] else ""), message)


def warn(message: str) -> None:
    """Warn about images, on behalf of the caller of efcil; the command shows a note instead."""
    if sys.version_info >= (3, 12):
        warnings.warn(message, DataWarning, skip_file_prefixes=(os.path.dirname(__file__),))
    else:
        warnings.warn(message, DataWarning, stacklevel=2)


def nearest(name: str, known: Iterable[str]) -> str:
    """Name the nearest known word or the dotted keys that end in it, or list all known words.

    >>> nearest("DPRC", ["dpcr", "lwf"])
    "did you mean 'dpcr'?"
    >>> nearest("lr", ["first.lr", "later.lr", "map_lr"])
    "did you mean 'first.lr' or 'later.lr'?"
    >>> nearest("zzz", ["dpcr", "lwf"])
    'known: dpcr, lwf'
    """
    folded = {word.casefold(): word for word in sorted(known)}
    close = [key for key in folded if key.endswith(f".{name.casefold()}")]
    close = close or difflib.get_close_matches(name.casefold(), folded, n=1)
    *others, last = (f"'{folded[key]}'" for key in close) if close else ("",)
    if not last:
        return "known: " + ", ".join(sorted(known))
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?"
