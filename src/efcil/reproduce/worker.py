"""Process of one run: `python -m efcil.reproduce.worker`, started by `efcil reproduce --parallel`.

It reads a job as one line of JSON from standard input and runs or resumes it. When its input is closed, because the
grid was stopped or died, it finishes its step, saves and exits. Its output is the log of the run.
"""

from __future__ import annotations

import sys
import threading

from efcil.accel.backend import Backend
from efcil.errors import EfcilError
from efcil.experiment.concurrent import execute_all
from efcil.experiment.reporters import PrefixReporter
from efcil.experiment.run import Run
from efcil.files import wait_for_end_of_input
from efcil.platform_support import stop_this_process
from efcil.reproduce.job import Job


def main() -> int:
    """Run the job; return the exit code."""
    job = Job.model_validate_json(sys.stdin.readline())
    try:
        run = job.run(Backend.choose(job.device), PrefixReporter(job.title))
        threading.Thread(target=_follow, args=(run,), daemon=True).start()
        execute_all([run], True, 1)
    except EfcilError as error:
        print(f"efcil: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _follow(run: Run) -> None:
    """Stop the run when the input is closed; an additional signal to the process group has no effect."""
    wait_for_end_of_input()
    run.stop.set()
    if not run.training:  # still loading data, nothing to save
        stop_this_process()


if __name__ == "__main__":
    sys.exit(main())
