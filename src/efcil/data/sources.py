"""Conversion of names, folders, arrays, and torch, torchvision and Hugging Face data sets to `DataSet`.

Images are converted once. torchvision and Hugging Face's `datasets` are not imported; their data sets are recognized by
their interface.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
from PIL import Image
from torch import Tensor

from efcil.config import build
from efcil.data import DATASETS, FilesOptions, Progress, load
from efcil.data import folder as folders
from efcil.data.convert import (
    Images,
    Labels,
    as_numpy,
    channel_moments,
    class_indices,
    colored,
    convert_image,
    convert_images,
    convert_label,
    convert_labels,
)
from efcil.data.dataset import DataSet, ImageSet, format_list
from efcil.errors import ConfigError, DataError, nearest
from efcil.files import StrPath

__all__ = ["SourceOptions", "as_dataset"]

_IMAGES = ("image", "img", "images", "picture", "pixel_values")  # column names in order of preference
_LABELS = ("label", "fine_label", "labels", "target", "class")
_PROBES = 8  # items read twice to detect random transforms


class SourceOptions(TypedDict, total=False):
    """Options of an image source."""

    name: str  # name in results; default: that of the source
    size: int  # resize the short side and center-crop; default: unchanged
    class_names: Sequence[str]  # names of labels 0, 1, ...; default: from the source, or the labels as text
    directory: StrPath  # of a downloaded data set, as `--data`
    options: Mapping[str, Any]  # of a named data set or folder, as `--set data.KEY=VALUE`
    progress: Progress  # called with converted and total images; default: a progress bar


class _Part(NamedTuple):
    """Converted training or test data."""

    images: Images
    labels: Labels
    names: Sequence[str] | None  # names of labels 0, 1, ..., if known


def as_dataset(
    train: Any,
    test: Any = None,
    *,
    name: str | None = None,
    size: int | None = None,
    class_names: Sequence[str] | None = None,
    directory: StrPath | None = None,
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> DataSet:
    """Build a `DataSet` of training and test images from any source; see `SourceOptions` for the options.

    `train` is one of

    - a name ("digits", "glyphs", "cifar100" with its `directory`, ...), which includes test images;
    - a folder of class folders; `test` is another one, or it contains train/ and test/, or it is split automatically;
    - `(images, labels)`: arrays or tensors of uint8 from 0 to 255 or floating point from 0 to 1, and integers or names;
    - a torch `Dataset` with items `(image, label)`, such as torchvision's;
    - a Hugging Face `Dataset`, or a mapping with "train" and "test" such as `DatasetDict`;
    - a `DataSet`, which is returned unchanged.

    Unsuitable data raises DataError.

    >>> images = np.zeros((6, 8, 8), dtype=np.uint8)
    >>> data = as_dataset((images, ["cat", "dog"] * 3), (images[:2], ["dog", "cat"]), name="pets")
    >>> data.class_names, data.train.images.shape, data.test.labels.tolist()
    (('cat', 'dog'), (6, 1, 8, 8), [1, 0])
    """
    if size is not None and size < 1:
        raise ConfigError(f"size={size}; wanted 1 or more")
    if isinstance(train, Mapping):
        train, test = _train_and_test(train, test)
    if isinstance(train, DataSet):
        if test is not None:
            raise DataError(f"test is given, but {train.name} includes test images; omit test")
        return train if name is None else replace(train, name=name)
    if isinstance(train, str | os.PathLike):
        stored = _load_stored(os.fspath(train), test, size, directory, options or {}, progress)
        return stored if name is None else replace(stored, name=name)
    for given, value in (("directory", directory), ("options", options)):
        if value is not None:
            raise ConfigError(
                f"{given} applies only to a named data set or a folder, but train is {type(train).__name__}"
            )
    if test is None:
        raise DataError("test is missing; give test images of every class in the same form as train")
    if isinstance(test, str | os.PathLike):
        raise DataError(f"test is {os.fspath(test)!r}, but train is {type(train).__name__}; give both in the same form")
    parts = [_read(source, side, size, progress) for source, side in ((train, "training"), (test, "test"))]
    names, *labels = class_indices([part.labels for part in parts], [part.names for part in parts], class_names)
    images = _of_one_shape([part.images for part in parts], size)
    mean, std = channel_moments(images[0])
    sets = [ImageSet(one, of) for one, of in zip(images, labels, strict=True)]
    return DataSet(name or _name_of(train), names, sets[0], sets[1], mean, std)


def _train_and_test(parts: Mapping[str, Any], test: Any) -> tuple[Any, Any]:
    """Return the two parts of a mapping, such as Hugging Face's DatasetDict."""
    if test is not None:
        raise DataError("test is given, but train is a mapping of splits; pass train['train'] as train")
    chosen = next((key for key in ("test", "validation", "val", "valid") if key in parts), None)
    if "train" not in parts or chosen is None:
        raise DataError(f"train is a mapping with {format_list(list(map(str, parts)))}; wanted 'train' and 'test'")
    return parts["train"], parts[chosen]


def _of_one_shape(images: list[Images], size: int | None) -> list[Images]:
    """Return training and test images of one shape, or raise DataError with a suitable size."""
    train, test = (one.shape[1:] for one in images)
    if train[1:] == test[1:] and {train[0], test[0]} == {1, 3} and size is not None:
        return [colored(one) for one in images]
    if train != test:
        shapes = " and ".join(
            f"{' x '.join(map(str, shape))} of {side}" for shape, side in ((train, "training"), (test, "test"))
        )
        raise DataError(
            f"images differ: {shapes} (channels x height x width); "
            f"give size={train[1]}, or another size, to resize them"
        )
    return images


def _name_of(source: Any) -> str:
    if isinstance(source, tuple | list):
        return "arrays"
    inner = source
    while getattr(inner, "dataset", None) is not None:  # torch's Subset
        inner = inner.dataset
    info = getattr(getattr(inner, "info", None), "dataset_name", None)  # of Hugging Face
    return str(info or type(inner).__name__).lower()


# --- names and folders -----------------------------------------------------------------------------------------------


def _load_stored(
    place: str,
    test: Any,
    size: int | None,
    directory: StrPath | None,
    options: Mapping[str, Any],
    progress: Progress | None,
) -> DataSet:
    """Load a data set by its name, or a folder of class folders."""
    name = DATASETS.canonical(place)
    is_name = name in DATASETS and name != "folder"
    place = name if is_name else place
    if not is_name and not os.path.isdir(place):
        raise DataError(f"'{place}' is not a data set or folder; {nearest(place, [*DATASETS])}")
    spec = DATASETS[place if is_name else "folder"]
    values = dict(options)
    if size is not None:
        key = "short_side" if issubclass(spec.options, FilesOptions) else "size"
        if key not in spec.options.model_fields:
            raise ConfigError(f"size={size}: the images of {place} have a fixed size; omit size")
        values[key] = size
    chosen = build(spec.options, values, place)
    if is_name:
        if test is not None:
            raise DataError(f"test is given, but {place} includes test images; omit test")
        if spec.directory and directory is None:
            raise DataError(f"{place} needs directory=..., the dataset directory; to get it: {spec.url}")
        return load(place, None if directory is None else Path(directory), chosen, progress)
    if test is None:
        return load("folder", Path(place), chosen, progress)
    if not isinstance(test, str | os.PathLike):
        raise DataError(f"train is the folder {place}, but test is {type(test).__name__}; give a folder too")
    more = chosen.model_dump(include={"skip_bad", "lazy", "keep_aspect"})
    return folders.load_parts(place, test, size=chosen.model_dump()["short_side"], progress=progress, **more)


# --- images with labels ----------------------------------------------------------------------------------------------


def _read(source: Any, side: str, size: int | None, progress: Progress | None) -> _Part:
    """Read images, labels and class names of one part from any source."""
    kind = type(source).__name__
    if isinstance(source, DataSet):
        raise DataError(f"{side} data are a DataSet, which has training and test images; pass it alone as train")
    if isinstance(source, Image.Image | Tensor | np.ndarray):
        raise DataError(f"{side} data are {kind} without labels; give (images, labels)")
    if hasattr(source, "batch_sampler") and hasattr(source, "dataset"):
        raise DataError(f"{side} data are a {kind}, which yields batches; pass its .dataset")
    if isinstance(source, ImageSet):
        return _read_arrays(source.images, source.labels, side, size, progress)
    if _is_hugging_face(source):
        return _read_hugging_face(source, side, size, progress)
    if _is_pair(source):
        return _read_arrays(source[0], source[1], side, size, progress)
    tensors = getattr(source, "tensors", None)  # of torch's TensorDataset
    if isinstance(tensors, tuple) and len(tensors) == 2:
        return _read_arrays(*tensors, side, size, progress)
    if (not hasattr(source, "__getitem__") and not isinstance(source, Iterable)) or hasattr(source, "iloc"):
        raise DataError(f"{side} data are {kind}; give a name, a folder, (images, labels) or a torch Dataset")
    names, stored = _class_names_of(source), _stored_arrays(source, size)
    if stored is not None:
        return _read_arrays(*stored, side, size, progress, names)
    return _read_items(source, side, size, progress, names)


def _is_pair(source: Any) -> bool:
    """Return whether it is (images, labels) and not a list of two items (image, label)."""
    if not isinstance(source, tuple | list) or len(source) != 2:
        return False
    return not all(isinstance(one, tuple | list) and len(one) == 2 and not np.isscalar(one[0]) for one in source)


def _read_arrays(
    images: Any,
    labels: Any,
    side: str,
    size: int | None,
    progress: Progress | None,
    names: Sequence[str] | None = None,
) -> _Part:
    """Read images with a separate array of labels."""
    found = convert_labels(labels, f"{side} label")
    count = _length(images)
    if count is not None and count != len(found):
        raise DataError(f"{side} data have {count} images but {len(found)} labels; give one label for each image")
    if not found:
        raise DataError(f"there are no {side} images; give at least one of each class")
    return _Part(convert_images(images, f"{side} images", size, progress), found, names)


def _read_items(
    source: Any, side: str, size: int | None, progress: Progress | None, names: Sequence[str] | None
) -> _Part:
    """Read items (image, label) one by one."""
    count = _length(source)
    by_index = count is not None and hasattr(source, "__getitem__")
    labels: list[Any] = []

    def images() -> Iterator[Any]:
        items = (source[place] for place in range(count or 0)) if by_index else iter(source)
        for place, item in enumerate(items):
            image, label = _pair(item, side, place)
            labels.append(convert_label(label, f"{side} label {place}"))
            yield image

    if by_index:
        _refuse_random(source, side, count or 0)
    pixels = convert_images(images(), f"{side} images", size, progress, count)
    return _Part(pixels, convert_labels(labels, f"{side} label"), names)


def _pair(item: Any, side: str, place: int) -> tuple[Any, Any]:
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    if isinstance(item, Mapping):
        image, label = (next((item[key] for key in keys if key in item), None) for keys in (_IMAGES, _LABELS))
        if image is not None and label is not None:
            return image, label
    of = f" of {len(item)}" if isinstance(item, tuple | list | Mapping) else ""
    raise DataError(f"{side} item {place} is {type(item).__name__}{of}; wanted (image, label)")


def _refuse_random(source: Any, side: str, count: int) -> None:
    """Raise DataError for random transforms in a data set, as it is read only once."""
    for place in range(min(count, _PROBES)):
        one, two = (_pair(source[place], side, place)[0] for _ in range(2))
        if not np.array_equal(as_numpy(one), as_numpy(two)):
            raise DataError(
                f"{side} image {place} is different each time it is read; remove random transforms from the data set, "
                "images are augmented during training (augment=...)"
            )


def _length(source: Any) -> int | None:
    try:
        return len(source)
    except TypeError:
        return None


def _class_names_of(source: Any) -> list[str] | None:
    """Return the class names of a torchvision data set, also through a Subset."""
    names = getattr(source, "classes", None)
    if names is None:
        inner = getattr(source, "dataset", None) or next(iter(getattr(source, "datasets", None) or ()), None)
        return None if inner is None else _class_names_of(inner)
    if not isinstance(names, list | tuple) or not names:
        return None
    texts = [name[0] if isinstance(name, tuple) and name else name for name in names]  # ImageNet has synonyms
    if not all(isinstance(text, str) for text in texts):
        return None
    return [text if texts.count(text) == 1 else f"{text} ({label})" for label, text in enumerate(texts)]


def _stored_arrays(source: Any, size: int | None) -> tuple[Any, Any] | None:
    """Return the arrays of a torchvision data set if its items equal them."""
    images = getattr(source, "data", None)
    labels = getattr(source, "targets", getattr(source, "labels", None))
    count = _length(source)
    if not isinstance(images, Tensor | np.ndarray) or images.ndim not in (3, 4) or labels is None or not count:
        return None
    if not str(images.dtype).endswith("uint8") or not len(images) == _length(labels) == count:
        return None
    try:
        for place in dict.fromkeys((0, count // 2, count - 1)):
            image, label = _pair(source[place], "", place)
            stored = convert_images(images[place : place + 1], "images", size)[0]
            if label != labels[place] or not np.array_equal(convert_image(image, "image", size), stored):
                return None
    except DataError:
        return None  # raised again when the items are read
    return images, labels


def _is_hugging_face(source: Any) -> bool:
    return isinstance(getattr(source, "features", None), Mapping) and hasattr(source, "column_names")


def _read_hugging_face(source: Any, side: str, size: int | None, progress: Progress | None) -> _Part:
    """Read the image and label columns, with class names from the label feature."""
    features: Mapping[str, Any] = source.features
    pictures = [column for column, feature in features.items() if type(feature).__name__ == "Image"]
    classes = [column for column, feature in features.items() if getattr(feature, "names", None)]
    image = next((key for key in _IMAGES if key in features), pictures[0] if len(pictures) == 1 else None)
    label = next((key for key in _LABELS if key in features), classes[0] if len(classes) == 1 else None)
    for column, what, known in ((image, "images", _IMAGES), (label, "labels", _LABELS)):
        if column is None:
            raise DataError(
                f"{side} data have the columns {format_list(list(features))}, none of them known to hold the {what}; "
                f"rename it to '{known[0]}' (rename_column)"
            )
    columns = source.select_columns([image, label])
    items = columns if _length(columns) is None else _Rows(columns, str(image), str(label))
    return _read_items(items, side, size, progress, getattr(features[str(label)], "names", None))


class _Rows:
    """Rows of a table as items (image, label)."""

    def __init__(self, table: Any, image: str, label: str):
        self.table, self.image, self.label = table, image, label

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, place: int) -> tuple[Any, Any]:
        row = self.table[place]
        return row[self.image], row[self.label]
