"""Folders of images as a data set: `train/<class>/**` with `test/<class>/**`, or `<class>/**` with a recorded split.

Images are decoded once, by several processes, into one array on disk that later calls only map. Everything kept lies
in the cache, never among the user's images:

    <cache>/<folder>-<key>/split-<seed>-<share>.json    which image is on which side; it never changes sides
                           <...>px-<fingerprint>.npy    uint8 (n, 3, size, size), training images first
                           <...>px-<fingerprint>.json   its files and labels; written last: without it the array is void
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
import types
import unicodedata
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from efcil.data.dataset import DataSet, ImageSet
from efcil.data.decode import read_image
from efcil.errors import DataError, EfcilError, OptionError
from efcil.files import StrPath, read_json, replaced, write_json

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as for every set of photographs (FACTS 1)

Progress = Callable[[int, int], None]

_VERSION = 1  # of the cache: raise it when decoding or the files' layout changes
_CHANNELS = 3
_CHUNK = 32  # images a worker decodes before it reports
_FEW = 512  # below this, starting processes costs more than they save
_STALE_SECONDS = 3600.0  # a temporary array that nobody wrote to for so long was left by a killed build
_IGNORED = frozenset({"thumbs.db", "desktop.ini", "__macosx"})  # what file managers leave behind
_TEST_NAMES = ("test", "val")


def load(
    directory: StrPath,
    *,
    size: int = 64,
    test_share: float = 0.2,
    seed: int = 0,
    workers: int | None = None,
    cache: StrPath | None = None,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> DataSet:
    """Load a tree of class folders as squares of `size` pixels, decoded once and mapped from the cache ever after.

    With `train/` and `test/` (or `val/`) the split is the user's. Otherwise `test_share` of each class is set aside by
    a rule that depends on `seed` and the file names, and recorded: when images are added, the others keep their side.
    Files that are no images, or damaged, raise one DataError that names them, or are skipped and noted (`skip_bad`).
    `workers` defaults to one process per core, or none for few images; `progress(done, total)` follows the decoding.
    """
    if size < 1:
        raise OptionError(f"size must be at least 1, got {size}")
    if not 0.0 < test_share < 1.0:
        raise OptionError(f"test_share must lie between 0 and 1, got {test_share}")
    if workers is not None and workers < 1:
        raise OptionError(f"workers must be at least 1, got {workers}")
    tree = _scan(Path(directory))
    if tree.strays and not skip_bad:
        raise _bad_files(tree.strays)
    tree.check_classes(tree.files)

    store = _Store.of(tree, Path(cache) if cache is not None else cache_directory(), size, seed, test_share)
    entry = store.find(tree)
    if entry is None:
        with _written_to(store.folder):
            entry = store.build(tree, skip_bad=skip_bad, workers=workers, progress=progress)
    if entry.bad and not skip_bad:
        raise _bad_files(entry.bad)

    notes = list(tree.notes)
    skipped = [*tree.strays, *entry.bad]
    if skipped:
        notes.append(f"skipped {_listed(skipped)}")
    labels = np.asarray(entry.labels, dtype=np.int64)
    return DataSet(
        name=tree.root.name or "folder",
        class_names=tree.class_names,
        train=ImageSet(entry.images[: entry.train], labels[: entry.train]),
        test=ImageSet(entry.images[entry.train :], labels[entry.train :]),
        mean=MEAN,
        std=STD,
        notes=tuple(notes),
    )


def cache_directory() -> Path:
    """Where decoded images are kept: EFCIL_CACHE, or `efcil` in XDG_CACHE_HOME or the system's cache directory."""
    if own := os.environ.get("EFCIL_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG rules say to ignore a relative one
        return Path(base) / "efcil"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "efcil"
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "efcil"
    return Path.home() / ".cache" / "efcil"


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Sort key under which numbers count as numbers.

    >>> sorted(["dog10", "Cat", "dog9", "dog"], key=natural_key)
    ['Cat', 'dog', 'dog9', 'dog10']
    """
    parts = re.split(r"([0-9]+)", name.casefold())  # text, number, text, ...: equal places hold equal types
    return [int(part) if place % 2 else part for place, part in enumerate(parts)], name


# ---------------------------------------------------------------------------------------------------------------------
# the tree


@dataclass(frozen=True)
class _File:
    name: str  # relative to the root, with slashes
    label: int
    size: int
    mtime_ns: int
    side: str | None  # "train" or "test", or None where the split is ours to make


@dataclass
class _Tree:
    root: Path
    given: bool  # the user's own train/ and test/
    test_name: str = "test"
    class_names: tuple[str, ...] = ()
    files: list[_File] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)  # "a/notes.txt is not an image"
    notes: list[str] = field(default_factory=list)

    def check_classes(self, files: Iterable[_File]) -> None:
        """Refuse a class that cannot be both learned and tested."""
        counts = {side: np.zeros(len(self.class_names), dtype=np.int64) for side in ("train", "test", None)}
        for file in files:
            counts[file.side][file.label] += 1
        for label, name in enumerate(self.class_names):
            if self.given:
                for side, part in (("train", "train"), ("test", self.test_name)):
                    if counts[side][label] == 0:
                        raise DataError(
                            f"{self.root}: class '{name}' has no images in {part}/; add images to {part}/{name} "
                            "or remove the class from both parts"
                        )
            elif (count := counts[None][label]) < 2:
                has = "no images" if count == 0 else "only one image"
                raise DataError(
                    f"{self.root}: class '{name}' has {has}, but needs at least two, one to learn from and one to "
                    f"test on; add images to {name} or remove the folder"
                )


def _scan(root: Path) -> _Tree:
    if not root.exists():
        raise DataError(f"{root}: no such directory; give a folder that holds one folder of images per class")
    if not root.is_dir():
        raise DataError(f"{root}: not a directory; give a folder that holds one folder of images per class")
    root = Path(os.path.realpath(root))
    try:
        folders, loose = _listing(root)
        by_name = {folder.casefold(): folder for folder in folders}
        tests = [by_name[name] for name in _TEST_NAMES if name in by_name]
        if "train" in by_name and tests:
            return _scan_given(root, by_name["train"], tests[0], folders, loose)
        if folders == [by_name.get("train")]:
            raise DataError(
                f"{root}: there is {folders[0]}/ but neither test/ nor val/; add one of them, or give "
                f"{root / folders[0]} itself to have a split made"
            )
        tree = _Tree(root, given=False)
        _collect(tree, [(None, "", folders, loose)])
        return tree
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _scan_given(root: Path, train: str, test: str, folders: list[str], loose: list[str]) -> _Tree:
    tree = _Tree(root, given=True, test_name=test)
    if unused := [folder for folder in folders if folder not in (train, test)]:
        tree.notes.append(f"not used, since there are {train}/ and {test}/: {_listed(unused)}")
    _collect(tree, [("train", train, *_listing(root / train)), ("test", test, *_listing(root / test))])
    _collect_loose(tree, "", loose)
    return tree


def _collect(tree: _Tree, parts: Sequence[tuple[str | None, str, list[str], list[str]]]) -> None:
    """Fill the tree from its parts, each a side with the folder that holds its class folders."""
    # Unicode can write one name in two ways; train/ and test/ unpacked on different systems are to agree.
    names = {unicodedata.normalize("NFC", folder) for _, _, folders, _ in parts for folder in folders}
    tree.class_names = tuple(sorted(names, key=natural_key))
    if not tree.class_names:
        raise DataError(f"{tree.root}: no class folders; put the images of each class into a folder of its own")
    labels = {name: label for label, name in enumerate(tree.class_names)}
    for side, part, folders, loose in parts:
        for folder in sorted(folders, key=natural_key):
            label = labels[unicodedata.normalize("NFC", folder)]
            above = frozenset({os.path.realpath(tree.root / part)})
            for name in _files_below(tree, _joined(part, folder), above):
                status = os.stat(tree.root / name)
                tree.files.append(_File(name, label, status.st_size, status.st_mtime_ns, side))
        _collect_loose(tree, part, loose)
    tree.files.sort(key=lambda file: (file.label, natural_key(file.name)))


def _collect_loose(tree: _Tree, part: str, loose: list[str]) -> None:
    """Files beside the class folders: a read-me is in its place there, an image is not."""
    for name in loose:
        if os.path.splitext(name)[1].lower() in SUFFIXES:
            tree.strays.append(f"{_joined(part, name)} lies outside the class folders")
        else:
            tree.notes.append(f"{_joined(part, name)} is not an image and was left aside")


def _files_below(tree: _Tree, folder: str, above: frozenset[str]) -> Iterator[str]:
    real = os.path.realpath(tree.root / folder)
    if real in above or tree.root.is_relative_to(real):
        tree.strays.append(f"{folder} is a link to a folder that holds it")
        return
    folders, files = _listing(tree.root / folder)
    for file in files:
        name = _joined(folder, file)
        if os.path.splitext(file)[1].lower() not in SUFFIXES:
            tree.strays.append(f"{name} is not an image")
        elif not os.path.isfile(tree.root / name):
            tree.strays.append(f"{name} is a link to nothing or not a file")
        else:
            yield name
    for inner in folders:
        yield from _files_below(tree, _joined(folder, inner), above | {real})


def _listing(folder: Path) -> tuple[list[str], list[str]]:
    """Names of the folders and of the other things in a folder, sorted, without what is hidden."""
    folders: list[str] = []
    files: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(".") and entry.name.casefold() not in _IGNORED:
                (folders if entry.is_dir() else files).append(entry.name)
    return sorted(folders, key=natural_key), sorted(files, key=natural_key)


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _listed(items: Sequence[str]) -> str:
    more = f" and {len(items) - 5} more" if len(items) > 5 else ""
    return ", ".join(items[:5]) + more


def _bad_files(problems: Sequence[str]) -> DataError:
    head = "" if len(problems) == 1 else f"{len(problems)} files cannot be used: "
    it = "it" if len(problems) == 1 else "them"
    return DataError(f"{head}{_listed(problems)}; remove {it} or pass --skip-bad (skip_bad=True)")


# ---------------------------------------------------------------------------------------------------------------------
# the split


def split_sides(
    names: Sequence[str],
    labels: Sequence[int],
    recorded: dict[str, str],
    *,
    test_share: float,
    seed: int,
) -> dict[str, str]:
    """Say for each name whether it is on the "train" or the "test" side.

    A recorded name keeps its side. The others of each class are ranked by a hash of seed and name, and fill the test
    side up to its share of the class, at least one image on either side; the rest is for training.

    >>> sides = split_sides(["a", "b", "c", "d"], [0, 0, 0, 0], {"a": "test"}, test_share=0.25, seed=0)
    >>> sorted(sides.items())
    [('a', 'test'), ('b', 'train'), ('c', 'train'), ('d', 'train')]
    """
    members: dict[int, list[str]] = {}
    for name, label in zip(names, labels, strict=True):
        members.setdefault(label, []).append(name)
    sides: dict[str, str] = {}
    for group in members.values():
        old = {name: recorded[name] for name in group if name in recorded}
        new = sorted((name for name in group if name not in old), key=lambda name: _rank(name, seed))
        wanted = min(max(round(test_share * len(group)), 1), len(group) - 1)
        missing = max(wanted - sum(side == "test" for side in old.values()), 0)
        sides |= old
        sides |= {name: "test" if place < missing else "train" for place, name in enumerate(new)}
    return sides


def _rank(name: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:".encode() + os.fsencode(name)).digest()


# ---------------------------------------------------------------------------------------------------------------------
# the cache


@dataclass(frozen=True)
class _Entry:
    images: npt.NDArray[np.uint8]
    labels: list[int]
    train: int  # the first so many are for training
    bad: list[str]


@dataclass(frozen=True)
class _Store:
    """The cache of one tree at one size and split."""

    folder: Path
    stem: str  # size, split and fingerprint of the files
    size: int
    seed: int
    test_share: float

    @classmethod
    def of(cls, tree: _Tree, cache: Path, size: int, seed: int, test_share: float) -> _Store:
        cache = Path(os.path.realpath(cache))
        if cache.is_relative_to(tree.root):
            raise DataError(f"{cache}: the cache lies among the images; choose another with cache= or EFCIL_CACHE")
        key = hashlib.sha256(os.fsencode(tree.root)).hexdigest()[:12]
        label = re.sub(r"[^A-Za-z0-9_-]+", "_", tree.root.name)[:40]
        digest = hashlib.sha256(repr((_VERSION, _CHANNELS, size, tree.class_names)).encode("utf-8", "backslashreplace"))
        for file in tree.files:
            digest.update(os.fsencode(file.name) + f"\0{file.size}\0{file.mtime_ns}\n".encode())
        split = "given" if tree.given else f"{seed}-{test_share}"
        stem = f"{split}-{size}px-{digest.hexdigest()[:24]}"
        return cls(cache / f"{label}-{key}", stem, size, seed, test_share)

    @property
    def array(self) -> Path:
        return self.folder / f"{self.stem}.npy"

    @property
    def index(self) -> Path:
        return self.folder / f"{self.stem}.json"

    @property
    def split(self) -> Path:
        return self.folder / f"split-{self.seed}-{self.test_share}.json"

    def find(self, tree: _Tree) -> _Entry | None:
        """The images decoded before, or None where they are not there, not whole or not up to date."""
        try:
            kept = read_json(self.index)
            images = np.load(self.array, mmap_mode="r", allow_pickle=False)
            names, labels, train, bad = kept["files"], kept["labels"], kept["train"], kept["bad"]
        except (EfcilError, OSError, ValueError, KeyError, TypeError):
            return None
        if images.shape != (len(names), _CHANNELS, self.size, self.size) or images.dtype != np.uint8:
            return None
        # Bad files are tried again: a missing permission or a failing network leaves no trace in the fingerprint.
        known = {file.name: file for file in tree.files}
        if any(_problem(tree.root, name, self.size) is None for name in bad):
            return None
        good = [file for file in tree.files if file.name not in bad]
        if _rows(good, self.sides(tree, good)) != ([known[name] for name in names if name in known], train):
            return None  # the recorded split was deleted or comes from another state of the folder
        return _Entry(images, labels, train, [bad[name] for name in bad])

    def sides(self, tree: _Tree, files: Sequence[_File]) -> dict[str, str]:
        """The side of every file: the user's, or the recorded one, or by the rule for files not seen before."""
        if tree.given:
            return {file.name: str(file.side) for file in files}
        names, labels = [file.name for file in files], [file.label for file in files]
        sides = split_sides(names, labels, self.recorded(), test_share=self.test_share, seed=self.seed)
        present = {(file.label, sides[file.name]) for file in files}
        for label, name in enumerate(tree.class_names):
            for side in ("train", "test"):
                if (label, side) not in present and any(file.label == label for file in files):
                    raise DataError(
                        f"{tree.root}: all {side} images of class '{name}' are gone; add images to {name}, or delete "
                        f"{self.split} to have a new split made (old results then no longer compare)"
                    )
        return sides

    def recorded(self) -> dict[str, str]:
        """The sides written down by earlier calls."""
        if not self.split.exists():
            return {}
        record = read_json(self.split, error=DataError)
        try:
            return {name: side for side in ("train", "test") for name in record[side]}
        except (KeyError, TypeError):
            raise DataError(f"{self.split}: not a record of a split; delete it to have a new split made") from None

    def build(self, tree: _Tree, *, skip_bad: bool, workers: int | None, progress: Progress | None) -> _Entry:
        """Decode all images; the array takes its name when it is whole, and counts once its index is there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.clear_stale()
        rows, train = _rows(tree.files, self.sides(tree, tree.files))
        needed = len(rows) * _CHANNELS * self.size**2
        if needed > (free := shutil.disk_usage(self.folder).free):
            raise DataError(
                f"{self.folder}: {needed / 1e9:.1f} GB are needed for {len(rows)} decoded images, {free / 1e9:.1f} GB "
                "are free; make room, choose another cache (EFCIL_CACHE) or a smaller size"
            )
        with replaced(self.array) as temporary:
            names = [file.name for file in rows]
            bad = _decode_all(tree.root, names, temporary, self.size, workers, progress)
            if bad:
                good = [file for file in tree.files if file.name not in bad]
                try:
                    tree.check_classes(good)
                except DataError:
                    if skip_bad:
                        raise
                    raise _bad_files(list(bad.values())) from None
                place = {name: row for row, name in enumerate(names)}
                rows, train = _rows(good, self.sides(tree, good))
                _reorder(temporary, [place[file.name] for file in rows])
        sides = self.sides(tree, rows)
        if not tree.given:
            self.record(sides)
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

    def record(self, sides: dict[str, str]) -> None:
        """Write the split down; images that are gone stay in it, since they may come back."""
        merged = self.recorded() | sides
        kept = {s: sorted((n for n in merged if merged[n] == s), key=natural_key) for s in ("train", "test")}
        write_json(self.split, {"seed": self.seed, "test_share": self.test_share, **kept})

    def clear_stale(self) -> None:
        """Remove what killed builds left."""
        for path in self.folder.glob(".*.tmp.npy"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()

    def clear_superseded(self) -> None:
        """Remove arrays of earlier states of the folder; a process that has one mapped keeps it until it ends."""
        prefix = self.stem.rpartition("-")[0]
        for path in self.folder.iterdir():
            if path.name.startswith(prefix + "-") and path.stem != self.stem:
                with contextlib.suppress(OSError):
                    path.unlink()


@contextlib.contextmanager
def _written_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{folder}: the cache cannot be written: {error.strerror or error}; choose another with EFCIL_CACHE"
        ) from error


def _rows(files: Sequence[_File], sides: dict[str, str]) -> tuple[list[_File], int]:
    """Files in the order of the array, training images first, and how many of those there are."""
    train = [file for file in files if sides[file.name] == "train"]
    return train + [file for file in files if sides[file.name] == "test"], len(train)


# ---------------------------------------------------------------------------------------------------------------------
# decoding


def _decode_all(
    root: Path, names: Sequence[str], target: Path, size: int, workers: int | None, progress: Progress | None
) -> dict[str, str]:
    """Decode the files into a new array file, one row each; returns what is wrong with which."""
    # Rows are written, not mapped: on a full disk a write fails with an error, a map kills the process.
    with open(target, "wb") as file:
        shape = (len(names), _CHANNELS, size, size)
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
        start = file.tell()
        row = _CHANNELS * size * size
        file.truncate(start + len(names) * row)
    jobs = [
        (os.fspath(root), names[i : i + _CHUNK], os.fspath(target), start + i * row, size)
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
    return {name: bad[name] for name in names if name in bad}  # in the order of the files, whichever worker was first


def _processes(workers: int | None, count: int) -> int:
    if multiprocessing.current_process().daemon:  # such a process may not have children
        return 1
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = 1 if count < _FEW else min(cores, 32)
    return min(workers, -(-count // _CHUNK))


def _results(
    jobs: Sequence[tuple[Any, ...]], processes: int, target: Path
) -> Generator[tuple[int, dict[str, str]], None, None]:
    if processes == 1:
        yield from (_decode_chunk(*job) for job in jobs)
        return
    context = multiprocessing.get_context("spawn")  # fork is unsafe beside CUDA and threads (FACTS 7.6)
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker)
    finished = False
    try:
        with _hidden_main(), _held_interrupt():
            futures = [pool.submit(_decode_chunk, *job) for job in jobs]
        for future in as_completed(futures):
            yield future.result()
        finished = True
    except BrokenProcessPool as error:
        raise DataError(
            "a decoding process died, perhaps for want of memory; free some, or decode with fewer (workers=1)"
        ) from error
    finally:
        if not finished:
            with contextlib.suppress(OSError):
                target.unlink()  # tells the workers to stop at the next image
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep spawned workers from running the user's script again, which needs a main guard otherwise."""
    # multiprocessing looks at __main__ when it starts a process, that is inside `submit`; a worker needs nothing of it.
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _held_interrupt() -> Iterator[None]:
    """Start processes deaf to Ctrl-C, which reaches the whole group: the parent ends them, without their tracebacks."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # children inherit it; here it comes later
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for systems without masks
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()  # returns when it has died, however it died: no orphan waits for work for ever
        os._exit(1)


def _decode_chunk(root: str, names: Sequence[str], target: str, offset: int, size: int) -> tuple[int, dict[str, str]]:
    """Decode consecutive rows into the array file; bad ones stay black and are reported."""
    rows = np.zeros((len(names), _CHANNELS, size, size), dtype=np.uint8)
    bad: dict[str, str] = {}
    for row, name in zip(rows, names, strict=True):
        if not os.path.exists(target):
            return 0, {}  # the build was given up
        try:
            row[:] = read_image(os.path.join(root, name), size, _CHANNELS, name=name)
        except DataError as error:
            bad[name] = str(error)
    with open(target, "r+b") as file:
        file.seek(offset)
        file.write(rows.data)
    return len(names), bad


def _problem(root: Path, name: str, size: int) -> str | None:
    try:
        read_image(root / name, size, _CHANNELS, name=name)
    except DataError as error:
        return str(error)
    return None


def _reorder(path: Path, order: Sequence[int]) -> None:
    """Rewrite an array file with the rows of `order` alone."""
    rows = np.load(path, mmap_mode="r")
    with replaced(path) as temporary, open(temporary, "wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": (len(order), *rows.shape[1:])}
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(order), 256):
            file.write(rows[order[start : start + 256]].tobytes())
        del rows  # Windows does not replace a file that is mapped
