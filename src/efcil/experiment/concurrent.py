"""Execute several runs, concurrently where one does not fill the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from efcil.accel.concurrent import Job, run_concurrently
from efcil.errors import ConfigError
from efcil.experiment.interruption import stoppable
from efcil.experiment.run import Run
from efcil.experiment.summaries import Summary
from efcil.training.trainer import TrainingInterrupted


def execute_all(
    runs: Sequence[Run], resume: bool, concurrent_runs: int, remedy: str = "resume with the same command and --resume"
) -> list[list[Summary]]:
    """Execute runs, several concurrently in one process where one does not fill a GPU."""

    def execute(run: Run) -> list[Summary]:
        if run.stop.is_set():
            raise TrainingInterrupted
        return run.execute(resume)

    for run in runs:
        run.concurrent_runs = max(run.concurrent_runs, min(concurrent_runs, len(runs)))

    def advice() -> str:
        return remedy if any(run.has_begun for run in runs) else "nothing was trained yet; start it again"

    with stoppable(runs, advice, force_on_second=all(run.world.size == 1 for run in runs)):
        check_all(runs)
        if concurrent_runs <= 1:
            return [run.execute(resume) for run in runs]
        jobs = [Job(partial(execute, run), run.backend.device, run.started, run.stop) for run in runs]
        return run_concurrently(jobs, concurrent_runs)


def check_all(runs: Sequence[Run]) -> None:
    """Raise the error of any of several runs that cannot run, before the first one trains.

    The first one checks itself when it starts. Of runs that differ only in their seeds, one is checked.
    """
    known = [runs[0].experiment]
    for run in runs[1:]:
        experiment = replace(run.experiment, seed=runs[0].experiment.seed)
        if experiment not in known:
            known.append(experiment)
            try:
                run.check()
            except ConfigError as error:
                raise ConfigError(f"{', '.join(experiment.methods)}: {error}") from None
