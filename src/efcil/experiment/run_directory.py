"""The directory of a run: where its files are, whose it is, its lock and its log."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from efcil.config import read_yaml
from efcil.errors import EfcilError, RunError
from efcil.experiment.specification import commit, versions
from efcil.experiment.tracking import Tracker
from efcil.files import (
    JSON_LIMIT,
    append_text,
    atomic_write_text,
    check_known,
    check_path,
    exclusive_lock,
    make_directory,
    open_below,
    read_json,
    read_text,
    remove_temporary_files,
    remove_tree,
    write_json,
)
from efcil.platform_support import file_name

FEATURES = "features"  # directory of saved features, beside config.yaml
FORMAT = 3  # of a run directory; raised when an older one can no longer be resumed


@contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Hold the run directory; refuse a second process."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = exclusive_lock(directory / ".lock")
    except BlockingIOError:
        raise RunError(f"{directory} is in use by another process; wait for it or choose another --out") from None
    except OSError as error:
        raise RunError(f"--out {directory} cannot be written: {error.strerror}") from None
    with lock:
        yield


@contextmanager
def io_errors(directory: Path) -> Iterator[None]:
    """Tell what the disk did in one line."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or directory} cannot be written: {error.strerror or error}"
        raise RunError(f"{what}; make room or make it writable, then --resume") from error


class RunDirectory:
    """Names the files of a run, and claims the directory for it.

    A run of one method has everything in one directory. A comparison trains in OUT/trajectory, and writes
    OUT/<method>/summary.json.
    """

    def __init__(self, out: Path, compare: bool = False):
        self.out, self.compare = out, compare
        self.home = out / "trajectory" if compare else out
        self.config, self.metrics = self.home / "config.yaml", self.home / "metrics.jsonl"
        self.checkpoints, self.features = self.home / "checkpoints", self.home / FEATURES
        self.snapshots, self.report = out / "snapshots", out / "report.html"

    def summary(self, label: str) -> Path:
        """Return the file of a method's summary."""
        return (self.out / file_name(label) if self.compare else self.out) / "summary.json"

    @contextmanager
    def hold(self, resume: bool) -> Iterator[None]:
        """Hold the directory, unless it holds a run that is not to be resumed or that this version cannot resume."""
        self._check_links()
        if self.config.exists():
            check_format(self.config)
            if not resume:
                command = shlex.join(["efcil", "resume", str(self.out)])
                raise RunError(
                    f"{self.out} already holds {self._described()}: resume it with `{command}` or --resume, or choose "
                    "another --out"
                )
        elif not (resume and self.checkpoints.is_dir()):  # config.yaml was lost, and checkpoints say whose they are
            self._check_free()
        with run_lock(self.out):
            remove_temporary_files(self.out)
            yield

    def _check_links(self) -> None:
        """Refuse links, FIFOs and devices in the place of what a run writes or deletes, before anything is written."""
        if not self.out.is_dir():
            return
        for path in (self.config, self.metrics, self.report, self.out / ".lock", self.out / "summary.json"):
            check_path(self.out, path)
        folders = [self.checkpoints, self.features, self.snapshots]
        if self.compare:
            folders += [path.parent for path in self.out.glob("*/summary.json")]
        for folder in folders:
            check_path(self.out, folder / "summary.json")

    def _check_free(self) -> None:
        """Refuse a directory that is no run's, but has what a run would replace."""
        for path in (self.report, self.metrics, self.home, self.checkpoints, self.features, self.snapshots):
            if path == self.out:
                continue
            if path.is_file() or (path.is_dir() and any(path.iterdir())):
                raise RunError(f"{path} is there already and not of this run: choose another --out or move it away")
        for path in (self.out / "summary.json", *(self.out.glob("*/summary.json") if self.compare else ())):
            if path.exists():
                raise RunError(f"{path} is there already and not of this run: choose another --out or move it away")

    def _described(self) -> str:
        files = sorted(self.out.glob("summary.json")) or sorted(self.out.glob("*/summary.json"))
        try:
            summaries = list(map(read_json, files))
            parts = [f"{s['method']} on {s['dataset']} ({s['tasks_done']} of {s['tasks']} tasks)" for s in summaries]
            return "a run of " + ", ".join(parts) if parts else "a run"
        except (EfcilError, KeyError, TypeError):
            return "a run"

    def claim(
        self,
        run: Mapping[str, Any],
        machine: Mapping[str, Any],
        command: str,
        note: Callable[[str], None],
        identity: str | None = None,
    ) -> str:
        """Write config.yaml, or check that the one that exists describes the same run; return the run's identity.

        `identity` is that of checkpoints whose config.yaml was lost. It ends with a digest of what is run, so that no
        file of other options is ever taken for this run's.
        """
        run = json.loads(json.dumps(run))
        bound = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:16]
        if not self.config.exists():
            own, _, of = (identity or f"{secrets.token_hex(8)}-{bound}").partition("-")
            if of != bound:
                raise RunError(
                    f"{self.checkpoints} are of a run with other options or data, and {self.config} is lost: "
                    "choose another --out"
                )
            identity = own
            make_directory(self.out, self.home)
            document = {
                "format": FORMAT,
                "id": identity,
                "run": run,
                "machine": machine,
                "versions": versions(),
                "commit": commit(),
                "command": command,
            }
            text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
            atomic_write_text(self.config, text, root=self.out)
            return f"{identity}-{bound}"
        try:
            tree = read_yaml(self.config)
            existing, existing_machine, identity = tree["run"], tree["machine"], str(tree["id"])
        except (OSError, yaml.YAMLError, ValueError, KeyError, TypeError, RecursionError):
            raise RunError(
                f"{self.config} cannot be read; choose another --out, or, if the run was begun with these very "
                "options, delete that file and --resume"
            ) from None
        if found := differences(existing, run):
            words = "; ".join(found[:4])
            raise RunError(f"{self.out} holds another run ({words}): choose another --out or the same options")
        if found := differences(existing_machine, machine):
            note(f"the run began on another machine ({'; '.join(found)}): its last digits may differ")
        return f"{identity}-{bound}"

    def read_summary(self, label: str) -> Any:
        """Return a method's summary as it was written, None where there is none that can be read."""
        try:
            return read_json(self.summary(label))
        except EfcilError:
            return None

    def write_summary(self, label: str, summary: Mapping[str, Any]) -> None:
        """Write a method's summary."""
        make_directory(self.out, self.summary(label).parent)
        write_json(self.summary(label), summary, root=self.out)


def remove_demo(out: Path, methods: Sequence[str]) -> None:
    """Remove an earlier demo, and nothing else that may lie there; refuse what is not efcil's in a run's directory."""
    known = re.compile(r"(\..*|config\.yaml|metrics\.jsonl|summary\.json|report\.html|checkpoints/task-[^/]*)")
    found = []
    for config in out.glob("*/trajectory/config.yaml"):
        if "command: efcil demo" not in read_text(config, JSON_LIMIT, errors="replace"):
            continue
        with open_below(out, config.parent.parent) as folder:
            parts = [name for name in ("trajectory", *methods) if folder.status(name) is not None]
            for name in parts:
                check_known(folder, name, known)
            found.append((config.parent.parent, parts))
    for place, parts in found:
        with open_below(out, place) as folder:
            for name in parts:
                remove_tree(folder, name)


def check_format(config: Path) -> None:
    """Refuse a config.yaml of another version of efcil; one that cannot be read is reported elsewhere."""
    try:
        tree = read_yaml(config)
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return
    found = tree.get("format", 1) if isinstance(tree, dict) and "run" in tree else FORMAT
    if found != FORMAT:
        age = "a later" if isinstance(found, int) and found > FORMAT else "an earlier"
        raise RunError(
            f"{config} was made by {age} version of efcil (format {found}, this version has {FORMAT}): "
            "choose another --out, or use that version"
        )


class MetricsLog:
    """metrics.jsonl: one line per epoch and task; truncated to the last checkpoint when a run is resumed.

    Trackers receive every line.
    """

    def __init__(self, path: Path, trackers: Sequence[Tracker] = (), root: Path | None = None):
        """`root`: the run's directory; links between it and the file are refused."""
        self.path, self.trackers, self.root = path, trackers, root

    def truncate(self, task: int, epoch: int) -> None:
        """Keep `task` whole tasks and `epoch` epochs of the next."""
        kept = []
        there = self.path.exists()
        lines = self.path.read_text(encoding="ascii", errors="replace").split("\n") if there else []
        for line in lines:
            try:
                event = json.loads(line.encode("ascii"))
                where = (int(event["task"]), int(event.get("epoch", 0)))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                continue  # damaged, or being written when the process died
            if where[0] <= task or (where[0] == task + 1 and 0 < where[1] <= epoch):
                kept.append(line + "\n")
        atomic_write_text(self.path, "".join(kept), root=self.root)
        for tracker in self.trackers:
            tracker.begin(map(json.loads, kept))

    def add(self, **event: Any) -> None:
        """Append an event."""
        append_text(self.path, json.dumps(event) + "\n", root=self.root)
        for tracker in self.trackers:
            tracker.add(event)

    def close(self) -> None:
        """Let the trackers finish."""
        for tracker in self.trackers:
            tracker.close()


def differences(there: Any, here: Any, prefix: str = "") -> list[str]:
    """Return a line for each value in which two nested mappings differ."""
    if isinstance(there, dict) and isinstance(here, dict):
        found: list[str] = []
        for key in sorted({*there, *here}):
            found += differences(there.get(key, "nothing"), here.get(key, "nothing"), f"{prefix}{key}.")
        return found
    return [] if there == here else [f"{prefix.rstrip('.')} is {there} there and {here} here"]
