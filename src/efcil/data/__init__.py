"""Sources of images: the registry. Each delivers a `DataSet`; nothing is imported or read before it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from efcil.config import Options
from efcil.errors import ConfigError, DataError
from efcil.plugins import Registry

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


class FilesOptions(Options):
    """Options of sets of image files, which are decoded once, or read as they are needed."""

    short_side: int = Field(default=256, ge=8)  # short side of a picture when its center is cut out
    train_short_side: int | None = Field(
        default=None, ge=8
    )  # short side of one that random crops are drawn from; null: short_side
    skip_bad: bool = False
    lazy: bool | None = None  # read as needed; null: only where the decoded array would fill half of the free disk
    keep_aspect: bool | None = None  # nothing is cut off; null: where training crops at random (augment=resized-crop)


class FolderOptions(FilesOptions):
    """Options of `folder`."""

    short_side: int = Field(default=64, ge=8)
    test_share: float = Field(default=0.2, gt=0, lt=1)  # where there is no test/ folder
    seed: int = Field(default=0, ge=0)  # of that split


class TinyImageNetOptions(FilesOptions):
    """Options of `tiny-imagenet`."""

    short_side: int = Field(default=64, ge=8)


class ImageNet100Options(FilesOptions):
    """Options of `imagenet100`."""

    class_list: str = "folders"  # the class folders there are, a list of class_lists/ or a file


@dataclass(frozen=True)
class DatasetSpec:
    """A source by name: what it is, what it takes."""

    name: str
    description: str
    license: str
    url: str  # where to get it
    directory: bool = False  # needs --data
    options: type[Options] = NoOptions
    fetchable: bool = False
    loader: Callable[..., DataSet] | None = None  # load(directory, **options) or load(**options); ours: by name
    size: str = "size unknown"  # to download, and decoded where that is kept


OWN = {
    spec.name: spec
    for spec in (
        DatasetSpec(
            "digits",
            "handwritten digits, 10 classes, 1,797 images of 8 x 8",
            "CC BY 4.0",
            "built in (scikit-learn)",
            size="no download",
        ),
        DatasetSpec(
            "glyphs",
            "rendered characters in many fonts and colours, any number of classes, any size",
            "MIT",
            "built in (drawn with matplotlib's fonts)",
            options=GlyphsOptions,
            size="no download",
        ),
        DatasetSpec(
            "cifar100",
            "CIFAR-100, 100 classes, 50,000 + 10,000 images of 32 x 32",
            "none stated by its authors",
            "efcil data fetch cifar100 --data DIR",
            directory=True,
            fetchable=True,
            size="169 MB",
        ),
        DatasetSpec(
            "tiny-imagenet",
            "Tiny-ImageNet, 200 classes, 100,000 + 10,000 images of 64 x 64",
            "ImageNet's terms: non-commercial research and education",
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            directory=True,
            options=TinyImageNetOptions,
            size="248 MB; 1.4 GB decoded",
        ),
        DatasetSpec(
            "imagenet100",
            "ImageNet-100, 100 classes of ImageNet, about 128,000 + 5,000 photographs",
            "ImageNet's terms: non-commercial research and education",
            "as imagenet1k; --set data.class_list=LIST says which hundred of its classes",
            directory=True,
            options=ImageNet100Options,
            size="about 15 GB; 39 GB decoded, short side 256",
        ),
        DatasetSpec(
            "imagenet1k",
            "ImageNet-1k (ILSVRC 2012), 1,000 classes, 1,281,167 + 50,000 photographs",
            "ImageNet's terms: non-commercial research and education",
            "https://image-net.org/download-images.php (an account is needed), ILSVRC2012, training and validation",
            directory=True,
            options=FilesOptions,
            size="155 GB; 394 GB decoded, short side 256",
        ),
        DatasetSpec(
            "cub200",
            "CUB-200-2011, 200 kinds of birds, 5,994 + 5,794 photographs",
            "the images are their owners': non-commercial research and education",
            "https://www.vision.caltech.edu/datasets/cub_200_2011/",
            directory=True,
            options=FilesOptions,
            size="1.2 GB; 3.5 GB decoded, short side 256",
        ),
        DatasetSpec(
            "folder",
            "your pictures: class folders, with train/ and test/ or split once",
            "yours",
            "--data DIR",
            directory=True,
            options=FolderOptions,
            size="as large as it is",
        ),
    )
}


def _check(name: str, spec: DatasetSpec) -> None:
    if spec.loader is None:
        raise ConfigError(f"data set '{name}' has no loader: give DatasetSpec a function that returns a DataSet")


DATASETS: Registry[DatasetSpec] = Registry(
    "data set",
    "efcil.datasets",
    OWN,
    lambda value: isinstance(value, DatasetSpec),
    "a DatasetSpec",
    check=_check,
    has_name=True,
)


def register_dataset(spec: DatasetSpec) -> DatasetSpec:
    """Let a data set be found by its name, as the entry points `efcil.datasets` do."""
    DATASETS.register(spec.name, spec)
    return spec


def find(name: str) -> DatasetSpec:
    """Return the source of a name, whatever its case, or say which one is nearest."""
    return DATASETS.find(DATASETS.canonical(name))


def module(name: str) -> Any:
    """Return the module that reads one of our sets."""
    return import_module(f"efcil.data.{name.replace('-', '_')}")


def remote(name: str) -> Remote:
    """Where a data set is downloaded from."""
    address: Remote = module(find(name).name).REMOTE
    return address


def check_directory(spec: DatasetSpec, directory: Path | None) -> None:
    """Refuse to go on without the directory that a source needs."""
    if spec.directory and directory is None:
        raise DataError(f"{spec.name} needs --data DIR, the directory it lies in; to get it: {spec.url}")


def load(name: str, directory: Path | None, options: Options, progress: Progress | None = None) -> DataSet:
    """Read a data set."""
    spec = find(name)
    check_directory(spec, directory)
    read = spec.loader or module(spec.name).load
    arguments: dict[str, Any] = options.model_dump()
    short = None
    if isinstance(options, FilesOptions):
        arguments["progress"] = progress
        arguments["size"] = arguments.pop("short_side")
        train_short_side = arguments.pop("train_short_side")
        if train_short_side is not None and train_short_side < options.short_side:
            raise ConfigError(
                f"data.train_short_side={train_short_side} is less than data.short_side="
                f"{options.short_side}, which centers are cut from"
            )
        if train_short_side not in (None, options.short_side):
            arguments["size"], short = train_short_side, options.short_side
    data: DataSet = read(directory, **arguments) if spec.directory else read(**arguments)
    return data if short is None else replace(data, short=short)
