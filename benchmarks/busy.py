"""How much longer does a run take beside other programs? The seconds of `efcil run dpcr digits`, by the clock.

    python benchmarks/busy.py [--repeats 3] [--loops N] [--check] [--out F] [--machine "2 cores of ..."]

In turns, in one run, with default options and no variable of threads set: alone, and beside N busy loops, one for each
core unless given. `--check` fails where the median run beside them takes more than three times the median run alone.
What else the machine does slows both: the load at the start of each turn is stored beside its seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.record import add_options, write_record
from efcil.platform_support import THREADS, WAITING, cores

LIMIT = 3.0
COMMAND = ("run", "dpcr", "digits", "--quiet", "--device", "cpu")


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    """Let processes compute without end while the block runs."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def seconds(command: Sequence[str]) -> float:
    """Run the command once, its threads as it chooses them, and return its seconds."""
    environment = {name: value for name, value in os.environ.items() if name not in (*THREADS, *WAITING)}
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        line = [sys.executable, "-m", "efcil", *command, "--out", str(Path(folder) / "run")]
        subprocess.run(line, check=True, env=environment)
        return time.perf_counter() - began


def measure(o: argparse.Namespace, command: Sequence[str] = COMMAND) -> dict[str, Any]:
    """Time both in turns; return seconds, loads and the ratio of their medians."""
    turns: dict[str, list[float]] = {"alone": [], "beside": []}
    loads: dict[str, list[float]] = {"alone": [], "beside": []}
    for _ in range(o.repeats):
        for how, loops in (("alone", 0), ("beside", o.loops)):
            loads[how].append(os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan"))
            with busy(loops):
                turns[how].append(seconds(command))
            print(f"{how}: {turns[how][-1]:.1f} s, load before it {loads[how][-1]:.1f}", flush=True)
    alone, beside = (statistics.median(turns[how]) for how in ("alone", "beside"))
    found = {"alone": alone, "beside": beside, "ratio": beside / alone, "turns": turns, "loads": loads}
    return {"command": "efcil " + " ".join(command), "loops": o.loops, "cores": cores(), "limit": LIMIT, **found}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--loops", type=int, default=cores())
    parser.add_argument("--check", action="store_true")
    add_options(parser)
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Measure, print, store and check."""
    given = sys.argv[1:] if given is None else given
    o = arguments(given)
    found = measure(o)
    print("{command}: alone {alone:.1f} s, beside {loops} busy loops {beside:.1f} s, {ratio:.1f} times".format(**found))
    write_record(o, __file__, given, busy=found)
    return int(o.check and found["ratio"] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
