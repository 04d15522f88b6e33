"""Conversion of folders, paths, bytes, Pillow images, arrays, tensors and data sets to uint8 squares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor

from efcil.data.cache import decode_to_memory
from efcil.data.class_folders import check_duplicates, scan_classes
from efcil.data.convert import to_uint8
from efcil.data.dataset import DataSet, ImageSet, format_list
from efcil.data.decode import read_image
from efcil.errors import DataError, warn
from efcil.product.names import as_names

Images = npt.NDArray[np.uint8]
Split = Literal["train", "test"]
ReadCallback = Callable[[int, int], None]
CHANNELS = 3


def read_images(images: Any, size: int) -> Images:
    """Return unlabeled images as (n, 3, size, size)."""
    if isinstance(images, str | os.PathLike):
        if os.path.isdir(images):
            raise DataError(f"{os.fspath(images)} is a folder; give the paths of its images")
        images = [images]
    elif isinstance(images, Image.Image | bytes):
        images = [images]
    elif isinstance(images, ImageSet):
        images = images.images
    return _to_array(images, size)[0]


def read_labeled_images(
    data: Any,
    labels: Any,
    size: int,
    split: Split = "train",
    *,
    skip_bad: bool = False,
    on_progress: ReadCallback = lambda done, total: None,
) -> tuple[Images, list[str]]:
    """Return images (n, 3, size, size) and their class names.

    `split` selects the part of a data set or of a folder with train/ and test/. Unreadable images raise DataError, or
    are skipped with `skip_bad`; a class without readable images always raises DataError. In a folder, files that are
    not images are skipped. A warning names what was skipped, and pictures that are in two classes.
    """
    bad: dict[int, str] = {}
    if isinstance(data, DataSet | ImageSet) or (isinstance(data, str | os.PathLike) and os.path.isdir(data)):
        if labels is not None:
            raise DataError("labels were given for data with labels; omit labels")
        if isinstance(data, DataSet | ImageSet):
            images, names = _from_dataset(data, size, split)
        else:
            return _from_folder(data, size, split, skip_bad, on_progress)
    else:
        if isinstance(data, str | os.PathLike | bytes | Image.Image):
            if isinstance(data, str | os.PathLike) and not os.path.exists(data):
                raise DataError(f"{os.fspath(data)}: no such folder; give a folder with one subfolder per class")
            data, labels = [data], [labels] if isinstance(labels, str | int) else labels
        if labels is None:
            raise DataError("labels are missing; give one for each image, or a folder of class folders")
        names = as_names(labels)
        count = len(data) if hasattr(data, "__len__") else None
        if count is not None and count != len(names):
            raise DataError(f"{len(names)} labels for {count} images; give one label for each image")
        images, bad = _to_array(data, size, on_progress, keep_bad=True)
        if len(images) != len(names):
            raise DataError(f"{len(names)} labels for {len(images)} images; give one label for each image")
    return _keep_readable(images, names, bad, skip_bad)


def _keep_readable(images: Images, names: list[str], bad: dict[int, str], skip_bad: bool) -> tuple[Images, list[str]]:
    """Drop unreadable images or raise DataError."""
    if not names:
        raise DataError("no images were given; give one or more")
    if not bad:
        return images, names
    good = [row for row in range(len(names)) if row not in bad]
    readable = {names[row] for row in good}
    lost = [name for name in dict.fromkeys(names) if name not in readable]
    reasons = list(bad.values())
    if lost:
        raise DataError(
            f"no readable image of class {format_list(lost)}: {format_list(reasons)}; add images or remove it"
        )
    if not skip_bad:
        raise DataError(f"{format_list(reasons)}; remove unreadable images or pass skip_bad=True (--skip-bad)")
    return images[good], [names[row] for row in good]


def _from_dataset(data: DataSet | ImageSet, size: int, split: Split) -> tuple[Images, list[str]]:
    if isinstance(data, DataSet):
        chosen = data.train if split == "train" else data.test
        names = [data.class_names[label] for label in chosen.labels]
    else:
        chosen, names = data, as_names(data.labels)
    return _from_array(np.asarray(chosen.images), size, channels_first=True), names


def _from_folder(
    folder: str | os.PathLike[str], size: int, split: Split, skip_bad: bool, on_progress: ReadCallback
) -> tuple[Images, list[str]]:
    tree = scan_classes(folder, split)
    if (problems := tree.unusable()) and not skip_bad:
        raise DataError(f"{format_list(problems)}; remove other files or pass skip_bad=True (--skip-bad)")
    found = {file.label for file in tree.files}
    empty = [name for label, name in enumerate(tree.class_names) if label not in found]
    if empty:
        skipped = f" ({format_list(tree.strays)})" if tree.strays else ""
        raise DataError(
            f"{tree.root}: no image of class {format_list(empty)}{skipped}; add images or remove the folder"
        )
    files, names = [file.name for file in tree.files], [tree.class_names[file.label] for file in tree.files]
    images, bad = decode_to_memory(tree.root, files, size=size, progress=on_progress)
    images, names = _keep_readable(images, names, bad, skip_bad)
    if left_out := [*tree.strays, *bad.values()]:
        warn(f"skipped {len(left_out)} file{'s' * (len(left_out) > 1)}: {format_list(left_out)}")
    check_duplicates(images, [file for row, file in enumerate(files) if row not in bad], names)
    return images, names


def _to_array(
    images: Any, size: int, on_progress: ReadCallback = lambda done, total: None, keep_bad: bool = False
) -> tuple[Images, dict[int, str]]:
    """Convert images to an array; with `keep_bad` also return the problem of each unreadable one instead of raising."""
    if isinstance(images, Tensor):
        return _from_array(images.detach().cpu().numpy(), size, channels_first=True), {}
    if isinstance(images, np.ndarray) and images.dtype != object and images.dtype.kind not in "US":
        return _from_array(images, size), {}
    if not isinstance(images, Iterable):
        raise DataError(f"images are {type(images).__name__}; wanted a list of paths or images, an array or a tensor")
    given: Sequence[Any] = list(images)
    rows = np.zeros((len(given), CHANNELS, size, size), dtype=np.uint8)
    bad: dict[int, str] = {}
    paths = [row for row, one in enumerate(given) if isinstance(one, str | os.PathLike)]
    if paths:
        names = [os.fspath(given[row]) for row in paths]
        rows[paths], wrong = decode_to_memory(Path(), names, size=size, progress=on_progress)
        bad |= {paths[place]: reason for place, reason in wrong.items()}
    for row in sorted(set(range(len(given))) - set(paths)):
        try:
            rows[row] = _read_one(given[row], size, f"image {row}")
        except DataError as error:
            bad[row] = str(error)
    if bad and not keep_bad:
        raise DataError(format_list(list(bad.values())))
    return rows, bad


def _read_one(image: Any, size: int, name: str) -> Images:
    if isinstance(image, bytes | Image.Image):
        return read_image(image, size, CHANNELS, name=name)
    if isinstance(image, Tensor | np.ndarray):
        first = isinstance(image, Tensor)
        array = image.detach().cpu().numpy() if isinstance(image, Tensor) else image
        if array.ndim not in (2, 3):
            raise DataError(f"{name} has shape {array.shape}; wanted (height, width) or with channels")
        return _from_array(array[None], size, channels_first=first, name=name)[0]
    raise DataError(f"{name} is {type(image).__name__}; wanted a path, bytes, Pillow image, array or tensor")


def _from_array(array: npt.NDArray[Any], size: int, channels_first: bool = False, name: str = "images") -> Images:
    """Convert (n, h, w), (n, h, w, c) or (n, c, h, w) to (n, 3, size, size); c is 1, 3, or 4 with alpha."""
    if array.ndim == 3 and array.shape[2] in (1, 3, 4):
        raise DataError(f"{name} have shape {array.shape}, a single image; give a batch, (1, {array.shape})")
    if array.ndim not in (3, 4) or 0 in array.shape[1:]:
        raise DataError(f"{name} have shape {array.shape}; wanted (n, h, w), (n, h, w, c) or (n, c, h, w)")
    values = to_uint8(array, name)
    if values.ndim == 3:
        values = values[..., None]
    else:
        last, first = values.shape[3] in (1, 3, 4), values.shape[1] in (1, 3, 4)
        if not (last or first):
            raise DataError(f"{name} have shape {array.shape}; wanted 1, 3 or 4 channels, first or last")
        if first and (channels_first or not last):
            values = values.transpose(0, 2, 3, 1)
    height, width, channels = values.shape[1:]
    if (height, width) == (size, size) and channels != 4:
        squares = np.broadcast_to(values, (*values.shape[:3], CHANNELS))
        return np.ascontiguousarray(squares.transpose(0, 3, 1, 2))
    rows = np.zeros((len(values), CHANNELS, size, size), dtype=np.uint8)
    for row, one in zip(rows, values, strict=True):
        image = Image.fromarray(np.ascontiguousarray(one[..., 0] if channels == 1 else one))
        row[:] = read_image(image, size, CHANNELS)
    return rows
