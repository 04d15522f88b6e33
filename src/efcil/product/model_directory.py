"""Model directories: safetensors and JSON with checksums, replaced atomically, without pickles.

model.json               format, method, options, class table, checksums of the other files
weights.safetensors      backbone and auxiliary head
statistics.safetensors   class statistics and classifier
previous/                the same before the last change, with another previous/ in it, a few deep
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError, field_validator
from safetensors import SafetensorError
from safetensors.torch import save_file

from efcil import __version__
from efcil.config import Options
from efcil.errors import DataError, EfcilError, MissingPackageError, ModelError
from efcil.files import (
    JSON_LIMIT,
    StrPath,
    atomic_replace,
    exclusive_lock,
    parse_json,
    read_bytes,
    remove_tree,
    write_json,
)
from efcil.platform_support import HeldDirectory, exchange, identity
from efcil.product.calibration import CalibrationOffset
from efcil.product.card_checks import check_config
from efcil.product.evidence import Evidence
from efcil.product.model_config import ModelConfig
from efcil.product.names import check_name, check_names
from efcil.product.state import UNDO_STEPS, ClassRecord, State
from efcil.tensor_files import check_finite, read_tensors, to_cpu

FORMAT = 6  # earlier ones were not released
KIND = "efcil model"
CARD, WEIGHTS, STATISTICS, PREVIOUS = "model.json", "weights.safetensors", "statistics.safetensors", "previous"
_FILES = (CARD, WEIGHTS, STATISTICS)
_TRIES = 100  # the model may be replaced while its card is read
_PATIENCE = 10.0  # seconds in which a model that is replaced all the time must be opened once


MOST_CLASSES = 100_000


class _Class(Options):
    name: Annotated[str, AfterValidator(check_name)]
    images: int = Field(ge=1, lt=2**53)
    learned: str = Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")
    recall: float | None = Field(ge=0, le=100)
    checked: int = Field(default=0, ge=0, lt=2**53)


_Sum = Annotated[float, Field(ge=-1e18, le=1e18)]
_Square = Annotated[float, Field(ge=0, le=1e18)]
_Count = Annotated[int, Field(ge=0, lt=2**53)]


class _Card(Options):
    """Contents of model.json."""

    kind: str
    format: int
    id: str = Field(pattern="^[0-9a-f]{16}$")  # of the model, through all its updates
    efcil: str = Field(max_length=100)  # version that saved it
    config: dict[str, Any]
    frozen: bool
    backbone_updates: int = Field(ge=0, lt=2**53)
    updates: int = Field(ge=0, lt=2**53)
    temperature: float = Field(ge=1e-12, le=1e12)
    calibration_offset: tuple[Annotated[float, Field(ge=-100, le=100)], Annotated[int, Field(ge=0, lt=2**53)]]
    evidence: tuple[_Count, _Square, _Square, _Sum, _Square, _Sum, _Square, _Square, _Sum]
    classes: list[_Class] = Field(max_length=MOST_CLASSES)
    files: dict[str, str] = Field(max_length=2)  # SHA-256

    @field_validator("classes")
    @classmethod
    def _check_names(cls, classes: list[_Class]) -> list[_Class]:
        check_names(one.name for one in classes)
        if len({one.name for one in classes}) < len(classes):
            raise DataError("a class name is there twice")
        return classes


def exists(directory: StrPath) -> bool:
    """Whether there is a model, or what calls itself one."""
    return os.path.lexists(_current(_real(directory)) / CARD)


def fingerprint(directory: StrPath) -> str:
    """Return a fingerprint of the model, or an empty string if there is none."""
    for _ in range(_TRIES):
        place = _current(_real(directory))
        try:  # the card contains the checksums of the other files
            return hashlib.sha256(read_bytes(place / CARD, JSON_LIMIT)).hexdigest()
        except (FileNotFoundError, NotADirectoryError):
            continue  # in the middle of a swap in two steps it is under another name
        except OSError as error:
            raise ModelError(f"cannot read {place / CARD}: {error.strerror or error}") from None
    return ""


def is_vacant(directory: StrPath) -> bool:
    """Return whether there is no model, nor anything else, so that a new model can be saved there."""
    place = _current(_real(directory))
    return not os.path.lexists(place) or (place.is_dir() and not any(place.iterdir()))


@contextlib.contextmanager
def save_lock(directory: Path) -> Iterator[None]:
    """Lock for checking and replacing a model; waits for other processes."""
    place = _real(directory)
    try:
        lock = exclusive_lock(place.with_name(f".{place.name[:64]}.save.lock"), wait=True, remove=True)
    except OSError as error:
        raise _unwritten(place, error) from error
    with lock:
        yield


def check_replaceable(directory: StrPath) -> None:
    """Raise ModelError unless a model can be saved there: nothing is there, an empty directory, or a whole model."""
    place, deadline = _real(directory), time.monotonic() + _PATIENCE
    while os.path.lexists(place):
        try:
            with HeldDirectory(place) as held:
                try:
                    if held.names():
                        _check_ours(held)
                    return
                except (OSError, ModelError):
                    if not _was_replaced(held) or time.monotonic() > deadline:
                        raise
        except FileNotFoundError:  # it is being replaced
            if time.monotonic() > deadline:
                raise
        except NotADirectoryError:
            raise ModelError(f"{place} is no directory; give a directory for the model") from None
        except OSError as error:
            raise _unwritten(place, error) from error


def _check_ours(held: HeldDirectory, model: str | None = None, depth: int = 0) -> None:
    """Raise ModelError for a directory that holds anything but one model, with `model` as its identity."""
    refused = "give a new directory or a model directory"
    kept = held.path if model is None else held.path.parent
    for name in held.names():
        found = held.status(name)
        known = name in _FILES or (name == PREVIOUS and depth < UNDO_STEPS)
        if not known:
            raise ModelError(f"{kept} contains other files ({held.path / name}); {refused}")
        wanted = stat.S_ISDIR if name == PREVIOUS else stat.S_ISREG
        if found is None or not wanted(found.st_mode):
            raise ModelError(f"{held.path / name} is not a model's: it is a link or of another kind; {refused}")
    if held.status(CARD) is None:
        raise ModelError(f"{held.path} has no {CARD}, so nobody can say whose files it holds; {refused}")
    try:
        with held.open_to_read(CARD) as file:
            document = parse_json(file.read(JSON_LIMIT))
    except (OSError, ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise ModelError(f"{held.path / CARD} is not a model card of efcil; {refused}")
    _check_format(held.path / CARD, document)
    identity = document.get("id")
    if model is not None and identity != model:
        raise ModelError(f"{held.path} holds another model; {refused}")
    if held.status(PREVIOUS) is not None:
        with held.directory(PREVIOUS) as inner:
            _check_ours(inner, str(identity), depth + 1)


def save(directory: StrPath, config: ModelConfig, state: State) -> None:
    """Save a model; an existing one is unchanged until the new one is complete.

    Nothing but a model or an empty directory is replaced.
    """
    place = _real(directory)
    check_replaceable(place)
    fresh = f".{place.name[:64]}.{os.getpid()}-{secrets.token_hex(4)}.new"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with HeldDirectory(os.path.realpath(place.parent)) as parent:
            parent.make_directory(fresh)
            own: tuple[int, int] | None = None
            try:
                with parent.directory(fresh) as held:
                    own = held.identity
                    _copy_permissions(parent, place.name, held)
                    _write(held, config, state)
                _swap(parent, fresh, place.name)
            finally:  # an incomplete model; what it replaced is gone already
                left = parent.status(fresh)
                if left is not None and identity(left) == own:
                    remove_tree(parent, fresh)
            parent.sync()
    except OSError as error:
        raise _unwritten(place, error) from error


def _unwritten(place: Path, error: OSError) -> ModelError:
    return ModelError(
        f"cannot save the model to {place}: {error.strerror or error}; "
        "existing files are unchanged: free some space or choose another directory"
    )


def _copy_permissions(parent: HeldDirectory, name: str, fresh: HeldDirectory) -> None:
    """Let those enter a new model who could enter the one that it replaces."""
    found = parent.status(name)
    if found is not None and stat.S_ISDIR(found.st_mode):
        with contextlib.suppress(OSError):
            fresh.set_mode(stat.S_IMODE(found.st_mode) | stat.S_IRWXU)


def _write(folder: HeldDirectory, config: ModelConfig, state: State) -> None:
    files = {WEIGHTS: state.weights, STATISTICS: state.statistics}
    sums = {}
    for name, tensors in files.items():
        with atomic_replace(folder.path / name) as temporary:
            try:
                save_file(to_cpu(tensors), temporary)
            except SafetensorError as error:  # raised when the disk is full
                raise OSError(str(error)) from None
        with folder.open_to_read(name) as file:
            sums[name] = _sha256(file)
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
        evidence=dataclasses.astuple(state.evidence),
        classes=[_Class(**vars(record)) for record in state.classes],
        files=sums,
    )
    write_json(folder.path / CARD, card.model_dump())
    mode = folder.mode & 0o666  # whoever may enter may read
    for name in _FILES:
        folder.set_mode(mode, name)
    if state.previous is not None:
        folder.make_directory(PREVIOUS)
        with folder.directory(PREVIOUS) as inner:
            inner.set_mode(folder.mode)
            _write(inner, config, state.previous)


def _swap(parent: HeldDirectory, fresh: str, name: str) -> None:
    """Replace a model by `fresh`, atomically if the system supports exchange, and remove it."""
    old = _replaced_name(name)  # left there when a swap in two steps was cut short
    if parent.status(old) is not None:
        with parent.directory(old) as held:
            _check_ours(held)
    if parent.status(name) is None:
        parent.rename(fresh, name)
        if parent.status(old) is not None:
            _remove_model(parent, old)
        return
    parent.check()
    if exchange(parent.path / fresh, parent.path / name):
        try:
            _check_replaced(parent, fresh)  # something may have come in since the first look
        except EfcilError:
            exchange(parent.path / fresh, parent.path / name)
            raise
        _remove_model(parent, fresh)
        return
    if parent.status(old) is not None:
        _remove_model(parent, old)
    parent.rename(name, old)  # two renames; `load` reads the old one in between
    try:
        _check_replaced(parent, old)
        parent.rename(fresh, name)
    except (OSError, EfcilError):
        parent.rename(old, name)
        raise
    _remove_model(parent, old)


def _check_replaced(parent: HeldDirectory, name: str) -> None:
    with parent.directory(name) as held:
        if held.names():
            _check_ours(held)


def _remove_model(parent: HeldDirectory, name: str) -> None:
    """Remove the files of a model and its directory; where anything else is in it, that stays."""
    with parent.directory(name) as held:
        if held.status(PREVIOUS) is not None:
            _remove_model(held, PREVIOUS)
        for file in _FILES:
            if held.status(file) is not None:
                held.remove(file)
    parent.remove_directory(name)


def _real(directory: StrPath) -> Path:
    place = Path(os.path.realpath(directory))
    if not place.name:  # beside it there is no place for a new model
        raise ModelError(f"{place} cannot be a model; give a directory in it")
    return place


def _replaced_name(name: str) -> str:
    return f".{name[:64]}.old"


def _current(place: Path) -> Path:
    """Return where the model is: in the middle of a swap in two steps, under the name of the replaced one."""
    old = place.with_name(_replaced_name(place.name))
    return old if not os.path.lexists(place) and os.path.isdir(old) and not os.path.islink(old) else place


def load(directory: StrPath) -> tuple[ModelConfig, State]:
    """Load a model; raise ModelError if it is missing, damaged or incompatible.

    The model may be replaced meanwhile, again and again. All its files are opened at once, in one directory; if that
    was replaced before all were open, those of the new one are.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        real = _real(directory)
        place = _current(real)
        with contextlib.ExitStack() as opened:
            try:
                held = opened.enter_context(HeldDirectory(place))
            except OSError as error:
                if os.path.lexists(place):
                    why = "is no directory" if isinstance(error, NotADirectoryError) else f"{error.strerror or error}"
                    raise ModelError(f"{place}: {why}; give a model directory") from None
                if _current(place) != place and time.monotonic() < deadline:
                    continue
                what = "no such directory; give a model directory or create one with `efcil teach`"
                raise ModelError(f"{place}: {what}") from None
            try:
                files = _open(held, opened)
                held.check()
                if _current(real) != place:  # a swap in two steps ended meanwhile, and removes what it replaced
                    raise FileNotFoundError(place)
            except (OSError, ModelError) as problem:
                if time.monotonic() < deadline and (_was_replaced(held) or _current(real) != place):
                    continue
                if isinstance(problem, OSError):
                    raise ModelError(f"cannot read {place}: {problem.strerror or problem}") from None
                raise
            return _read_chain(held.path, files)


def _was_replaced(held: HeldDirectory) -> bool:
    try:
        held.check()
    except OSError:
        return True
    return False


@dataclass(frozen=True)
class _Files:
    """The open files of a model."""

    files: dict[str, BufferedReader]
    previous: _Files | None = None


def _open(held: HeldDirectory, opened: contextlib.ExitStack, depth: int = 0) -> _Files:
    """Open all files of a model before one is read: from then on it cannot change."""
    files = {}
    for name in _FILES:
        try:
            files[name] = opened.enter_context(held.open_to_read(name))
        except FileNotFoundError:
            if name == CARD:
                what = f"is not a model directory: it has no {CARD}; give a saved model"
                raise ModelError(f"{held.path} {what}") from None
            raise ModelError(f"{held.path}: {name} is missing; restore the directory from a backup") from None
        except OSError as error:
            raise ModelError(f"cannot read {held.path / name}: {error.strerror or error}") from None
    if held.status(PREVIOUS) is None or depth == UNDO_STEPS:
        return _Files(files)
    return _Files(files, _open(opened.enter_context(held.directory(PREVIOUS)), opened, depth + 1))


def _read_chain(place: Path, opened: _Files) -> tuple[ModelConfig, State]:
    """Read a model with its earlier states."""
    config, state = _read(place, opened)
    if opened.previous is not None:
        state = state.updated(previous=_read_chain(place / PREVIOUS, opened.previous)[1])
    return config, state


def _read(place: Path, opened: _Files) -> tuple[ModelConfig, State]:
    card = _card(place / CARD, opened.files[CARD])
    tensors = {}
    for name in (WEIGHTS, STATISTICS):
        file = opened.files[name]
        if _sha256(file) != card.files.get(name):
            raise ModelError(f"{place / name} is damaged: its checksum differs from {CARD}; restore it from a backup")
        file.seek(0)
        try:
            tensors[name], _ = read_tensors(file)
            check_finite(tensors[name])
        except (OSError, ValueError, RuntimeError, MemoryError, RecursionError) as error:
            raise ModelError(f"cannot read {place / name}: {error}") from None
    try:
        config = ModelConfig.from_dict(card.config)
        if unknown := card.config.keys() - config.to_dict().keys():
            raise ModelError(f"config has the unknown {min(unknown)!r}")
        check_config(config, tensors[WEIGHTS], tensors[STATISTICS])
    except MissingPackageError:  # the model is sound
        raise
    except (EfcilError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        raise ModelError(f"{place / CARD}: {error}; restore it from a backup") from None
    records = tuple(ClassRecord(**record.model_dump()) for record in card.classes)
    state = State(
        classes=records,
        weights=tensors[WEIGHTS],
        statistics=tensors[STATISTICS],
        temperature=card.temperature,
        calibration_offset=CalibrationOffset(*card.calibration_offset),
        evidence=Evidence(*card.evidence),
        backbone_updates=card.backbone_updates,
        updates=card.updates,
        frozen=card.frozen,
        previous=None,
        identity=card.id,
    )
    return config, state


def _card(path: Path, file: BufferedReader) -> _Card:
    try:
        document = parse_json(file.read(JSON_LIMIT))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged or not JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise ModelError(f"{path} is not a model card; give a saved model")
    _check_format(path, document)
    try:
        return _Card.model_validate(document)
    except DataError as error:
        raise ModelError(f"{path}: {error}; restore it from a backup") from None
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise ModelError(f"{path}: {where}: {error.errors()[0]['msg'].lower()}; restore it from a backup") from None


def _check_format(path: Path, document: Mapping[str, Any]) -> None:
    """Raise ModelError for a model card of another version."""
    version = document.get("format")
    if not isinstance(version, int) or version < 1:
        raise ModelError(f"{path}: unknown format {version!r}; restore it from a backup")
    if version < FORMAT:
        raise ModelError(
            f"{path} was made by an earlier version of efcil (format {version}, this version has {FORMAT}); "
            "train the model again"
        )
    if version > FORMAT:
        writer = str(document.get("efcil", "a later version"))[:100]
        raise ModelError(
            f"{path}: format {version} was written by efcil {writer}; {__version__} supports formats up to "
            f"{FORMAT}: pip install --upgrade efcil"
        )


def _sha256(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()
