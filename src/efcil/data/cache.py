"""Cache of decoded image trees: worker processes decode into an array file, which later calls memory-map.

Files are written only to the cache, never to the image folder:

    <cache>/<folder>-<key>/<split>-<size>px-<fingerprint>.npy    uint8 (n, 3, size, size), training images first
                           <split>-<size>px-<fingerprint>.json   its files and labels; written last
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import multiprocessing
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from efcil.data.dataset import DataSet, ImageSet, Official, format_list
from efcil.data.decode import read_image
from efcil.data.letterbox import stored_shape
from efcil.data.preprocessing import IMAGENET_MEAN as MEAN
from efcil.data.preprocessing import IMAGENET_STD as STD
from efcil.data.preprocessing import Preprocessing
from efcil.data.workers import CHANNELS, decode_chunk, pool_of, problem, starting
from efcil.errors import ConfigError, DataError
from efcil.files import StrPath, atomic_replace, read_json, write_json
from efcil.platform_support import cores, user_cache

SUFFIXES = frozenset(".jpg .jpeg .png .bmp .gif .tif .tiff .webp .ppm .pgm .heic .heif".split())
IGNORED = frozenset({"thumbs.db", "desktop.ini", "__macosx"})  # created by file managers
NOT_AN_IMAGE = "is not an image"  # end of a stray with another suffix

Progress = Callable[[int, int], None]

_VERSION = 1  # of the cache format; increase when decoding or layout changes
_CHUNK = 32  # images per job of a worker
MIN_PARALLEL = 512  # fewer images are decoded faster without processes
_STALE_SECONDS = 3600.0  # age of a temporary array after which its build counts as killed
PROBE_SIZE = 8  # image size for checks that a file can be decoded


@dataclass(frozen=True)
class File:
    """An image file of a tree."""

    name: str  # relative path with slashes
    label: int
    size: int
    mtime_ns: int
    side: str | None  # "train", "test", or None if the split is generated


class Split(Protocol):
    """Assigns the files of a tree to train or test; `home` is the cache directory of the tree."""

    @property
    def key(self) -> str:
        """Name of the split in cache file names."""
        ...

    def check(self, tree: Tree, files: Iterable[File]) -> None:
        """Raise DataError if a class lacks training or test images."""
        ...

    def split_of(self, tree: Tree, files: Sequence[File], home: Path) -> dict[str, str]:
        """Return "train" or "test" for each file."""
        ...

    def record(self, sides: dict[str, str], home: Path) -> None:
        """Save the split, if the tree does not define it."""
        ...


@dataclass(frozen=True)
class GivenSplit:
    """Split defined by folders such as train/ and test/."""

    train: str = "train"  # for messages
    test: str = "test"
    key: str = "given"

    def check(self, tree: Tree, files: Iterable[File]) -> None:
        """Raise DataError if a class is missing in one part."""
        present = {(file.label, file.side) for file in files}
        for label, name in enumerate(tree.class_names):
            for side, part in (("train", self.train), ("test", self.test)):
                if (label, side) not in present:
                    raise DataError(
                        f"{tree.root}: class '{name}' has no images in {part}/; add images to {part}/{name} "
                        "or remove the class from both parts"
                    )

    def split_of(self, tree: Tree, files: Sequence[File], home: Path) -> dict[str, str]:
        """Return the side of each file."""
        return {file.name: str(file.side) for file in files}

    def record(self, sides: dict[str, str], home: Path) -> None:
        """Do nothing; the folders define the split."""


@dataclass
class Tree:
    """Image files with labels, before decoding."""

    root: Path
    class_names: tuple[str, ...] = ()
    files: list[File] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)  # "a/notes.txt is not an image"
    notes: list[str] = field(default_factory=list)
    split: Split = field(default_factory=GivenSplit)
    official: Official | None = None

    def unusable(self) -> list[str]:
        """Return the strays but for files without the suffix of an image."""
        return [stray for stray in self.strays if not stray.endswith(NOT_AN_IMAGE)]


def load_decoded(
    tree: Tree,
    name: str,
    *,
    size: int | Preprocessing,
    workers: int | None = None,
    cache: StrPath | None = None,
    skip_bad: bool = False,
    lazy: bool | None = None,
    keep_aspect: bool | None = None,
    progress: Progress | None = None,
) -> DataSet:
    """Load the images of a tree as squares of `size` pixels, decoded once and then memory-mapped from the cache.

    `size` may also be what a backbone expects of a picture.

    With `keep_aspect` images are letterboxed instead of cropped (`efcil.data.letterbox`), for random crops. With
    `lazy`, or by default if the array would take more than half of the free disk space, worker processes decode images
    on every access. Unreadable files raise one DataError that names them, or are skipped and noted (`skip_bad`).
    `workers` defaults to one process per core, or none for few images; `progress(done, total)` reports decoding.
    """
    check_decoding(size, workers)
    if tree.strays and not skip_bad:
        raise _bad_files(tree.strays)
    tree.split.check(tree, tree.files)

    store = _Store.of(tree, home(tree, cache), size, bool(keep_aspect))
    entry = None if lazy else store.find(tree)
    if entry is None and (lazy or (lazy is None and not store.fits(tree))):
        return _lazy_data_set(tree, name, store, workers)
    if entry is None:
        with _disk_errors(store.folder):
            entry = store.build(tree, skip_bad=skip_bad, workers=workers, progress=progress)
    if entry.bad and not skip_bad:
        raise _bad_files(entry.bad)

    return _data_set(tree, name, entry.images, entry.labels, entry.train, [*tree.strays, *entry.bad], [])


def loader(name: str, scan: Callable[[StrPath], Tree], side: int) -> Callable[..., DataSet]:
    """Return the `load` function of a data set from its `scan` and default image size."""

    def load(
        directory: StrPath,
        *,
        size: int = side,
        skip_bad: bool = False,
        lazy: bool | None = None,
        keep_aspect: bool | None = None,
        progress: Progress | None = None,
    ) -> DataSet:
        """Load the data set from its folder; options as in `load_decoded`."""
        tree = scan(directory)
        return load_decoded(
            tree, name, size=size, skip_bad=skip_bad, lazy=lazy, keep_aspect=keep_aspect, progress=progress
        )

    return load


def _data_set(
    tree: Tree, name: str, images: Any, labels: Sequence[int], train: int, skipped: Sequence[str], notes: Sequence[str]
) -> DataSet:
    """Build the data set from images, the first `train` of which are for training, and notes."""
    notes = [*tree.notes, *notes]
    if skipped:
        notes.append(f"skipped {format_list(skipped)}")
    every = np.asarray(labels, dtype=np.int64)
    if tree.official is not None:
        counts = (np.bincount(part, minlength=len(tree.class_names)) for part in np.split(every, [train]))
        if differences := tree.official.differences(tree.class_names, *counts):
            notes.append(f"not the official {name}: {'; '.join(differences)}")
    return DataSet(
        name=name,
        class_names=tree.class_names,
        train=ImageSet(images[:train], every[:train]),
        test=ImageSet(images[train:], every[train:]),
        mean=MEAN,
        std=STD,
        notes=tuple(notes),
    )


def _lazy_data_set(tree: Tree, name: str, store: _Store, workers: int | None) -> DataSet:
    from efcil.data.lazy import Decoder, LazyImageFolder

    rows, train = store.rows(tree, tree.files)
    with _disk_errors(store.folder):
        store.folder.mkdir(parents=True, exist_ok=True)
        tree.split.record(tree.split.split_of(tree, rows, store.folder), store.folder)
    decoder = Decoder(tree.root, [file.name for file in rows], store.size, workers, store.keep_aspect)
    images = LazyImageFolder(decoder, np.arange(len(rows)))
    note = f"{len(rows):,} images are decoded on access by {decoder.workers} processes"
    return _data_set(tree, name, images, [file.label for file in rows], train, tree.strays, [note])


def check_decoding(size: int | Preprocessing, workers: int | None) -> None:
    """Raise ConfigError for invalid options of `load_decoded`, before a large tree is scanned."""
    Preprocessing.of(size)
    if workers is not None and workers < 1:
        raise ConfigError(f"workers must be at least 1, got {workers}")


def unreadable(tree: Tree, workers: int | None = None, progress: Progress | None = None) -> dict[str, str]:
    """Decode every file of a tree and return the problem of each unreadable one."""
    with tempfile.TemporaryDirectory(prefix="efcil-") as folder:
        names = [file.name for file in tree.files]
        return _decode_all(tree.root, names, Path(folder) / "glance.npy", PROBE_SIZE, workers, progress)


def decode_to_memory(
    root: Path,
    names: Sequence[str],
    *,
    size: int | Preprocessing,
    workers: int | None = None,
    progress: Progress | None = None,
) -> tuple[npt.NDArray[np.uint8], dict[int, str]]:
    """Decode files into memory, (n, channels, size, size), and return the problem of each unreadable row.

    Unreadable rows are black. Many files are decoded by several processes through a temporary file.
    """
    side = Preprocessing.of(size).size
    check_decoding(side, workers)
    if _processes(workers, len(names)) > 1:
        with tempfile.TemporaryDirectory(prefix="efcil-") as folder:
            target = Path(folder) / "pictures.npy"
            wrong = _decode_all(root, names, target, size, workers, progress)
            pictures = np.load(target, allow_pickle=False)
            return pictures, {row: wrong[name] for row, name in enumerate(names) if name in wrong}
    rows = np.zeros((len(names), CHANNELS, side, side), dtype=np.uint8)
    bad: dict[int, str] = {}
    for row, name in enumerate(names):
        try:
            rows[row] = read_image(root / name, size, CHANNELS, name=name)
        except DataError as error:
            bad[row] = str(error)
        if progress is not None and ((row + 1) % _CHUNK == 0 or row + 1 == len(names)):
            progress(row + 1, len(names))
    return rows, bad


def cache_directory() -> Path:
    """Return the cache directory: EFCIL_CACHE, or `efcil` in XDG_CACHE_HOME or the system's cache directory."""
    if custom := os.environ.get("EFCIL_CACHE"):
        return Path(custom).expanduser()
    return user_cache() / "efcil"


def home(tree: Tree, cache: StrPath | None = None) -> Path:
    """Return the cache directory of a tree."""
    cache = Path(os.path.realpath(cache if cache is not None else cache_directory()))
    if cache.is_relative_to(tree.root):
        raise DataError(f"{cache}: the cache is inside the image folder; choose another with cache= or EFCIL_CACHE")
    key = hashlib.sha256(os.fsencode(tree.root)).hexdigest()[:12]
    label = re.sub(r"[^A-Za-z0-9_-]+", "_", tree.root.name)[:40]
    return cache / f"{label}-{key}"


def _bad_files(problems: Sequence[str]) -> DataError:
    head = "" if len(problems) == 1 else f"{len(problems)} files cannot be used: "
    pronoun = "it" if len(problems) == 1 else "them"
    return DataError(f"{head}{format_list(problems)}; remove {pronoun} or pass --skip-bad (skip_bad=True)")


# ---------------------------------------------------------------------------------------------------------------------
# the cache


@dataclass(frozen=True)
class _Entry:
    images: npt.NDArray[np.uint8]
    labels: list[int]
    train: int  # number of leading training images
    bad: list[str]


@dataclass(frozen=True)
class _Store:
    """Cache of one tree at one size and split."""

    folder: Path
    stem: str  # split, size and fingerprint of the files
    size: int | Preprocessing
    keep_aspect: bool

    @classmethod
    def of(cls, tree: Tree, folder: Path, size: int | Preprocessing, keep_aspect: bool) -> _Store:
        form, side = Preprocessing.of(size).decoding, Preprocessing.of(size).size
        digest = hashlib.sha256(repr((_VERSION, CHANNELS, side, tree.class_names)).encode("utf-8", "backslashreplace"))
        for file in tree.files:
            digest.update(os.fsencode(file.name) + f"\0{file.size}\0{file.mtime_ns}\n".encode())
        form += "whole" if keep_aspect else ""
        return cls(folder, f"{tree.split.key}-{form}-{digest.hexdigest()[:24]}", size, keep_aspect)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of an image."""
        return stored_shape(CHANNELS, Preprocessing.of(self.size).size, self.keep_aspect)

    @property
    def array(self) -> Path:
        return self.folder / f"{self.stem}.npy"

    @property
    def index(self) -> Path:
        return self.folder / f"{self.stem}.json"

    def find(self, tree: Tree) -> _Entry | None:
        """Return the cached images, or None if missing, incomplete or outdated."""
        try:
            kept = read_json(self.index)
            images = np.load(self.array, mmap_mode="r", allow_pickle=False)
            names, labels, train, bad = kept["files"], kept["labels"], kept["train"], kept["bad"]
        except Exception:  # numpy raises various errors for a damaged header; rebuild in any case
            return None
        if not isinstance(names, list) or not isinstance(bad, dict):
            return None
        if images.shape != (len(names), *self.shape) or images.dtype != np.uint8:
            return None
        # Retry bad files: permission and network errors do not change the fingerprint.
        if any(problem(tree.root, name, self.size) is None for name in bad):
            return None
        rows, count = self.rows(tree, [file for file in tree.files if file.name not in bad])
        if ([file.name for file in rows], [file.label for file in rows], count) != (names, labels, train):
            return None  # the recorded split was deleted, or labels or sides are outdated
        return _Entry(images, labels, train, [bad[name] for name in bad])

    def rows(self, tree: Tree, files: Sequence[File]) -> tuple[list[File], int]:
        """Return the files in array order, training images first, and the number of training images."""
        sides = tree.split.split_of(tree, files, self.folder)
        train = [file for file in files if sides[file.name] == "train"]
        return train + [file for file in files if sides[file.name] == "test"], len(train)

    def build(self, tree: Tree, *, skip_bad: bool, workers: int | None, progress: Progress | None) -> _Entry:
        """Decode all images; the complete array is renamed, and valid once its index is written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.clear_stale()
        rows, train = self.rows(tree, tree.files)
        needed = self.needed(len(rows))
        if needed > (free := shutil.disk_usage(self.folder).free):
            raise DataError(
                f"{self.folder}: {len(rows)} decoded images need {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB "
                "are free; free some space, set EFCIL_CACHE, use a smaller size or --set data.lazy=true"
            )
        with atomic_replace(self.array) as temporary:
            names = [file.name for file in rows]
            bad = _decode_all(tree.root, names, temporary, self.size, workers, progress, self.keep_aspect)
            if bad:
                good = [file for file in tree.files if file.name not in bad]
                try:
                    tree.split.check(tree, good)
                except DataError:
                    if skip_bad:
                        raise
                    raise _bad_files(list(bad.values())) from None
                place = {name: row for row, name in enumerate(names)}
                rows, train = self.rows(tree, good)
                _reorder(temporary, [place[file.name] for file in rows])
        tree.split.record(tree.split.split_of(tree, rows, self.folder), self.folder)
        labels = [file.label for file in rows]
        write_json(
            self.index,
            {
                "version": _VERSION,
                "class_names": tree.class_names,
                "train": train,
                "files": [file.name for file in rows],
                "labels": labels,
                "bad": bad,
            },
            indent=None,
        )
        self.clear_superseded()
        return _Entry(np.load(self.array, mmap_mode="r", allow_pickle=False), labels, train, list(bad.values()))

    def needed(self, count: int) -> int:
        """Return the size in bytes of the array of `count` images."""
        return count * math.prod(self.shape)

    def fits(self, tree: Tree) -> bool:
        """Return whether the array takes at most half of the free disk space."""
        existing = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
        return self.needed(len(tree.files)) <= shutil.disk_usage(existing).free / 2

    def clear_stale(self) -> None:
        """Remove temporary files of killed builds."""
        for path in self.folder.glob(".*.tmp.npy"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()

    def clear_superseded(self) -> None:
        """Remove outdated arrays; processes that have mapped one can still read it."""
        prefix = self.stem.rpartition("-")[0]
        for path in self.folder.iterdir():
            if path.name.startswith(prefix + "-") and path.stem != self.stem:
                with contextlib.suppress(OSError):
                    path.unlink()


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write the cache {folder}: {error.strerror or error}; choose another with EFCIL_CACHE"
        ) from error


# ---------------------------------------------------------------------------------------------------------------------
# decoding


def _decode_all(
    root: Path,
    names: Sequence[str],
    target: Path,
    size: int | Preprocessing,
    workers: int | None,
    progress: Progress | None,
    keep_aspect: bool = False,
) -> dict[str, str]:
    """Decode the files into the rows of a new array file; return the problem of each unreadable one."""
    # Write instead of mapping: on a full disk, writing raises an error while a mapping kills the process.
    with open(target, "wb") as file:
        shape = (len(names), *stored_shape(CHANNELS, Preprocessing.of(size).size, keep_aspect))
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
        start = file.tell()
        row = math.prod(shape[1:])
        file.truncate(start + len(names) * row)
    jobs = [
        (os.fspath(root), names[i : i + _CHUNK], os.fspath(target), start + i * row, size, keep_aspect)
        for i in range(0, len(names), _CHUNK)
    ]
    bad: dict[str, str] = {}
    done = 0
    with contextlib.closing(_results(jobs, _processes(workers, len(names)), target)) as results:
        for count, problems in results:
            bad |= problems
            done += count
            if progress is not None:
                progress(done, len(names))
    return {name: bad[name] for name in names if name in bad}  # in file order


def _processes(wanted: int | None, count: int) -> int:
    if multiprocessing.current_process().daemon:  # daemons cannot have children
        return 1
    if wanted is None:
        wanted = 1 if count < MIN_PARALLEL else min(cores(), 32)
    return min(wanted, -(-count // _CHUNK))


def _results(
    jobs: Sequence[tuple[Any, ...]], processes: int, target: Path
) -> Generator[tuple[int, dict[str, str]], None, None]:
    if processes == 1:
        yield from (decode_chunk(*job) for job in jobs)
        return
    pool = pool_of(processes)
    finished = False
    try:
        with starting():
            futures = [pool.submit(decode_chunk, *job) for job in jobs]
        for future in as_completed(futures):
            yield future.result()
        finished = True
    except BrokenProcessPool as error:
        raise DataError(
            "a decoding process died, perhaps out of memory; free memory or use fewer processes (workers=1)"
        ) from error
    finally:
        if not finished:
            with contextlib.suppress(OSError):
                target.unlink()  # makes the workers stop at the next image
        pool.shutdown(wait=True, cancel_futures=True)


def _reorder(path: Path, order: Sequence[int]) -> None:
    """Rewrite an array file with only the rows of `order`."""
    rows = np.load(path, mmap_mode="r", allow_pickle=False)
    with atomic_replace(path) as temporary, open(temporary, "wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": (len(order), *rows.shape[1:])}
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(order), 256):
            file.write(rows[order[start : start + 256]].tobytes())
        del rows  # Windows cannot replace a mapped file
