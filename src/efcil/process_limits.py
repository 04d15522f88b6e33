"""Limits of memory and processor time of a process, and how much memory one has taken, on every system.

Where the system has no such limits, the process that has started another one watches it with `resident_memory`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
import mmap
import os
import subprocess
import time
from typing import Any


@functools.cache
def has_process_limits() -> bool:
    """Whether the system stops a process that takes more than it may (Linux); elsewhere somebody has to watch it."""
    return importlib.util.find_spec("resource") is not None and os.path.exists("/proc/self/statm")


def limit_memory(more: int) -> None:
    """Let this process take so many bytes more than it has, where the system has such a limit."""
    if has_process_limits():
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.getrlimit(resource.RLIMIT_AS)[1]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def limit_processor_time(seconds: int) -> None:
    """Let this process compute for so long from now on, where the system has such a limit; it is killed then."""
    if has_process_limits():
        import resource

        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + seconds, hard))


def resident_memory(process: int) -> int | None:
    """Return the bytes of memory that a process has taken; None where they cannot be asked for."""
    try:
        if os.name == "nt":
            return _windows_resident_memory(process)
        if os.path.exists("/proc/self/statm"):
            with open(f"/proc/{process}/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * mmap.PAGESIZE
        command = ["ps", "-o", "rss=", "-p", str(process)]  # macOS
        found = subprocess.run(command, capture_output=True, check=True, timeout=5)  # nosec B603 # constant but a number
        return int(found.stdout) * 1024
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


def _windows_resident_memory(process: int) -> int | None:
    library: Any = getattr(ctypes, "windll", None)
    if library is None:
        return None
    counters = (ctypes.c_size_t * 10)()  # PROCESS_MEMORY_COUNTERS: two numbers of 32 bits, then sizes
    handle = library.kernel32.OpenProcess(0x0410, False, process)  # to query it and read its memory's size
    try:
        found = library.psapi.GetProcessMemoryInfo(handle, ctypes.byref(counters), ctypes.sizeof(counters))
        return int(counters[2]) if found else None
    finally:
        library.kernel32.CloseHandle(handle)
