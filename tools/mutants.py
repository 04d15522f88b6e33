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
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
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
SECONDS = 120  # a mutant whose tests take longer than that has made one hang
ADDOPTS = "--strict-markers --strict-config --import-mode=importlib"  # pyproject.toml's, without doctests
FAILED = re.compile(r"^(?:FAILED|ERROR) ((?:src|tests)/[\w/.]+::[\w.]+)", re.MULTILINE)


class MutantError(Exception):
    """A list that cannot be used, or tests that fail with nothing broken."""


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
        path.write_text(text.replace(self.find, self.replace), encoding="utf-8")
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
    """Copy what git tracks, and what it would, from `root` into `target`."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        if (root / name).is_file():  # not one that was removed and is still tracked
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)
    return target


def environment(root: Path) -> dict[str, str]:
    """Import the package of the copy, and keep no bytecode: a file put back within a second would look unchanged."""
    own = {"PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "500"}
    return {**os.environ, **own}


def check_import(root: Path) -> None:
    """Make sure that Python takes the package from the copy and not from where it is installed."""
    command = [sys.executable, "-c", "import efcil; print(efcil.__file__)"]
    done = subprocess.run(command, cwd=root, env=environment(root), capture_output=True, text=True, check=True)
    if not Path(done.stdout.strip()).resolve().is_relative_to(root.resolve()):
        raise MutantError(f"the package is imported from {done.stdout.strip()}, not from the copy")


def run_tests(root: Path, tests: Iterable[str], *, stop: bool, seconds: float | None = None) -> tuple[int, list[str]]:
    """Run tests in a copy; return pytest's exit status and the names of those that failed."""
    names = list(dict.fromkeys(tests))
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-m", "not slow"]
    command += ["-o", f"addopts={ADDOPTS}", *(["-x"] if stop else [])]
    command += ["--doctest-modules"] if any(name.startswith("src/") for name in names) else []
    done = subprocess.run(
        [*command, *names], cwd=root, env=environment(root), capture_output=True, text=True, timeout=seconds
    )
    return done.returncode, FAILED.findall(done.stdout)


def check_baseline(root: Path, tests: Iterable[str]) -> None:
    """Refuse to go on when a test fails with nothing broken."""
    code, failed = run_tests(root, sorted(set(tests)), stop=False)
    if code != 0:
        raise MutantError(f"with nothing broken pytest ends with {code}; failing: {', '.join(failed) or 'see pytest'}")


def judge(mutant: Mutant, root: Path) -> Outcome:
    """Break the copy, run the mutant's tests, put the copy back."""
    began = time.perf_counter()
    before = mutant.apply(root)
    try:
        code, failed = run_tests(root, mutant.tests, stop=True, seconds=SECONDS)
    except subprocess.TimeoutExpired:
        code, failed = -1, [f"no end within {SECONDS} s"]
    finally:
        (root / mutant.file).write_text(before, encoding="utf-8")
    verdict = {0: "SURVIVED", 1: "killed"}.get(code, "error")
    if verdict == "killed" and not failed:
        verdict = "error"
    test = failed[0] if failed else "" if verdict == "SURVIVED" else f"pytest ended with {code}"
    return Outcome(mutant, verdict, test, time.perf_counter() - began)


def judge_all(mutants: Sequence[Mutant], root: Path, jobs: int) -> Iterator[Outcome]:
    """Judge mutants in their order, each job in a copy of its own."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for job in range(jobs):
            copies.put(copied(root, Path(directory, str(job))))
        first = Path(directory, "0")
        check_import(first)
        check_baseline(first, (test for mutant in mutants for test in mutant.tests))

        def one(mutant: Mutant) -> Outcome:
            place = copies.get()
            try:
                return judge(mutant, place)
            finally:
                copies.put(place)

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(one, mutants)


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
    parser.add_argument("--mutants", type=Path, default=LIST, metavar="FILE", help="another list; nothing is written")
    options = parser.parse_args(arguments)
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
