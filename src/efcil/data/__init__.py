"""Sources of images: the registry. Each delivers a `DataSet`; nothing is imported or read before it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from efcil.config import Options
from efcil.errors import DataError, OptionError, nearest
from efcil.plugins import registry

if TYPE_CHECKING:
    from efcil.data.dataset import DataSet
    from efcil.data.fetch import Remote

Progress = Callable[[int, int | None], None]


class NoOptions(Options):
    """A source that has nothing to choose."""


class GlyphsOptions(Options):
    """Options of `glyphs`."""

    classes: int = Field(default=20, ge=2)
    size: int = Field(default=16, ge=8)
    train_per_class: int = Field(default=150, ge=1)
    test_per_class: int = Field(default=20, ge=1)
    seed: int = Field(default=0, ge=0)


class FolderOptions(Options):
    """Options of `folder`."""

    size: int = Field(default=64, ge=8)  # side of the stored square
    test_share: float = Field(default=0.2, gt=0, lt=1)  # where there is no test/ folder
    seed: int = Field(default=0, ge=0)  # of that split
    skip_bad: bool = False


@dataclass(frozen=True)
class Source:
    """A source by name: what it is, what it takes."""

    name: str
    about: str
    licence: str
    origin: str  # where to get it
    directory: bool = False  # needs --data
    options: type[Options] = NoOptions
    fetchable: bool = False
    loader: Callable[..., DataSet] | None = None  # load(directory, **options) or load(**options); ours: by name


SOURCES = {
    source.name: source
    for source in (
        Source(
            "digits", "handwritten digits, 10 classes, 1,797 images of 8 x 8", "CC BY 4.0", "built in (scikit-learn)"
        ),
        Source(
            "glyphs",
            "rendered characters in many fonts and colours, any number of classes, any size",
            "MIT",
            "built in (drawn with matplotlib's fonts)",
            options=GlyphsOptions,
        ),
        Source(
            "cifar100",
            "CIFAR-100, 100 classes, 50,000 + 10,000 images of 32 x 32",
            "none stated by its authors",
            "efcil data fetch cifar100 --data DIR",
            directory=True,
            fetchable=True,
        ),
        Source(
            "folder",
            "your pictures: class folders, with train/ and test/ or split once",
            "yours",
            "--data DIR",
            directory=True,
            options=FolderOptions,
        ),
    )
}


def registered() -> dict[str, Source]:
    """Return every source: ours, and those of other packages (entry points of the group `efcil.datasets`)."""
    return registry("efcil.datasets", Source, SOURCES)


def find(name: str) -> Source:
    """Return the source of a name, or say which one is nearest."""
    known = registered()
    if name not in known:
        raise OptionError(f"unknown data set '{name}': {nearest(name, known)}")
    return known[name]


def remote(name: str) -> Remote:
    """Where a data set is downloaded from."""
    address: Remote = import_module(f"efcil.data.{find(name).name}").REMOTE
    return address


def load(name: str, directory: Path | None, options: Options, progress: Progress | None = None) -> DataSet:
    """Read a data set."""
    source = find(name)
    if source.directory and directory is None:
        raise DataError(f"{name} needs --data DIR, the directory it lies in; to get it: {source.origin}")
    read = source.loader or import_module(f"efcil.data.{name}").load
    arguments: dict[str, Any] = options.model_dump()
    if name == "folder":
        arguments["progress"] = progress
    data: DataSet = read(directory, **arguments) if source.directory else read(**arguments)
    return data
