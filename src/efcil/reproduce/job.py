"""One run of the grid, complete enough to be told to another process or another machine."""

from __future__ import annotations

from pathlib import Path

from efcil.accel.execution import Execution
from efcil.config import Options
from efcil.experiment.reporters import Reporter
from efcil.experiment.run import Run, RunOptions
from efcil.reproduce.result_index import RunKey


class Job(Options):
    """A cell, and what the command was given to run it with."""

    key: RunKey
    overrides: tuple[str, ...] = ()
    data: Path | None = None
    out: Path
    command: str
    device: str = "cpu"
    concurrent_runs: int = 1  # that share its device, itself included

    @property
    def title(self) -> str:
        """What it is called in messages."""
        return f"{self.key.dataset} T={self.key.tasks} order {self.key.order} {self.key.group}"

    @property
    def directory(self) -> Path:
        """Its run directory."""
        return self.out / self.key.directory

    def absolute(self) -> Job:
        """Return it with paths that hold in every directory."""
        data = None if self.data is None else self.data.absolute()
        return self.model_copy(update={"data": data, "out": self.out.absolute()})

    def run(self, execution: Execution, reporter: Reporter) -> Run:
        """Return the run, not yet begun."""
        options = RunOptions(
            command=self.command,
            compare=True,
            snapshots=("dpcr", "rrcr") if self.key.group == "trajectory" else (),
            concurrent_runs=self.concurrent_runs,
        )
        return Run(self.key.experiment(self.overrides), self.directory, execution, reporter, options, self.data)
