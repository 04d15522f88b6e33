"""Compare an old commit with this working tree on a GPU: tests, training step, one run, three orders.

    git archive --output runs/old.tar COMMIT src benchmarks       first; copy it to the machine with the GPU
    python benchmarks/gpu_check.py --old runs/old.tar --data DIR --out check.json
    python benchmarks/gpu_check.py --old runs/old.tar --data DIR --out check.json --only orders
    python benchmarks/gpu_check.py --old runs/old.tar --data DIR --out check.json --only compare

Each of the three calls takes less than 10 minutes on an H200 and adds its measurements to the file (JSON):

- tests    tests of this tree that need CUDA or Triton; skipped ones count as failures
- run      `efcil run dpcr cifar100 --tasks 10 --order 1993`, old and new: wall-clock seconds, A_f and A_avg, after a
           warm-up run of two epochs per task that fills the compiler caches
- step     `benchmarks/steps.py` of both trees in turn, for `--rounds` rounds if time allows
- orders   three orders: as threads of one process in the old tree, as separate processes in the new one
- compare  three orders with `efcil compare` of both trees

Trees are used only through their command lines, with PYTHONPATH=src and the option names of each (OPTIONS). Every
process has a time limit and is killed after `--limit`. Verdicts: step, run and compare are at most 2 % slower, accuracy
is within 1 point, processes are at most 20 % slower than threads, no test failed or was skipped. The exit code is 1 if
a bound is violated or a measurement failed. `--tiny --device cpu` runs everything on the digits, without meaningful
times or verdicts.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = ("tests", "run", "step", "orders", "compare")
USUAL = ("tests", "run", "step")
LIMITS = {"tests": 200.0, "warm-up": 120.0, "run": 240.0, "step": 200.0, "orders": 420.0, "compare": 420.0}
SLOWER, PROCESSES, POINTS = 1.02, 1.20, 1.0  # bounds of the verdicts
OPTIONS = {"concurrent": ("--concurrent-runs", "--at-once")}  # newest name first
EPOCHS = (("first.epochs", "later.epochs"), ("training.first.epochs", "training.later.epochs"))
ACCURACIES = {"A_f": ("A_f", "final_accuracy"), "A_avg": ("A_avg", "average_accuracy")}
Row = dict[str, Any]


class CheckError(Exception):
    """A process failed or timed out."""


@dataclass
class Tree:
    """A source tree and its command lines."""

    side: str
    path: Path
    commit: str
    helps: dict[str, str] = field(default_factory=dict)  # --help of its commands
    epoch_keys: tuple[str, ...] = EPOCHS[0]
    warm_up: float | None = None  # seconds

    def about(self) -> Row:
        """Return the identity of the tree: commit and digest of its source."""
        digest = hashlib.sha256()
        for path in sorted((self.path / "src").rglob("*.py")):
            digest.update(path.relative_to(self.path).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
        return {"commit": self.commit, "digest": digest.hexdigest()[:16]}

    def environment(self) -> dict[str, str]:
        """Return the environment of its processes, with only this tree's code."""
        own = {"PYTHONPATH": str(self.path / "src"), "EFCIL_COMMIT": self.commit, "COLUMNS": "200"}
        return os.environ | own | {"TERMINAL_WIDTH": "200", "NO_COLOR": "1"}

    def efcil(self, *words: str) -> list[str]:
        """Return the command line of `efcil` in this tree."""
        return [sys.executable, "-m", "efcil", *words]

    def option(self, command: str, meaning: str) -> str:
        """Return the name of an option in this tree."""
        if command not in self.helps:
            asked = subprocess.run(
                self.efcil(command, "--help"), cwd=self.path, env=self.environment(), capture_output=True, text=True
            )
            self.helps[command] = asked.stdout
        for name in OPTIONS[meaning]:
            if name in self.helps[command]:
                return name
        raise CheckError(f"efcil {command} of the {self.side} tree has none of {', '.join(OPTIONS[meaning])}")


@dataclass
class Check:
    """State of a check: trees, settings and deadline."""

    old: Tree
    new: Tree
    device: str
    tiny: bool
    data: Path | None
    work: Path
    ends: float  # on the monotonic clock
    rounds: int

    def execute(self, kind: str, *commands: tuple[Tree, list[str]]) -> float:
        """Run processes concurrently; return the seconds until the last one has ended."""
        limit = min(LIMITS[kind], self.ends - time.monotonic())
        if limit <= 0:
            raise CheckError(f"{kind}: no time left; run again with --only")
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            running = []
            for number, (tree, command) in enumerate(commands):
                log = stack.enter_context((self.work / f"{kind}-{tree.side}-{number}.log").open("w+"))
                how: Any = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
                process = subprocess.Popen(command, cwd=tree.path, env=tree.environment(), **how)
                stack.callback(stop, process)
                running.append((process, log, tree))
            for process, log, tree in running:
                try:
                    code = process.wait(max(0.0, began + limit - time.monotonic()))
                except subprocess.TimeoutExpired:
                    raise CheckError(f"{kind} of the {tree.side} tree: not done after {limit:.0f} s") from None
                if code:
                    log.seek(0)
                    raise CheckError(f"{kind} of the {tree.side} tree: exit code {code}\n{log.read()[-3000:]}")
        return time.monotonic() - began

    def training(self, tree: Tree, verb: str, order: str, out: Path, epochs: int | None = None) -> list[str]:
        """Return a command line that trains dpcr, optionally with `epochs` per task."""
        words = [verb, "dpcr", "digits" if self.tiny else "cifar100", "--tasks", "5" if self.tiny else "10"]
        words += ["--orders" if verb == "compare" else "--order", order, "--device", self.device, "--quiet"]
        words += ["--out", str(out)]
        if self.data is not None:
            words += ["--data", str(self.data)]
        if epochs is not None:
            words += [word for key in tree.epoch_keys for word in ("--set", f"{key}={epochs}")]
        return tree.efcil(*words)

    def warm_up(self, tree: Tree) -> float:
        """Fill the compiler caches once per tree, and find the names of the epoch options."""
        if tree.warm_up is None:
            errors = []
            for number, tree.epoch_keys in enumerate(EPOCHS):
                out = self.work / f"{tree.side}-warm-up-{number}"
                try:
                    command = self.training(tree, "run", "1993", out, 1 if self.tiny else 2)
                    tree.warm_up = self.execute("warm-up", (tree, command))
                    break
                except CheckError as error:
                    errors.append(str(error))
            else:
                raise CheckError("\n".join(errors))
        return tree.warm_up

    def epochs(self) -> int | None:
        """Return the number of epochs per task, None for the preset."""
        return 1 if self.tiny else None

    def in_turn(self, rounds: int) -> Iterator[tuple[int, Tree]]:
        """Yield the trees in alternating order."""
        for number in range(rounds):
            for tree in (self.old, self.new) if number % 2 == 0 else (self.new, self.old):
                yield number, tree

    # -- the sections --------------------------------------------------------------------------------------------------

    def tests(self) -> Row:
        """Run the GPU tests of the new tree."""
        report = self.work / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "cuda or triton", "tests"]
        command += [f"--junitxml={report}", *(["--fail-on-skip"] if self.device.startswith("cuda") else [])]
        failed = None
        try:
            seconds = self.execute("tests", (self.new, command))
        except CheckError as error:
            if not report.exists():
                raise
            failed, seconds = str(error), 0.0
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
        outcome = {kind: [str(c.get("name")) for c in cases if c.find(kind) is not None] for kind in OUTCOMES}
        bad = outcome["failure"] + outcome["error"]
        counts = {"failed": bad, "skipped": len(outcome["skipped"])}
        found = {"seconds": seconds, "passed": len(cases) - len(bad) - counts["skipped"], **counts}
        return found | ({"log": failed[-3000:]} if failed else {})

    def run(self) -> Row:
        """Measure the wall-clock time of one run of each tree."""
        found: Row = {"old": [], "new": [], "warm_up": {t.side: self.warm_up(t) for t in (self.old, self.new)}}
        for number, tree in self.in_turn(1):
            out = self.work / f"{tree.side}-run-{number}"
            seconds = self.execute("run", (tree, self.training(tree, "run", "1993", out, self.epochs())))
            found[tree.side].append({"seconds": seconds, **accuracy(out)})
        return found

    def step(self) -> Row:
        """Measure the training step with the benchmark of each tree."""
        found: Row = {"old": [], "new": []}
        longest = 0.0
        for number, tree in self.in_turn(self.rounds):
            if number and self.ends - time.monotonic() < 1.2 * longest:
                found["note"] = f"no time for round {number + 1}"
                break
            out = self.work / f"{tree.side}-step-{number}.json"
            command = [sys.executable, "benchmarks/steps.py", "--device", self.device, "--out", str(out)]
            command += ["--tiny", "--steps", "1"] if self.tiny else ["--steps", "200"]
            seconds = self.execute("step", (tree, command))
            longest = max(longest, seconds)
            rows = json.loads(out.read_text(encoding="utf-8"))["raw"]["ways"]
            kept = ("way", "teacher", "ms", "raw", "first_seconds", "failed")
            rows = [{key: row[key] for key in kept if key in row} for row in rows]
            found[tree.side].append({"seconds": seconds, "ways": rows})
        return found

    def orders(self) -> Row:
        """Measure three orders as threads of the old tree and as processes of the new one."""
        found: Row = {"warm_up": {tree.side: self.warm_up(tree) for tree in (self.old, self.new)}}
        found["threads"] = self.together(self.old)
        outs = {order: self.work / f"processes-{order}" for order in "123"}
        trained = [(self.new, self.training(self.new, "run", o, out, self.epochs())) for o, out in outs.items()]
        found["processes"] = {"seconds": self.execute("orders", *trained)}
        found["processes"]["accuracy"] = {order: accuracy(out) for order, out in outs.items()}
        return found

    def compare(self) -> Row:
        """Measure three orders of both trees with `efcil compare`."""
        found: Row = {"warm_up": {tree.side: self.warm_up(tree) for tree in (self.old, self.new)}}
        return found | {tree.side: self.together(tree) for tree in (self.old, self.new)}

    def together(self, tree: Tree) -> Row:
        """Measure `efcil compare` of three concurrent orders."""
        out = self.work / f"{tree.side}-compare-{time.monotonic_ns()}"
        command = self.training(tree, "compare", "1,2,3", out, self.epochs())
        seconds = self.execute("compare", (tree, [*command, tree.option("compare", "concurrent"), "3"]))
        return {"seconds": seconds, "accuracy": accuracy(out)}


OUTCOMES = ("failure", "error", "skipped")


def stop(process: subprocess.Popen[Any]) -> None:
    """Kill a process and its children."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def accuracy(out: Path) -> dict[str, float]:
    """Return the mean accuracies of a run's summaries in percent."""
    found: dict[str, list[float]] = {}
    for path in sorted(out.rglob("summary.json")):
        summary = json.loads(path.read_text(encoding="utf-8"))
        for name, keys in ACCURACIES.items():
            found.setdefault(name, []).extend([summary[key] for key in keys if key in summary][:1])
    if not all(found.get(name) for name in ACCURACIES):
        raise CheckError(f"{out.name}: no summary.json with {' and '.join(ACCURACIES)}")
    return {name: statistics.mean(values) for name, values in found.items()}


def step_times(rounds: Sequence[Row]) -> dict[str, float]:
    """Return milliseconds per step: the fastest variant for each kind of teacher, median over rounds.

    >>> rows = [{"way": "a", "teacher": "none", "ms": 2.0}, {"way": "b", "teacher": "none", "ms": 1.5}]
    >>> step_times([{"ways": rows}, {"ways": [{"way": "b", "teacher": "none", "failed": "no memory"}, *rows[:1]]}])
    {'none': 1.75}
    """
    found: dict[str, list[float]] = {}
    for one in rounds:
        best: dict[str, float] = {}
        for row in one["ways"]:
            if "ms" in row:
                best[str(row["teacher"])] = min(row["ms"], best.get(str(row["teacher"]), row["ms"]))
        for teacher, ms in best.items():
            found.setdefault(teacher, []).append(ms)
    return {teacher: statistics.median(values) for teacher, values in found.items()}


def verdicts(sections: dict[str, Row]) -> list[Row]:
    """Compare the measurements with the bounds.

    >>> once = lambda seconds, a: {"seconds": seconds, "accuracy": {"A_f": a, "A_avg": 64.0}}
    >>> said = verdicts({"orders": {"threads": once(240.0, 52.0), "processes": {"seconds": 300.0}}})
    >>> [(line["passed"], line["text"]) for line in said]
    [(False, 'three orders, processes against threads: 240.0 -> 300.0 s, +25.0 % (bound +20 %)')]
    >>> [line["passed"] for line in verdicts({"compare": {"old": once(240.0, 52.0), "new": once(244.0, 50.9)}})]
    [True, False, True]
    """
    lines: list[Row] = []

    def slower(what: str, old: float, new: float, bound: float, unit: str = "s", digits: int = 1) -> None:
        text = f"{what}: {old:.{digits}f} -> {new:.{digits}f} {unit}, {100 * (new / old - 1):+.1f} %"
        lines.append({"passed": new / old <= bound, "text": f"{text} (bound {100 * (bound - 1):+.0f} %)"})

    def apart(what: str, old: Row, new: Row) -> None:
        for name in ACCURACIES:
            text = f"{what}, {name}: {old[name]:.2f} -> {new[name]:.2f} (bound {POINTS:g} point)"
            lines.append({"passed": abs(new[name] - old[name]) <= POINTS, "text": text})

    done = {name: section for name, section in sections.items() if "failed_to_measure" not in section}
    for name in sections.keys() - done.keys():
        lines.append({"passed": False, "text": f"{name}: {sections[name]['failed_to_measure'].splitlines()[0]}"})
    if "tests" in done:
        tests = done["tests"]
        text = f"tests: {tests['passed']} passed, {len(tests['failed'])} failed, {tests['skipped']} skipped"
        lines.append({"passed": tests["passed"] > 0 and not tests["failed"] and not tests["skipped"], "text": text})
    if "run" in done:
        old, new = (done["run"][side] for side in ("old", "new"))
        slower("run", *(statistics.median(row["seconds"] for row in rows) for rows in (old, new)), SLOWER)
        apart("run", old[0], new[0])
    if "step" in done:
        times = [step_times(done["step"][side]) for side in ("old", "new")]
        for teacher in times[0]:
            if teacher in times[1]:
                slower(f"step, teacher {teacher}", times[0][teacher], times[1][teacher], SLOWER, "ms", 3)
        if not times[0].keys() & times[1].keys():
            lines.append({"passed": False, "text": "step: no comparable timings"})
    if "compare" in done:
        both = done["compare"]
        slower("three orders, efcil compare", both["old"]["seconds"], both["new"]["seconds"], SLOWER)
        apart("three orders, efcil compare", both["old"]["accuracy"], both["new"]["accuracy"])
    if "orders" in done:
        both = done["orders"]
        seconds = [both[kind]["seconds"] for kind in ("threads", "processes")]
        slower("three orders, processes against threads", *seconds, PROCESSES)
    return lines


def machine(device: str) -> Row:
    """Describe the machine, querying torch in a separate process."""
    code = "import json, torch; c = torch.cuda.is_available(); print(json.dumps({'torch': torch.__version__, "
    code += "'cuda': torch.version.cuda, 'gpu': torch.cuda.get_device_name() if c else None}))"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: Row = json.loads(asked.stdout)
    return {"device": device, **found, "cores": os.cpu_count(), "python": sys.version.partition(" ")[0]}


def unpacked(old: Path, commit: str | None, work: Path) -> Tree:
    """Return the old tree from a folder or an archive, which records its commit."""
    if old.is_file():
        with tarfile.open(old) as archive:
            commit = commit or archive.pax_headers.get("comment")
            archive.extractall(work / "old", filter="data")
        old = work / "old"
    for needed in ("src/efcil", "benchmarks/steps.py"):
        if not (old / needed).exists():
            raise CheckError(f"--old: {needed} is missing; git archive --output runs/old.tar COMMIT src benchmarks")
    return Tree("old", old.resolve(), commit or "unknown")


def this_commit() -> str:
    """Return the commit of the working tree, or "" without git."""
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return asked.stdout.strip() or os.environ.get("EFCIL_COMMIT", "unknown")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="the old tree: a folder or an output of git archive")
    parser.add_argument("--old-commit", help="its commit, if it is not an archive")
    parser.add_argument("--new-commit", help="the commit of this tree, without git")
    parser.add_argument("--data", type=Path, help="directory with CIFAR-100")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; sections of earlier calls are kept")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(USUAL), help="default: tests, run and step")
    parser.add_argument("--limit", type=float, default=585.0, help="time limit in seconds")
    parser.add_argument("--rounds", type=int, default=2, help="step measurements per tree")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes of a test")
    asked = parser.parse_args(arguments)
    ends = time.monotonic() + asked.limit
    if asked.data is None and not asked.tiny and set(asked.only) - {"tests", "step"}:
        parser.error("--data is missing; give the directory with CIFAR-100")
    where = machine(asked.device)
    if asked.device.startswith("cuda") and where["gpu"] is None:
        parser.error("CUDA is not available; use --tiny --device cpu for a trial")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        try:
            old = unpacked(asked.old, asked.old_commit, work)
        except (CheckError, OSError, tarfile.TarError) as error:
            parser.error(f"{asked.old}: {error}")
        new = Tree("new", ROOT, asked.new_commit or this_commit())
        result: Row = {"old": old.about(), "new": new.about(), "tiny": asked.tiny, "sections": {}}
        if asked.out.exists():
            before = json.loads(asked.out.read_text(encoding="utf-8"))
            if any(before.get(key) != result[key] for key in ("old", "new", "tiny")):
                parser.error(f"{asked.out} has measurements of other trees; remove it or use another file")
            result = before
        data = asked.data.resolve() if asked.data is not None else None
        check = Check(old, new, asked.device, asked.tiny, data, work, ends, asked.rounds)
        for name in (section for section in SECTIONS if section in asked.only):
            began = time.monotonic()
            try:
                section = getattr(check, name)()
            except (CheckError, OSError, ValueError, KeyError) as error:  # keep the other measurements
                section = {"failed_to_measure": f"{type(error).__name__}: {error}"}
            spent = time.monotonic() - began
            result["sections"][name] = {"machine": where, "section_seconds": spent, **section}
            result["verdicts"] = verdicts(result["sections"])
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {spent:.1f} s {section.get('failed_to_measure', '')}", file=sys.stderr, flush=True)
    for line in result["verdicts"]:
        print(f"{'ok    ' if line['passed'] else 'MISSED'} {line['text']}")
    failed = any("failed_to_measure" in section for section in result["sections"].values())
    return int(failed or (not asked.tiny and any(not line["passed"] for line in result["verdicts"])))


if __name__ == "__main__":
    sys.exit(main())
