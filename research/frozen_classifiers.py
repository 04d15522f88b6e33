"""The tables of docs/classifiers.md: classifiers of frozen features on photo sets, by images a class.

    python research/frozen_classifiers.py extract SET.npz DIR ...   features of folders of class folders, one set
    python research/frozen_classifiers.py measure SET.npz ...   measure, and store in results/frozen-features.jsonl
    python research/frozen_classifiers.py                       write the tables in docs/classifiers.md
    python research/frozen_classifiers.py --check               exit 1 when the page is not what the results give

SET.npz holds the features of a set, computed once: `features` (n, dim), `labels` (n,), in random order within each
class. The first third of a class, at most 50 images, is for testing; a draw of the rest is learned. What is already
stored is not measured again. `measure --validation` tests on the images that a draw leaves over and touches no test
image: options are chosen by it, and its numbers are kept apart.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from efcil.classifiers import CLASSIFIERS
from efcil.core.class_stats import ClassStats
from efcil.core.gram_storage import GRAMS, MEANS, SHARED
from efcil.data.cache import SUFFIXES, decode_to_memory
from efcil.files import atomic_write_text, read_json_lines, write_json_lines
from efcil.product import IncrementalClassifier

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "classifiers.md"
STORED = ROOT / "results" / "frozen-features.jsonl"
UNEVEN = 0
"""In the place of a number of images: 2 to 80 of each class, log-uniform."""
SHOTS = (1, 2, 5, 20, 80, UNEVEN)
STORAGE = {"mean": MEANS, "shared": SHARED, "gram": GRAMS}
TITLES = {
    "ncm": "nearest mean",
    "slda": "SLDA",
    "ridge-gcv": "ridge, GCV",
    "ranpac": "RanPAC, 2,000",
    "gaussian": "Gaussians",
    "mahalanobis": "FeCAM",
    "logistic": "logistic regression, all features stored",
}
OPTIONS: dict[str, dict[str, Any]] = {  # where the defaults are not for features of a pretrained backbone
    "mahalanobis": {"power": 0.5, "shrink_diagonal": 1.0, "shrink_off_diagonal": 1.0, "shrink_times": 1},
}
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


class FeatureSet:
    """Features of a photo set, split into training images and test images."""

    def __init__(self, path: Path):
        with np.load(path) as found:
            self.features, self.labels = torch.from_numpy(found["features"]).float(), found["labels"]
        self.name = path.stem
        rows = [np.flatnonzero(self.labels == c) for c in np.unique(self.labels)]
        held = [min(50, len(own) // 3) for own in rows]
        self.test = np.concatenate([own[:first] for own, first in zip(rows, held, strict=True)])
        self.pools = [own[first:] for own, first in zip(rows, held, strict=True)]

    def draw(self, shots: int, draw: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows to learn, `shots` of each class or nine tenths of its training images, and those left over."""
        learned, left = [], []
        for label, pool in enumerate(self.pools):
            source = np.random.default_rng([draw, label])
            order = source.permutation(pool)
            wanted = shots if shots != UNEVEN else round(float(np.exp(source.uniform(np.log(2), np.log(80)))))
            first = min(wanted, len(pool) * 9 // 10)
            learned.append(order[:first])
            left.append(order[first:])
        return np.concatenate(learned), np.concatenate(left)


def scores(head: str, features: Tensor, labels: Tensor, test: Tensor) -> np.ndarray:
    """Learn features with a classifier and score others, (n, classes)."""
    if head == "logistic":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model = LogisticRegression(max_iter=1000).fit(features.numpy(), labels.numpy())
        found: np.ndarray = model.predict_log_proba(test.numpy())
        return found
    classifier = CLASSIFIERS[head](**OPTIONS.get(head, {}))
    stats = [
        ClassStats.from_features(features if behind is None else behind(features, ()), labels, STORAGE[needs])
        for behind, needs in zip(classifier.feature_maps, classifier.track_needs, strict=True)
    ]
    classifier.fit(*stats)
    return classifier.logits(test).numpy()


def measure(
    paths: Sequence[Path], heads: Sequence[str], draws: Sequence[int], validation: bool, many: Sequence[int]
) -> None:
    """Measure what is not stored yet, draw after draw, and store each."""
    sets = [FeatureSet(path) for path in paths]
    for draw in draws:
        for photos in sets:
            for shots in many:
                for head in heads:
                    _measure_one(photos, head, shots, draw, "validation" if validation else "test")


def _measure_one(photos: FeatureSet, head: str, shots: int, draw: int, part: str) -> None:
    stored = read_json_lines(STORED) if STORED.exists() else []
    key = {"set": photos.name, "part": part, "shots": shots, "head": head}
    line = next((line for line in stored if key.items() <= line.items()), None)
    if line is None:
        line = {**key, "classes": len(photos.pools), "draws": [], "accuracy": [], "seconds": []}
        stored.append(line)
    if draw in line["draws"]:
        return
    learned, left = photos.draw(shots, draw)
    test = photos.test if part == "test" else left
    start = time.perf_counter()
    found = scores(head, photos.features[learned], torch.from_numpy(photos.labels[learned]), photos.features[test])
    hits = found.argmax(1) == photos.labels[test]
    mean = np.mean([hits[photos.labels[test] == c].mean() for c in np.unique(photos.labels[test])])
    line["images"] = len(learned)
    line["draws"].append(draw)
    line["accuracy"].append(round(100 * float(mean), 2))
    line["seconds"].append(round(time.perf_counter() - start, 2))
    stored.sort(key=lambda own: (own["part"], own["set"], SHOTS.index(own["shots"]), list(TITLES).index(own["head"])))
    write_json_lines(STORED, stored)
    print(photos.name, part, shots, head, draw, line["accuracy"][-1], line["seconds"][-1], flush=True)


# --- features ---------------------------------------------------------------------------------------------------------


def extract(target: Path, folders: Sequence[Path], classes: int | None, largest: bool, most: int) -> None:
    """Compute the features of class folders; the parts of a set, as train/ and test/, are put together.

    Of more classes than `classes` those with the most images are taken, or ones drawn at random; of each class at most
    `most` images, drawn at random. Unreadable files are named and left out.
    """
    files: dict[str, list[Path]] = {}
    for folder in folders:
        for home in sorted(place for place in folder.iterdir() if place.is_dir()):
            files.setdefault(home.name, []).extend(sorted(f for f in home.iterdir() if f.suffix.lower() in SUFFIXES))
    if classes is not None:
        names = sorted(files, key=lambda name: -len(files[name])) if largest else sorted(files)
        order = range(len(names)) if largest else np.random.default_rng(0).permutation(len(names))
        files = {names[place]: files[names[place]] for place in sorted(order[:classes])}
    model = IncrementalClassifier(progress=False, device="cpu")
    features, labels = [], []
    for label, own in enumerate(files.values()):
        chosen = [str(own[place]) for place in np.random.default_rng([0, label]).permutation(len(own))[:most]]
        images, bad = decode_to_memory(Path(), chosen, size=model.preprocessing)
        for problem in bad.values():
            print(problem)
        images = images[[row for row in range(len(images)) if row not in bad]]
        features += [model.embed(images[begin : begin + 16]) for begin in range(0, len(images), 16)]
        labels += [label] * len(images)
    np.savez(target, features=np.concatenate(features), labels=np.array(labels))
    print(f"{target}: {len(labels):,} images of {len(files)} classes", flush=True)


# --- the page ---------------------------------------------------------------------------------------------------------


def tables(stored: Sequence[dict[str, Any]]) -> str:
    """Write a table for each set: a row for each classifier, a column for each number of images a class."""
    found = []
    for name in sorted({line["set"] for line in stored if line["part"] == "test"}):
        own = [line for line in stored if line["set"] == name and line["part"] == "test"]
        shots = [k for k in SHOTS if any(line["shots"] == k for line in own)]
        images = {line["shots"]: line["images"] for line in own}
        found += ["", f"### {name}: {own[0]['classes']} classes", ""]
        found.append(_row(["classifier", *(f"{k or 'uneven'} ({images[k]:,})" for k in shots)]))
        found.append(_row(["---", *("---:" for _ in shots)]))
        for head, title in TITLES.items():
            cells = [next((line for line in own if (line["head"], line["shots"]) == (head, k)), None) for k in shots]
            if any(cells):
                found.append(_row([title, *map(_cell, cells)]))
    return "\n".join([*found, ""])


def _cell(line: dict[str, Any] | None) -> str:
    if line is None:
        return "-"
    values = line["accuracy"]
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def page(text: str) -> str:
    """Return the page with the tables of the stored results."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{tables(read_json_lines(STORED))}\n{END}{rest.split(END)[1]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    commands = parser.add_subparsers(dest="command")
    measuring = commands.add_parser("measure")
    measuring.add_argument("sets", nargs="+", type=Path)
    measuring.add_argument("--heads", default=",".join(TITLES))
    measuring.add_argument("--draws", type=int, default=5)
    measuring.add_argument("--validation", action="store_true")
    measuring.add_argument("--shots", default=",".join(map(str, SHOTS)))
    extracting = commands.add_parser("extract")
    extracting.add_argument("target", type=Path)
    extracting.add_argument("folders", nargs="+", type=Path)
    extracting.add_argument("--classes", type=int)
    extracting.add_argument("--largest", action="store_true")
    extracting.add_argument("--most", type=int, default=140, help="images of a class")
    options = parser.parse_args(arguments)
    if options.command == "measure":
        shots = [int(one) for one in options.shots.split(",")]
        measure(options.sets, options.heads.split(","), range(options.draws), options.validation, shots)
        return 0
    if options.command == "extract":
        extract(options.target, options.folders, options.classes, options.largest, options.most)
        return 0
    text = PAGE.read_text(encoding="utf-8")
    wanted = page(text)
    if options.check:
        if text != wanted:
            print(f"{PAGE.name} is not what the stored results give; run python {Path(__file__).name}", file=sys.stderr)
        return int(text != wanted)
    atomic_write_text(PAGE, wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
