"""Model directories: safetensors and JSON with checksums, replaced atomically, without pickles.

model.json               format, method, options, class table, checksums of the other files
weights.safetensors      backbone and auxiliary head
statistics.safetensors   class statistics and classifier
previous/                the same three files before the last update
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from efcil import __version__
from efcil.config import Options
from efcil.errors import EfcilError, ModelError
from efcil.files import StrPath, exclusive_lock, read_json, write_json
from efcil.platform_support import exchange, sync_directory, sync_file
from efcil.product.calibration import CalibrationOffset
from efcil.product.model_config import ModelConfig
from efcil.product.state import ClassRecord, State
from efcil.tensor_files import align, to_cpu

FORMAT = 4  # earlier ones were not released
KIND = "efcil model"
CARD, WEIGHTS, STATISTICS, PREVIOUS = "model.json", "weights.safetensors", "statistics.safetensors", "previous"
_OWN = {CARD, WEIGHTS, STATISTICS, PREVIOUS}
_TRIES = 3  # the model may be replaced while it is loaded


class _Class(Options):
    name: str
    images: int = Field(ge=1)
    learned: str
    recall: float | None


class _Card(Options):
    """Contents of model.json."""

    kind: str
    format: int
    id: str = Field(pattern="[0-9a-f]{16}")  # of the model, through all its updates
    efcil: str  # version that saved it
    config: dict[str, Any]
    frozen: bool
    backbone_updates: int
    updates: int
    temperature: float = Field(gt=0)
    calibration_offset: tuple[float, int]
    classes: list[_Class]
    files: dict[str, str]  # SHA-256


def fingerprint(directory: Path) -> str:
    """Return a fingerprint of the model, or an empty string if there is none."""
    card = directory / CARD  # contains the checksums of the other files
    return hashlib.sha256(card.read_bytes()).hexdigest() if card.exists() else ""


@contextlib.contextmanager
def save_lock(directory: Path) -> Iterator[None]:
    """Lock for checking and replacing a model; waits for other processes."""
    place = Path(os.path.realpath(directory))
    try:
        lock = exclusive_lock(place.with_name(f".{place.name[:64]}.save.lock"), wait=True, remove=True)
    except OSError as error:
        raise _unwritten(place, error) from error
    with lock:
        yield


def save(directory: StrPath, config: ModelConfig, state: State) -> None:
    """Save a model; an existing one is unchanged until the new one is complete."""
    place = Path(os.path.realpath(directory))
    if place.exists():
        if not place.is_dir():
            raise ModelError(f"{place} is a file; give a directory for the model")
        others = sorted(entry.name for entry in place.iterdir() if entry.name not in _OWN)
        if others:
            raise ModelError(f"{place} contains other files ({others[0]}); give a new directory or a model directory")
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
        shutil.rmtree(fresh, ignore_errors=True)  # an incomplete model, or the old one after the swap
    sync_directory(place.parent)


def _unwritten(place: Path, error: OSError) -> ModelError:
    return ModelError(
        f"cannot save the model to {place}: {error.strerror or error}; "
        "existing files are unchanged: free some space or choose another directory"
    )


def _write(folder: Path, config: ModelConfig, state: State) -> None:
    folder.mkdir()
    files = {WEIGHTS: state.weights, STATISTICS: state.statistics}
    sums = {}
    for name, tensors in files.items():
        try:
            save_file(to_cpu(tensors), folder / name)
        except SafetensorError as error:  # raised when the disk is full
            raise OSError(str(error)) from None
        sync_file(folder / name)
        sums[name] = _sha256(folder / name)
    card = _Card(
        kind=KIND,
        format=FORMAT,
        id=state.identity,
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
    """Replace a model by `fresh`, atomically if the system supports exchange; the old one is then at `fresh`."""
    if not place.exists():
        os.rename(fresh, place)
        return
    if exchange(fresh, place):
        return
    old = _replaced_path(place)  # two renames; `load` checks this path too
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


def load(directory: StrPath) -> tuple[ModelConfig, State]:
    """Load a model; raise ModelError if it is missing, damaged or incompatible."""
    place = Path(os.path.realpath(directory))
    if not place.exists() and _replaced_path(place).is_dir():  # interrupted between the two renames
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
        raise ModelError(f"{place}: no such directory; give a model directory or create one with `efcil teach`")
    if not (place / CARD).is_file():
        raise ModelError(f"{place} is not a model directory: it has no {CARD}; give a saved model")
    card = _card(place / CARD)
    tensors = {}
    for name in (WEIGHTS, STATISTICS):
        path = place / name
        if not path.is_file():
            raise ModelError(f"{place}: {name} is missing; restore the directory from a backup")
        if _sha256(path) != card.files.get(name):
            raise ModelError(f"{path} is damaged: its checksum differs from {CARD}; restore it from a backup")
        try:
            tensors[name] = align(load_file(path))
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"cannot read {path}: {error}") from None
    try:
        config = ModelConfig.from_dict(card.config)
    except (EfcilError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        raise ModelError(f"{place / CARD}: {error}; restore it from a backup") from None
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
        identity=card.id,
    )
    return config, state


def _card(path: Path) -> _Card:
    document = read_json(path, error=ModelError)
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise ModelError(f"{path} is not a model card; give a saved model")
    version = document.get("format")
    if not isinstance(version, int) or version < 1:
        raise ModelError(f"{path}: unknown format {version!r}; restore it from a backup")
    if version < FORMAT:
        raise ModelError(
            f"{path} was made by an earlier version of efcil (format {version}, this version has {FORMAT}); "
            "train the model again"
        )
    if version > FORMAT:
        writer = document.get("efcil", "a later version")
        raise ModelError(
            f"{path}: format {version} was written by efcil {writer}; {__version__} supports formats up to "
            f"{FORMAT}: pip install --upgrade efcil"
        )
    try:
        return _Card.model_validate(document)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise ModelError(f"{path}: {where}: {error.errors()[0]['msg'].lower()}; restore it from a backup") from None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
