"""Execute several runs, concurrently where one does not fill the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from efcil.accel.concurrent import Job, run_concurrently
from efcil.experiment.interruption import stoppable
from efcil.experiment.run import Run
from efcil.experiment.summaries import Summary
from efcil.training.trainer import TrainingInterrupted


def execute_all(
    runs: Sequence[Run], resume: bool, concurrent_runs: int, remedy: str = "go on with the same command and --resume"
) -> list[list[Summary]]:
    """Execute runs, several at once in one process where a GPU is not filled by one."""

    def execute(run: Run) -> list[Summary]:
        if run.stop.is_set():
            raise TrainingInterrupted
        return run.execute(resume)

    for run in runs:
        run.concurrent_runs = max(run.concurrent_runs, min(concurrent_runs, len(runs)))
    with stoppable(runs, remedy, force_on_second=all(run.world.size == 1 for run in runs)):
        if concurrent_runs <= 1:
            return [run.execute(resume) for run in runs]
        jobs = [Job(partial(execute, run), run.backend.device, run.started, run.stop) for run in runs]
        return run_concurrently(jobs, concurrent_runs)
