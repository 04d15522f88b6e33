"""The process of one run: `python -m efcil.reproduce.worker`, started by a grid, never by hand.

It reads a job as one line of JSON from its standard input, and runs or resumes it. When its input ends, whether the
grid was stopped or died, it finishes its step, saves and ends. What it prints is the run's log.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from efcil.accel.execution import Execution
from efcil.errors import EfcilError
from efcil.experiment.concurrent import execute_all
from efcil.experiment.reporters import PrefixReporter
from efcil.experiment.run import Run
from efcil.files import wait_for_end_of_input
from efcil.reproduce.job import Job


def main() -> int:
    """Run as told; return the exit code."""
    job = Job.model_validate_json(sys.stdin.readline())
    try:
        run = job.run(Execution.choose(job.device), PrefixReporter(job.title))
        threading.Thread(target=_follow, args=(run,), daemon=True).start()
        execute_all([run], True, 1)
    except EfcilError as error:
        print(f"efcil: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _follow(run: Run) -> None:
    """Stop the run when the input ends. A signal that came as well, to the whole group, makes no difference."""
    wait_for_end_of_input()
    run.stop.set()
    if not run.training:  # nothing to finish: it is still reading its data
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
