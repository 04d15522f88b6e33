"""Registry of data sets. Each loader returns a `DataSet`; modules are imported lazily."""

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
    from efcil.data.preprocessing import Preprocessing

Progress = Callable[[int, int | None], None]


class NoOptions(Options):
    """Options of a data set without options."""


class GlyphsOptions(Options):
    """Options of `glyphs`."""

    classes: int = Field(default=20, ge=2)
    """Number of classes."""
    size: int = Field(default=16, ge=8, le=4096)
    """Side of the images in pixels."""
    train_per_class: int = Field(default=150, ge=1)
    """Training images per class."""
    test_per_class: int = Field(default=20, ge=1)
    """Test images per class."""
    seed: int = Field(default=0, ge=0)
    """Seed of fonts, colors and distortions."""


class FilesOptions(Options):
    """Options of image-file data sets, which are decoded once into a cache or read lazily."""

    short_side: int = Field(default=256, ge=8)
    """Short side of an image in pixels when its center is cut out."""
    train_short_side: int | None = Field(default=None, ge=8)
    """Short side of an image that random crops are drawn from; null: short_side."""
    skip_bad: bool = False
    """Skip unreadable image files."""
    lazy: bool | None = None
    """Decode images as needed; null: only where the decoded array would fill half of the free disk."""
    keep_aspect: bool | None = None
    """Cut nothing off; null: where training draws random crops (augment=resized-crop)."""


class FolderOptions(FilesOptions):
    """Options of `folder`."""

    short_side: int = Field(default=64, ge=8)
    """Short side of an image in pixels when its center is cut out."""
    test_share: float = Field(default=0.2, gt=0, lt=1)
    """Share of test images where there is no test/ folder."""
    seed: int = Field(default=0, ge=0)
    """Seed of that split."""


class SplitOptions(FolderOptions):
    """Options of sets of photographs that come without a split."""

    short_side: int = Field(default=256, ge=8)
    """Short side of an image in pixels when its center is cut out."""


class TinyImageNetOptions(FilesOptions):
    """Options of `tiny-imagenet`."""

    short_side: int = Field(default=64, ge=8)
    """Short side of an image in pixels when its center is cut out."""


class MiniImageNetOptions(FilesOptions):
    """Options of `mini-imagenet`."""

    short_side: int = Field(default=84, ge=8)
    """Short side of an image in pixels when its center is cut out."""


class ImageNet100Options(FilesOptions):
    """Options of `imagenet100`."""

    class_list: str = "folders"
    """Classes: all class folders (folders), a list of class_lists/, or a file."""


@dataclass(frozen=True)
class DatasetSpec:
    """Description of a data set: name, source, options and loader."""

    name: str
    description: str
    license: str
    url: str  # download page
    directory: bool = False  # needs --data
    options: type[Options] = NoOptions
    fetchable: bool = False
    loader: Callable[..., DataSet] | None = (
        None  # load(directory, **options) or load(**options); None for built-in sets
    )
    size: str = "size unknown"  # download size, and size of the decoded cache


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
            "rendered characters in many fonts and colors, any number of classes, any size",
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
            "mini-imagenet",
            "mini-ImageNet, 100 classes of ImageNet, 50,000 + 10,000 images of 84 x 84",
            "ImageNet's terms: non-commercial research and education",
            "https://github.com/Deo0330/split_minidataset (train/ and val/)",
            directory=True,
            options=MiniImageNetOptions,
            size="247 MB; 1.3 GB decoded",
        ),
        DatasetSpec(
            "imagenet100",
            "ImageNet-100, 100 classes of ImageNet, about 128,000 + 5,000 photographs",
            "ImageNet's terms: non-commercial research and education",
            "as imagenet1k; --set data.class_list=LIST selects the hundred classes",
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
            "CUB-200-2011, 200 bird species, 5,994 + 5,794 photographs",
            "the images are their owners': non-commercial research and education",
            "https://www.vision.caltech.edu/datasets/cub_200_2011/",
            directory=True,
            options=FilesOptions,
            size="1.2 GB; 3.5 GB decoded, short side 256",
        ),
        *(
            DatasetSpec(
                name,
                f"{title}, 200 classes of ImageNet, {count} images, with train/ and test/ or an automatic split",
                "the images are their owners': non-commercial research and education",
                f"https://people.eecs.berkeley.edu/~hendrycks/{name}.tar",
                directory=True,
                options=SplitOptions,
                size=size,
            )
            for name, title, count, size in (
                ("imagenet-r", "ImageNet-R (renditions)", "30,000", "2.2 GB; 4.5 GB decoded, 224 pixels"),
                (
                    "imagenet-a",
                    "ImageNet-A (natural adversarial examples)",
                    "7,500",
                    "0.7 GB; 1.1 GB decoded, 224 pixels",
                ),
            )
        ),
        DatasetSpec(
            "clothing",
            "clothing of ten kinds, 3,068 + 372 photographs",
            "CC0",
            "efcil data fetch clothing --data DIR",
            directory=True,
            options=SplitOptions,
            fetchable=True,
            size="106 MB",
        ),
        DatasetSpec(
            "folder",
            "your images: class folders, with train/ and test/ or an automatic split",
            "yours",
            "--data DIR",
            directory=True,
            options=FolderOptions,
            size="size of your folder",
        ),
    )
}


def _check(name: str, spec: DatasetSpec) -> None:
    if spec.loader is None:
        raise ConfigError(
            f"data set '{name}' has no loader; set DatasetSpec.loader to a function that returns a DataSet"
        )


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
    """Register a data set by its name, like the entry points `efcil.datasets`.

    >>> import numpy as np
    >>> from efcil.data.dataset import DataSet, ImageSet
    >>> def dots():
    ...     labels = np.repeat(np.arange(4), 10)
    ...     images = ImageSet(np.full((40, 1, 16, 16), 60 * labels[:, None, None, None], np.uint8), labels)
    ...     return DataSet("dots", ("black", "dark", "light", "bright"), images, images, mean=(0.5,), std=(0.25,))
    >>> spec = DatasetSpec("dots", "gray squares, 4 classes", "MIT", "this example", loader=dots)
    >>> register_dataset(spec).name  # `efcil run dpcr dots --tasks 2` works now
    'dots'
    >>> DATASETS.reset()
    """
    DATASETS.register(spec.name, spec)
    return spec


def find(name: str) -> DatasetSpec:
    """Return the source of a name, whatever its case, or say which one is nearest."""
    return DATASETS.find(DATASETS.canonical(name))


def module(name: str) -> Any:
    """Return the module of a built-in data set."""
    return import_module(f"efcil.data.{name.replace('-', '_')}")


def remote(name: str) -> Remote:
    """Return the download source of a data set."""
    address: Remote = module(find(name).name).REMOTE
    return address


def check_directory(spec: DatasetSpec, directory: Path | None) -> None:
    """Raise DataError if a data set needs a directory and none is given."""
    if spec.directory and directory is None:
        raise DataError(f"{spec.name} needs --data DIR, the dataset directory; to get it: {spec.url}")


def load(
    name: str,
    directory: Path | None,
    options: Options,
    progress: Progress | None = None,
    wanted: Preprocessing | None = None,
) -> DataSet:
    """Load a data set; `wanted` is what a pretrained network expects of its pictures."""
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
                f"data.train_short_side={train_short_side} is smaller than data.short_side="
                f"{options.short_side}; raise it or lower data.short_side"
            )
        if train_short_side not in (None, options.short_side):
            arguments["size"], short = train_short_side, options.short_side
        if wanted is not None:
            arguments["size"] = wanted
    data: DataSet = read(directory, **arguments) if spec.directory else read(**arguments)
    if wanted is not None:
        return data.prepared(wanted)
    return data if short is None else replace(data, short=short)
