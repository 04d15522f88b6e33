"""The default model on photographs that it has not been chosen with: rounds of pets and of flowers.

    python research/photo_rounds.py features PETS FLOWERS CACHE     features of all photos, once, through the model
    python research/photo_rounds.py measure CACHE                   accuracy, calibration, "none of these"; stored
    python research/photo_rounds.py others CACHE SET.npz ...        the same of sets by frozen_classifiers.py extract
    python research/photo_rounds.py teach PETS                      time, memory and size of `efcil teach`; stored
    python research/photo_rounds.py page                            the table in docs/classifiers.md

PETS is the folder of images of `shlim2210/oxford-pets-datasets` (Abyssinian_1.jpg, ...), FLOWERS that of
`Oldpel/flower_photos` with train/ and val/. Results go to results/photo-rounds.jsonl, one line for each measurement,
values draw by draw. Photos for testing are the same in all draws: 50 of a pet, 60 of a flower's val part, a third of a
class of the other sets; training photos are drawn from the rest. "None of these" is asked of similar classes that were
never taught, and of photos of another set that have nothing to do with those that were.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from efcil.errors import DataError
from efcil.files import atomic_write_text, read_json_lines, write_json_lines
from efcil.product import IncrementalClassifier
from efcil.product.inputs import read_images

ROOT = Path(__file__).resolve().parent.parent
STORED, PAGE = ROOT / "results" / "photo-rounds.jsonl", ROOT / "docs" / "classifiers.md"
BEGIN, END = "<!-- rounds: begin -->", "<!-- rounds: end -->"
PETS = (
    ("Abyssinian", "beagle", "Bombay", "pug"),
    ("Persian", "samoyed", "Siamese"),
    ("boxer", "Sphynx", "yorkshire_terrier"),
)
FLOWERS = (("daisy", "dandelion"), ("roses", "sunflowers"), ("tulips",))
DRAWS = 5
SHOTS = 20  # photos a class of the other sets
STRANGE = 0.05  # share of known images that may be turned away


class Photos:
    """Features of photos by class, for training and for testing."""

    def __init__(self, path: Path):
        with np.load(path) as found:
            self.features, self.labels = torch.from_numpy(found["features"]).float(), found["labels"].astype(str)
            if "test" in found:
                self.test = found["test"]
            else:  # within a class in random order
                self.test = np.zeros(len(self.labels), bool)
                for kind in np.unique(self.labels):
                    own = np.flatnonzero(self.labels == kind)
                    self.test[own[: len(own) // 3]] = True

    def rows(self, kind: str, test: bool) -> np.ndarray:
        """Rows of a class."""
        return np.flatnonzero((self.labels == kind) & (self.test == test))


def extract(pets: Path, flowers: Path, cache: Path) -> None:
    """Compute the features of all photos through the default model."""
    model = IncrementalClassifier(progress=False, device="cpu")
    cache.mkdir(parents=True, exist_ok=True)
    by_breed: dict[str, list[Path]] = {}
    for file in sorted(pets.glob("*.jpg")):
        by_breed.setdefault(file.stem.rpartition("_")[0], []).append(file)
    known = {kind for kinds in PETS for kind in kinds}
    chosen = []
    for kind, files in by_breed.items():
        order = [files[i] for i in np.random.default_rng(0).permutation(len(files))]
        chosen += [(file, kind, place < 50) for place, file in enumerate(order[: 200 if kind in known else 30])]
    _features(model, chosen, cache / "pets.npz")
    chosen = []
    for kinds in FLOWERS:
        for kind in kinds:
            for part, most in (("val", 60), ("train", 300)):
                files = sorted((flowers / part / kind).glob("*.jpg"))
                order = [files[i] for i in np.random.default_rng(0).permutation(len(files))][:most]
                chosen += [(file, kind, part == "val") for file in order]
    _features(model, chosen, cache / "flowers.npz")


def _features(model: IncrementalClassifier, chosen: list[tuple[Path, str, bool]], target: Path) -> None:
    found: list[np.ndarray] = []
    kept: list[tuple[Path, str, bool]] = []
    for begin in range(0, len(chosen), 16):
        part = chosen[begin : begin + 16]
        try:
            features = [model.embed([file for file, _, _ in part])]
        except DataError as error:  # the set has files that are no photos
            print(error)
            part = [one for one in part if _is_readable(model, one[0])]
            features = [model.embed([file for file, _, _ in part])]
        found += features
        kept += part
    labels, test = [kind for _, kind, _ in kept], [test for _, _, test in kept]
    np.savez(target, features=np.concatenate(found), labels=np.array(labels), test=np.array(test))
    print(target, len(kept), flush=True)


def _is_readable(model: IncrementalClassifier, file: Path) -> bool:
    try:
        read_images([file], model.preprocessing)
    except DataError:
        return False
    return True


def teach(model: IncrementalClassifier, features: torch.Tensor, names: list[str]) -> None:
    """Teach a model features that were computed before, as `learn` does after it has read the pictures."""
    model._snapshot = model._updated(features, names, None, None, lambda progress: None)


def measure(cache: Path) -> None:
    """Measure rounds of both sets."""
    for name, far, rounds, shots in (
        ("flowers", "pets", FLOWERS, 80),
        ("pets", "flowers", PETS, 80),
        ("pets", "flowers", PETS, 30),
    ):
        _measure_set(name, Photos(cache / f"{name}.npz"), _tested(Photos(cache / f"{far}.npz")), rounds, shots)


def others(cache: Path, sets: list[Path]) -> None:
    """Measure three rounds of three quarters of the classes of other sets; the other classes are never taught."""
    far = {name: _tested(Photos(cache / f"{name}.npz")) for name in ("pets", "flowers")}
    for path in sets:
        photos = Photos(path)
        kinds = np.random.default_rng(0).permutation(np.unique(photos.labels))
        known = kinds[: len(kinds) * 3 // 4]
        rounds = tuple(tuple(part.tolist()) for part in np.array_split(known, 3))
        _measure_set(path.stem, photos, far["pets" if "flower" in path.stem else "flowers"], rounds, SHOTS)


def _tested(photos: Photos) -> torch.Tensor:
    return photos.features[np.flatnonzero(photos.test)]


def _measure_set(name: str, photos: Photos, far: torch.Tensor, rounds: tuple[tuple[str, ...], ...], shots: int) -> None:
    found = [_draw(photos, far, rounds, shots, draw) for draw in range(DRAWS)]
    values = {key: [one[key] for one in found] for key in found[0]}
    store({"set": name, "shots": shots, "rounds": [list(kinds) for kinds in rounds]}, values)


def _draw(
    photos: Photos, far: torch.Tensor, rounds: tuple[tuple[str, ...], ...], shots: int, draw: int
) -> dict[str, Any]:
    """Teach round after round; measure after each on all classes so far, and at last everything else."""
    model = IncrementalClassifier(progress=False, device="cpu")
    learned: list[np.ndarray] = []
    accuracy, expected, seen = [], [], list[str]()
    for number, kinds in enumerate(rounds):
        rows = []
        for place, kind in enumerate(kinds):
            pool = photos.rows(kind, test=False)
            rows.append(np.random.default_rng([draw, number, place]).permutation(pool)[:shots])
        learned += rows
        chosen = np.concatenate(rows)
        teach(model, photos.features[chosen], photos.labels[chosen].tolist())
        seen += kinds
        tests = np.concatenate([photos.rows(kind, test=True) for kind in seen])
        sure = model._scored(model._snapshot, photos.features[tests])
        right = model.classes_[sure.argmax(1)] == photos.labels[tests]
        accuracy.append(round(100 * float(right.mean()), 2))
        told = [row["expected"] for row in model.summary()["classes"]]
        expected.append(round(statistics.fmean(told), 2) if None not in told else None)
    others = np.flatnonzero(~np.isin(photos.labels, model.classes_))
    left = np.concatenate([np.setdiff1d(photos.rows(kind, test=False), np.concatenate(learned)) for kind in seen])
    more = np.concatenate([tests, left])  # every photo of the classes that was not learned
    sure = model._scored(model._snapshot, photos.features[more])
    found = {
        "accuracy": accuracy,
        "expected": expected,
        "ece": round(calibration_error(sure, model.classes_, photos.labels[more]), 4),
        "photos_for_ece": len(more),
        "logistic": _logistic(photos, np.concatenate(learned), tests),
    }
    shares = model._p_value(model._snapshot, far)
    known = model._p_value(model._snapshot, photos.features[tests])
    found |= {"auroc_far": _auroc(known, shares), "far_turned_away": round(100 * float((shares < STRANGE).mean()), 2)}
    return found | _strangers(photos, model, rounds, learned, others, tests)


def _logistic(photos: Photos, learned: np.ndarray, tests: np.ndarray) -> float:
    """Logistic regression that keeps the features of all photos."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = LogisticRegression(max_iter=1000).fit(photos.features[learned].numpy(), photos.labels[learned])
    return round(100 * float(fitted.score(photos.features[tests].numpy(), photos.labels[tests])), 2)


def _strangers(
    photos: Photos,
    model: IncrementalClassifier,
    rounds: tuple[tuple[str, ...], ...],
    learned: list[np.ndarray],
    others: np.ndarray,
    tests: np.ndarray,
) -> dict[str, Any]:
    """AUROC of "none of these" on unknown classes: other breeds, or each flower left out in turn."""
    if len(others):
        return _told_apart(model, photos, tests, others)
    found = []
    for left_out, unknown in enumerate(kind for kinds in rounds for kind in kinds):
        other = IncrementalClassifier(progress=False, device="cpu")
        rows = np.concatenate([own for place, own in enumerate(learned) if place != left_out])
        teach(other, photos.features[rows], photos.labels[rows].tolist())
        known = tests[photos.labels[tests] != unknown]
        found.append(_told_apart(other, photos, known, photos.rows(unknown, test=True)))
    return {key: round(statistics.fmean(one[key] for one in found), 4) for key in found[0]}


def _told_apart(model: IncrementalClassifier, photos: Photos, known: np.ndarray, others: np.ndarray) -> dict[str, Any]:
    shares = [model._p_value(model._snapshot, photos.features[rows]) for rows in (known, others)]
    return {
        "auroc": _auroc(*shares),
        "known_turned_away": round(100 * float((shares[0] < STRANGE).mean()), 2),
        "unknown_turned_away": round(100 * float((shares[1] < STRANGE).mean()), 2),
    }


def _auroc(known: np.ndarray, unknown: np.ndarray) -> float:
    truth = np.repeat([1, 0], [len(known), len(unknown)])
    return round(float(roc_auc_score(truth, np.concatenate([known, unknown]))), 4)


def calibration_error(sure: np.ndarray, names: np.ndarray, truth: np.ndarray, bins: int = 10) -> float:
    """Return the expected calibration error: how far confidence and accuracy are apart, in bins of confidence."""
    confidence, right = sure.max(1), names[sure.argmax(1)] == truth
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = [abs(confidence[place == b].mean() - right[place == b].mean()) for b in range(bins) if (place == b).any()]
    weights = [(place == b).mean() for b in range(bins) if (place == b).any()]
    return float(np.dot(weights, gaps))


def command(pets: Path) -> None:
    """Measure `efcil teach` in three rounds of 80 photos a class, as a user starts it."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        seconds, busy, images = [], [], []
        for number, kinds in enumerate(PETS):
            for kind in kinds:
                home = root / f"round{number}" / kind
                home.mkdir(parents=True)
                for file in sorted(pets.glob(f"{kind}_*.jpg"))[:80]:
                    shutil.copy(file, home)
            begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            arguments = [sys.executable, "-m", "efcil", "teach", str(root / "model"), str(root / f"round{number}")]
            subprocess.run([*arguments, "--device", "cpu", "--quiet"], check=True)
            seconds.append(round(time.perf_counter() - begin, 1))
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            busy.append(round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1))
            images.append(80 * len(kinds))
        size = sum(file.stat().st_size for file in (root / "model").rglob("*") if file.is_file())
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    about = {"images": images, "peak_gb": round(peak / 1e9, 2), "model_mb": round(size / 1e6, 1)}
    store({"set": "pets", "shots": "efcil teach"}, {"seconds": seconds, "cpu_seconds": busy} | about)


def store(key: dict[str, Any], values: dict[str, Any]) -> None:
    """Replace the line of a measurement."""
    lines = [line for line in (read_json_lines(STORED) if STORED.exists() else []) if not key.items() <= line.items()]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    words = ["python", "research/photo_rounds.py", sys.argv[1]]
    about = {"command": " ".join(words), "commit": commit.stdout.strip(), "threads": torch.get_num_threads()}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    lines.append(key | values | about | {"machine": machine})
    write_json_lines(STORED, lines)
    print(json.dumps(lines[-1], indent=1))


def page(text: str) -> str:
    """Return the page with the table of the stored results."""
    lines = read_json_lines(STORED)
    measured = [line for line in lines if "accuracy" in line]
    chosen = [line for line in measured if line["set"] in ("pets", "flowers")]
    rest = [line for line in measured if line not in chosen]
    tables = [_table(part) for part in (chosen, rest) if part]
    (command,) = (line for line in lines if "peak_gb" in line)
    words = [f"{images} photos in {s:.0f} s" for images, s in zip(command["images"], command["seconds"], strict=True)]
    busy = ", ".join(f"{s:.0f}" for s in command["cpu_seconds"])
    cost = (
        f"`efcil teach` for pets, one process per round ({command['machine']}): {', '.join(words)}; {busy} s of CPU "
        f"time. Peak memory {command['peak_gb']} GB; the model of ten classes, including earlier states for `undo`, "
        f"{command['model_mb']} MB."
    )
    before, after = text.split(BEGIN)
    inside = "\n\n".join([*tables, cost])
    return f"{before}{BEGIN}\n\n{inside}\n\n{END}{after.split(END)[1]}"


def _table(rounds: list[dict[str, Any]]) -> str:
    heads = [f"{line['set']}, {sum(map(len, line['rounds']))} classes, {line['shots']} per class" for line in rounds]
    rows = [["", *heads], ["---", *["---:"] * len(rounds)]]
    steps = zip(*([_spread(step) for step in zip(*line["accuracy"], strict=True)] for line in rounds), strict=True)
    rows += [[f"accuracy after round {number}", *step] for number, step in enumerate(steps, 1)]
    estimated = [_spread([draw[-1] for draw in line["expected"]]) for line in rounds]
    rows.append(["estimated after the last round", *estimated])
    rows.append(["logistic regression, all features stored", *(_spread(line["logistic"]) for line in rounds)])
    rows.append(["calibration error (ECE, 10 bins)", *(_spread(line["ece"], 3) for line in rounds)])
    for key, digits, words in (
        ("auroc", 3, 'AUROC of "none of these", similar unknown classes'),
        ("auroc_far", 3, 'AUROC of "none of these", photos of another set'),
        ("known_turned_away", 1, "rejected at 5 %: known classes"),
        ("unknown_turned_away", 1, "rejected at 5 %: similar unknown classes"),
        ("far_turned_away", 1, "rejected at 5 %: photos of another set"),
    ):
        rows.append([words, *(_spread(line[key], digits) if key in line else "-" for line in rounds)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _spread(values: Any, digits: int = 1) -> str:
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("features")
    for name in ("pets", "flowers", "cache"):
        one.add_argument(name, type=Path)
    commands.add_parser("measure").add_argument("cache", type=Path)
    other = commands.add_parser("others")
    other.add_argument("cache", type=Path)
    other.add_argument("sets", nargs="+", type=Path)
    commands.add_parser("teach").add_argument("pets", type=Path)
    commands.add_parser("page")
    options = parser.parse_args()
    if options.command == "page":
        atomic_write_text(PAGE, page(PAGE.read_text(encoding="utf-8")))
    elif options.command == "features":
        extract(options.pets, options.flowers, options.cache)
    elif options.command == "measure":
        measure(options.cache)
    elif options.command == "others":
        others(options.cache, options.sets)
    else:
        command(options.pets)


if __name__ == "__main__":
    main()
