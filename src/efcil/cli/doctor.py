"""What this machine can do, and what is missing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator

import torch

from efcil.accel.backend import Backend
from efcil.data.cache import cache_directory
from efcil.experiment.specification import commit, versions
from efcil.platform_support import command_beside_python, cores, memory, thread_choice


def examine() -> Iterator[str]:
    """Yield the findings, a line each; what is wrong starts with `missing` or `warning`."""
    found = versions()
    yield f"efcil {found['efcil']} ({commit()}), Python {found['python']}, torch {found['torch']}"
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        yield f"warning: Python {found['python']} is not tested; use 3.11 to 3.14"
    backend = Backend.choose()
    compile, graphs = _yes(backend.compile), _yes(backend.cuda_graphs)
    yield f"computes on {backend.name}, compile {compile}, captured step {graphs}"
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        yield f"GPU {index}: {torch.cuda.get_device_name(index)}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    if not torch.cuda.is_available():
        yield "no CUDA GPU: the built-in sets take about a minute; CIFAR-100 at the paper's schedule takes days here"
    threads, found_memory = torch.get_num_threads(), memory()
    size = "unknown" if found_memory is None else f"{found_memory / 2**30:.0f} GiB"
    yield f"{cores()} CPU cores, {threads} thread{'s' * (threads != 1)} in use, {size} memory"
    yield from thread_choice.reasons
    if threads > cores():
        yield f"warning: more threads than cores; pass --threads {cores()}"
    cache = cache_directory()
    place = next(p for p in (cache, *cache.parents) if p.exists())
    yield f"cache of decoded images: {cache}, {shutil.disk_usage(place).free / 2**30:.0f} GiB free"
    if not os.access(place, os.W_OK):
        yield f"missing: {place} cannot be written; set EFCIL_CACHE to a directory that can"
    if not command_beside_python("efcil"):
        yield "optional: the command efcil is not beside this Python; python -m efcil works too"


def _yes(value: bool) -> str:
    return "on" if value else "off"
