"""The model that answers, and its directory: both change at once, and only when the new one is whole."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efcil.errors import RunError
from efcil.experiment.run_directory import run_lock
from efcil.product import IncrementalClassifier
from efcil.product.model_directory import fingerprint, save_lock


class Conflict(RunError):
    """Something that cannot be done now: the model is being changed already, or has nothing to do it with."""


@dataclass(frozen=True)
class ServedModel:
    """A model at one moment; never changed, only replaced."""

    model: IncrementalClassifier
    version: int
    names: tuple[str, ...]
    summary: dict[str, Any]


class ModelStore:
    """Holds the model directory while the service runs; a second service is refused."""

    def __init__(self, directory: Path, device: str = "auto"):
        self.directory, self.device = Path(os.path.realpath(directory)), device
        self.work = self.directory.with_name(f".{self.directory.name}.serving")  # same disk: copies are cheap to swap
        self._fingerprint = fingerprint(self.directory)  # first: a change while it is loaded is seen later
        self.current = self._served_model(IncrementalClassifier.load(self.directory, device=device), 1)
        self._claimed: str | None = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the working directory, first without what a killed service left there, at last without itself."""
        try:
            lock = run_lock(self.work)
            lock.__enter__()
        except RunError as error:
            why = str(error).split(";")[0].removeprefix("--out ")
            raise RunError(f"{self.directory} cannot be served: {why}") from None
        try:
            for left in self.work.iterdir():
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
            yield
        finally:
            shutil.rmtree(self.work, ignore_errors=True)
            lock.__exit__(None, None, None)

    @property
    def size(self) -> int:
        """Pixels along a side of the pictures that the model sees."""
        return int(self.current.summary["size"])

    def check_free(self) -> None:
        """Refuse while the model is being changed."""
        if self._claimed is not None:
            raise Conflict(f"{self._claimed}; wait for it to end or cancel it, then try again")

    def claim(self, what: str) -> None:
        """Take the right to change the model."""
        self.check_free()
        self._claimed = what

    def release(self) -> None:
        """Give the right to change the model back."""
        self._claimed = None

    def copy(self, place: Path) -> None:
        """Copy the model directory."""
        self._check_unchanged()
        shutil.copytree(self.directory, place)

    def replace_with(self, place: Path) -> None:
        """Let the model saved in `place` answer from now on."""
        self._replace(IncrementalClassifier.load(place, device=self.device))

    def change(self, how: Callable[[IncrementalClassifier], object]) -> None:
        """Change the model: a copy, while the present one goes on answering."""
        self._check_unchanged()
        model = IncrementalClassifier.load(self.directory, device=self.device)
        how(model)
        self._replace(model)

    def _replace(self, model: IncrementalClassifier) -> None:
        served = self._served_model(model, self.current.version + 1)
        with save_lock(self.directory):
            self._check_unchanged()
            model.save(self.directory)  # whole or not at all
            self._fingerprint = fingerprint(self.directory)
        self.current = served

    def _served_model(self, model: IncrementalClassifier, version: int) -> ServedModel:
        return ServedModel(model, version, tuple(map(str, model.classes_)), model.summary())

    def _check_unchanged(self) -> None:
        """Refuse to overwrite what somebody else has written meanwhile."""
        if fingerprint(self.directory) != self._fingerprint:
            raise Conflict("the model directory was changed by another process; restart the service to take it up")
