"""A model directory: safetensors and JSON, checksummed, swapped in whole; nothing in it is ever unpickled.

model.json               format, method, options, class table, checksums of the other files
weights.safetensors      backbone and auxiliary head
statistics.safetensors   what the method keeps of each class
previous/                the same three files, before the last teaching
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from efcil import __version__
from efcil.config import Options
from efcil.errors import EfcilError, ModelError
from efcil.files import StrPath, exclusive_lock, read_json, sync_directory, sync_file, write_json
from efcil.product.calibration import CalibrationOffset
from efcil.product.model_config import ModelConfig
from efcil.product.state import ClassRecord, State
from efcil.tensor_files import align, to_cpu

FORMAT = 3  # 1 and 2 were never released
KIND = "efcil model"
CARD, WEIGHTS, STATISTICS, PREVIOUS = "model.json", "weights.safetensors", "statistics.safetensors", "previous"
_OWN = {CARD, WEIGHTS, STATISTICS, PREVIOUS}
_TRIES = 3  # a model may be replaced while it is read


class _Class(Options):
    name: str
    images: int = Field(ge=1)
    learned: str
    recall: float | None


class _Card(Options):
    """What model.json holds."""

    kind: str
    format: int
    efcil: str  # version that wrote it
    config: dict[str, Any]
    frozen: bool
    backbone_updates: int
    updates: int
    temperature: float = Field(gt=0)
    calibration_offset: tuple[float, int]
    classes: list[_Class]
    files: dict[str, str]  # SHA-256


def fingerprint(directory: Path) -> str:
    """Return what changes with every change of a model; empty where there is none."""
    card = directory / CARD  # it holds the checksums of the other files
    return hashlib.sha256(card.read_bytes()).hexdigest() if card.exists() else ""


@contextlib.contextmanager
def save_lock(directory: Path) -> Iterator[None]:
    """Let one process at a time check that a model is unchanged and then replace it; the others wait."""
    place = Path(os.path.realpath(directory))
    try:
        lock = exclusive_lock(place.with_name(f".{place.name[:64]}.save.lock"), wait=True, remove=True)
    except OSError as error:
        raise _unwritten(place, error) from error
    with lock:
        yield


def save(directory: StrPath, config: ModelConfig, state: State) -> None:
    """Write a model; what was at `directory` stays as it is until the new one is whole, whatever goes wrong."""
    place = Path(os.path.realpath(directory))
    if place.exists():
        if not place.is_dir():
            raise ModelError(f"{place}: is a file; give a directory for the model")
        others = sorted(entry.name for entry in place.iterdir() if entry.name not in _OWN)
        if others:
            raise ModelError(f"{place}: holds other files ({others[0]}); give a new directory, or a model's own")
    token = f"{os.getpid()}-{secrets.token_hex(4)}"
    fresh = place.with_name(f".{place.name[:64]}.{token}.new")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _write(fresh, config, state)
        if state.previous is not None:
            _write(fresh / PREVIOUS, config, state.previous)
        _swap(fresh, place)
    except OSError as error:
        raise _unwritten(place, error) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)  # not written to its end, or the old model after the swap
    sync_directory(place.parent)


def _unwritten(place: Path, error: OSError) -> ModelError:
    return ModelError(
        f"{place}: the model cannot be written: {error.strerror or error}; "
        "what was there before is unchanged: make room, or choose another directory"
    )


def _write(folder: Path, config: ModelConfig, state: State) -> None:
    folder.mkdir()
    files = {WEIGHTS: state.weights, STATISTICS: state.statistics}
    sums = {}
    for name, tensors in files.items():
        try:
            save_file(to_cpu(tensors), folder / name)
        except SafetensorError as error:  # which is how it tells of a full disk
            raise OSError(str(error)) from None
        sync_file(folder / name)
        sums[name] = _sha256(folder / name)
    card = _Card(
        kind=KIND,
        format=FORMAT,
        efcil=__version__,
        config=config.to_dict(),
        frozen=state.frozen,
        backbone_updates=state.backbone_updates,
        updates=state.updates,
        temperature=state.temperature,
        calibration_offset=(state.calibration_offset.log_ratio, state.calibration_offset.images),
        classes=[_Class(**vars(record)) for record in state.classes],
        files=sums,
    )
    write_json(folder / CARD, card.model_dump())


def _swap(fresh: Path, place: Path) -> None:
    """Put `fresh` in place of a model, at once where the system can exchange two names; the old one is there then."""
    if not place.exists():
        os.rename(fresh, place)
        return
    if _try_exchange(fresh, place):
        return
    old = _replaced_path(place)  # two steps: `load` looks there too
    shutil.rmtree(old, ignore_errors=True)
    os.rename(place, old)
    try:
        os.rename(fresh, place)
    except OSError:
        os.rename(old, place)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _replaced_path(place: Path) -> Path:
    return place.with_name(f".{place.name[:64]}.old")


def _try_exchange(one: Path, other: Path) -> bool:
    """Exchange two directories in one step (Linux, renameat2 with RENAME_EXCHANGE), or say that it cannot be done."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        exchange = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    here, flag = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(exchange(here, os.fsencode(one), here, os.fsencode(other), flag) == 0)


def load(directory: StrPath) -> tuple[ModelConfig, State]:
    """Read a model; whatever is wrong with it is a ModelError that says what to do."""
    place = Path(os.path.realpath(directory))
    if not place.exists() and _replaced_path(place).is_dir():  # a swap in two steps was cut short between them
        with contextlib.suppress(OSError):
            os.rename(_replaced_path(place), place)
    for left in reversed(range(_TRIES)):
        try:
            config, state = _read(place)
            if (place / PREVIOUS).exists():
                state = state.with_previous(_read(place / PREVIOUS)[1])
            return config, state
        except ModelError:
            if not left:
                raise
    raise AssertionError


def _read(place: Path) -> tuple[ModelConfig, State]:
    if not place.is_dir():
        raise ModelError(f"{place}: no such directory; give the directory of a model, or teach a new one into it")
    if not (place / CARD).is_file():
        raise ModelError(f"{place}: is no model: it has no {CARD}; give the directory that save wrote")
    card = _card(place / CARD)
    tensors = {}
    for name in (WEIGHTS, STATISTICS):
        path = place / name
        if not path.is_file():
            raise ModelError(f"{place}: {name} is missing; restore the directory from a copy")
        if _sha256(path) != card.files.get(name):
            raise ModelError(f"{path}: is damaged: its checksum is not that of {CARD}; restore it from a copy")
        try:
            tensors[name] = align(load_file(path))
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from None
    try:
        config = ModelConfig.from_dict(card.config)
    except (EfcilError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        raise ModelError(f"{place / CARD}: {error}; restore it from a copy") from None
    records = tuple(ClassRecord(**record.model_dump()) for record in card.classes)
    state = State(
        classes=records,
        weights=tensors[WEIGHTS],
        statistics=tensors[STATISTICS],
        temperature=card.temperature,
        calibration_offset=CalibrationOffset(*card.calibration_offset),
        backbone_updates=card.backbone_updates,
        updates=card.updates,
        frozen=card.frozen,
        previous=None,
    )
    return config, state


def _card(path: Path) -> _Card:
    found = read_json(path, error=ModelError)
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise ModelError(f"{path}: is not the card of a model")
    version = found.get("format")
    if not isinstance(version, int) or version < 1:
        raise ModelError(f"{path}: format {version!r} is not one that was ever written; restore it from a copy")
    if version < FORMAT:
        raise ModelError(f"{path}: format {version} was made by an earlier version, before 0.2; teach the model anew")
    if version > FORMAT:
        writer = found.get("efcil", "a later version")
        raise ModelError(
            f"{path}: format {version} was written by efcil {writer}, this is {__version__}, which reads up to format "
            f"{FORMAT}: pip install --upgrade efcil"
        )
    try:
        return _Card.model_validate(found)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise ModelError(f"{path}: {where}: {error.errors()[0]['msg'].lower()}; restore it from a copy") from None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
