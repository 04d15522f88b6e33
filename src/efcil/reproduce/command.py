"""`efcil reproduce`: execute missing runs, then write and print the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from efcil import data as datasets
from efcil.accel.backend import Backend
from efcil.errors import ConfigError, RunsFailed
from efcil.experiment.concurrent import execute_all
from efcil.experiment.reporters import PrefixReporter, Reporter, choose_reporter
from efcil.files import check_results
from efcil.reproduce import NAMES, ReproduceRequest, ResultIndex, RunKey, find
from efcil.reproduce.job import Job
from efcil.reproduce.on_ray import RayTasks
from efcil.reproduce.parallel import Executor, Processes, gpus, run_all, slots
from efcil.reproduce.result_index import SNAPSHOT_GROUPS


def listing() -> list[tuple[str, str]]:
    """Return the available names with descriptions."""
    return [(r.name, r.description) for r in NAMES.values()]


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _directories(given: Sequence[str]) -> dict[str, Path]:
    directories = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise ConfigError(f"--data {text}: wanted NAME=DIR, for example cifar100=data/cifar100")
        directories[datasets.find(name).name] = Path(path)
    return directories


def _numbers(text: str) -> tuple[int, ...]:
    parts = _list(text)
    if not all(part.isdigit() for part in parts):
        raise ConfigError(f"--tasks {text}: wanted comma-separated numbers")
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
    overrides: Sequence[str],
    device: str,
    concurrent_runs: int | None,
    parallel: str | None,
    retries: int,
    quiet: bool,
    command: str,
    show: Callable[[str], None] = print,
) -> None:
    """Execute missing runs of the named tables and figures if their data are available; write and show each."""
    wanted_names = [find(name) for name in _list(names)]
    directories = _directories(data)
    if parallel and concurrent_runs:
        raise ConfigError("give either --parallel (processes) or --concurrent-runs (threads)")
    used = _device(device, parallel)
    request = ReproduceRequest(out, _list(orders), _numbers(tasks), _list(only), command, used, tuple(overrides))
    for r in wanted_names:
        if r.grid and not r.splits(request):
            splits_ = sorted({t for splits in r.grid.values() for t in splits})
            raise ConfigError(f"--tasks {tasks}: {r.name} has only {', '.join(map(str, splits_))}")
    check_results(out, [f"{r.name}.{suffix}" for r in wanted_names for suffix in ("md", "csv", "tex", "png", "svg")])
    keys = _joined([key for r in wanted_names for key in r.to_run(request)], out)
    for place in results:
        if not place.is_dir():
            raise ConfigError(f"--from {place}: no such directory")
    reporter, failed = choose_reporter(quiet), None
    try:
        jobs = _missing_jobs(keys, request, directories, results, reporter)
        if jobs and parallel:
            for job in jobs:
                job.key.experiment(job.overrides)  # report invalid options before any run starts
            executor = _executor(parallel, device, len(jobs), quiet)
            run_all([job.absolute() for job in jobs], executor, retries, reporter)
        elif jobs:
            backend = Backend.choose(device)
            runs = [job.run(backend, Reporter() if quiet else PrefixReporter(job.title)) for job in jobs]
            execute_all(runs, True, concurrent_runs or backend.concurrent_runs, f"resume with: {command}")
    except RunsFailed as error:
        failed = error  # raised after the tables are shown
    finally:
        reporter.close()
    shown = _joined([key for r in wanted_names for key in r.run_keys(request)], out)
    index = _read_results(shown, request, results)
    for text in index.excluded:
        reporter.note(text)
    for r in wanted_names:
        written = r.write(index, request)
        if not quiet:
            show(written["md"].read_text(encoding="utf-8"))
            print("written: " + ", ".join(str(path) for path in written.values()))
    if failed is not None:
        raise failed


def _device(device: str, parallel: str | None) -> str:
    """Return the torch device name; with --parallel, without initializing CUDA in this process."""
    if parallel is None:
        return str(Backend.choose(device).device)
    if parallel.partition(":")[0] == "ray":
        return "cpu"
    return "cuda" if gpus(device) else "cpu" if device == "auto" else device


def _executor(parallel: str, device: str, jobs: int, quiet: bool) -> Executor:
    if parallel.partition(":")[0] == "ray":
        return RayTasks(parallel, device, jobs, quiet)
    return Processes(slots(parallel, device, jobs), quiet)


def _read_results(keys: Sequence[RunKey], request: ReproduceRequest, results: Sequence[Path]) -> ResultIndex:
    index = ResultIndex()
    run_directories = [request.out / key.directory for key in keys if (request.out / key.directory).is_dir()]
    index.read([*run_directories, *results], keys, request.overrides)
    return index


def _joined(keys: Sequence[RunKey], out: Path) -> list[RunKey]:
    """Return each run once; one that a larger run covers, which is asked for or begun, gives way to it."""

    def replaced(key: RunKey) -> RunKey:
        return next((more for more in reversed(key.larger) if more in keys or (out / more.directory).is_dir()), key)

    return list(dict.fromkeys(map(replaced, keys)))


def _missing_jobs(
    keys: Sequence[RunKey],
    request: ReproduceRequest,
    directories: dict[str, Path],
    results: Sequence[Path],
    reporter: Reporter,
) -> list[Job]:
    """Return jobs for missing results whose data are available."""
    index = _read_results(keys, request, results)
    jobs = []
    for key in keys:
        if _is_done(index, key, request.out):
            continue
        source = datasets.find(key.dataset)
        if source.directory and key.dataset not in directories:
            continue
        jobs.append(
            Job(
                key=key,
                overrides=request.overrides,
                data=directories.get(key.dataset),
                out=request.out,
                command=request.command,
                device=request.device,
            )
        )
    absent = sorted({c.dataset for c in keys if datasets.find(c.dataset).directory and c.dataset not in directories})
    if absent:
        needs = "; ".join(f"{name} (get it: {datasets.find(name).url})" for name in absent)
        if not jobs and not any(_is_known(index, key, request.out) for key in keys):
            raise ConfigError(f"nothing to run without data: give --data NAME=DIR for at least one of {needs}")
        reporter.note(f"skipped without --data NAME=DIR: {needs}")
    return jobs


def _is_done(index: ResultIndex, key: RunKey, out: Path) -> bool:
    """Return whether no runs are missing; a figure also needs the data that it shows."""
    drawn = key.group in SNAPSHOT_GROUPS[:-1] and not key.snapshot(out, key.tasks).exists()
    return not drawn and all(_is_measured(index, key, label) for label in key.methods)


def _is_known(index: ResultIndex, key: RunKey, out: Path) -> bool:
    """Return whether there are any results to show."""
    return (out / key.directory).is_dir() or any(_is_measured(index, key, label) for label in key.methods)


def _is_measured(index: ResultIndex, key: RunKey, label: str) -> bool:
    where = (key.dataset, key.tasks, key.order)
    name, method = label, key.experiment().methods[label][0]
    heads = [f"{name}/{head}" for head in method.heads] or [name]
    return all(index.summary(*where, head) is not None for head in heads)
