"""The served model and its directory, replaced together and atomically."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efcil.data.preprocessing import Preprocessing
from efcil.errors import RunError
from efcil.files import working_directory
from efcil.product import IncrementalClassifier
from efcil.product.model_directory import fingerprint, is_vacant, save_lock

_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


class Conflict(RunError):
    """The operation conflicts with a running change or the state of the model."""


@dataclass(frozen=True)
class ServedModel:
    """Immutable snapshot of a model."""

    model: IncrementalClassifier
    version: int
    names: tuple[str, ...]
    summary: dict[str, Any]


class ModelStore:
    """Owns the model directory while the service runs; a second service is refused.

    Where there is no directory, or an empty one, the model is new and is saved by its first update.
    """

    def __init__(self, directory: Path, device: str = "auto"):
        self.directory, self.device = Path(os.path.realpath(directory)), device
        self._fingerprint = fingerprint(self.directory)  # before loading, to detect concurrent changes
        # On the same file system, so that models can be swapped.
        self.work = self.directory.with_name(f".{self.directory.name}.serving")
        self.current = self._served_model(self._load(), 1)
        self._claimed: str | None = None
        self._place: contextlib.ExitStack | None = None  # the working directory, while it is held
        self.read_only: str | None = None  # why the model cannot be changed

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the working directory (`hold`), if it is not held yet; remove it at the end."""
        if self._place is None:
            self.hold()
        try:
            yield
        finally:
            self.let_go()

    def hold(self) -> None:
        """Lock and clean the working directory. Where nothing can be written, the model cannot be changed."""
        with contextlib.ExitStack() as held:
            try:
                self.work.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(working_directory(self.work, "efcil serving"))
            except BlockingIOError:
                raise RunError(f"cannot serve {self.directory}: another service does ({self.work})") from None
            except OSError as error:
                why = f"{self.work} cannot be written: {error.strerror or error}"
                if not self._fingerprint or error.errno not in _NOT_WRITABLE:
                    raise RunError(f"cannot serve {self.directory}: {why}") from None
                self.read_only = why
            self._place = held.pop_all()

    def let_go(self) -> None:
        """Remove the working directory and its lock."""
        if self._place is not None:
            self._place.close()
            self._place = None

    @property
    def size(self) -> int:
        """Image size of the model in pixels."""
        return int(self.current.summary["size"])

    @property
    def preprocessing(self) -> Preprocessing:
        """How an uploaded image becomes pixels of the model."""
        return self.current.model.preprocessing

    def check_free(self) -> None:
        """Raise Conflict while the model is being changed."""
        if self.read_only:
            raise Conflict("the model's place is read-only: it can be asked, not changed")
        if self._claimed is not None:
            raise Conflict(f"{self._claimed}; wait or cancel it, then try again")

    def claim(self, what: str) -> None:
        """Acquire the exclusive right to change the model."""
        self.check_free()
        self._claimed = what

    def release(self) -> None:
        """Release the right to change the model."""
        self._claimed = None

    def copy(self, place: Path) -> None:
        """Copy the model directory, or save a new model."""
        self._check_unchanged()
        if self._fingerprint:
            shutil.copytree(self.directory, place)
        else:
            self.current.model.save(place)

    def replace_with(self, place: Path) -> None:
        """Serve the model saved in `place` from now on."""
        self._replace(IncrementalClassifier.load(place, device=self.device))

    def change(self, how: Callable[[IncrementalClassifier], object]) -> None:
        """Apply a change to a copy of the model and serve the result."""
        self._check_unchanged()
        model = self._load()
        how(model)
        self._replace(model)

    def _replace(self, model: IncrementalClassifier) -> None:
        served = self._served_model(model, self.current.version + 1)
        with save_lock(self.directory):
            self._check_unchanged()
            model.save(self.directory)  # atomic
            self._fingerprint = fingerprint(self.directory)
        self.current = served

    def _load(self) -> IncrementalClassifier:
        if is_vacant(self.directory):
            return IncrementalClassifier(device=self.device, progress=False)
        return IncrementalClassifier.load(self.directory, device=self.device)

    def _served_model(self, model: IncrementalClassifier, version: int) -> ServedModel:
        return ServedModel(model, version, tuple(map(str, model.classes_)), model.summary())

    def _check_unchanged(self) -> None:
        """Raise Conflict if another process has changed the directory."""
        if fingerprint(self.directory) != self._fingerprint:
            raise Conflict("the model directory was changed by another process; restart the service to load it")
