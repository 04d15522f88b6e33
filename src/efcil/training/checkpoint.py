"""Checkpoints: safetensors files that carry their own checksum, and the store that finds the newest sound one.

A file is named after what it holds: `task-03.safetensors` is everything after the third task; with
`task-04-epoch-0050.safetensors` the fourth task goes on after its fiftieth epoch (weights, momentum and teacher; the
statistics are those of task 3's file). Two of each kind are kept, so that a damaged one can be passed over.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from efcil.errors import CheckpointError
from efcil.files import replaced
from efcil.training.machine import own_stream

Tensors = dict[str, Tensor]
ALIGNMENT = 64  # bytes: where memory that torch allocates begins


def digest(tensors: Mapping[str, Tensor], meta: str = "") -> str:
    """SHA-256 of tensors on the CPU, with their names and kinds, and of a text."""
    found = hashlib.sha256(meta.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return found.hexdigest()


def on_cpu(tensors: Mapping[str, Tensor]) -> Tensors:
    """Copy tensors as a file needs them: safetensors refuses channels_last and shared storage."""
    return {
        name: t.detach().clone(memory_format=torch.contiguous_format)
        if t.device.type == "cpu"
        else t.detach().contiguous().cpu()
        for name, t in tensors.items()
    }


def copied(tensors: Mapping[str, Tensor]) -> Callable[[], Tensors]:
    """Copy tensors now; what is returned gives them as a file needs them, once, in whichever thread that is.

    On a GPU with room they are copied there, where that is quick, and brought to the CPU only when asked for.
    """
    places = {t.device for t in tensors.values() if t.is_cuda}
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    if len(places) != 1 or size > torch.cuda.mem_get_info(*places)[0] // 4:
        plain = on_cpu(tensors)
        return lambda: plain
    (device,) = places
    held = {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    made, aside = torch.cuda.current_stream(device).record_event(), own_stream(device, "files")

    def brought() -> Tensors:
        with torch.cuda.stream(aside):
            made.wait()
            return {name: held.pop(name).cpu() for name in list(held)}

    return brought


def aligned(tensors: Mapping[str, Tensor]) -> Tensors:
    """Copy tensors that do not begin where torch's own do, as those of a file: products may round differently there."""
    return {name: t if t.data_ptr() % ALIGNMENT == 0 else t.clone() for name, t in tensors.items()}


def save_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write tensors and JSON `meta` as one safetensors file, whole or not at all, with a checksum of all of it."""
    _write(path, on_cpu(tensors), meta)


def _write(path: Path, plain: Tensors, meta: Mapping[str, Any]) -> None:
    text = json.dumps(meta, sort_keys=True)
    with replaced(path) as temporary:
        try:
            save_file(plain, temporary, metadata={"meta": text, "sha256": digest(plain, text)})
        except SafetensorError as error:  # how the library tells that the disk is full
            raise OSError(str(error)) from error


def load_tensors(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Read what `save_tensors` wrote; CheckpointError if it was cut short or any bit of it changed."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = aligned({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 (not a dict)
        text = metadata["meta"]
        sound = metadata["sha256"] == digest(tensors, text)
        meta = json.loads(text)
    except (SafetensorError, KeyError, ValueError, OSError, RuntimeError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{path} cannot be read: {error or type(error).__name__}") from None
    if not sound:
        raise CheckpointError(f"{path} is damaged: its checksum does not match its contents")
    return tensors, meta


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands: `task` tasks are learned; with `epoch`, that many epochs of the next one as well."""

    task: int
    epoch: int | None
    tensors: Tensors  # of the last finished task: representation and statistics
    meta: dict[str, Any]
    partial: Tensors  # of the task in the middle of which the run stands, if any


class CheckpointStore:
    """The checkpoints of one run."""

    KEEP = 2  # of each kind
    _NAME = re.compile(r"task-(\d+)(?:-epoch-(\d+))?\.safetensors")

    def __init__(self, directory: Path, note: Callable[[str], None] = lambda text: None):
        self.directory = directory
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
        self._save(f"task-{task:02d}.safetensors", tensors, meta)

    def save_epoch(self, task: int, epoch: int, tensors: Tensors, meta: Mapping[str, Any]) -> None:
        """Keep the middle of a task: `epoch` epochs of the `task`-th task are done."""
        self._save(f"task-{task:02d}-epoch-{epoch:04d}.safetensors", tensors, meta)

    def _save(self, name: str, tensors: Tensors, meta: Mapping[str, Any]) -> None:
        self.wait()
        plain = copied(tensors)  # what comes after may change them

        def write() -> None:
            self.directory.mkdir(parents=True, exist_ok=True)
            _write(self.directory / name, plain(), meta)
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
            path.unlink()
            over.add(task)
        done = [f for f in parts if f[0] in over]
        going = [f for f in parts if f[0] not in over]
        for _, _, path in done + going[self.KEEP :]:
            path.unlink()

    def newest(self) -> Checkpoint | None:
        """Return the newest sound state, passing over what is damaged; None where nothing was saved.

        Raises CheckpointError when checkpoints exist but none of them is sound.
        """
        self.wait()
        files = self._files()
        wholes: dict[int, tuple[Tensors, dict[str, Any]] | None] = {}

        def whole(task: int) -> tuple[Tensors, dict[str, Any]] | None:
            if task == 0:
                return {}, {}
            if task not in wholes:
                wholes[task] = self._try(self.directory / f"task-{task:02d}.safetensors")
            return wholes[task]

        for position, (task, epoch, path) in enumerate(files):
            found = None
            if epoch is None:
                loaded = whole(task)
                if loaded is not None:
                    found = Checkpoint(task, None, *loaded, {})
            else:
                base, part = whole(task - 1), self._try(path)
                if base is not None and part is not None:
                    found = Checkpoint(task - 1, epoch, base[0], {**base[1], **part[1]}, part[0])
            if found is not None:
                for _, _, unused in files[:position]:  # newer ones must not pass for what is learned again now
                    unused.replace(unused.with_name(unused.name + ".unused"))
                return found
        if files:
            raise CheckpointError(
                f"none of the {len(files)} checkpoints in {self.directory} is sound: start again in another --out"
            )
        return None

    def _try(self, path: Path) -> tuple[Tensors, dict[str, Any]] | None:
        try:
            return load_tensors(path)
        except CheckpointError as error:
            self.note(f"{error}; the one before it is used")
            return None
