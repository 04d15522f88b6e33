"""A model updated in rounds from the command line, compared with the same protocol in `efcil run`.

    python benchmarks/rounds.py glyphs
    python benchmarks/rounds.py DIR --classes 20 --size 64 --width 32 --seeds 0 1 2 --out FILE

DIR has train/ and test/, each with one folder of images per class; `glyphs` and `digits` are first written as such
folders. For each seed, in separate processes: `efcil teach` five times, each with the next fifth of the classes; `efcil
evaluate`; `efcil run dpcr folder` with the options in the model's model.json; then, for one class of each round, `efcil
forget` on a copy of the model and `efcil evaluate` on the other classes.

Without held-out images (the default here) both perform identical computations. With `--val-fraction 0.1`, the default
of `efcil teach`, a tenth of each class is held out to measure recall.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from efcil.data import digits, glyphs
from efcil.data.dataset import DataSet
from efcil.data.folder import natural_key

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for use as a script

from benchmarks.record import add_options, write_record

Answers = Sequence[tuple[str, list[str]]]

ROUNDS = 5
THREADS = "2"  # equal for both, since rounding depends on the number of threads
# Options of built-in data sets: image size, and image options of their preset.
BUILT_IN: dict[str, tuple[int, list[str]]] = {
    "glyphs": (16, ["augment=glyphs", "batch_size=64", "width=16"]),
    "digits": (16, ["augment=digits", "width=8"]),
}


def efcil(*arguments: object) -> str:
    """Run the command in a separate process and return its output."""
    command = [sys.executable, "-m", "efcil", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": THREADS, "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command[3:])}: exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def write_folders(root: Path, data: DataSet, size: int) -> Path:
    """Write a data set as images: train/CLASS/0001.png and test/CLASS/0001.png."""
    for side, part in (("train", data.train), ("test", data.test)):
        for row, (pixels, label) in enumerate(zip(part.images, part.labels, strict=True)):
            folder = root / side / f"class {data.class_names[label]}"
            folder.mkdir(parents=True, exist_ok=True)
            picture = Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
            picture.resize((size, size)).save(folder / f"{row:05}.png")
    return root


def built_in(name: str, root: Path, classes: int) -> Path:
    """Write a built-in data set as folders."""
    if name == "glyphs":
        made = glyphs.load(classes=classes, size=16, train_per_class=150, test_per_class=50)
        return write_folders(root, made, 16)
    return write_folders(root, digits.load(), BUILT_IN[name][0])


def linked(names: Iterable[str], source: Path, target: Path) -> Path:
    """Create a folder with links to some class folders of another one."""
    target.mkdir(parents=True)
    for name in names:
        (target / name).symlink_to(source / name, target_is_directory=True)
    return target


def names_of(data: Path, classes: int | None) -> list[str]:
    """Return the first class names in the learning order of `efcil run`."""
    names = sorted((folder.name for folder in (data / "train").iterdir() if folder.is_dir()), key=natural_key)
    return names[:classes]


def taught(work: Path, data: Path, names: Sequence[str], new_model_options: Sequence[object]) -> Path:
    """Train a new model in rounds, with options in the first one only."""
    model = work / "model"
    step = len(names) // ROUNDS
    for number in range(ROUNDS):
        lesson = linked(names[number * step : (number + 1) * step], data / "train", work / f"round{number}")
        efcil("teach", model, lesson, *([] if number else new_model_options), "--quiet")
    return model


def evaluated(model: Path, folder: Path) -> dict[str, Any]:
    """Return the result of `efcil evaluate`."""
    found: dict[str, Any] = json.loads(efcil("evaluate", model, folder, "--json"))
    return found


def ran(work: Path, data: Path, model: Path, seed: int) -> tuple[dict[str, Any], list[str]]:
    """Return the summary of `efcil run` with the options of a model, and these options."""
    settings = json.loads((model / "model.json").read_text())["config"]
    values = {"data.short_side": settings["preprocessing"]["size"], **settings["training"], **settings["options"]}
    given = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    flags = [word for setting in given for word in ("--set", setting)]
    efcil("run", "dpcr", "folder", "--data", data, "--tasks", ROUNDS, "--seed", seed, *flags, "--out", work / "run",
          "--quiet")  # fmt: skip
    summary: dict[str, Any] = json.loads((work / "run" / "summary.json").read_text())
    return summary, given


def answered(model: Path, folder: Path) -> list[tuple[str, list[str]]]:
    """Return the class of each image and the classes predicted by `efcil predict`, most likely first."""
    answers = json.loads(efcil("predict", model, folder, "--json", "--top", 10_000))
    return [(Path(one["file"]).parent.name, [guess["label"] for guess in one["top"]]) for one in answers]


def without(model: Path, work: Path, data: Path, names: Sequence[str], name: str, answers: Answers) -> dict[str, Any]:
    """Forget one class in a copy of the model; return the accuracy on the other classes.

    `before` is that of the model, `ruled_out` of the model without predicting the class, `after` of the copy.
    """
    place = work / f"without {name}"
    others = linked([other for other in names if other != name], data / "test", place / "test")
    copied = shutil.copytree(model, place / "model")
    efcil("forget", copied, name, "--for-good")
    kept = [(truth, guesses) for truth, guesses in answers if truth != name]
    struck = [(truth, [guess for guess in guesses if guess != name]) for truth, guesses in kept]
    found = evaluated(copied, others)
    if found["images"] != len(kept):
        raise RuntimeError(f"{found['images']} images were evaluated, but {len(kept)} predicted")
    return {"class": name, "before": _right(kept), "ruled_out": _right(struck), "after": found["accuracy"]}


def _right(answers: Answers) -> float:
    return round(100 * sum(guesses[0] == truth for truth, guesses in answers) / len(answers), 2)


def measure(
    data: Path,
    names: Sequence[str],
    seed: int,
    new_model_options: Sequence[object],
    work: Path,
    forgotten: int = ROUNDS,
) -> dict[str, Any]:
    """Measure one seed: accuracies in percent of the model and the run, and the effect of forgetting on other
    classes."""
    chosen = work / "data"
    for side in ("train", "test"):
        linked(names, data / side, chosen / side)
    model = taught(work, chosen, names, [*new_model_options, "--seed", seed])
    found = evaluated(model, chosen / "test")
    summary, settings = ran(work, chosen, model, seed)
    step = len(names) // ROUNDS
    answers = answered(model, chosen / "test")
    gone = [without(model, work, chosen, names, names[number * step], answers) for number in range(forgotten)]
    return {
        "seed": seed,
        "pictures": found["images"],
        "taught": found["accuracy"],
        "run": summary["A_f"],
        "forgotten": gone,
        "settings": settings,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="glyphs, digits, or a folder with train/ and test/")
    parser.add_argument("--classes", type=int, help="number of classes, a multiple of 5")
    parser.add_argument("--size", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--val-fraction", type=float, default=0.0)
    parser.add_argument("--set", action="append", default=[], help="key=value option of `efcil teach`")
    parser.add_argument("--about", help="description of the data for the record; default: the folder's name")
    add_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        size, settings = BUILT_IN.get(options.data, (64, []))
        data = Path(options.data).resolve()
        if options.data in BUILT_IN:
            data = built_in(options.data, root / "pictures", options.classes or 20)
        names = names_of(data, options.classes)
        if not names or len(names) % ROUNDS:
            parser.error(f"{len(names)} classes do not divide into {ROUNDS} equal rounds; set --classes")
        new_model_options: list[object] = [
            "--method",
            "dpcr",
            "--size",
            options.size or size,
            "--val-fraction",
            options.val_fraction,
        ]
        new_model_options += ["--width", options.width] if options.width else []
        new_model_options += [word for setting in (*settings, *options.set) for word in ("--set", setting)]
        rows = []
        for seed in options.seeds:
            rows.append(measure(data, names, seed, new_model_options, root / f"seed{seed}"))
            print({key: value for key, value in rows[-1].items() if key != "settings"}, flush=True)
    about = options.about or (options.data if options.data in BUILT_IN else data.name)
    rounds = {"data": about, "classes": len(names), "val_fraction": options.val_fraction, "rows": rows}
    write_record(options, __file__, sys.argv[1:], rounds=rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
