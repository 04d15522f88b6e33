"""Save and load tensors bit-exactly as safetensors files with a checksum."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from efcil import accel
from efcil.errors import CheckpointError
from efcil.files import JSON_LIMIT, atomic_replace, make_directory, parse_json
from efcil.platform_support import open_regular

Tensors = dict[str, Tensor]
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}  # by their names in safetensors files
_DIMENSIONS = 16  # of one tensor


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


def read_tensors(file: BufferedReader) -> tuple[Tensors, dict[str, str]]:
    """Read an open safetensors file: tensors and metadata.

    Every size is compared with the length of the file before memory is taken. Raise ValueError for what does not fit.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise ValueError("it is shorter than its header says")
    if length > JSON_LIMIT:
        raise ValueError(f"its header has {length:,} bytes, more than the {JSON_LIMIT:,} that one may have")
    header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no mapping")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("its metadata are no texts")
    entries = sorted((_entry(name, entry) for name, entry in header.items()), key=lambda entry: entry[1])
    at = 0
    for name, (begin, end), _, _ in entries:
        if begin != at:
            raise ValueError(f"{name} begins at byte {begin:,}, not at {at:,}")
        at = end
    if at != size - 8 - length:
        raise ValueError(f"it has {size:,} bytes, its header says {at + 8 + length:,}")
    return {name: _read(file, name, dtype, shape) for name, _, dtype, shape in entries}, metadata


def _entry(name: str, entry: Any) -> tuple[str, tuple[int, int], torch.dtype, list[int]]:
    """Check what the header says of one tensor."""
    kind = entry.get("dtype") if isinstance(entry, dict) else None
    dtype = _TYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise ValueError(f"{name} has an unknown type of numbers")
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not _is_counts(shape) or len(shape) > _DIMENSIONS:
        raise ValueError(f"{name} has no valid shape")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} is not as long as its shape says")
    return name, (offsets[0], offsets[1]), dtype, shape


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 1 << 48 for one in value)


def _read(file: BufferedReader, name: str, dtype: torch.dtype, shape: list[int]) -> Tensor:
    # In memory of torch's own alignment: products of tensors with another one may round differently.
    tensor = torch.empty(shape, dtype=dtype)
    if not tensor.numel():
        return tensor
    raw = tensor.reshape(-1).view(torch.uint8)
    view, done = raw.numpy().data, 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise ValueError(f"it ends in the middle of {name}")
        done += count
    if dtype is torch.bool and int(raw.max()) > 1:
        raise ValueError(f"{name} has values that are neither true nor false")
    return tensor


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError for NaN or infinity in a tensor."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} has numbers that are not finite")


def save_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], root: Path | None = None) -> None:
    """Write tensors and JSON `meta` atomically as one safetensors file with a checksum.

    With `root`, a directory of ours that the file is in, its directory is made, and no link on the way is followed.
    """
    write_tensors(path, to_cpu(tensors), meta, root)


def write_tensors(path: Path, plain: Tensors, meta: Mapping[str, Any], root: Path | None = None) -> None:
    """Write CPU tensors like `save_tensors`."""
    text = json.dumps(meta, sort_keys=True)
    if root is not None:
        make_directory(root, path.parent)
    with atomic_replace(path, root=root) as temporary:
        try:
            save_file(plain, temporary, metadata={"meta": text, "sha256": digest(plain, text)})
        except SafetensorError as error:  # raised when the disk is full
            raise OSError(str(error)) from error


def load_tensors(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Load a file of `save_tensors`; raise CheckpointError if it is truncated or corrupted."""
    try:
        with open_regular(path) as file:
            tensors, metadata = read_tensors(file)
        text = metadata["meta"]
        sound = metadata["sha256"] == digest(tensors, text)
        meta = parse_json(text.encode())
    except (KeyError, ValueError, OSError, RuntimeError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"cannot read {path}: {error or type(error).__name__}") from None
    if not sound:
        raise CheckpointError(f"{path} is damaged: its checksum does not match its contents")
    if not isinstance(meta, dict):
        raise CheckpointError(f"{path} is damaged: it does not say what it holds")
    return tensors, meta
