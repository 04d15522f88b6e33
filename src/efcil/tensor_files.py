"""Save and load tensors bit-exactly as safetensors files with a checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from efcil import accel, platform_support
from efcil.errors import CheckpointError
from efcil.files import atomic_replace

Tensors = dict[str, Tensor]
ALIGNMENT = 64  # bytes, alignment of torch's allocator


def digest(tensors: Mapping[str, Tensor], meta: str = "") -> str:
    """Compute the SHA-256 of CPU tensors with names, dtypes and shapes, and of a text."""
    sha = hashlib.sha256(meta.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return sha.hexdigest()


def to_cpu(tensors: Mapping[str, Tensor]) -> Tensors:
    """Copy tensors to contiguous CPU memory; safetensors refuses channels_last and shared storage."""
    return {
        name: t.detach().clone(memory_format=torch.contiguous_format)
        if t.device.type == "cpu"
        else t.detach().contiguous().cpu()
        for name, t in tensors.items()
    }


def snapshot(tensors: Mapping[str, Tensor]) -> Callable[[], Tensors]:
    """Copy tensors; the returned function moves the copies to the CPU, once, from any thread.

    If the GPU has enough memory, the copy stays there, which is fast.
    """
    on_gpu = accel.copied_in_place(tensors)
    if on_gpu is not None:
        return on_gpu
    plain = to_cpu(tensors)
    return lambda: plain


def align(tensors: Mapping[str, Tensor]) -> Tensors:
    """Copy tensors with unaligned memory, as loaded from a file: products may round differently.

    On Windows copy all of them: a file cannot be replaced while tensors are mapped to it.
    """
    may_stay = platform_support.REPLACES_MAPPED_FILES
    return {name: t if may_stay and t.data_ptr() % ALIGNMENT == 0 else t.clone() for name, t in tensors.items()}


def save_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write tensors and JSON `meta` atomically as one safetensors file with a checksum."""
    write_tensors(path, to_cpu(tensors), meta)


def write_tensors(path: Path, plain: Tensors, meta: Mapping[str, Any]) -> None:
    """Write CPU tensors like `save_tensors`."""
    text = json.dumps(meta, sort_keys=True)
    with atomic_replace(path) as temporary:
        try:
            save_file(plain, temporary, metadata={"meta": text, "sha256": digest(plain, text)})
        except SafetensorError as error:  # raised when the disk is full
            raise OSError(str(error)) from error


def load_tensors(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Load a file of `save_tensors`; raise CheckpointError if it is truncated or corrupted."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = align({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 (not a dict)
        text = metadata["meta"]
        sound = metadata["sha256"] == digest(tensors, text)
        meta = json.loads(text)
    except (SafetensorError, KeyError, ValueError, OSError, RuntimeError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"cannot read {path}: {error or type(error).__name__}") from None
    if not sound:
        raise CheckpointError(f"{path} is damaged: its checksum does not match its contents")
    return tensors, meta
