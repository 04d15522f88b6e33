"""Conversion of folders, paths, bytes, Pillow images, arrays, tensors and data sets to uint8 squares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from efcil.data.cache import decode_to_memory
from efcil.data.class_folders import check_duplicates, scan_classes
from efcil.data.convert import to_uint8
from efcil.data.dataset import DataSet, ImageSet, format_list
from efcil.data.decode import read_image
from efcil.data.duplicates import Duplicates
from efcil.data.preprocessing import Preprocessing
from efcil.errors import DataError, warn
from efcil.product.names import as_names

Images = npt.NDArray[np.uint8]
Split = Literal["train", "test"]
ReadCallback = Callable[[int, int], None]
CHANNELS = 3
BATCH = 16  # pictures that are in memory at once where they are not kept


def read_images(images: Any, wanted: int | Preprocessing) -> Images:
    """Return unlabeled images as (n, 3, size, size); `wanted` is the size or what a backbone expects."""
    if isinstance(images, str | os.PathLike):
        if os.path.isdir(images):
            raise DataError(f"{os.fspath(images)} is a folder; give the paths of its images")
        images = [images]
    elif isinstance(images, Image.Image | bytes):
        images = [images]
    elif isinstance(images, ImageSet):
        images = images.images
    if isinstance(images, Tensor | np.ndarray) and not _is_list(images):
        return _read_array(images, wanted)
    rows, bad = _decode(_listed(images), wanted)
    if bad:
        raise DataError(format_list(list(bad.values())))
    return rows


def read_labeled_images(
    data: Any,
    labels: Any,
    wanted: int | Preprocessing,
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
    pictures = _open(data, labels, wanted, split, skip_bad)
    images, bad = pictures.read(slice(0, len(pictures.names)), on_progress)
    duplicates = Duplicates()
    if pictures.files is not None:
        duplicates.add(images[[row for row in range(len(images)) if row not in bad]])
    kept = _keep_readable(pictures, bad, skip_bad, duplicates)
    on_progress(len(kept), len(kept))
    return (images if len(kept) == len(images) else images[kept]), [pictures.names[row] for row in kept]


def map_labeled_images(
    data: Any,
    labels: Any,
    wanted: int | Preprocessing,
    use: Callable[[Images], Tensor],
    split: Split = "train",
    *,
    skip_bad: bool = False,
    on_progress: ReadCallback = lambda done, total: None,
) -> tuple[Tensor, list[str], list[str] | None]:
    """Return what `use` makes of the images, as rows of a tensor, their class names and, of a folder, their files.

    No image is kept. Else as `read_labeled_images`.
    """
    pictures = _open(data, labels, wanted, split, skip_bad)
    found: list[Tensor] = []
    bad: dict[int, str] = {}
    duplicates, total = Duplicates(), len(pictures.names)
    for begin in range(0, total, BATCH):
        images, wrong = pictures.read(slice(begin, min(begin + BATCH, total)), lambda done, of: None)
        bad |= {begin + place: problem for place, problem in wrong.items()}
        images = images[[place for place in range(len(images)) if place not in wrong]]
        if pictures.files is not None and len(images):
            duplicates.add(images)
        if len(images) and (skip_bad or not bad):
            found.append(use(images))
        on_progress(min(begin + BATCH, total), total)
    kept = _keep_readable(pictures, bad, skip_bad, duplicates)
    files = None if pictures.files is None else [os.path.join(pictures.root, pictures.files[row]) for row in kept]
    return torch.cat(found), [pictures.names[row] for row in kept], files


class _Pictures(NamedTuple):
    """Labeled pictures that are decoded when they are asked for."""

    names: list[str]  # class names
    read: Callable[[slice, ReadCallback], tuple[Images, dict[int, str]]]  # images, and what is wrong with some of them
    files: list[str] | None = None  # of a folder
    root: Path = Path()  # the folder
    is_test: bool = False  # or to be learned
    strays: Sequence[str] = ()  # files of a folder that are no images


def _open(data: Any, labels: Any, wanted: int | Preprocessing, split: Split, skip_bad: bool) -> _Pictures:
    if isinstance(data, DataSet | ImageSet) or (isinstance(data, str | os.PathLike) and os.path.isdir(data)):
        if labels is not None:
            raise DataError("labels were given for data with labels; omit labels")
        if isinstance(data, DataSet | ImageSet):
            return _open_dataset(data, wanted, split)
        return _open_folder(data, wanted, split, skip_bad)
    if isinstance(data, str | os.PathLike | bytes | Image.Image):
        if isinstance(data, str | os.PathLike) and not os.path.exists(data):
            raise DataError(f"{os.fspath(data)}: no such folder; give a folder with one subfolder per class")
        data, labels = [data], [labels] if isinstance(labels, str | int) else labels
    if labels is None:
        raise DataError("labels are missing; give one for each image, or a folder of class folders")
    names = as_names(labels)
    given = data if isinstance(data, Tensor | np.ndarray) and not _is_list(data) else _listed(data)
    if len(given) != len(names):
        raise DataError(f"{len(names)} labels for {len(given)} images; give one label for each image")
    if isinstance(given, list):
        return _Pictures(names, lambda rows, progress: _decode(given[rows], wanted, progress, rows.start))
    return _Pictures(names, lambda rows, progress: (_read_array(given[rows], wanted), {}))


def _open_dataset(data: DataSet | ImageSet, wanted: int | Preprocessing, split: Split) -> _Pictures:
    if isinstance(data, DataSet):
        chosen = data.train if split == "train" else data.test
        names = [data.class_names[label] for label in chosen.labels]
    else:
        chosen, names = data, as_names(data.labels)

    def read(rows: slice, progress: ReadCallback) -> tuple[Images, dict[int, str]]:
        return _from_array(np.asarray(chosen.images[rows]), wanted, channels_first=True), {}

    return _Pictures(names, read)


def _open_folder(
    folder: str | os.PathLike[str], wanted: int | Preprocessing, split: Split, skip_bad: bool
) -> _Pictures:
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

    def read(rows: slice, progress: ReadCallback) -> tuple[Images, dict[int, str]]:
        return decode_to_memory(tree.root, files[rows], size=wanted, progress=progress)

    return _Pictures(names, read, files, tree.root, split == "test", tree.strays)


def _keep_readable(pictures: _Pictures, bad: dict[int, str], skip_bad: bool, duplicates: Duplicates) -> list[int]:
    """Return the rows of readable images or raise DataError; warn of what is odd in a folder."""
    names = pictures.names
    if not names:
        raise DataError("no images were given; give one or more")
    good = [row for row in range(len(names)) if row not in bad]
    if bad:
        readable = {names[row] for row in good}
        lost = [name for name in dict.fromkeys(names) if name not in readable]
        reasons = list(bad.values())
        if lost:
            raise DataError(
                f"no readable image of class {format_list(lost)}: {format_list(reasons)}; add images or remove it"
            )
        if not skip_bad:
            raise DataError(f"{format_list(reasons)}; remove unreadable images or pass skip_bad=True (--skip-bad)")
    if pictures.files is not None:
        if left_out := [*pictures.strays, *bad.values()]:
            warn(f"skipped {len(left_out)} file{'s' * (len(left_out) > 1)}: {format_list(left_out)}")
        files = [pictures.files[row] for row in good]
        check_duplicates(duplicates.groups(), files, [names[row] for row in good], refuse=not pictures.is_test)
    return good


def _listed(images: Any) -> list[Any]:
    if not isinstance(images, Iterable):
        raise DataError(f"images are {type(images).__name__}; wanted a list of paths or images, an array or a tensor")
    return list(images)


def _is_list(images: Tensor | npt.NDArray[Any]) -> bool:
    """Return whether an array holds paths or images rather than pixels."""
    return isinstance(images, np.ndarray) and (images.dtype == object or images.dtype.kind in "US")


def _read_array(images: Tensor | npt.NDArray[Any], wanted: int | Preprocessing) -> Images:
    if isinstance(images, Tensor):
        return _from_array(images.detach().cpu().numpy(), wanted, channels_first=True)
    return _from_array(images, wanted)


def _decode(
    given: Sequence[Any],
    wanted: int | Preprocessing,
    on_progress: ReadCallback = lambda done, total: None,
    first: int = 0,
) -> tuple[Images, dict[int, str]]:
    """Convert a list of paths and images to an array, and return the problem of each unreadable one."""
    rows, bad = np.zeros((len(given), CHANNELS, *[Preprocessing.of(wanted).size] * 2), dtype=np.uint8), dict[int, str]()
    paths = [row for row, one in enumerate(given) if isinstance(one, str | os.PathLike)]
    if paths:
        names = [os.fspath(given[row]) for row in paths]
        rows[paths], wrong = decode_to_memory(Path(), names, size=wanted, progress=on_progress)
        bad |= {paths[place]: reason for place, reason in wrong.items()}
    for row in sorted(set(range(len(given))) - set(paths)):
        try:
            rows[row] = _read_one(given[row], wanted, f"image {first + row}")
        except DataError as error:
            bad[row] = str(error)
    return rows, bad


def _read_one(image: Any, wanted: int | Preprocessing, name: str) -> Images:
    if isinstance(image, bytes | Image.Image):
        return read_image(image, wanted, CHANNELS, name=name)
    if isinstance(image, Tensor | np.ndarray):
        first = isinstance(image, Tensor)
        array = image.detach().cpu().numpy() if isinstance(image, Tensor) else image
        if array.ndim not in (2, 3):
            raise DataError(f"{name} has shape {array.shape}; wanted (height, width) or with channels")
        return _from_array(array[None], wanted, channels_first=first, name=name)[0]
    raise DataError(f"{name} is {type(image).__name__}; wanted a path, bytes, Pillow image, array or tensor")


def _from_array(
    array: npt.NDArray[Any], wanted: int | Preprocessing, channels_first: bool = False, name: str = "images"
) -> Images:
    """Convert (n, h, w), (n, h, w, c) or (n, c, h, w) to (n, 3, size, size); c is 1, 3, or 4 with alpha.

    Images of that size already are taken as they are.
    """
    size = Preprocessing.of(wanted).size
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
        row[:] = read_image(image, wanted, CHANNELS)
    return rows
