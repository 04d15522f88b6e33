"""`efcil reproduce`: run what is missing, then write and show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from efcil import data as sources
from efcil.errors import OptionError
from efcil.progress import Lines, Quiet, reporter
from efcil.reproduce import NAMES, Cell, Measured, Wanted, find
from efcil.reproduce.cells import GROUPS
from efcil.runs import Run, execute_all
from efcil.training.machine import Machine


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
    quiet: bool,
    command: str,
) -> None:
    """Run the missing cells of the named tables and figures for which there are data; write and print each."""
    wanted_names = [find(name) for name in _list(names)]
    directories = _directories(data)
    machine = Machine.choose(device)
    wanted = Wanted(out, _list(orders), _numbers(tasks), _list(only), command, str(machine.device), tuple(settings))
    for r in wanted_names:
        if r.grid and not r.splits(wanted):
            known = sorted({t for splits in r.grid.values() for t in splits})
            raise OptionError(f"--tasks {tasks}: {r.name} has only {', '.join(map(str, known))}")
    cells = list(dict.fromkeys(cell for r in wanted_names for cell in r.to_run(wanted)))
    for place in results:
        if not place.is_dir():
            raise OptionError(f"--from {place}: no such directory")
    voice = reporter(quiet)
    try:
        _run_missing(cells, wanted, directories, results, machine, voice, quiet, at_once)
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


def _measured(cells: Sequence[Cell], wanted: Wanted, results: Sequence[Path]) -> Measured:
    measured = Measured()
    own = [wanted.out / cell.place for cell in cells if (wanted.out / cell.place).is_dir()]
    measured.read([*own, *results], cells, wanted.settings)
    return measured


def _run_missing(
    cells: Sequence[Cell],
    wanted: Wanted,
    directories: dict[str, Path],
    results: Sequence[Path],
    machine: Machine,
    voice: Quiet,
    quiet: bool,
    at_once: int | None,
) -> None:
    """Run the cells that are not measured and whose data are there; several at once where a GPU has room."""
    measured = _measured(cells, wanted, results)
    runs = []
    for cell in cells:
        labels = [label for label in GROUPS[cell.group] if not _has(measured, cell, label)]
        if not labels:
            continue
        source = sources.find(cell.dataset)
        if source.directory and cell.dataset not in directories:
            continue
        title = f"{cell.dataset} T={cell.tasks} order {cell.order} {cell.group}"
        runs.append(
            Run(
                cell.plan(wanted.settings),
                directories.get(cell.dataset),
                wanted.out / cell.place,
                machine,
                Quiet() if quiet else Lines(title),
                command=wanted.command,
                compare=True,
                snapshots=("dpcr", "rrcr") if cell.group == "trajectory" else (),
            )
        )
    absent = sorted({c.dataset for c in cells if sources.find(c.dataset).directory and c.dataset not in directories})
    if absent and cells:
        voice.note(f"not run, since no directory is given: {', '.join(absent)} (--data NAME=DIR)")
    if runs:
        execute_all(runs, True, at_once or machine.runs_at_once, "go on with the same command")


def _has(measured: Measured, cell: Cell, label: str) -> bool:
    where = (cell.dataset, cell.tasks, cell.order)
    name, method = label, cell.plan().methods[label][0]
    heads = [f"{name}/{head}" for head in method.heads] or [name]
    return all(measured.summary(*where, head) is not None for head in heads)
