"""Serializable description of one run, for other processes or machines."""

from __future__ import annotations

from pathlib import Path

from efcil.accel.backend import Backend
from efcil.config import Options
from efcil.experiment.reporters import Reporter
from efcil.experiment.run import Run, RunOptions
from efcil.reproduce.result_index import RunKey


class Job(Options):
    """Run key with the options of the command."""

    key: RunKey
    overrides: tuple[str, ...] = ()
    data: Path | None = None
    out: Path
    command: str
    device: str = "cpu"
    concurrent_runs: int = 1  # runs sharing its device, itself included

    @property
    def title(self) -> str:
        """Name in messages."""
        return f"{self.key.dataset} T={self.key.tasks} order {self.key.order} {self.key.group}"

    @property
    def directory(self) -> Path:
        """Run directory."""
        return self.out / self.key.directory

    def absolute(self) -> Job:
        """Return the job with absolute paths."""
        data = None if self.data is None else self.data.absolute()
        return self.model_copy(update={"data": data, "out": self.out.absolute()})

    def run(self, backend: Backend, reporter: Reporter) -> Run:
        """Return the run, not yet begun."""
        options = RunOptions(
            command=self.command,
            compare=True,
            snapshots=self.key.snapshots,
            concurrent_runs=self.concurrent_runs,
        )
        return Run(self.key.experiment(self.overrides), self.directory, backend, reporter, options, self.data)
