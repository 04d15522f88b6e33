"""`efcil reproduce`: run what is missing, then write and show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from efcil import data as sources
from efcil.accel.machine import Machine
from efcil.errors import OptionError, RunsFailed
from efcil.experiment.reporters import Lines, Quiet, reporter
from efcil.experiment.run import execute_all
from efcil.reproduce import NAMES, Cell, Measured, Wanted, find
from efcil.reproduce.cells import GROUPS
from efcil.reproduce.job import Job
from efcil.reproduce.on_ray import RayTasks
from efcil.reproduce.parallel import Executor, Processes, gpus, run_all, slots


def listing() -> str:
    """Return the names and what each is."""
    return "\n".join(f"{r.name:17} {r.about}" for r in NAMES.values())


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _directories(given: Sequence[str]) -> dict[str, Path]:
    found = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise OptionError(f"--data {text}: must be NAME=DIR, for example cifar100=data/cifar100")
        found[sources.find(name).name] = Path(path)
    return found


def _numbers(text: str) -> tuple[int, ...]:
    parts = _list(text)
    if not all(part.isdigit() for part in parts):
        raise OptionError(f"--tasks {text}: must be numbers with commas between them")
    return tuple(map(int, parts))


def execute(
    names: str,
    *,
    data: Sequence[str],
    out: Path,
    only: str,
    orders: str,
    tasks: str,
    results: Sequence[Path],
    settings: Sequence[str],
    device: str,
    at_once: int | None,
    parallel: str | None,
    retries: int,
    quiet: bool,
    command: str,
) -> None:
    """Run the missing cells of the named tables and figures for which there are data; write and print each."""
    wanted_names = [find(name) for name in _list(names)]
    directories = _directories(data)
    if parallel and at_once:
        raise OptionError("--parallel and --at-once: give one; the first is for processes, the second for threads")
    used = _device(device, parallel)
    wanted = Wanted(out, _list(orders), _numbers(tasks), _list(only), command, used, tuple(settings))
    for r in wanted_names:
        if r.grid and not r.splits(wanted):
            known = sorted({t for splits in r.grid.values() for t in splits})
            raise OptionError(f"--tasks {tasks}: {r.name} has only {', '.join(map(str, known))}")
    cells = list(dict.fromkeys(cell for r in wanted_names for cell in r.to_run(wanted)))
    for place in results:
        if not place.is_dir():
            raise OptionError(f"--from {place}: no such directory")
    voice, failed = reporter(quiet), None
    try:
        jobs = _missing(cells, wanted, directories, results, voice)
        if jobs and parallel:
            for job in jobs:
                job.cell.plan(job.settings)  # a mistake in an option is told here, once
            executor = _executor(parallel, device, len(jobs), quiet)
            run_all([job.absolute() for job in jobs], executor, retries, voice)
        elif jobs:
            machine = Machine.choose(device)
            runs = [job.run(machine, Quiet() if quiet else Lines(job.title)) for job in jobs]
            execute_all(runs, True, at_once or machine.runs_at_once, "go on with the same command")
    except RunsFailed as error:
        failed = error  # told after the tables: what was measured is shown all the same
    finally:
        voice.close()
    shown = list(dict.fromkeys(cell for r in wanted_names for cell in r.cells(wanted)))
    measured = _measured(shown, wanted, results)
    for text in measured.other:
        voice.note(text)
    for r in wanted_names:
        written = r.write(measured, wanted)
        if not quiet:
            print(written["md"].read_text(encoding="utf-8"))
            print("written: " + ", ".join(str(path) for path in written.values()))
    if failed is not None:
        raise failed


def _device(device: str, parallel: str | None) -> str:
    """Return the device in torch's words. Processes of a grid have the GPUs to themselves: none is touched for it."""
    if parallel is None:
        return str(Machine.choose(device).device)
    if parallel.partition(":")[0] == "ray":
        return "cpu"
    return "cuda" if gpus(device) else "cpu" if device == "auto" else device


def _executor(parallel: str, device: str, jobs: int, quiet: bool) -> Executor:
    if parallel.partition(":")[0] == "ray":
        return RayTasks(parallel, device, jobs, quiet)
    return Processes(slots(parallel, device, jobs), quiet)


def _measured(cells: Sequence[Cell], wanted: Wanted, results: Sequence[Path]) -> Measured:
    measured = Measured()
    own = [wanted.out / cell.place for cell in cells if (wanted.out / cell.place).is_dir()]
    measured.read([*own, *results], cells, wanted.settings)
    return measured


def _missing(
    cells: Sequence[Cell], wanted: Wanted, directories: dict[str, Path], results: Sequence[Path], voice: Quiet
) -> list[Job]:
    """Return the cells that are not measured and whose data are there."""
    measured = _measured(cells, wanted, results)
    jobs = []
    for cell in cells:
        labels = [label for label in GROUPS[cell.group] if not _has(measured, cell, label)]
        if not labels:
            continue
        source = sources.find(cell.dataset)
        if source.directory and cell.dataset not in directories:
            continue
        jobs.append(
            Job(
                cell=cell,
                settings=wanted.settings,
                data=directories.get(cell.dataset),
                out=wanted.out,
                command=wanted.command,
                device=wanted.device,
            )
        )
    absent = sorted({c.dataset for c in cells if sources.find(c.dataset).directory and c.dataset not in directories})
    if absent and cells:
        voice.note(f"not run, since no directory is given: {', '.join(absent)} (--data NAME=DIR)")
    return jobs


def _has(measured: Measured, cell: Cell, label: str) -> bool:
    where = (cell.dataset, cell.tasks, cell.order)
    name, method = label, cell.plan().methods[label][0]
    heads = [f"{name}/{head}" for head in method.heads] or [name]
    return all(measured.summary(*where, head) is not None for head in heads)
