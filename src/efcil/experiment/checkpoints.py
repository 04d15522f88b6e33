"""Keep the checkpoints of a run, and find the newest sound one.

A file is named after what it holds: `task-03.safetensors` is everything after the third task; with
`task-04-epoch-0050.safetensors` the fourth task is resumed after its fiftieth epoch (weights, momentum and teacher; the
statistics are those of task 3's file). Two of each kind are kept, so that a damaged one can be passed over."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efcil.errors import CheckpointError
from efcil.files import remove_file, rename_file
from efcil.tensor_files import Tensors, load_tensors, snapshot, write_tensors

_PLACE = "place"  # [task, epoch] of a file in its own metadata


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands: `task` tasks are learned; with `epoch`, that many epochs of the next one as well."""

    task: int
    epoch: int | None
    tensors: Tensors  # of the last finished task: learner and statistics
    meta: dict[str, Any]
    partial: Tensors  # of the task in the middle of which the run stands, if any


class CheckpointStore:
    """The checkpoints of one run."""

    KEEP = 2  # of each kind
    _NAME = re.compile(r"task-(\d+)(?:-epoch-(\d+))?\.safetensors")

    def __init__(self, directory: Path, note: Callable[[str], None] = lambda text: None, root: Path | None = None):
        """`root`: the run's directory; links between it and the checkpoints are refused."""
        self.directory, self.root = directory, root or directory.parent
        self.note = note
        self._writer = ThreadPoolExecutor(1)  # files are hashed and written while the next task begins
        self._pending: Future[None] | None = None

    def _files(self) -> list[tuple[int, int | None, Path]]:
        """(task, epoch, path), newest first."""
        found = []
        for path in self.directory.glob("task-*.safetensors"):
            match = self._NAME.fullmatch(path.name)
            if match:
                found.append((int(match[1]), int(match[2]) if match[2] else None, path))
        return sorted(found, key=lambda f: (f[0], float("inf") if f[1] is None else f[1]), reverse=True)

    def save_task(self, task: int, tensors: Tensors, meta: Mapping[str, Any]) -> None:
        """Keep everything after `task` learned tasks."""
        self._save(f"task-{task:02d}.safetensors", tensors, {**meta, _PLACE: [task, None]})

    def save_epoch(self, task: int, epoch: int, tensors: Tensors, meta: Mapping[str, Any]) -> None:
        """Keep the middle of a task: `epoch` epochs of the `task`-th task are done."""
        self._save(f"task-{task:02d}-epoch-{epoch:04d}.safetensors", tensors, {**meta, _PLACE: [task, epoch]})

    def _save(self, name: str, tensors: Tensors, meta: Mapping[str, Any]) -> None:
        self.wait()
        plain = snapshot(tensors)  # what comes after may change them

        def write() -> None:
            write_tensors(self.directory / name, plain(), meta, self.root)
            self._prune()

        self._pending = self._writer.submit(write)

    def wait(self) -> None:
        """Return when what was saved is on disk; an error in writing it is raised here."""
        self.settle()  # first: where a signal ends this, it is still known that something is being written
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except OSError as error:
                raise CheckpointError(
                    f"{self.directory} cannot be written: {error.strerror or error}; free some space, then --resume"
                ) from None

    def settle(self) -> None:
        """Return when nothing is being written any more; how that went, `wait` tells."""
        if self._pending is not None:
            self._pending.exception()

    def _prune(self) -> None:
        files = self._files()
        whole = [f for f in files if f[1] is None]
        parts = [f for f in files if f[1] is not None]
        over = {f[0] for f in whole}  # tasks that are finished need no middle
        for task, _, path in whole[self.KEEP :]:
            remove_file(path, root=self.root)
            over.add(task)
        done = [f for f in parts if f[0] in over]
        going = [f for f in parts if f[0] not in over]
        for _, _, path in done + going[self.KEEP :]:
            remove_file(path, root=self.root)

    def latest(self, run: str | None = None) -> Checkpoint | None:
        """Return the newest sound state, passing over what is damaged; None where nothing was saved.

        Raises CheckpointError when checkpoints exist but none of them is sound, and for one of another run than `run`
        or under a name that is not its own: somebody has put it there.
        """
        self.wait()
        files = self._files()
        paths = {task: path for task, epoch, path in files if epoch is None}
        by_task: dict[int, tuple[Tensors, dict[str, Any]] | None] = {}

        def whole(task: int) -> tuple[Tensors, dict[str, Any]] | None:
            if task == 0:
                return {}, {}
            if task not in by_task:
                by_task[task] = self._try(paths[task], [task, None], run) if task in paths else None
            return by_task[task]

        for position, (task, epoch, path) in enumerate(files):
            found = None
            if epoch is None:
                loaded = whole(task)
                if loaded is not None:
                    found = Checkpoint(task, None, *loaded, {})
            else:
                base, part = whole(task - 1), self._try(path, [task, epoch], run)
                if base is not None and part is not None:
                    found = Checkpoint(task - 1, epoch, base[0], {**base[1], **part[1]}, part[0])
            if found is not None:
                for _, _, unused in files[:position]:  # newer ones must not pass for what is learned again now
                    rename_file(unused, unused.name + ".unused", root=self.root)
                return found
        if files:
            raise CheckpointError(
                f"none of the {len(files)} checkpoints in {self.directory} is sound: start again in another --out"
            )
        return None

    def run_identity(self) -> str | None:
        """Return the identity of the run that saved the newest sound checkpoint, None where there is none."""
        found = (self._try(path, [task, epoch]) for task, epoch, path in self._files())
        return next((str(loaded[1].get("run")) for loaded in found if loaded is not None), None)

    def _try(
        self, path: Path, place: list[int | None], run: str | None = None
    ) -> tuple[Tensors, dict[str, Any]] | None:
        try:
            tensors, meta = load_tensors(path)
        except CheckpointError as error:
            self.note(f"{error}; the one before it is used")
            return None
        remedy = "move it away, or start again in another --out"
        if run is not None and meta.get("run") != run:
            raise CheckpointError(f"{path} is of another run, or of other options or data: {remedy}")
        if (saved := meta.pop(_PLACE, None)) != place:
            raise CheckpointError(f"{path} does not hold what its name says ({_named(saved)}): {remedy}")
        return tensors, meta


def _named(place: Any) -> str:
    """Return the name of the checkpoint of a place, as far as it is one."""
    match place:
        case [int(task), None]:
            return f"it was saved as task-{task:02d}"
        case [int(task), int(epoch)]:
            return f"it was saved as task-{task:02d}-epoch-{epoch:04d}"
    return "it does not say what it is"
