"""Commands that train: demo, run, compare, resume, tune."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from efcil.cli.directories import (
    WITH_RESUME,
    command_line,
    directory_stem,
    new_directory,
    resume_command,
    stored_command,
)
from efcil.cli.options import (
    EXPERIMENTS,
    MACHINE,
    SETTINGS,
    Backbone,
    Compile,
    ConcurrentRuns,
    ConfigFile,
    CudaGraphs,
    DataDir,
    DataSetName,
    Device,
    Epochs,
    Every,
    Increment,
    InitCls,
    JsonLinesFlag,
    Learner,
    LogTo,
    Method,
    Methods,
    Order,
    Orders,
    Out,
    Overrides,
    Precision,
    Preset,
    QuietFlag,
    Resume,
    SaveFeatures,
    Seed,
    SkipBad,
    SyncBN,
    Tasks,
    Threads,
    Uneven,
)
from efcil.errors import ConfigError
from efcil.platform_support import thread_choice

if TYPE_CHECKING:
    from efcil.experiment.reporters import Reporter
    from efcil.experiment.run import Run
    from efcil.experiment.specification import Experiment, ExperimentSpec
    from efcil.training.distributed import World

app = typer.Typer()


# --- from options to runs ---------------------------------------------------------------------------------------------


def parse_increment(text: str | None) -> int | list[int] | None:
    """Read --increment: a number, or comma-separated numbers.

    >>> parse_increment("10,5")
    [10, 5]
    """
    if text is None:
        return None
    try:
        values = [int(part) for part in text.strip("[] ").split(",")]
    except ValueError:
        raise ConfigError(f"--increment {text}: must be a number, or comma-separated numbers") from None
    return values[0] if len(values) == 1 else values


def defaults(command: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of a command with their defaults, for commands that call others."""
    parameters = inspect.signature(command).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def resolve_options(methods: Sequence[str], dataset: str, o: Mapping[str, Any]) -> Experiment:
    """Resolve and check the options of a command whose methods share a backbone."""
    from efcil.experiment.specification import resolve

    return resolve(specification(methods, dataset, o))


def resolve_comparison(methods: Sequence[str], dataset: str, o: Mapping[str, Any]) -> dict[str, Experiment]:
    """Resolve and check the options of a comparison: an experiment for each trained backbone, by its learner."""
    from efcil.experiment.specification import by_trajectory, resolve

    parts = by_trajectory(specification(methods, dataset, o))
    return {name.replace(":", "-"): resolve(part) for name, part in parts.items()}


def specification(methods: Sequence[str], dataset: str, o: Mapping[str, Any]) -> ExperimentSpec:
    """Return what the options of a command ask for."""
    from efcil.experiment.specification import ExperimentSpec

    overrides = [*o["overrides"], *(["data.skip_bad=true"] if o["skip_bad"] else [])]
    overrides += [f"backbone={o['backbone']}"] if o.get("backbone") else []
    return ExperimentSpec(
        methods=tuple(methods),
        dataset=dataset,
        tasks=o["tasks"],
        init_cls=o["init_cls"],
        increment=parse_increment(o["increment"]),
        allow_uneven=o["allow_uneven"],
        order=o["order"],
        seed=o["seed"],
        preset=o["preset"],
        overrides=tuple(overrides),
        val_fraction=o.get("val_fraction", 0.0),
        learner=o.get("learner"),
        epochs=o.get("epochs"),
    )


def make_run(
    experiment: Experiment, o: Mapping[str, Any], out: Path, compare: bool, reporter: Reporter, world: World
) -> Run:
    """Make a run of resolved options; `o` has those that do not change its numbers."""
    from efcil.accel.backend import Backend
    from efcil.experiment.run import Run, RunOptions
    from efcil.experiment.tracking import trackers

    if o["threads"]:
        import torch

        torch.set_num_threads(o["threads"])
        thread_choice.fixed = True
    modes = (o["precision"], o["compile"], o["cuda_graphs"], world, o["sync_bn"])
    backend = Backend.choose(o["device"], *modes, note=reporter.note)
    options = RunOptions(
        command=command_line(o["out"] or out),
        compare=compare,
        checkpoint_seconds=o["checkpoint_seconds"],
        save_features=o["save_features"],
        trackers=trackers(o["log"] if world.is_main else [], out, experiment.fingerprint()),
    )
    return Run(experiment, out, backend, reporter, options, o["data"])


def _execute(methods: Sequence[str], dataset: str, o: Mapping[str, Any], orders: Sequence[str], compare: bool) -> None:
    """Execute a run for each order and backbone, and leave the screen tidy; under torchrun, this process's part."""
    from efcil.experiment.concurrent import execute_all
    from efcil.experiment.reporters import NullReporter, choose_reporter
    from efcil.experiment.shared_terminal import reporters_of_runs
    from efcil.experiment.specification import joining_methods
    from efcil.files import check_results
    from efcil.report import REPORT_FILES
    from efcil.training.distributed import init_distributed

    silent, concurrent = o["quiet"] or o["json"], o.get("concurrent_runs")
    with init_distributed() as world:
        reporter = choose_reporter(o["quiet"], o["json"]) if world.is_main else NullReporter()
        out = None
        try:
            for text in o.get("notes", ()):
                reporter.note(text)
            joining = joining_methods(specification(methods, dataset, {**o, "order": orders[0]}))
            if joining:
                reporter.note(f"{', '.join(joining)}: on the frozen backbone of the others; --learner NAME trains one")
            with world.sync_errors():
                experiments = {
                    (order, learner): experiment
                    for order in orders
                    for learner, experiment in resolve_comparison(methods, dataset, {**o, "order": order}).items()
                }
                several = len(experiments) > 1
                if several and world.size > 1 and concurrent not in (None, 1):
                    raise ConfigError(
                        f"--concurrent-runs {concurrent}: {world.size} processes train one run at a time; drop it"
                    )
                places = _places(list(experiments))
                if world.is_main:
                    homes = {
                        str(places[key] / ("trajectory" if compare else "")): experiment.fingerprint()
                        for key, experiment in experiments.items()
                    }
                    first = next(iter(experiments.values()))  # which has names as they are registered
                    name = "compare" if compare else next(iter(first.methods))
                    stem = directory_stem([name], {**o, "dataset": first.dataset}, orders)
                    out = o["out"] or new_directory(stem, homes, o["resume"])
            out = Path(world.broadcast_object(str(out)))
            keys = list(experiments)
            tells = reporters_of_runs(reporter, [_title(key, keys) for key in keys])
            runs = []
            with world.sync_errors():
                if several and world.is_main:
                    check_results(out, REPORT_FILES)
                for (key, experiment), own in zip(experiments.items(), tells, strict=True):
                    runs.append(make_run(experiment, {**o, "out": out}, out / places[key], compare, own, world))
            parallel = (concurrent or runs[0].backend.concurrent_runs) if several else 1
            execute_all(runs, o["resume"], parallel, f"resume with: {resume_command(out)}")
        finally:
            reporter.close()
        if several and world.is_main:
            from efcil.cli.console import console, print_runs
            from efcil.report import load_summaries, write_report
            from efcil.resolution import parse_label

            summaries = load_summaries([out / place for place in places.values()])
            asked = [parse_label(method)[0] for method in methods]
            summaries.sort(key=lambda summary: asked.index(summary["method"]))  # within it by order
            write_report(summaries, out)
            if not silent:
                print_runs(summaries)
                console().print(f"written to {out}; the curves are in {out / 'report.html'}", soft_wrap=True)


def _places(keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Path]:
    """Return a directory for each order and learner, as far as there are several.

    >>> _places([("1", "lwf"), ("1", "joint")])[("1", "joint")].as_posix()
    'joint'
    >>> _places([("1", "lwf"), ("2", "lwf")])[("2", "lwf")].as_posix()
    'order-2'
    """
    orders, learners = ({key[place] for key in keys} for place in (0, 1))
    return {
        (order, learner): Path(
            *([f"order-{Path(order).stem}"] if len(orders) > 1 else []), *([learner] if len(learners) > 1 else [])
        )
        for order, learner in keys
    }


def _title(key: tuple[str, str], keys: Sequence[tuple[str, str]]) -> str:
    """Return what a run of several is called in the lines that it prints."""
    orders, learners = ({other[place] for other in keys} for place in (0, 1))
    words = ([f"order {key[0]}"] if len(orders) > 1 else []) + ([key[1]] if len(learners) > 1 else [])
    return ", ".join(words)


def _with_file(options: dict[str, Any], context: typer.Context) -> dict[str, Any]:
    """Add the options of --config, where it is given, below what was typed."""
    if options["config"] is None:
        return options
    from efcil.cli.config_file import merged

    sources = {name: context.get_parameter_source(name) for name in context.params}
    typed = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    return merged(options["config"], options, typed)


def _commas(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


DEMO = ("dpcr-plus", "dpcr", "acil", "lwf-ncm", "lwf", "finetune", "joint")


# --- the commands -----------------------------------------------------------------------------------------------------


@app.command(rich_help_panel=EXPERIMENTS)
def demo(
    what: Annotated[
        str,
        typer.Argument(metavar="[digits|photos]", help="digits, or photos: clothing, 106 MB to download."),
    ] = "digits",
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Output directory; an earlier demo in it is replaced."),
    ] = Path("demo"),
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="photos: directory to download to; by default in the cache."),
    ] = None,
    quiet: QuietFlag = False,
    json: JsonLinesFlag = False,
) -> None:
    """Compare DPCR+, DPCR and other methods on ten digits in five tasks, or teach ten kinds of clothing from photos."""
    if what == "photos":
        from efcil.cli.photos import demo_photos

        return demo_photos(out, data, quiet)
    if what != "digits":
        raise ConfigError(f"demo {what}: unknown; take digits or photos")
    from efcil.experiment.run_directory import remove_demo

    remove_demo(out, DEMO)
    options = {**defaults(compare), "out": out, "tasks": 5, "device": "cpu", "quiet": quiet, "json": json}
    _execute(DEMO, "digits", options, ["1993"], compare=True)
    if not (quiet or json):
        from importlib import resources
        from json import loads

        from efcil.cli.console import console

        stored = loads(resources.files("efcil.presets").joinpath("demo.json").read_text(encoding="utf-8"))
        means = ", ".join(f"{method} {stored[method]:.1f}" for method in sorted(stored, key=stored.get, reverse=True))
        console().print(f"mean A_f over class orders 1, 2 and 3, measured before: {means}")


@app.command(rich_help_panel=EXPERIMENTS)
def run(
    context: typer.Context,
    method: Method = "",
    dataset: DataSetName = "",
    data: DataDir = None,
    tasks: Tasks = None,
    init_cls: InitCls = None,
    increment: Increment = None,
    allow_uneven: Uneven = False,
    order: Order = "identity",
    seed: Seed = 0,
    learner: Learner = None,
    backbone: Backbone = None,
    epochs: Epochs = None,
    preset: Preset = None,
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
    config: ConfigFile = None,
    skip_bad: SkipBad = False,
    out: Out = None,
    resume: Resume = False,
    save_features: SaveFeatures = False,
    log: LogTo = [],  # noqa: B006
    checkpoint_seconds: Every = 60.0,
    quiet: QuietFlag = False,
    json: JsonLinesFlag = False,
    device: Device = "auto",
    precision: Precision = "auto",
    compile: Compile = None,
    cuda_graphs: CudaGraphs = None,
    sync_bn: SyncBN = False,
    threads: Threads = None,
) -> None:
    """Train and evaluate one method on all tasks of a data set."""
    options = _with_file(dict(locals()), context)
    if not options["method"] or not options["dataset"]:
        raise ConfigError("missing METHOD and DATASET, e.g. efcil run dpcr digits")
    _execute([options["method"]], options["dataset"], options, [options["order"]], compare=False)


@app.command(rich_help_panel=EXPERIMENTS)
def compare(
    context: typer.Context,
    methods: Methods = "",
    dataset: DataSetName = "",
    data: DataDir = None,
    tasks: Tasks = None,
    init_cls: InitCls = None,
    increment: Increment = None,
    allow_uneven: Uneven = False,
    orders: Orders = "identity",
    seed: Seed = 0,
    learner: Learner = None,
    backbone: Backbone = None,
    epochs: Epochs = None,
    preset: Preset = None,
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
    config: ConfigFile = None,
    skip_bad: SkipBad = False,
    out: Out = None,
    resume: Resume = False,
    save_features: SaveFeatures = False,
    log: LogTo = [],  # noqa: B006
    checkpoint_seconds: Every = 60.0,
    quiet: QuietFlag = False,
    json: JsonLinesFlag = False,
    device: Device = "auto",
    precision: Precision = "auto",
    compile: Compile = None,
    cuda_graphs: CudaGraphs = None,
    sync_bn: SyncBN = False,
    threads: Threads = None,
    concurrent_runs: ConcurrentRuns = None,
) -> None:
    """Compare methods on the same tasks; those that share a learner share a trained backbone."""
    options = _with_file(dict(locals()), context)
    names, orders_given = _commas(options["methods"]), _commas(options["orders"])
    if not names or not options["dataset"] or not orders_given:
        raise ConfigError("missing METHODS and DATASET, e.g. efcil compare dpcr,lwf-ncm digits")
    _execute(names, options["dataset"], options, orders_given, compare=True)


@app.command(rich_help_panel=EXPERIMENTS)
def resume(
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="Directory of a run or comparison.", show_default=False)
    ],
    data: DataDir = None,
    quiet: QuietFlag = False,
    json: JsonLinesFlag = False,
    device: Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", help="Another device.", rich_help_panel=MACHINE)
    ] = None,
) -> None:
    """Resume an interrupted run, comparison, search or reproduction from its directory."""
    words, start, out = stored_command(directory)
    if data is not None:
        words += ["--data", str(data.resolve())]
    if device is not None:
        words += ["--device", device]
    words += ["--quiet"] * quiet + ["--json"] * json
    if start.resolve() == Path.cwd():
        out = Path(os.path.relpath(out))
    else:
        print(f"note: paths are relative to {start}, where the run was started", file=sys.stderr)
        os.chdir(start)
    words += ["--out", str(out)]
    from efcil.cli import app as every_command

    sys.argv[1:] = words  # what is stored is the command that is resumed, not this one
    every_command([*words, *(["--resume"] if words[0] in WITH_RESUME else [])], prog_name="efcil")


@app.command(rich_help_panel=EXPERIMENTS)
def tune(
    context: typer.Context,
    method: Method = "",
    dataset: DataSetName = "",
    grid: Annotated[
        list[str],
        typer.Option(
            "--try",
            metavar="KEY=VALUES",
            help="Values to try, key=value,value; repeat for a grid.",
            show_default=False,
            rich_help_panel=SETTINGS,
        ),
    ] = [],  # noqa: B006
    val_fraction: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=0.5,
            metavar="SHARE",
            help="Share of each class's training images held out to measure on.",
            rich_help_panel=SETTINGS,
        ),
    ] = 0.1,
    data: DataDir = None,
    tasks: Tasks = None,
    init_cls: InitCls = None,
    increment: Increment = None,
    allow_uneven: Uneven = False,
    orders: Orders = "identity,1992,1993",
    seed: Seed = 0,
    learner: Learner = None,
    backbone: Backbone = None,
    epochs: Epochs = None,
    preset: Preset = None,
    overrides: Overrides = [],  # noqa: B006
    config: ConfigFile = None,
    skip_bad: SkipBad = False,
    out: Out = None,
    resume: Resume = False,
    save_features: SaveFeatures = False,
    log: LogTo = [],  # noqa: B006
    checkpoint_seconds: Every = 60.0,
    quiet: QuietFlag = False,
    json: JsonLinesFlag = False,
    device: Device = "auto",
    precision: Precision = "auto",
    compile: Compile = None,
    cuda_graphs: CudaGraphs = None,
    sync_bn: SyncBN = False,
    threads: Threads = None,
    concurrent_runs: ConcurrentRuns = None,
) -> None:
    """Select options on held-out training images, never on test images. Completed runs are skipped."""
    from efcil.cli.search import search

    options = _with_file(dict(locals()), context)
    if not options["method"] or not options["dataset"] or not grid:
        raise ConfigError("missing METHOD, DATASET or --try, e.g. efcil tune dpcr digits --try ridge=20,200")
    search(options, grid)
