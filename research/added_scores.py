"""Standardized scores of several methods of one run, added: such as a frozen backbone beside the one that moves.

    python research/added_scores.py RUN dpcr,acil [--device cpu]

RUN is the directory of `efcil compare dpcr,acil ... --save-features`, or that of one of its orders. Printed are A_f and
A_avg of each method and of the sum, for each order. The sum of DPCR and ACIL costs one more network, the first task's,
and one more forward pass an image; nothing more is trained.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from efcil.accel.backend import Backend
from efcil.core.metrics import AccuracyMatrix
from efcil.errors import EfcilError
from efcil.experiment.ensemble import standardized
from efcil.experiment.reevaluate import config_of, evaluated_tasks, experiment_of
from efcil.experiment.run_directory import FEATURES


def added(home: Path, methods: list[str], device: str) -> dict[str, AccuracyMatrix]:
    """Return the accuracies of each method and of all together."""
    run = config_of(home)["run"]
    found: dict[str, AccuracyMatrix] = {}
    for index, task in enumerate(
        evaluated_tasks(home, experiment_of(run, methods, ()), run["learner"], Backend.choose(device))
    ):
        scores = {**task.scores, " + ".join(task.scores): sum(map(standardized, task.scores.values()))}
        for name, one in scores.items():
            found.setdefault(name, AccuracyMatrix(task.totals)).record(index, *task.hits(one))
    return found


def homes(run: Path) -> Iterator[Path]:
    """Yield the directories below a run that keep features."""
    yield from sorted({folder.parent for folder in run.glob(f"**/{FEATURES}") if folder.is_dir()})


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each method and order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("methods", type=lambda text: text.split(","))
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args(arguments)
    try:
        found = [(home, added(home, asked.methods, asked.device)) for home in homes(asked.run)]
    except EfcilError as error:
        parser.error(str(error))
    if not found:
        parser.error(f"{asked.run} has no features; run it with --save-features")
    for home, matrices in found:
        order = config_of(home)["run"]["order"]
        for name, matrix in matrices.items():
            summary = matrix.summary()
            print(f"{summary['A_f']:6.2f} {summary['A_avg']:6.2f}  {name}, order {order}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
