"""Options that several commands share, declared once. Panels of the help text are named here, too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXPERIMENTS, MODELS, DATA, TOOLS = "Experiments", "Models", "Data sets", "Look around"  # panels of commands
PROBLEM, SETTINGS, OUTPUT, MACHINE = "Data and tasks", "Settings", "Output", "Machine"  # panels of options
NEW_MODEL, LIMITS = "New model", "Limits"

Method = Annotated[str, typer.Argument(metavar="METHOD", help="Method, see `efcil methods`.", show_default=False)]
Methods = Annotated[
    str,
    typer.Argument(metavar="METHODS", help="Comma-separated methods; a variant is name:key=value.", show_default=False),
]
DataSetName = Annotated[
    str, typer.Argument(metavar="DATASET", help="Data set, see `efcil data list`.", show_default=False)
]
ModelDir = Annotated[Path, typer.Argument(metavar="MODEL", help="Model directory.", show_default=False)]

DataDir = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="Dataset directory.", rich_help_panel=PROBLEM)
]
Tasks = Annotated[
    int | None,
    typer.Option(metavar="N", help="Number of equal tasks; 5 by default.", rich_help_panel=PROBLEM),
]
InitCls = Annotated[
    int | None, typer.Option("--init-cls", metavar="N", help="Classes in the first task.", rich_help_panel=PROBLEM)
]
Increment = Annotated[
    str | None,
    typer.Option(metavar="N", help="Classes per later task: a number, or a list (10,5,5).", rich_help_panel=PROBLEM),
]
Uneven = Annotated[
    bool,
    typer.Option("--allow-uneven", metavar="", help="Allow tasks that differ by one class.", rich_help_panel=PROBLEM),
]
Order = Annotated[
    str,
    typer.Option(
        "--order",
        metavar="ORDER",
        help="Class order: identity, a seed (1993), hard or easy (similar classes in one task, or apart), or a file.",
        rich_help_panel=PROBLEM,
    ),
]
Orders = Annotated[
    str,
    typer.Option(
        "--orders",
        "--order",
        metavar="ORDERS",
        help="Comma-separated class orders, such as 1992,1993 or hard,easy.",
        rich_help_panel=PROBLEM,
    ),
]
MOST_SEED, MOST_THREADS = 2**63 - 1, 4096
Seed = Annotated[
    int,
    typer.Option(
        min=0, max=MOST_SEED, metavar="N", help="Seed of weights, batches and augmentation.", rich_help_panel=PROBLEM
    ),
]
Learner = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Learner of all methods instead of their own, such as pretrained.",
        rich_help_panel=SETTINGS,
    ),
]
Backbone = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Network that computes the features.", rich_help_panel=SETTINGS),
]
Epochs = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Epochs per task instead of the preset's; its learning-rate schedules are scaled.",
        rich_help_panel=SETTINGS,
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Preset values; by default the first of the data set.", rich_help_panel=SETTINGS),
]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set an option, see `efcil options METHOD`; repeatable.",
        show_default=False,
        rich_help_panel=SETTINGS,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Read options from a YAML file, a run's config.yaml or a JSON file of PyCIL.",
        rich_help_panel=SETTINGS,
    ),
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", metavar="", help="Skip unreadable image files.", rich_help_panel=SETTINGS)
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Output directory; by default a new one below runs/.", rich_help_panel=OUTPUT),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", metavar="", help="Resume the run in --out; see also `efcil resume`.", rich_help_panel=OUTPUT
    ),
]
SaveFeatures = Annotated[
    bool,
    typer.Option(
        "--save-features",
        metavar="",
        help="Save the features of every task, for `efcil reevaluate`.",
        rich_help_panel=OUTPUT,
    ),
]
LogTo = Annotated[
    list[str],
    typer.Option(
        "--log",
        metavar="TRACKER",
        help="Also log to tensorboard or wandb; repeatable.",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]
Every = Annotated[
    float,
    typer.Option(
        "--checkpoint-seconds",
        min=0,
        metavar="S",
        help="Seconds between checkpoints within a task.",
        rich_help_panel=OUTPUT,
    ),
]
QuietFlag = Annotated[
    bool, typer.Option("--quiet", metavar="", help="Only print warnings and errors.", rich_help_panel=OUTPUT)
]
JsonFlag = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.", rich_help_panel=OUTPUT)]
JsonLinesFlag = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON Lines.", rich_help_panel=OUTPUT)]
MarkdownFlag = Annotated[
    bool, typer.Option("--markdown", metavar="", help="Print the table as Markdown.", rich_help_panel=OUTPUT)
]
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:1, mps.", rich_help_panel=MACHINE)
]
Precision = Annotated[
    str, typer.Option("--precision", metavar="PRECISION", help="auto, fp32 or bf16.", rich_help_panel=MACHINE)
]
Compile = Annotated[
    bool | None,
    typer.Option(
        metavar="",
        help="Compile backbones, ResNets with custom Triton kernels; default: on GPUs.",
        rich_help_panel=MACHINE,
    ),
]
CudaGraphs = Annotated[
    bool | None,
    typer.Option(
        metavar="", help="Capture the training step in a CUDA graph; default: on GPUs.", rich_help_panel=MACHINE
    ),
]
SyncBN = Annotated[
    bool,
    typer.Option(
        "--sync-bn",
        metavar="",
        help="With torchrun on GPUs: batch norm over the whole batch.",
        rich_help_panel=MACHINE,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MOST_THREADS,
        metavar="N",
        help="CPU threads; results are bit-identical for equal counts.",
        rich_help_panel=MACHINE,
    ),
]
ConcurrentRuns = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Runs trained in parallel; 3 on a GPU by default.", rich_help_panel=MACHINE),
]
