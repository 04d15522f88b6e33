"""Break the code on purpose, one small change at a time, and see that a test fails: which test guards what.

    python tools/mutants.py                run every mutant of tools/mutants.yaml and write docs/mutants.md
    python tools/mutants.py --only ID ...  run these and write nothing
    python tools/mutants.py --list         list them
    python tools/mutants.py --check        run all, write nothing, exit 1 unless every mutant is killed

The repository is copied once; each mutant is one text replaced in the copy, put back afterwards. The tests a mutant
names are run before anything is broken, since a test that fails anyway proves nothing.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tools" / "mutants.yaml"
PAGE = ROOT / "docs" / "mutants.md"
KEYS = {"id", "broken", "file", "find", "replace", "tests"}
LEFT_OUT = {".git", ".venv", "runs", "demo", "__pycache__"}  # where there is no git to say
SECONDS = 120  # a mutant whose tests take longer than that has made one hang
ADDOPTS = "--strict-markers --strict-config --import-mode=importlib"  # pyproject.toml's, without doctests
PRELOADED = (
    "pytest",
    "hypothesis",
    "hypothesis.strategies",
    "numpy",
    "torch",
    "torch._dynamo",
    "pydantic",
    "yaml",
    "PIL.Image",
    "safetensors.torch",
    "typer",
)
FAILED = re.compile(r"^(?:FAILED|ERROR) ((?:src|tests)/[\w/.]+::[\w.]+)", re.MULTILINE)


class MutantError(Exception):
    """A list that cannot be used, or tests that fail with nothing broken."""


_seconds = itertools.count(1)


def write(path: Path, text: str) -> None:
    """Write a file with a time that it never had: bytecode is told by whole seconds and length, and must not be old."""
    path.write_text(text, encoding="utf-8")
    when = int(time.time()) + next(_seconds)
    os.utime(path, (when, when))


@dataclass(frozen=True)
class Mutant:
    """One deliberate breakage and the tests that are to see it."""

    id: str
    broken: str  # in words
    file: str  # relative to the repository
    find: str  # occurs exactly once in the file
    replace: str
    tests: tuple[str, ...]  # ids or files; a file of src means its doctests

    def apply(self, root: Path) -> str:
        """Break the file below `root`; return the text it had."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.find) != 1:
            raise MutantError(f"{self.id}: its text occurs {text.count(self.find)} times in {self.file}, wanted once")
        write(path, text.replace(self.find, self.replace))
        return text


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant."""

    mutant: Mutant
    verdict: str  # killed, SURVIVED or error
    test: str  # the first that failed, or what went wrong
    seconds: float


def read(path: Path) -> list[Mutant]:
    """Read and check a list of mutants."""
    mutants = []
    for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
        if set(entry) != KEYS:
            raise MutantError(f"{entry.get('id')}: has {sorted(entry)}, wanted {sorted(KEYS)}")
        if not entry["tests"] or entry["find"] == entry["replace"]:
            raise MutantError(f"{entry['id']}: names no test, or changes nothing")
        mutants.append(Mutant(**{**entry, "tests": tuple(entry["tests"])}))
    twice = [name for name, count in Counter(mutant.id for mutant in mutants).items() if count > 1]
    if twice:
        raise MutantError(f"there are several mutants {', '.join(twice)}")
    return mutants


def copied(root: Path, target: Path) -> Path:
    """Copy what git tracks, and what it would track, from `root` into `target`."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive
        below = (path.relative_to(root) for path in root.rglob("*"))
        names = [path.as_posix() for path in below if not LEFT_OUT.intersection(path.parts)]
    for name in filter(None, names):
        if (root / name).is_file():  # not one that was removed and is still tracked
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)
    return target


def environment(root: Path) -> dict[str, str]:
    """Have Python import the package of the copy, in one thread, and pytest print whole names."""
    own = {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "500"}
    return {**os.environ, **own}


def check_import(root: Path) -> None:
    """Make sure that Python takes the package from the copy and not from where it is installed."""
    command = [sys.executable, "-c", "import efcil; print(efcil.__file__)"]
    done = subprocess.run(command, cwd=root, env=environment(root), capture_output=True, text=True, check=True)
    if not Path(done.stdout.strip()).resolve().is_relative_to(root.resolve()):
        raise MutantError(f"the package is imported from {done.stdout.strip()}, not from the copy")


class Copy:
    """A copy of the repository and a process in it that has imported what is slow, and forks for every run of tests."""

    def __init__(self, root: Path, target: Path) -> None:
        self.root = copied(root, target)
        check_import(self.root)
        command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        self.process = subprocess.Popen(
            command, cwd=self.root, env=environment(self.root), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run_tests(self, tests: Iterable[str], *, stop: bool, seconds: float) -> tuple[int, list[str]]:
        """Return pytest's exit status and the names of the tests that failed; -1 when there was no end."""
        names = list(dict.fromkeys(tests))
        command = [
            "-q",
            "--tb=no",
            "-rfE",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow and not alone",
            "-o",
            f"addopts={ADDOPTS}",
        ]
        command += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]  # of what is preloaded
        command += ["-x"] if stop else []
        command += ["--doctest-modules"] if any(name.startswith("src/") for name in names) else []
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"arguments": [*command, *names], "seconds": seconds}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return answer["code"], FAILED.findall(answer["output"])

    def judge(self, mutant: Mutant) -> Outcome:
        """Break the copy, run the mutant's tests, put the copy back."""
        began = time.perf_counter()
        before = mutant.apply(self.root)
        try:
            code, failed = self.run_tests(mutant.tests, stop=True, seconds=SECONDS)
        finally:
            write(self.root / mutant.file, before)
        verdict = {0: "SURVIVED", 1: "killed"}.get(code, "error")
        if verdict == "killed" and not failed:
            verdict = "error"
        test = failed[0] if failed else "" if verdict == "SURVIVED" else f"pytest ended with {code}"
        return Outcome(mutant, verdict, test, time.perf_counter() - began)

    def close(self) -> None:
        """End the process."""
        self.process.communicate()  # the end of its input


def serve() -> None:
    """Read runs of pytest from standard input, a JSON object a line; answer each with its status and output."""
    for name in PRELOADED:
        importlib.import_module(name)
    assert "efcil" not in sys.modules, "the package must be imported anew, broken as it is, by every run"
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if child == 0:
                os.setsid()
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                code = 3
                try:
                    code = int(importlib.import_module("pytest").main(request["arguments"]))
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            status = _wait(child, request["seconds"])
            output.seek(0)
            text = output.read().decode("utf-8", "replace")
        print(json.dumps({"code": status, "output": text}), flush=True)


def _wait(child: int, seconds: float) -> int:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)  # the child leads its own group
    os.waitpid(child, 0)
    return -1


def judge_all(mutants: Sequence[Mutant], root: Path, jobs: int) -> Iterator[Outcome]:
    """Judge mutants in their order, each job in a copy of its own."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copies = [Copy(root, Path(directory, str(job))) for job in range(jobs)]
        try:
            code, failed = copies[0].run_tests(tests, stop=False, seconds=60 * SECONDS)
            if code != 0:
                raise MutantError(
                    f"with nothing broken pytest ends with {code}; failing: {', '.join(failed) or 'none'}"
                )
            free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
            for copy in copies:
                free.put(copy)

            def one(mutant: Mutant) -> Outcome:
                copy = free.get()
                try:
                    return copy.judge(mutant)
                finally:
                    free.put(copy)

            with ThreadPoolExecutor(jobs) as pool:
                yield from pool.map(one, mutants)
        finally:
            for copy in copies:
                copy.close()


def page_text(outcomes: Sequence[Outcome]) -> str:
    """docs/mutants.md."""
    lines = [
        "# Tests that have been seen to fail",
        "",
        "Written by `python tools/mutants.py` from `tools/mutants.yaml`; do not edit.",
        "",
        "Each row is one small breakage of the code, made in a copy of the repository, and the first test that failed",
        "because of it. Every one of these tests passes when nothing is broken; that is checked first.",
        "",
        f"{len(outcomes)} breakages, {sum(o.verdict == 'killed' for o in outcomes)} of them seen by a test.",
        "",
    ]
    modules = dict.fromkeys(outcome.mutant.file for outcome in outcomes)
    for module in modules:
        lines += [f"## `{module}`", "", "| Mutant | What was broken | Test that failed |", "| --- | --- | --- |"]
        for outcome in outcomes:
            if outcome.mutant.file == module:
                broken = outcome.mutant.broken.replace("|", "\\|")
                lines.append(f"| {outcome.mutant.id} | {broken} | {_test_cell(outcome)} |")
        lines.append("")
    return "\n".join(lines)


def _test_cell(outcome: Outcome) -> str:
    if outcome.verdict != "killed":
        return f"**{outcome.verdict}**"
    file, _, test = outcome.test.partition("::")
    return f"doctest of `{test}`" if file.startswith("src/") else f"`{file}::{test}`"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, list or check; 0 when all is well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", metavar="ID", help="run these mutants alone and write nothing")
    parser.add_argument("--list", action="store_true", help="list the mutants and run nothing")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 unless every mutant is killed")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants at a time, each in its own copy")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--mutants", type=Path, default=LIST, metavar="FILE", help="another list; nothing is written")
    options = parser.parse_args(arguments)
    if options.serve:
        serve()
        return 0
    try:
        mutants = read(options.mutants)
        unknown = set(options.only or ()) - {mutant.id for mutant in mutants}
        if unknown:
            raise MutantError(f"there is no mutant {', '.join(sorted(unknown))}")
        mutants = [mutant for mutant in mutants if not options.only or mutant.id in options.only]
        if options.list:
            for mutant in mutants:
                print(f"{mutant.id:36} {mutant.broken}")
            return 0
        outcomes = []
        for outcome in judge_all(mutants, ROOT, max(1, options.jobs)):
            outcomes.append(outcome)
            print(f"{outcome.verdict:9} {outcome.seconds:5.1f} s  {outcome.mutant.id:36} {outcome.test}", flush=True)
    except MutantError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 1
    counts = Counter(outcome.verdict for outcome in outcomes)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    if not (options.only or options.check or options.mutants != LIST):
        PAGE.write_text(page_text(outcomes), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return 1 if options.check and counts["killed"] < len(outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
