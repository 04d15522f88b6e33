"""The command in processes of its own that begin with everything imported: many of them cost little more than one."""

import contextlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "pytest",
        "sklearn.datasets",
        "torch._dynamo",
        "efcil.cli",
        "efcil.cli.doctor",
        "efcil.experiment.run",
        "efcil.data.digits",
    ]
)


def _command(given, told, noted, limit):
    for path, number in ((told, 1), (noted, 2)):
        descriptor = os.open(path, os.O_WRONLY)
        os.dup2(descriptor, number)
        os.close(descriptor)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    sys.argv = given
    from efcil.cli import main

    main()


class Forked:
    """A process that runs the command with --json; what it tells is read as it comes."""

    def __init__(self, given, limit=None):
        """`limit`: bytes that a file may have."""
        self.home = tempfile.TemporaryDirectory(prefix="efcil-")
        told, self.noted = os.path.join(self.home.name, "told"), os.path.join(self.home.name, "noted")
        os.mkfifo(told)
        open(self.noted, "w").close()
        self.process = _FORKS.Process(target=_command, args=(given, told, self.noted, limit))
        self.process.start()
        self.told = open(told, encoding="utf-8")  # noqa: SIM115 (waits until the other end is open)

    def events(self):
        """Yield what the command tells, as long as it lives."""
        for line in self.told:
            with contextlib.suppress(ValueError):  # a line that was cut by a kill
                yield json.loads(line)

    @property
    def over(self):
        """Whether it has ended."""
        return self.process.exitcode is not None

    def kill(self, number=signal.SIGKILL):
        """Send a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def ended(self):
        """Wait for the end: (exit code, what it said on standard error)."""
        for _ in self.events():
            pass
        self.process.join()
        with open(self.noted, encoding="utf-8") as file:
            said = file.read()
        self.told.close()
        self.home.cleanup()
        return self.process.exitcode, said
