"""Conversion of images to uint8 (n, channels, height, width) and of labels to integers or names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor

from efcil.data.dataset import format_list
from efcil.data.decode import read_image
from efcil.data.folder import natural_key
from efcil.errors import DataError

__all__ = [
    "as_numpy",
    "channel_moments",
    "class_indices",
    "colored",
    "convert_image",
    "convert_images",
    "convert_label",
    "convert_labels",
    "to_uint8",
]

Images = npt.NDArray[np.uint8]
Labels = list[int] | list[str]
Progress = Callable[[int, int | None], None]
_CHANNELS = (1, 3, 4)  # channel counts to detect the layout of an array
_GRAY_MODES = ("1", "L", "LA", "La", "I", "F")
_SLOW = 2_000  # minimum number of images for a progress bar


def to_uint8(array: npt.NDArray[Any], name: str) -> Images:
    """Convert pixels to 0 to 255; floating-point values must be between 0 and 1.

    >>> to_uint8(np.array([0.0, 0.5, 1.0]), "images")
    array([  0, 128, 255], dtype=uint8)
    """
    if array.dtype == np.uint8:
        return array
    if not np.issubdtype(array.dtype, np.floating):
        raise DataError(f"{name}: {array.dtype} values; wanted uint8, or floating point from 0 to 1")
    if not np.isfinite(array).all():
        which = np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(1))
        raise DataError(f"{name}: NaN or infinite pixels in image {which[0]}, {len(which)} in total; replace them")
    low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
    if low < 0 or high > 1:
        raise DataError(
            f"{name}: {array.dtype} values from {low:g} to {high:g}; "
            "wanted 0 to 1, before any normalization, or uint8 from 0 to 255"
        )
    return np.rint(array * 255).astype(np.uint8)


def as_numpy(values: Any) -> npt.NDArray[Any]:
    """Convert a tensor on any device, or anything that numpy supports, to an array."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


# --- images ----------------------------------------------------------------------------------------------------------


def convert_images(
    images: Any, name: str, size: int | None = None, progress: Progress | None = None, count: int | None = None
) -> Images:
    """Convert one array or tensor (n, h, w), (n, h, w, c) or (n, c, h, w), or single images, to (n, c, side, side).

    With `size` images are resized by their short side and center-cropped. `count` is the number of single images, if
    they have no length.

    >>> convert_images(np.zeros((2, 4, 6, 3), dtype=np.uint8), "images", size=2).shape
    (2, 3, 2, 2)
    """
    if not isinstance(images, Tensor) and not (isinstance(images, np.ndarray) and images.dtype != object):
        count = len(images) if hasattr(images, "__len__") else count
        return _stack(images, count, name, size, progress)
    array = as_numpy(images)
    if array.ndim not in (3, 4) or 0 in array.shape[1:]:
        raise DataError(f"{name} have shape {array.shape}; wanted (n, h, w), (n, h, w, c) or (n, c, h, w)")
    array = _channels_first(array, isinstance(images, Tensor), name)
    if size is None or array.shape[2:] == (size, size):
        if array.shape[2] != array.shape[3]:
            raise DataError(
                f"{name} are {_shape(array)}, not square; give size={min(array.shape[2:])}, or another size"
            )
        return np.ascontiguousarray(to_uint8(array, name))
    return _stack(array, len(array), name, size, progress, channels_first=True)


def convert_image(image: Any, name: str, size: int | None = None, channels_first: bool | None = None) -> Images:
    """Convert one Pillow image, array or tensor to (c, side, side).

    >>> convert_image(Image.new("RGB", (8, 8)), "image").shape
    (3, 8, 8)
    """
    if not isinstance(image, Image.Image):
        if not isinstance(image, Tensor | np.ndarray):
            raise DataError(f"{name} is {type(image).__name__}; wanted a Pillow image, an array or a tensor")
        array = as_numpy(image)
        if array.ndim not in (2, 3) or 0 in array.shape:
            raise DataError(f"{name} has shape {array.shape}; wanted (h, w), (h, w, c) or (c, h, w)")
        first = isinstance(image, Tensor) if channels_first is None else channels_first
        pixels = to_uint8(_channels_first(array[None], first, name), name)[0]
        if (size is None and pixels.shape[1] == pixels.shape[2]) or pixels.shape[1:] == (size, size):
            return pixels
        if len(pixels) not in _CHANNELS:
            raise DataError(f"{name} has {len(pixels)} channels and cannot be resized; give images of {size} pixels")
        image = Image.fromarray(np.ascontiguousarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)))
    if size is None and image.size[0] != image.size[1]:
        raise DataError(
            f"{name} is {image.size[1]} x {image.size[0]}, not square; give size={min(image.size)}, or another size"
        )
    return read_image(image, size or image.size[0], 1 if image.mode in _GRAY_MODES else 3, name=name)


def _channels_first(array: npt.NDArray[Any], prefer_first: bool, name: str) -> npt.NDArray[Any]:
    """Return images (n, h, w), (n, h, w, c) or (n, c, h, w) as (n, c, h, w)."""
    if array.ndim == 3:
        return array[:, None]
    last, first = array.shape[3] in _CHANNELS, array.shape[1] in _CHANNELS
    if not (last or first):
        raise DataError(f"{name} have shape {array.shape}; wanted 1, 3 or 4 channels, first or last")
    return array if first and (prefer_first or not last) else array.transpose(0, 3, 1, 2)


def _stack(
    images: Iterable[Any],
    count: int | None,
    name: str,
    size: int | None,
    progress: Progress | None,
    channels_first: bool | None = None,
) -> Images:
    """Convert single images to one array."""
    rows: Images | None = None
    done = 0
    with _followed(progress, count, name) as follow:
        for done, image in enumerate(images, 1):
            one = convert_image(image, f"{name[:-1]} {done - 1}", size, channels_first)
            if rows is None:
                rows = np.empty((count or 1024, *one.shape), dtype=np.uint8)
            if one.shape != rows.shape[1:]:
                one, rows = _alike(one, rows, done - 1, name, size)
            if done > len(rows):
                rows = np.concatenate([rows, np.empty_like(rows)])
            rows[done - 1] = one
            follow(done, count)
    if rows is None:
        raise DataError(f"there are no {name}; give at least one of each class")
    return rows[:done]


def _alike(one: Images, rows: Images, place: int, name: str, size: int | None) -> tuple[Images, Images]:
    """Convert gray images to color if they are mixed; raise DataError for other differences."""
    if size is None or {len(one), rows.shape[1]} != {1, 3}:
        raise DataError(
            f"{name} differ: image 0 is {_shape(rows)} (channels x height x width), image {place} {_shape(one[None])}; "
            f"give size={rows.shape[2]}, or another size, to resize them"
        )
    return colored(one[None])[0], colored(rows)


def colored(images: Images) -> Images:
    """Convert gray images (n, 1, h, w) to color (n, 3, h, w); others are unchanged.

    >>> colored(np.zeros((2, 1, 4, 4), dtype=np.uint8)).shape
    (2, 3, 4, 4)
    """
    return np.repeat(images, 3, axis=1) if images.shape[1] == 1 else images


def _shape(images: npt.NDArray[Any]) -> str:
    return " x ".join(map(str, images.shape[1:]))


def channel_moments(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel, of pixels in [0, 1]; 1 for a constant channel.

    >>> channel_moments(np.array([0, 255], dtype=np.uint8).reshape(2, 1, 1, 1))
    ((0.5,), (0.5,))
    """
    counts = np.zeros((images.shape[1], 256), dtype=np.int64)
    for start in range(0, len(images), 4096):
        block = images[start : start + 4096]
        for channel in range(len(counts)):
            counts[channel] += np.bincount(block[:, channel].reshape(-1), minlength=256)
    levels = np.arange(256) / 255
    mean = counts @ levels / counts.sum(1)
    std = np.sqrt((counts * (levels - mean[:, None]) ** 2).sum(1) / counts.sum(1))
    return tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist())


@contextmanager
def _followed(progress: Progress | None, count: int | None, name: str) -> Iterator[Progress]:
    """Yield the given progress callback, or else a progress bar in terminals and notebooks."""
    if progress is not None or (count or 0) < _SLOW:
        yield progress or (lambda done, total: None)
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not (console.is_terminal or console.is_jupyter)) as bar:
        task = bar.add_task(f"converting {name}", total=count)
        yield lambda done, total: bar.update(task, completed=done)


# --- labels ----------------------------------------------------------------------------------------------------------


def convert_label(label: Any, name: str) -> int | str:
    """Convert a label to a non-negative integer or a class name.

    >>> convert_label(np.int64(3), "label"), convert_label("cat", "label")
    (3, 'cat')
    >>> convert_label(0.5, "training label 7")
    Traceback (most recent call last):
    efcil.errors.DataError: training label 7 is 0.5 (float); labels must be integers from 0 on, or names of classes
    """
    value = label.item() if isinstance(label, np.generic | np.ndarray | Tensor) and label.ndim == 0 else label
    if isinstance(value, str) and value:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    text = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor | np.ndarray) else f"{value!r:.60}"
    raise DataError(
        f"{name} is {text} ({type(value).__name__}); labels must be integers from 0 on, or names of classes"
    )


def convert_labels(labels: Any, name: str) -> Labels:
    """Convert the labels of one part, all integers or all names; `name` describes one label in messages.

    >>> convert_labels(np.array([1, 0]), "training label")
    [1, 0]
    """
    if isinstance(labels, Tensor | np.ndarray):
        array = as_numpy(labels)
        if array.ndim != 1:
            raise DataError(f"{name}s have shape {array.shape}; wanted one label for each image, (n,)")
        if array.dtype.kind in "fcb":
            raise DataError(f"{name}s are {array.dtype}; labels must be integers from 0 on, or names of classes")
        labels = array.tolist()
    elif isinstance(labels, str | bytes) or not isinstance(labels, Iterable):
        raise DataError(f"{name}s are {type(labels).__name__}; give one label for each image")
    found = [convert_label(label, f"{name} {place}") for place, label in enumerate(labels)]
    numbers = sum(isinstance(label, int) for label in found)
    if numbers not in (0, len(found)):
        raise DataError(f"{numbers} {name}s are integers and {len(found) - numbers} are names; use one kind")
    return found  # type: ignore[return-value]  # all of one kind


def class_indices(
    parts: Sequence[Labels], names: Sequence[Sequence[str] | None], chosen: Sequence[str] | None = None
) -> tuple[tuple[str, ...], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the class names, and training and test labels as class indices.

    `names` are the class names of both parts, `chosen` those of the user. Classes are those with training images; test
    images of other classes raise DataError.

    >>> class_indices([["b", "a"], ["b"]], [None, None])
    (('a', 'b'), array([1, 0]), array([1]))
    >>> class_indices([[7, 3], [3]], [None, None])
    (('3', '7'), array([1, 0]), array([0]))
    """
    if chosen is not None:
        chosen = list(map(str, chosen))
        if len(set(chosen)) < len(chosen):
            twice = [name for name in dict.fromkeys(chosen) if chosen.count(name) > 1]
            raise DataError(f"class_names has {format_list(twice)} more than once; use distinct names")
        names = [chosen, chosen]
    own = [given if given is not None else names[1 - side] for side, given in enumerate(names)]
    train, test = (_named(labels, given) for labels, given in zip(parts, own, strict=True))
    if {type(label) for label in train} != {type(label) for label in test}:
        raise DataError(
            "training labels and test labels differ: one part has integers, the other class names; use one kind"
        )
    present = set(train)
    if own[0] is not None:
        ordered: list[Any] = [name for name in own[0] if name in present]
    else:
        ordered = sorted(present) if isinstance(train[0], int) else sorted(present, key=natural_key)
    position = {label: place for place, label in enumerate(ordered)}
    unseen = sorted({str(label) for label in test if label not in position})
    if unseen:
        raise DataError(
            f"test images of {'class' if len(unseen) == 1 else 'classes'} {format_list(unseen)}, which have no "
            "training images; add some or remove these test images"
        )
    train_indices, test_indices = (np.array([position[label] for label in part], np.int64) for part in (train, test))
    return tuple(map(str, ordered)), train_indices, test_indices


def _named(labels: Labels, names: Sequence[str] | None) -> list[Any]:
    """Return the names of labels, if known."""
    if names is None:
        return list(labels)
    known = {*names, *range(len(names))}
    for label in dict.fromkeys(labels):
        if label not in known:
            raise DataError(f"label {label!r} is not one of the {len(names)} classes, {format_list(list(names))}")
    return [label if isinstance(label, str) else names[label] for label in labels]
