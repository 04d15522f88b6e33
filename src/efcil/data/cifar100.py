"""CIFAR-100 from its official files, the python or the binary version.

The python version consists of three pickles, and a pickle can call any function when it is loaded. The names that
arrays need are mapped to stand-ins that only record shape, dtype and bytes; other names are refused. A small pickle can
also represent billions of nested values or a huge memo table; operations that would traverse or allocate them are not
used.
"""

from __future__ import annotations

import hashlib
import os
import pickle  # nosec B403 # only through _ArraysOnly, which refuses everything but arrays
import shlex
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NoReturn

import numpy as np
import numpy.typing as npt

from efcil.data.dataset import DataSet, ImageSet, Official
from efcil.data.fetch import Remote
from efcil.errors import DataError

MEAN = (0.5071, 0.4867, 0.4408)
STD = (0.2675, 0.2565, 0.2761)
REMOTE = Remote(
    url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    name="cifar-100-python.tar.gz",
    checksum="md5:eb9058c3a382ffc7106e4002c42a8d85",
    size=169_001_437,
    unpack="cifar-100-python",
    files={
        "train": "md5:16019d7e3df5f24257cddd939b257f8d",
        "test": "md5:f0ef6b0ae62326f3e7ffdfab6717acfc",
        "meta": "md5:7973b15100ade9c7d40fb424638fde48",
    },
)
OFFICIAL = Official(100, 50_000, 10_000, train_each=500, test_each=100)

_PIXELS = 3 * 32 * 32
_BLOCK = 2**25  # bytes per hash update, which releases the GIL
_PYTHON, _BINARY = ("train", "test", "meta"), ("train.bin", "test.bin", "fine_label_names.txt")


def load(directory: str | os.PathLike[str]) -> DataSet:
    """Load CIFAR-100 with its hundred fine labels from `directory` or its extracted subfolder.

    A readable copy that differs from the official one in bytes or number of images is accepted with a note in the
    result's `notes`. (No checksums were published for the binary version.)
    """
    directory = Path(directory)
    folder, names = _find(directory)
    read = _read_binary if names is _BINARY else _read_python
    train, test, class_names, notes = read(folder)
    for part, images, wanted in (("train", train, OFFICIAL.train), ("test", test, OFFICIAL.test)):
        if len(images) != wanted:
            notes.append(f"{folder}: {len(images):,} {part} images, the official set has {wanted:,}")
    return DataSet("cifar100", class_names, train, test, MEAN, STD, tuple(notes))


# --------------------------------------------------------------------------------------------------------------- files


def _find(directory: Path) -> tuple[Path, tuple[str, ...]]:
    """Find the folder with a complete version."""
    if not directory.is_dir():
        what = "is not a folder" if directory.exists() else "does not exist"
        raise DataError(f"cifar100: {directory} {what}; {_fetch_command(directory)}")
    lacking: dict[Path, str] = {}
    for names, own in ((_PYTHON, "cifar-100-python"), (_BINARY, "cifar-100-binary")):
        for folder in (directory / own, directory):
            missing = [name for name in names if not (folder / name).is_file()]
            if not missing:
                return folder, names
            if folder.name == own and folder.is_dir():
                lacking[folder] = ", ".join(missing)
    home = _home(directory)
    part, archive = home / f"{REMOTE.name}.part", home / REMOTE.name
    if part.is_file():
        have = f"{part.stat().st_size:,} of {REMOTE.size:,} bytes"
        raise DataError(f"cifar100: the download {part} is incomplete ({have}); {_fetch_command(home)} to resume it")
    for folder, missing_names in lacking.items():
        _damaged(folder, f"{folder} lacks {missing_names}")
    if archive.is_file():
        raise DataError(f"cifar100: {archive} is not extracted; {_fetch_command(home)} to check and unpack it")
    raise DataError(f"cifar100: no cifar-100-python or cifar-100-binary in {directory}; {_fetch_command(home)}")


def _home(folder: Path) -> Path:
    """Return the folder to fetch into: the parent of the extracted folder."""
    return folder.parent if folder.name.startswith("cifar-100-") else folder


def _fetch_command(folder: Path) -> str:
    return f"run `efcil data fetch cifar100 --data {shlex.quote(str(_home(folder)))}`"


def _damaged(folder: Path, what: str) -> NoReturn:
    # A complete subfolder takes precedence over loose files, so only the subfolder needs to be removed.
    first = f"remove {folder} and " if _home(folder) != folder else ""
    raise DataError(f"cifar100: {what}; {first}{_fetch_command(folder)}")


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"cannot read cifar100 file {path} ({error.strerror}); make it readable")


# ------------------------------------------------------------------------------------------------------ binary version


def _read_binary(folder: Path) -> tuple[ImageSet, ImageSet, tuple[str, ...], list[str]]:
    """Read records of one coarse label byte, one fine label byte and 3072 pixel bytes."""
    text = _bytes(folder / "fine_label_names.txt").tobytes().decode("utf-8", "replace")
    class_names = tuple(line.strip() for line in text.splitlines() if line.strip())
    parts = []
    for name in ("train", "test"):
        path = folder / f"{name}.bin"
        raw = _bytes(path)
        if not len(raw) or len(raw) % (_PIXELS + 2):
            _damaged(folder, f"{path} has {len(raw):,} bytes, not whole records of {_PIXELS + 2}: it is truncated")
        records = raw.reshape(-1, _PIXELS + 2)
        labels = records[:, 1].astype(np.int64)
        _check_labels(path, labels, class_names)
        parts.append(ImageSet(np.ascontiguousarray(records[:, 2:]).reshape(-1, 3, 32, 32), labels))
    return parts[0], parts[1], class_names, []


def _bytes(path: Path) -> npt.NDArray[np.uint8]:
    try:
        return np.fromfile(path, np.uint8)
    except OSError as error:
        raise _unreadable(path, error) from None


# ------------------------------------------------------------------------------------------------------ python version


def _read_python(folder: Path) -> tuple[ImageSet, ImageSet, tuple[str, ...], list[str]]:
    with ThreadPoolExecutor(1) as beside:
        sums = {name: beside.submit(_md5, folder / name) for name in REMOTE.files}
        train, test, class_names = _contents(folder)
        others = [name for name, official in REMOTE.files.items() if f"md5:{sums[name].result()}" != official]
    notes = [f"{folder}: {', '.join(others)} differ from the official files (md5), but can be read"] if others else []
    return train, test, class_names, notes


def _contents(folder: Path) -> tuple[ImageSet, ImageSet, tuple[str, ...]]:
    meta = _unpickle(folder / "meta")
    class_names = tuple(_entry(folder / "meta", meta, "fine_label_names", list))
    if not all(isinstance(name, str | bytes) for name in class_names):
        _damaged(folder, f"{folder / 'meta'}: some class names are not text")
    class_names = tuple(map(_text, class_names))
    parts = []
    for name in ("train", "test"):
        path = folder / name
        content = _unpickle(path)
        data = _entry(path, content, "data", _Array).value
        labels = _labels(path, _entry(path, content, "fine_labels", (list, _Array)))
        if data is None or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != _PIXELS:
            got = "nothing" if data is None else f"{data.dtype} {data.shape}"
            _damaged(folder, f"{path} holds {got} as data, not uint8 (images, {_PIXELS})")
        if len(data) != len(labels):
            _damaged(folder, f"{path} holds {len(data):,} images but {len(labels):,} labels")
        _check_labels(path, labels, class_names)
        parts.append(ImageSet(np.array(data, order="C").reshape(-1, 3, 32, 32), labels))  # a writable copy
    return parts[0], parts[1], class_names


def _unpickle(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            # The official files are from Python 2; encoding="bytes" leaves its strings, pixels included, undecoded.
            content = _ArraysOnly(_WithinFile(file), encoding="bytes").load()
    except OSError as error:
        raise _unreadable(path, error) from None
    except _ForbiddenError as error:
        _damaged(path.parent, f"{path} is not a CIFAR file: it tries to load {error}, which was refused")
    except Exception as error:  # a broken pickle raises arbitrary errors
        _damaged(path.parent, f"{path} is truncated or damaged ({type(error).__name__}, {path.stat().st_size:,} bytes)")
    if not isinstance(content, dict):
        _damaged(path.parent, f"{path} does not contain a dictionary of arrays")
    return {_text(key): value for key, value in content.items()}


def _md5(path: Path) -> str:
    md5 = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            md5.update(block)
    return md5.hexdigest()


def _entry(path: Path, content: dict[str, Any], key: str, kind: Any) -> Any:
    if not isinstance(content.get(key), kind):
        _damaged(path.parent, f"{path} has no usable '{key}'")
    return content[key]


def _labels(path: Path, labels: Any) -> npt.NDArray[np.int64]:
    values = labels.value if isinstance(labels, _Array) else labels
    if isinstance(values, list):
        values = [item.value.item() if _is_scalar(item) else item for item in values]
        if not all(type(value) is int and abs(value) < 2**31 for value in values):
            values = None  # do not traverse: nested lists may be unbounded
    array = np.array(values)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        _damaged(path.parent, f"{path}: the fine labels are not integers")
    return array.astype(np.int64)


def _is_scalar(item: Any) -> bool:
    return isinstance(item, _Array) and item.value is not None and item.value.ndim == 0


def _check_labels(path: Path, labels: npt.NDArray[np.int64], class_names: tuple[str, ...]) -> None:
    if len(labels) and (labels.min() < 0 or labels.max() >= len(class_names)):
        wrong = labels.min() if labels.min() < 0 else labels.max()
        _damaged(path.parent, f"{path} has the label {wrong}, but there are {len(class_names)} class names")


def _text(name: Any) -> str:
    if not isinstance(name, str | bytes):
        raise ValueError(f"expected text, got {type(name).__name__}")
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else name


class _ForbiddenError(Exception):
    """The pickle refers to something that is not part of an array."""


class _Type:
    """Stand-in for numpy.dtype: an integer type code and its byte order."""

    __slots__ = ("code",)

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = _text(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = _text(state[1])
        self.code = (order if order in "<>" else "") + self.code

    def resolve(self) -> np.dtype[Any]:
        """Return the numpy dtype."""
        dtype = np.dtype(self.code)
        if dtype.kind not in "iu":
            raise ValueError(f"unexpected array type {dtype}")
        return dtype


class _Array:
    """Stand-in for numpy.ndarray and, with no dimensions, for numpy scalars."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: npt.NDArray[Any] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, shape, dtype, fortran, raw = state
        self.fill(raw, dtype, shape, "F" if fortran else "C")

    def fill(self, raw: Any, dtype: Any, shape: Any, order: Any) -> None:
        """View the bytes as an array."""
        if not isinstance(dtype, _Type) or not isinstance(raw, (bytes, bytearray)):
            raise ValueError("not an integer array")
        self.value = np.frombuffer(raw, dtype.resolve()).reshape(shape, order="F" if order == "F" else "C")


# The Python implementation: the C one allocates its memo table with the size given in the file, up to 32 GiB.
class _ArraysOnly(pickle._Unpickler):
    """Unpickler of plain values and numpy arrays that refuses all other names and calls only stand-ins."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]  # values since the last mark

    def find_class(self, module: str, name: str, /) -> Any:
        """Return the stand-in for a name."""
        package = module.replace("numpy._core", "numpy.core", 1)  # renamed in NumPy 2
        # bound methods, as a pickle could set attributes of plain functions
        stand_ins: dict[tuple[str, str], Any] = {
            ("numpy", "ndarray"): _Array,
            ("numpy", "dtype"): _Type,
            ("numpy.core.multiarray", "_reconstruct"): self._reconstruct,
            ("numpy.core.multiarray", "scalar"): self._scalar,
            ("numpy.core.numeric", "_frombuffer"): self._from_buffer,
            ("_codecs", "encode"): self._encode,
        }
        try:
            return stand_ins[package, name]
        except KeyError:
            raise _ForbiddenError(f"{module}.{name}") from None

    def _reconstruct(self, kind: Any, *_: Any) -> _Array:
        if kind is not _Array:
            raise ValueError("not an array")
        return _Array()

    def _scalar(self, dtype: Any, raw: Any) -> _Array:
        array = _Array()
        array.fill(raw, dtype, (), "C")
        return array

    def _from_buffer(self, raw: Any, dtype: Any, shape: Any, order: Any = "C", *_: Any) -> _Array:
        array = _Array()
        array.fill(raw, dtype, shape, order)
        return array

    def _encode(self, text: str, encoding: str = "latin1") -> bytes:
        """Decode bytes from a Python 3 pickle in protocol 2."""
        if _text(encoding) not in ("latin1", "latin-1"):
            raise ValueError(f"unexpected encoding {encoding}")
        return text.encode("latin1")


def _with_text_keys(code: bytes, keys: slice) -> Callable[[_ArraysOnly], None]:
    """Wrap the library's handler of an opcode with a check that dictionary keys are text.

    Hashing a tuple traverses it, which takes exponential time for nested pairs of the same pair.
    """
    load: Any = pickle._Unpickler.dispatch[code[0]]

    def checked(self: _ArraysOnly) -> None:
        for key in self.stack[keys]:
            _text(key)
        load(self)

    return checked


def _load_bytearray(self: Any) -> None:
    """Read before memory is taken; the library takes as much as the file claims, and then reads."""
    (length,) = struct.unpack("<Q", self.read(8))
    data = self.read(length)
    if len(data) < length:
        raise EOFError
    self.append(data)


class _WithinFile:
    """A file that is asked for no more bytes than it has: memory for all of them is taken before they are read."""

    def __init__(self, file: BinaryIO):
        self._file, self._size = file, os.fstat(file.fileno()).st_size
        self.readline = file.readline

    def read(self, count: int) -> bytes:
        return self._file.read(max(0, min(count, self._size - self._file.tell())))


_ArraysOnly.dispatch |= {
    pickle.BYTEARRAY8[0]: _load_bytearray,
    pickle.SETITEM[0]: _with_text_keys(pickle.SETITEM, slice(-2, -1)),
    **{code[0]: _with_text_keys(code, slice(None, None, 2)) for code in (pickle.SETITEMS, pickle.DICT)},
    **{code[0]: _with_text_keys(code, slice(None)) for code in (pickle.ADDITEMS, pickle.FROZENSET)},
}
