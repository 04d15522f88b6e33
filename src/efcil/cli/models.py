"""Commands for a model that keeps learning: from teach and predict to push, pull and serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from efcil.cli.options import (
    LIMITS,
    MACHINE,
    MODELS,
    MOST_SEED,
    MOST_THREADS,
    NEW_MODEL,
    OUTPUT,
    SETTINGS,
    Device,
    JsonFlag,
    ModelDir,
    Overrides,
    QuietFlag,
    SkipBad,
)
from efcil.errors import ConfigError, printable

app = typer.Typer()


@app.command(rich_help_panel=MODELS)
def teach(
    model: ModelDir,
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Image folder with one subfolder per class.", show_default=False),
    ],
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Method; slda by default. One that trains, such as dpcr, starts from scratch without --backbone.",
            rich_help_panel=NEW_MODEL,
        ),
    ] = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Pretrained and frozen: efficientnet-lite0 (default), -lite1, -lite2, timm/NAME; resnet10 or "
            "scratch: trained on your images only.",
            rich_help_panel=NEW_MODEL,
        ),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Channels of a ResNet trained from scratch.",
            rich_help_panel=NEW_MODEL,
        ),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(
            min=8,
            metavar="N",
            help="Image size (pixels); the backbone's own by default.",
            rich_help_panel=NEW_MODEL,
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File of weights for --backbone (safetensors, .pth), pretrained (the published ones) or none.",
            rich_help_panel=NEW_MODEL,
        ),
    ] = None,
    frozen: Annotated[
        bool | None,
        typer.Option(
            "--frozen/--no-frozen",
            metavar="",
            help="Freeze a pretrained backbone (default), or keep training it if the method can.",
            rich_help_panel=NEW_MODEL,
        ),
    ] = None,
    adapt: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN",
            help="Fine-tune the pretrained backbone with a small learning rate: none (default, best in our "
            "measurements), first (update) or always.",
            rich_help_panel=NEW_MODEL,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=MOST_SEED, metavar="N", help="Random seed.", rich_help_panel=NEW_MODEL)
    ] = None,
    val_fraction: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Share of each class held out to measure recall; 0.1 by default.",
            rich_help_panel=NEW_MODEL,
        ),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
    epochs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Epochs of this update.", rich_help_panel=SETTINGS)
    ] = None,
    budget: Annotated[
        float | None, typer.Option(metavar="S", help="Time limit of this update (seconds).", rich_help_panel=SETTINGS)
    ] = None,
    device: Device = "auto",
    skip_bad: SkipBad = False,
    quiet: QuietFlag = False,
) -> None:
    """Teach a model new classes, or update known ones; creates the model if it does not exist."""
    from efcil.config import parse_overrides
    from efcil.product import commands

    chosen = {"method": method, "backbone": backbone, "width": width, "size": size, "weights": weights, "seed": seed}
    given = {**chosen, "frozen": frozen, "adapt": adapt, "val_fraction": val_fraction}
    new_model_options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    new_model_options |= {"options": parse_overrides(overrides)} if overrides else {}
    message = commands.teach(
        model, folder, new_model_options, epochs=epochs, budget=budget, device=device, skip_bad=skip_bad, quiet=quiet
    )
    if not quiet:
        print(message)


@app.command(rich_help_panel=MODELS)
def predict(
    model: ModelDir,
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATHS", help="Images, or folders of images.", show_default=False)
    ],
    top: Annotated[int, typer.Option(min=1, metavar="K", help="Print the K best classes.", rich_help_panel=OUTPUT)] = 1,
    reject_below: Annotated[
        float | None,
        typer.Option(metavar="P", help='Answer "none of these" below this confidence.', rich_help_panel=OUTPUT),
    ] = None,
    reject_strange: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help='Answer "none of these" to images less typical than all but this share of training images; try 0.05.',
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    device: Device = "auto",
    json: JsonFlag = False,
    csv: Annotated[bool, typer.Option("--csv", metavar="", help="Print CSV.", rich_help_panel=OUTPUT)] = False,
) -> None:
    """Classify images."""
    from efcil.product import commands

    answers = commands.predict(model, paths, top=top, device=device, reject=(reject_below, reject_strange))
    if json:
        print(commands.to_json(answers))
    elif csv:
        print(commands.to_csv(answers), end="")
    else:
        for answer in answers:
            rest = ", ".join(f"{t['label']} {100 * t['confidence']:.0f} %" for t in answer["top"][1:])
            best = f"{answer['top'][0]['label']} {100 * answer['confidence']:.0f} %"
            label = best if answer["label"] else f"none of these; else {best}"
            print(f"{printable(answer['file'])}: {label}" + (f" ({rest})" if rest else ""))


@app.command(rich_help_panel=MODELS)
def evaluate(
    model: ModelDir,
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="Image folder with one subfolder per class (its test/, if any).", show_default=False
        ),
    ],
    device: Device = "auto",
    skip_bad: SkipBad = False,
    skip_unknown: Annotated[
        bool, typer.Option("--skip-unknown", metavar="", help="Ignore classes that the model does not know.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a page: confusion matrix, wrong images, accuracy per class.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Report overall and per-class accuracy on an image folder, and misclassified images."""
    from efcil.product import commands

    found = commands.evaluate(model, folder, device=device, skip_bad=skip_bad, skip_unknown=skip_unknown, html=html)
    if json:
        print(commands.to_json(found))
        return
    width = max(map(len, found["recall"]))
    for name, (right, total) in found["counts"].items():
        print(f"{name:{width}}  {right:>4} of {total:<4}  {found['recall'][name]:6.2f} %")
    print(f"accuracy: {found['accuracy']:.2f} % of {found['images']} images")
    for name, answer, count in found["confused"][:10]:
        print(f"{count} of {name} classified as {answer}")
    for one in found["wrong"][:10]:
        print(f"wrong: {printable(one['file'])}: {one['answer']} {100 * one['confidence']:.0f} %")
    if len(found["wrong"]) > 10:
        print(f"{len(found['wrong']) - 10} more wrong ones: --json lists all, --html FILE shows them")
    for name, count in found["skipped"].items():
        print(f"left out: {count} of {name}, which the model does not know")


@app.command(rich_help_panel=MODELS)
def summary(model: ModelDir, json: JsonFlag = False) -> None:
    """Show what a model consists of and which classes it knows."""
    from efcil.product import commands

    found = commands.load_model(model, "cpu").summary()
    print(commands.to_json(found) if json else commands.summary_text(found))


@app.command(rich_help_panel=MODELS)
def forget(
    model: ModelDir,
    classes: Annotated[list[str], typer.Argument(metavar="CLASSES", help="Classes to remove.", show_default=False)],
    for_good: Annotated[
        bool, typer.Option("--for-good", metavar="", help="Delete earlier states: `undo` cannot restore them.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", metavar="", help="Do not ask.")] = False,
    device: Device = "auto",
) -> None:
    """Remove classes and refit the classifier; the backbone's weights stay."""
    import sys

    from efcil.product import commands

    if sys.stdin.isatty() and not yes:
        typer.confirm(f"Remove {', '.join(classes)} from {model}{' for good' if for_good else ''}?", abort=True)
    changed = commands.change(model, device, "forget", classes, for_good=for_good)
    print(f"removed {', '.join(classes)}; {_classes(changed)} left")


@app.command(rich_help_panel=MODELS)
def undo(model: ModelDir, device: Device = "auto") -> None:
    """Restore the model as it was before its last update."""
    from efcil.product import commands

    changed = commands.change(model, device, "undo")
    print(f"undone; {model} knows {_classes(changed)} now")


@app.command(rich_help_panel=MODELS)
def rename(
    model: ModelDir,
    old: Annotated[str, typer.Argument(metavar="OLD", help="Class.", show_default=False)],
    new: Annotated[str, typer.Argument(metavar="NEW", help="New name.", show_default=False)],
    device: Device = "auto",
) -> None:
    """Rename a class."""
    from efcil.product import commands

    commands.change(model, device, "rename", {old: new})
    print(f"renamed {old} to {new}")


@app.command(rich_help_panel=MODELS)
def merge(
    model: ModelDir,
    other: Annotated[
        Path, typer.Argument(metavar="OTHER", help="Model whose classes are added; not changed.", show_default=False)
    ],
    device: Device = "auto",
) -> None:
    """Add the classes of another model with the same frozen backbone."""
    from efcil.product import commands

    changed = commands.change(model, device, "merge", commands.load_model(other, device))
    print(f"merged; {model} knows {_classes(changed)} now")


def _classes(model: Any) -> str:
    count = len(model.classes_)
    return f"{count} class{'es' * (count != 1)}"


@app.command(rich_help_panel=MODELS)
def export(
    model: ModelDir,
    onnx: Annotated[
        Path,
        typer.Option(
            "--onnx",
            metavar="FILE",
            help="ONNX file to write; needs the extra `onnx`.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ],
    int8: Annotated[
        list[Path],
        typer.Option(
            "--int8",
            metavar="PICTURES",
            help="Quantize to int8, calibrated with these images (files or class folders); repeatable.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = [],  # noqa: B006 (typer copies it)
) -> None:
    """Export a model to ONNX: uint8 images in, probabilities out; class names and preprocessing in the metadata."""
    from efcil.product import commands
    from efcil.product.export import export_onnx

    pictures = commands.image_files(int8) if int8 else None
    labels = None if pictures is None else [path.resolve().parent.name for path in pictures]
    print(f"written: {export_onnx(commands.load_model(model, 'cpu'), onnx, pictures, labels)}")


@app.command(rich_help_panel=MODELS)
def push(
    model: ModelDir,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="OWNER/NAME on the Hub.", show_default=False)],
    public: Annotated[
        bool, typer.Option("--public", metavar="", help="Make a new repository public.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Upload a model with a model card to the Hugging Face Hub. Needs the extra `hub`."""
    from efcil.product.hub import push as upload

    print(f"pushed: {upload(model, repo, public=public)}")


@app.command(rich_help_panel=MODELS)
def pull(
    repo: Annotated[str, typer.Argument(metavar="REPO", help="OWNER/NAME on the Hub.", show_default=False)],
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL", help="New model directory; NAME by default.", show_default=False)
    ] = None,
    revision: Annotated[
        str | None, typer.Option(metavar="REV", help="Branch, tag or commit.", rich_help_panel=OUTPUT)
    ] = None,
) -> None:
    """Download a model from the Hugging Face Hub, and check it. Needs the extra `hub`."""
    from efcil.product.hub import pull as download

    directory = model or Path(repo.rpartition("/")[2])
    count = download(repo, directory, revision=revision)
    print(f"pulled: {directory} knows {count} class{'es' * (count != 1)}")


@app.command(rich_help_panel=MODELS)
def serve(
    model: ModelDir,
    host: Annotated[str, typer.Option("--host", metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, metavar="PORT", help="Port to listen on; 0: any free one.")
    ] = 8000,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            envvar="EFCIL_TOKEN",
            metavar="TOKEN",
            help="Token required to change the model; generated and printed if missing.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Host name by which clients may call the service, e.g. that of a proxy."),
    ] = None,
    max_mib: Annotated[
        int, typer.Option(min=1, max=2**14, metavar="N", help="Maximum request size (MiB).", rich_help_panel=LIMITS)
    ] = 64,
    max_unpacked_mib: Annotated[
        int,
        typer.Option(
            min=1, max=2**14, metavar="N", help="Maximum size of an unpacked zip file (MiB).", rich_help_panel=LIMITS
        ),
    ] = 256,
    max_megapixels: Annotated[
        int,
        typer.Option(min=1, max=10_000, metavar="N", help="Maximum image size (megapixels).", rich_help_panel=LIMITS),
    ] = 40,
    max_predict_files: Annotated[
        int,
        typer.Option(
            min=1, max=10_000, metavar="N", help="Maximum images per /predict request.", rich_help_panel=LIMITS
        ),
    ] = 64,
    max_teach_files: Annotated[
        int,
        typer.Option(
            min=1, max=100_000, metavar="N", help="Maximum images per /teach request.", rich_help_panel=LIMITS
        ),
    ] = 1000,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="TLS certificate (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="TLS private key (PEM).")] = None,
    device: Device = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_THREADS,
            metavar="N",
            help="CPU threads for predictions; default: all.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    teach_threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_THREADS,
            metavar="N",
            help="CPU threads for training; default: half.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP with a drag-and-drop web UI. Needs the extra `serve`."""
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
            held=3 * max(max_mib, 64) * MIB,
            unpacked=max_unpacked_mib * MIB,
            pixels=max_megapixels * 1_000_000,
            predict_files=max_predict_files,
            teach_files=max_teach_files,
        ),
        device=device,
        threads=threads,
        teach_threads=teach_threads,
        tls=(tls_cert, tls_key) if tls_cert and tls_key else None,
        allowed_hosts=allowed_host or (),
    )
