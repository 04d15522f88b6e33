"""The command `efcil`. Heavy imports happen inside the commands, so that help is instant."""

from __future__ import annotations

import inspect
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from efcil import __version__
from efcil.errors import ConfigError, EfcilError

app = typer.Typer(
    name="efcil",
    help="Exemplar-free class-incremental learning: learn new classes while the old images are gone.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)
data_app = typer.Typer(help="Data sets: list, fetch, verify.", no_args_is_help=True)
app.add_typer(data_app, name="data")

DataDir = Annotated[Path | None, typer.Option("--data", help="Directory the data set lies in.")]
Tasks = Annotated[int | None, typer.Option(help="Number of equal tasks.")]
InitCls = Annotated[int | None, typer.Option("--init-cls", help="Classes in the first task.")]
Increment = Annotated[str | None, typer.Option(help="Classes in each later task: a number, or a list such as 10,5,5.")]
Uneven = Annotated[bool, typer.Option("--allow-uneven", help="Let --tasks make tasks that differ by one class.")]
Order = Annotated[str, typer.Option(help="Class order: identity, a seed such as 1993, or a file.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of weights, batches and augmentation.")]
Preset = Annotated[str | None, typer.Option(help="Named settings; the first one of the data set by default.")]
Overrides = Annotated[list[str], typer.Option("--set", help="Any option as key=value; may be repeated.")]
Out = Annotated[Path | None, typer.Option(help="Directory of the run; made from its names by default.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where the run in --out stands.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")]
Precision = Annotated[str, typer.Option(help="auto, fp32 or bf16.")]
Compile = Annotated[
    bool | None,
    typer.Option(help="Compile the backbones, ResNets in bf16 with kernels of our own; on by default on a GPU."),
]
CudaGraphs = Annotated[
    bool | None, typer.Option(help="Record the training step as a CUDA graph; on by default on a GPU.")
]
SyncBN = Annotated[
    bool, typer.Option("--sync-bn", help="Under torchrun, on GPUs: normalize over the whole batch, not each share.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; results are bit-equal for equal counts.")]
Every = Annotated[float, typer.Option("--checkpoint-seconds", min=0, help="Seconds between checkpoints inside a task.")]
QuietFlag = Annotated[bool, typer.Option("--quiet", help="Say nothing but errors and notes.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
SaveFeatures = Annotated[
    bool, typer.Option("--save-features", help="Keep every task's features, for `efcil reevaluate` with other methods.")
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Sets of image files: leave out those that cannot be read.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="YAML file with any of these options, a run's config.yaml, or PyCIL's JSON."),
]
LogTo = Annotated[
    list[str], typer.Option("--log", help="tensorboard (into OUT/tensorboard) or wandb, as well; may be repeated.")
]


def _version(value: bool) -> None:
    if value:
        print(f"efcil {__version__}")
        raise typer.Exit


DISTRIBUTED = ("run", "compare")


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    if os.environ.get("TORCHELASTIC_RUN_ID") and context.invoked_subcommand not in DISTRIBUTED:
        from efcil.training.distributed import world_size

        if world_size() > 1:
            known = " and ".join(f"`efcil {name}`" for name in DISTRIBUTED)
            raise ConfigError(
                f"efcil {context.invoked_subcommand} works alone, and torchrun started {world_size()} processes of it: "
                f"start it without torchrun; only {known} share their work"
            )


def _increment(text: str | None) -> int | list[int] | None:
    if text is None:
        return None
    try:
        values = [int(part) for part in text.strip("[] ").split(",")]
    except ValueError:
        raise ConfigError(f"--increment {text}: must be a number, or numbers with commas between them") from None
    return values[0] if len(values) == 1 else values


def _run(methods: list[str], dataset: str, o: dict[str, Any], compare: bool, reporter: Any, world: Any) -> Any:
    """Resolve the options of a command into a run."""
    from efcil.accel.backend import Backend
    from efcil.experiment.run import Run, RunOptions
    from efcil.experiment.specification import ExperimentSpec, resolve
    from efcil.experiment.tracking import trackers

    overrides = [*o["overrides"], *(["data.skip_bad=true"] if o["skip_bad"] else [])]
    spec = ExperimentSpec(
        methods=tuple(methods),
        dataset=dataset,
        tasks=o["tasks"],
        init_cls=o["init_cls"],
        increment=_increment(o["increment"]),
        allow_uneven=o["allow_uneven"],
        order=o["order"],
        seed=o["seed"],
        preset=o["preset"],
        overrides=tuple(overrides),
        val_fraction=o.get("val_fraction", 0.0),
    )
    experiment = resolve(spec)
    if o["threads"]:
        import torch

        torch.set_num_threads(o["threads"])
    modes = (o["precision"], o["compile"], o["cuda_graphs"], world, o["sync_bn"])
    backend = Backend.choose(o["device"], *modes, note=reporter.note)
    split = "-".join(f"{key}{value}" for key, value in experiment.tasks.items()).replace(" ", "")
    name = next(iter(experiment.methods)).replace(":", "-")
    out = o["out"] or Path("runs") / f"{name}-{experiment.dataset}-{split}-order{Path(o['order']).stem}-seed{o['seed']}"
    command = shlex.join(["efcil", *sys.argv[1:]])  # as typed, for config.yaml and summary.json
    options = RunOptions(
        command=command,
        compare=compare,
        checkpoint_seconds=o["checkpoint_seconds"],
        save_features=o["save_features"],
        trackers=trackers(o["log"] if world.is_main else [], out, experiment.fingerprint()),
    )
    return Run(experiment, out, backend, reporter, options, o["data"])


def _say(o: dict[str, Any], reporter: Any) -> None:
    """Say what the file of --config left to be said."""
    for text in o.get("notes", ()):
        reporter.note(text)


def _execute(methods: list[str], dataset: str, o: dict[str, Any], compare: bool = False) -> None:
    """Execute one run and leave the screen tidy; under torchrun, this process's part of it."""
    from efcil.experiment.reporters import NullReporter, choose_reporter
    from efcil.training.distributed import init_distributed

    with init_distributed() as world:
        reporter = choose_reporter(o["quiet"], o["json"]) if world.is_main else NullReporter()
        try:
            _say(o, reporter)
            with world.sync_errors():
                run = _run(methods, dataset, o, compare, reporter, world)
            from efcil.experiment.concurrent import execute_all

            execute_all([run], o["resume"], 1, f"go on with --resume --out {run.out}")
        finally:
            reporter.close()


def _typed(context: typer.Context) -> set[str]:
    """Return the options that were typed, as against those left at their defaults."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _with_file(options: dict[str, Any], context: typer.Context) -> dict[str, Any]:
    """Add the options of --config, where it is given, below what was typed."""
    if options["config"] is None:
        return options
    from efcil.cli.config_file import merged

    return merged(options["config"], options, _typed(context))


def _shared(
    data: DataDir = None,
    tasks: Tasks = None,
    init_cls: InitCls = None,
    increment: Increment = None,
    allow_uneven: Uneven = False,
    seed: Seed = 0,
    preset: Preset = None,
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
    config: ConfigFile = None,
    out: Out = None,
    resume: Resume = False,
    device: Device = "auto",
    precision: Precision = "auto",
    compile: Compile = None,
    cuda_graphs: CudaGraphs = None,
    sync_bn: SyncBN = False,
    threads: Threads = None,
    checkpoint_seconds: Every = 60.0,
    skip_bad: SkipBad = False,
    save_features: SaveFeatures = False,
    log: LogTo = [],  # noqa: B006
    quiet: QuietFlag = False,
    json: JsonFlag = False,
) -> None:
    """Hold the options that `run` and `compare` share."""


def _with_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command whose last parameter is **options the parameters of `_shared`."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[:-1]
    shared = inspect.signature(_shared, eval_str=True).parameters.values()
    command.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in (*own, *shared)}
    return command


@app.command()
@_with_shared_options
def run(
    context: typer.Context,
    method: Annotated[str, typer.Argument(help="Method, see `efcil methods`.")] = "",
    dataset: Annotated[str, typer.Argument(help="Data set, see `efcil data list`.")] = "",
    order: Order = "identity",
    **options: Any,
) -> None:
    """Run one method through all tasks of a data set."""
    options |= {"method": method, "dataset": dataset, "order": order}
    options = _with_file(options, context)
    if not options["method"] or not options["dataset"]:
        raise ConfigError("say what to run: efcil run METHOD DATASET, for example efcil run dpcr digits")
    _execute([options["method"]], options["dataset"], options)


@app.command()
@_with_shared_options
def compare(
    context: typer.Context,
    methods: Annotated[str, typer.Argument(help="Methods with commas between them; a variant is name:key=value.")] = "",
    dataset: Annotated[str, typer.Argument(help="Data set, see `efcil data list`.")] = "",
    orders: Annotated[str, typer.Option(help="Class orders with commas between them.")] = "identity",
    concurrent_runs: Annotated[
        int | None, typer.Option(min=1, help="Orders trained at once; 3 on a GPU by default.")
    ] = None,
    **options: Any,
) -> None:
    """Train one backbone trajectory for each class order and read every method from it."""
    from efcil.data import find

    options |= {"methods": methods, "dataset": dataset, "orders": orders, "concurrent_runs": concurrent_runs}
    options = _with_file(options, context)
    concurrent_runs = options["concurrent_runs"]
    names = [m.strip() for m in options["methods"].split(",") if m.strip()]
    if not names or not options["dataset"]:
        raise ConfigError("say what to compare: efcil compare METHOD,METHOD DATASET, for example dpcr,lwf-ncm digits")
    chosen = [o.strip() for o in options["orders"].split(",") if o.strip()]
    split = "".join(f"-{key}{options[key]}" for key in ("tasks", "init_cls", "increment") if options[key] is not None)
    dataset = find(options["dataset"]).name
    out = options["out"] or Path("runs") / f"compare-{dataset}{split}-seed{options['seed']}"
    if len(chosen) == 1:
        _execute(names, options["dataset"], {**options, "order": chosen[0], "out": out}, compare=True)
        return
    from efcil.experiment.concurrent import execute_all
    from efcil.experiment.reporters import NullReporter, PrefixReporter, choose_reporter
    from efcil.report import load_summaries, markdown_table, write_report
    from efcil.training.distributed import init_distributed

    quiet = options["quiet"] or options["json"]
    places = {order: out / f"order-{Path(order).stem}" for order in chosen}
    with init_distributed() as world:
        runs = []
        with world.sync_errors():
            if world.size > 1 and concurrent_runs not in (None, 1):
                raise ConfigError(
                    f"--concurrent-runs {concurrent_runs}: {world.size} processes train one order at a time; drop it"
                )
            if world.is_main:
                _say(options, choose_reporter(options["quiet"], options["json"]))
            for order, place in places.items():
                reporter = (
                    choose_reporter(options["quiet"], options["json"]) if quiet else PrefixReporter(f"order {order}")
                )
                own = {**options, "order": order, "out": place}
                runs.append(
                    _run(names, options["dataset"], own, True, reporter if world.is_main else NullReporter(), world)
                )
        execute_all(runs, options["resume"], concurrent_runs or runs[0].backend.concurrent_runs)
        if world.is_main:
            summaries = load_summaries(list(places.values()))
            write_report(summaries, out)
            if not quiet:
                print(markdown_table(summaries))


@app.command()
@_with_shared_options
def tune(
    context: typer.Context,
    method: Annotated[str, typer.Argument(help="Method, see `efcil methods`.")] = "",
    dataset: Annotated[str, typer.Argument(help="Data set, see `efcil data list`.")] = "",
    grid: Annotated[
        list[str], typer.Option("--try", help="An option and its values, key=value,value; repeat for more: all pairs.")
    ] = [],  # noqa: B006
    orders: Annotated[
        str, typer.Option(help="Class orders with commas between them; report later on others.")
    ] = "identity,1992,1993",
    val_fraction: Annotated[
        float, typer.Option(min=0.01, max=0.5, help="Share of each class's training images that is measured on.")
    ] = 0.1,
    concurrent_runs: Annotated[
        int | None, typer.Option(min=1, help="Runs trained at once; 3 on a GPU by default.")
    ] = None,
    **options: Any,
) -> None:
    """Choose options on held-out training images, never on test images. What is done is not done again."""
    from efcil.experiment.tuning import execute

    options |= {
        "method": method,
        "dataset": dataset,
        "orders": orders,
        "val_fraction": val_fraction,
        "concurrent_runs": concurrent_runs,
    }
    options = _with_file(options, context)
    if not options["method"] or not options["dataset"] or not grid:
        raise ConfigError("say what to choose: efcil tune METHOD DATASET --try key=value,value")
    execute(options, grid, _run)


@app.command()
def reevaluate(
    source: Annotated[Path, typer.Argument(help="Directory of a run or comparison with --save-features.")],
    methods: Annotated[str, typer.Argument(help="Methods with commas between them; a variant is name:key=value.")],
    overrides: Overrides = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option(help="Directory to write to; beside the run by default.")] = None,
    device: Device = "auto",
    quiet: QuietFlag = False,
) -> None:
    """Read other methods from a finished run: no training, no images, the same numbers as in company."""
    from efcil.experiment.reevaluate import execute

    execute(source, methods, overrides, out, device, quiet, shlex.join(["efcil", *sys.argv[1:]]))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory to write to; an earlier demo there is replaced.")] = Path("demo"),
    quiet: QuietFlag = False,
    json: JsonFlag = False,
) -> None:
    """Learn ten digits in five tasks: DPCR against its baselines, with a page of curves. About a minute."""
    import shutil

    names = ["dpcr", "dp-ncm", "lwf-ncm", "lwf"]
    config = out / "trajectory" / "config.yaml"
    if config.exists() and "command: efcil demo" in config.read_text(encoding="utf-8"):
        for part in ("trajectory", *names):  # what a demo writes, and nothing else that may lie there
            shutil.rmtree(out / part, ignore_errors=True)
    options = {p.name: p.default for p in inspect.signature(_shared).parameters.values()}
    options |= {"out": out, "order": "identity", "tasks": 5, "device": "cpu", "quiet": quiet, "json": json}
    _execute(names, "digits", options, compare=True)
    if not (quiet or json):
        print(f"open {out / 'report.html'} in a browser to see the curves")


@app.command()
def reproduce(
    names: Annotated[str, typer.Argument(help="Table or figure, or several with commas; without: list them.")] = "",
    data: Annotated[
        list[str],
        typer.Option(help="NAME=DIR: where a data set lies; repeat for more. One without a directory is not run."),
    ] = [],  # noqa: B006 (typer copies it)
    out: Annotated[Path, typer.Option(help="Directory of the runs and of what is made of them.")] = Path("reproduce"),
    only: Annotated[str, typer.Option(help="Run only these data sets or methods (with commas).")] = "",
    orders: Annotated[str, typer.Option(help="Class orders; default: the paper's.")] = "",
    tasks: Annotated[str, typer.Option(help="Numbers of tasks; default: the paper's.")] = "",
    results: Annotated[
        list[Path], typer.Option("--from", help="Directory with summaries measured before; repeat for more.")
    ] = [],  # noqa: B006
    overrides: Overrides = [],  # noqa: B006
    device: Device = "auto",
    concurrent_runs: Annotated[
        int | None, typer.Option(min=1, help="Runs trained at once in this process; 3 on a GPU by default.")
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option(
            help="Runs in processes of their own: how many, auto (3 per GPU, or one per core), ray or ray://HOST:PORT."
        ),
    ] = None,
    retries: Annotated[int, typer.Option(min=0, help="With --parallel: how often a failed run is tried again.")] = 2,
    quiet: QuietFlag = False,
) -> None:
    """Make a table or figure of the paper: run what is missing, show its numbers beside ours."""
    from efcil.reproduce.command import execute, listing

    if not names:
        print(listing())
        return
    execute(
        names,
        data=data,
        out=out,
        only=only,
        orders=orders,
        tasks=tasks,
        results=results,
        overrides=overrides,
        device=device,
        concurrent_runs=concurrent_runs,
        parallel=parallel,
        retries=retries,
        quiet=quiet,
        command=shlex.join(["efcil", *sys.argv[1:]]),
    )


@app.command()
def report(
    directories: Annotated[list[Path], typer.Argument(help="Run directories; those below them count too.")],
    out: Annotated[Path, typer.Option(help="Directory to write to.")] = Path("report"),
) -> None:
    """Make the table, curves, accuracy matrices and one self-contained page of runs, finished or not."""
    from efcil.report import load_summaries, markdown_table, write_report

    summaries = load_summaries(directories)
    written = write_report(summaries, out)
    print(markdown_table(summaries))
    print("written: " + ", ".join(str(path) for path in written.values()))


@app.command()
def methods() -> None:
    """List the methods: what each is made of, what it keeps, the paper's and our numbers."""
    from rich.console import Console
    from rich.table import Table

    from efcil.methods import METHODS, measured

    numbers = measured()
    table = Table(box=None, pad_edge=False)
    for name in ("method", "learner", "shift", "classifier", "memory per class", "exemplars", "paper", "ours"):
        table.add_column(name, justify="right" if name in ("paper", "ours") else "left", no_wrap=name == "method")
    for m in METHODS.values():
        usual = f"{m.name} ({m.preset})" if m.preset else m.name
        found = numbers.get(f"{m.name}:memory=500/{m.published}" if m.exemplars else usual, {})
        cells = [f"{v[0]:.2f} / {v[1]:.2f}" if (v := found.get(who)) else "-" for who in ("paper", "ours")]
        table.add_row(m.name, *m.parts, m.memory_formula, "yes" if m.exemplars else "no", *cells)
    Console().print(table)
    print("paper, ours: A_f / A_avg on CIFAR-100 in ten tasks, mean over class orders; - is not measured")
    print("with exemplars: 500 in all, the classifier that the paper printed")


ModelDir = Annotated[Path, typer.Argument(help="Model directory.")]


@app.command()
def teach(
    model: ModelDir,
    folder: Annotated[Path, typer.Argument(help="Folder with one folder of pictures per class.")],
    method: Annotated[str | None, typer.Option(help="New model: method; dpcr by default.")] = None,
    backbone: Annotated[str | None, typer.Option(help="New model: backbone, or timm/NAME.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="New model: channels of the first stage.")] = None,
    size: Annotated[int | None, typer.Option(min=8, help="New model: side of the pictures; 64 by default.")] = None,
    weights: Annotated[Path | None, typer.Option(help="New model: safetensors file with a backbone's weights.")] = None,
    frozen: Annotated[bool, typer.Option("--frozen", help="New model: the backbone never learns (--weights).")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="New model: seed.")] = None,
    val_fraction: Annotated[
        float | None, typer.Option(help="New model: share of each class kept from training to measure recall; 0.1.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of this teaching.")] = None,
    budget: Annotated[float | None, typer.Option(help="Seconds that this teaching may take.")] = None,
    device: Device = "auto",
    skip_bad: SkipBad = False,
    quiet: QuietFlag = False,
) -> None:
    """Teach a model new classes, or more pictures of old ones; a model that does not exist yet is made."""
    from efcil.config import parse_overrides
    from efcil.product import commands

    chosen = {"method": method, "backbone": backbone, "width": width, "size": size, "weights": weights, "seed": seed}
    given = {**chosen, "val_fraction": val_fraction}
    new_model_options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    new_model_options |= {"frozen": True} if frozen else {}
    new_model_options |= {"options": parse_overrides(overrides)} if overrides else {}
    message = commands.teach(
        model, folder, new_model_options, epochs=epochs, budget=budget, device=device, skip_bad=skip_bad, quiet=quiet
    )
    if not quiet:
        print(message)


@app.command()
def predict(
    model: ModelDir,
    paths: Annotated[list[Path], typer.Argument(help="Pictures, or folders of them.")],
    top: Annotated[int, typer.Option(min=1, help="Answers for each picture, best first.")] = 1,
    reject_below: Annotated[float | None, typer.Option(help="Below this confidence: none of these.")] = None,
    device: Device = "auto",
    json: JsonFlag = False,
    csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values.")] = False,
) -> None:
    """Name what is in pictures."""
    from efcil.product import commands

    answers = commands.predict(model, paths, top=top, reject_below=reject_below, device=device)
    if json:
        print(commands.to_json(answers))
    elif csv:
        print(commands.to_csv(answers), end="")
    else:
        for answer in answers:
            rest = ", ".join(f"{t['label']} {100 * t['confidence']:.0f} %" for t in answer["top"][1:])
            label = answer["label"] or "none of these"
            print(f"{answer['file']}: {label} {100 * answer['confidence']:.0f} %" + (f" ({rest})" if rest else ""))


@app.command()
def evaluate(
    model: ModelDir,
    folder: Annotated[Path, typer.Argument(help="Folder with one folder of pictures per class; its test/, if any.")],
    device: Device = "auto",
    skip_bad: SkipBad = False,
    json: JsonFlag = False,
) -> None:
    """Say how many pictures of a folder a model names rightly, in all and of each class."""
    from efcil.product import commands

    found = commands.evaluate(model, folder, device=device, skip_bad=skip_bad)
    if json:
        print(commands.to_json(found))
        return
    width = max(map(len, found["recall"]))
    for name, recall in found["recall"].items():
        print(f"{name:{width}}  {recall:6.2f} %")
    print(f"{found['accuracy']:.2f} % of {found['images']} pictures are named rightly")


@app.command()
def forget(
    model: ModelDir, classes: Annotated[list[str], typer.Argument(help="Classes to forget.")], device: Device = "auto"
) -> None:
    """Drop classes and solve again; the backbone's weights, which have seen them, stay."""
    from efcil.product import commands

    changed = commands.change(model, device, "forget", classes)
    print(f"forgotten: {', '.join(classes)}; {len(changed.classes_)} classes are left")


@app.command()
def undo(model: ModelDir, device: Device = "auto") -> None:
    """Go back to the model before its last teaching."""
    from efcil.product import commands

    changed = commands.change(model, device, "undo")
    print(f"undone; {model} knows {len(changed.classes_)} classes now")


@app.command()
def rename(
    model: ModelDir,
    old: Annotated[str, typer.Argument(help="Class.")],
    new: Annotated[str, typer.Argument(help="Its new name.")],
    device: Device = "auto",
) -> None:
    """Give a class another name."""
    from efcil.product import commands

    commands.change(model, device, "rename", {old: new})
    print(f"{old} is called {new} now")


@app.command()
def merge(
    model: ModelDir,
    other: Annotated[Path, typer.Argument(help="Model whose classes are added; it stays as it is.")],
    device: Device = "auto",
) -> None:
    """Add what another model knows; both must have the same frozen backbone."""
    from efcil.product import commands

    changed = commands.change(model, device, "merge", commands.load_model(other, device))
    print(f"merged; {model} knows {len(changed.classes_)} classes now")


@app.command()
def summary(model: ModelDir, json: JsonFlag = False) -> None:
    """Say what a model is and knows."""
    from efcil.product import commands

    found = commands.load_model(model, "cpu").summary()
    print(commands.to_json(found) if json else commands.summary_text(found))


@app.command()
def export(
    model: ModelDir, onnx: Annotated[Path, typer.Option("--onnx", help="File to write; needs the extra `onnx`.")]
) -> None:
    """Write a model as one ONNX file: uint8 pictures in, probabilities out, class names in its metadata."""
    from efcil.product import commands
    from efcil.product.export import export_onnx

    path = export_onnx(commands.load_model(model, "cpu"), onnx)
    print(f"written: {path} ({path.stat().st_size / 1e6:.1f} MB)")


@app.command()
def serve(
    model: Annotated[Path, typer.Argument(help="Model directory.")],
    host: Annotated[str, typer.Option(help="Address to listen on; the default is this machine's own.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(envvar="EFCIL_TOKEN", help="Token for everything that writes; one is made and shown if missing."),
    ] = None,
    max_mib: Annotated[int, typer.Option(min=1, help="MiB of a request.")] = 64,
    max_unpacked_mib: Annotated[int, typer.Option(min=1, help="MiB of all that an uploaded zip unpacks to.")] = 256,
    max_megapixels: Annotated[int, typer.Option(min=1, help="Million pixels of a picture.")] = 40,
    max_predict_files: Annotated[int, typer.Option(min=1, help="Pictures of a request to /predict.")] = 64,
    max_teach_files: Annotated[int, typer.Option(min=1, help="Pictures of a request to /teach.")] = 1000,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate (PEM) to answer with TLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key (PEM) of the certificate.")] = None,
    device: Device = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of answers; all cores by default.")] = None,
    teach_threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of a teaching; half of the cores by default.")
    ] = None,
) -> None:
    """Serve a model over HTTP: predictions, teaching and a page to do both with. Needs the extra `serve`."""
    from efcil.serve.command import serve as run_service
    from efcil.serve.limits import MIB, Limits

    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("--tls-cert and --tls-key belong together: give both or none")
    run_service(
        model,
        host=host,
        port=port,
        token=token,
        limits=Limits(
            bytes=max_mib * MIB,
            unpacked=max_unpacked_mib * MIB,
            pixels=max_megapixels * 1_000_000,
            predict_files=max_predict_files,
            teach_files=max_teach_files,
        ),
        device=device,
        threads=threads,
        teach_threads=teach_threads,
        tls=(tls_cert, tls_key) if tls_cert and tls_key else None,
    )


@app.command()
def doctor() -> None:
    """Say what this machine can do and what is missing."""
    from efcil.cli.doctor import examine

    for line in examine():
        print(line)


@data_app.command("list")
def data_list() -> None:
    """List the data sets: what each is, its size, its license and where to get it."""
    from efcil.data import DATASETS

    for source in DATASETS.values():
        print(f"{source.name:14} {source.description}; {source.size}")
        print(f"{'':14} license: {source.license}; get it: {source.url}")


@data_app.command("fetch")
def data_fetch(
    name: Annotated[str, typer.Argument(help="Data set.")],
    data: Annotated[Path, typer.Option("--data", help="Directory to put it into.")] = Path("data"),
    quiet: QuietFlag = False,
) -> None:
    """Download a data set from its official address; an interrupted download goes on where it stopped."""
    from efcil import data as sources

    source = sources.find(name)
    if not source.fetchable:
        raise ConfigError(f"{name} is not downloaded: get it by {source.url}")
    from efcil.data.fetch import fetch
    from efcil.experiment.reporters import choose_reporter

    reporter = choose_reporter(quiet)
    try:
        remote = sources.remote(name)
        place = fetch(remote, data, progress=lambda done, total: reporter.progress(f"downloading {name}", done, total))
    finally:
        reporter.close()
    print(f"{name} is in {place}; use it with --data {data}")


@data_app.command("verify")
def data_verify(
    name: Annotated[str, typer.Argument(help="Data set.")],
    place: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="The same as --data.")] = None,
    data: DataDir = None,
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
    skip_bad: SkipBad = False,
    quiet: QuietFlag = False,
) -> None:
    """Decode every image, count them in each class and part, and compare with the official counts."""
    from efcil import data as sources
    from efcil.config import build, parse_overrides
    from efcil.data.verify import verify
    from efcil.errors import DataError
    from efcil.experiment.reporters import choose_reporter

    if place is not None and data is not None:
        raise ConfigError(f"the directory is given twice, {place} and --data {data}: give it once")
    given = {key.removeprefix("data."): value for key, value in parse_overrides(overrides).items()}
    options = build(sources.find(name).options, given | ({"skip_bad": True} if skip_bad else {}), name)
    reporter = choose_reporter(quiet)
    try:
        found = verify(name, data or place, options, lambda *count: reporter.progress(f"reading {name}", *count))
    finally:
        reporter.close()
    for note in found.notes:
        print(f"note: {note}")
    for problem in found.problems:
        print(f"problem: {problem}")
    if found.problems:
        count = f"{len(found.problems)} problem{'s' if len(found.problems) > 1 else ''}"
        raise DataError(f"{name} in {data or place}: {count}, listed above; mend or replace these files")
    print(found.summary)


def main() -> None:
    """Run the command; an error is one line on standard error and a non-zero exit."""
    try:
        app()
    except EfcilError as error:
        if str(error):
            print(f"efcil: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
