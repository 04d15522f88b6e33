"""What other packages ask of GPUs: how many there are, their memory, copies there; without one the answers hold too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from efcil.accel.streams import thread_stream


def device_count() -> int:
    """Return how many GPUs there are; none of them is touched."""
    return torch.cuda.device_count()


def is_available() -> bool:
    """Whether there is a GPU that can be used."""
    return torch.cuda.is_available()


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that are free on a GPU; None for a CPU, whose memory nobody needs to spare."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def synchronize(device: torch.device) -> None:
    """Wait until a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Let what this thread does on a GPU go to the stream of its run, beside those of other threads."""
    return torch.cuda.stream(thread_stream(device, "run")) if device.type == "cuda" else contextlib.nullcontext()


def copied_in_place(tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]] | None:
    """Copy tensors on the one GPU that has all of them and room; None elsewhere.

    What is returned brings the copies to the CPU, once, in whichever thread that is.
    """
    places = {t.device for t in tensors.values() if t.is_cuda}
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    if len(places) != 1 or size > torch.cuda.mem_get_info(*places)[0] // 4:
        return None
    (device,) = places
    held = {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    made, aside = torch.cuda.current_stream(device).record_event(), thread_stream(device, "files")

    def brought() -> dict[str, Tensor]:
        with torch.cuda.stream(aside):
            made.wait()
            return {name: held.pop(name).cpu() for name in list(held)}

    return brought
