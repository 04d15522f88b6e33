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
import hashlib
import statistics
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from efcil.classifiers import CLASSIFIERS
from efcil.classifiers.gaussian import Gaussian, GaussianOptions
from efcil.core.class_stats import ClassStats
from efcil.core.feature_maps import FeatureMap
from efcil.core.gaussian import pooled_covariance
from efcil.core.gram_storage import MEANS, SHARED, StorageSpec
from efcil.core.linear_algebra import EPS, cholesky
from efcil.data.cache import SUFFIXES, decode_to_memory
from efcil.files import atomic_write_text, read_json_lines, write_json_lines
from efcil.product import IncrementalClassifier

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "classifiers.md"
STORED = ROOT / "results" / "frozen-features.jsonl"
UNEVEN = 0
"""In the place of a number of images: 2 to 80 of each class, log-uniform."""
SHOTS = (1, 2, 5, 20, 80, UNEVEN)
STORAGE = {"mean": MEANS, "shared": SHARED, "gram": StorageSpec("factors")}  # factors: the same Grams, less work
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
DEFAULT = "slda"
PROMISED = (5, 20, 80)
"""Images per class at which the default is to be about as good as the best."""
COMPARED = (  # with what the default is compared, and by how many points it may be below
    ("the best other classifier", [head for head in TITLES if head not in (DEFAULT, "logistic")], 1),
    ("logistic regression", ["logistic"], 2),
)
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
        self._mapped: dict[FeatureMap | None, Tensor] = {None: self.features}

    def draw(self, shots: int, draw: int, classes: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Rows to learn, `shots` of each class or nine tenths of its training images, and those left over.

        With `classes`, of so many classes drawn at random.
        """
        learned, left = [], []
        for label in sorted(np.random.default_rng([draw]).permutation(len(self.pools))[:classes]):
            source = np.random.default_rng([draw, label])
            order = source.permutation(self.pools[label])
            wanted = shots if shots != UNEVEN else round(float(np.exp(source.uniform(np.log(2), np.log(80)))))
            first = min(wanted, len(order) * 9 // 10)
            learned.append(order[:first])
            left.append(order[first:])
        return np.concatenate(learned), np.concatenate(left)

    def mapped(self, feature_map: FeatureMap | None) -> Tensor:
        """Return the mapped features of all images, which are computed once."""
        if feature_map not in self._mapped:
            assert feature_map is not None
            self._mapped[feature_map] = feature_map(self.features, ())
        return self._mapped[feature_map]


def scores(photos: FeatureSet, head: str, learned: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Learn images with a classifier and score others, (n, classes)."""
    labels = torch.from_numpy(photos.labels[learned])
    features, points = photos.features[learned], photos.features[test]
    if head == "logistic":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model = LogisticRegression(max_iter=1000).fit(features.numpy(), labels.numpy())
        found: np.ndarray = model.predict_log_proba(points.numpy())
        return found
    classifier = CLASSIFIERS[head](**OPTIONS.get(head, {}))
    if isinstance(classifier, Gaussian):
        return gaussian_scores(classifier.options, features, labels, points).numpy()
    maps = classifier.feature_maps
    classifier.fit(
        *(
            ClassStats.from_features(photos.mapped(behind)[learned], labels, STORAGE[needs])
            for behind, needs in zip(maps, classifier.track_needs, strict=True)
        )
    )
    if len(maps) == 1:
        return classifier.mapped_logits(photos.mapped(maps[0])[test]).numpy()
    return classifier.logits(points).numpy()


def gaussian_scores(options: GaussianOptions, features: Tensor, labels: Tensor, points: Tensor) -> Tensor:
    """Return the logits of the classifier `gaussian`, without a matrix of dim x dim for each class.

    The covariance of a class is B + U'U with B the same for all classes and a row of U for each image of the class, so
    its inverse and determinant follow from those of B and of I + U B^-1 U' (Woodbury).
    """
    stats = ClassStats.from_features(features, labels, SHARED)
    within = pooled_covariance(stats)
    variance, moment = float(within.trace()), float(stats.gram_sum().trace() / stats.count.sum())
    factor = torch.eye(stats.dim, dtype=torch.float64)
    share = 0.0
    if variance > stats.dim * EPS * moment:  # else a single image of each class
        share = 1 - options.gaussian_shared
        factor = cholesky(
            options.gaussian_shared * within + options.gaussian_ridge * variance / stats.dim * factor, "B", "add images"
        )

    def white(rows: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(factor, rows.double().T, upper=False).T

    middle = stats.mean.mean(0)
    images, tested, centers = (white(rows - middle) for rows in (features, points, stats.mean))
    squares = torch.cdist(tested, centers).square()
    found = []
    for place, (label, count) in enumerate(zip(stats.classes, stats.count, strict=True)):
        spread = (images[labels == label] - centers[place]) * (share / count).sqrt()
        inner = torch.linalg.cholesky(torch.eye(len(spread), dtype=torch.float64) + spread @ spread.T)
        along = torch.linalg.solve_triangular(
            inner, spread @ tested.T - (spread @ centers[place])[:, None], upper=False
        )
        found.append((along.square().sum(0) - squares[:, place]) / 2 - inner.diagonal().log().sum())
    return torch.stack(found, 1) - factor.diagonal().log().sum()


def measure(
    paths: Sequence[Path],
    heads: Sequence[str],
    draws: Sequence[int],
    validation: bool,
    many: Sequence[int],
    classes: int | None = None,
) -> None:
    """Measure what is not stored yet, set after set, and store each draw."""
    part = "validation" if validation else "test"
    for path in paths:
        photos = FeatureSet(path)
        for draw in draws:
            for shots in many:
                _measure_draw(photos, heads, shots, draw, part, classes)


def _measure_draw(
    photos: FeatureSet, heads: Sequence[str], shots: int, draw: int, part: str, classes: int | None
) -> None:
    stored = read_json_lines(STORED) if STORED.exists() else []
    learned, left = photos.draw(shots, draw, classes)
    known = np.unique(photos.labels[learned])
    test = photos.test[np.isin(photos.labels[photos.test], known)] if part == "test" else left
    answers = photos.labels[test]
    for head in heads:
        key = {"set": photos.name, "part": part, "shots": shots, "head": head, "classes": len(known)}
        line = next((line for line in stored if key.items() <= line.items()), None)
        if line is None:
            line = {**key, "draws": [], "accuracy": [], "seconds": []}
            stored.append(line)
        if draw in line["draws"]:
            continue
        start = time.perf_counter()
        hits = known[scores(photos, head, learned, test).argmax(1)] == answers
        mean = np.mean([hits[answers == c].mean() for c in np.unique(answers)])
        line["images"] = len(learned)
        line["draws"].append(draw)
        line["accuracy"].append(round(100 * float(mean), 2))
        line["seconds"].append(round(time.perf_counter() - start, 2))
        print(photos.name, len(known), part, shots, head, draw, line["accuracy"][-1], line["seconds"][-1], flush=True)
    stored.sort(key=_place)
    write_json_lines(STORED, stored)


def _place(line: dict[str, Any]) -> tuple[Any, ...]:
    of_set = line["part"], line["set"], -line["classes"]
    return *of_set, SHOTS.index(line["shots"]), list(TITLES).index(line["head"])


# --- features ---------------------------------------------------------------------------------------------------------


def extract(target: Path, folders: Sequence[Path], classes: int | None, largest: bool, most: int) -> None:
    """Compute the features of class folders; the parts of a set, as train/ and test/, are put together.

    Of more classes than `classes` those with the most images are taken, or ones drawn at random; of each class at most
    `most` images, drawn at random. Unreadable files are named and left out, and so are files with the same content in
    several classes: labels that contradict each other, or a placeholder for images that were removed.
    """
    files: dict[str, list[Path]] = {}
    for folder in folders:
        for home in sorted(place for place in folder.iterdir() if place.is_dir()):
            files.setdefault(home.name, []).extend(sorted(f for f in home.iterdir() if f.suffix.lower() in SUFFIXES))
    if classes is not None:
        names = sorted(files, key=lambda name: -len(files[name])) if largest else sorted(files)
        order = range(len(names)) if largest else np.random.default_rng(0).permutation(len(names))
        files = {names[place]: files[names[place]] for place in sorted(order[:classes])}
    chosen_files = [
        [own[place] for place in np.random.default_rng([0, label]).permutation(len(own))[:most]]
        for label, own in enumerate(files.values())
    ]
    classes_of: dict[bytes, set[int]] = {}
    for label, own in enumerate(chosen_files):
        for file in own:
            classes_of.setdefault(_digest(file), set()).add(label)
    model = IncrementalClassifier(progress=False, device="cpu")
    features, labels = [], []
    for label, own in enumerate(chosen_files):
        chosen = [str(file) for file in own if len(classes_of[_digest(file)]) == 1]
        if len(chosen) < len(own):
            print(f"{own[0].parent.name}: {len(own) - len(chosen)} files that other classes have too")
        images, bad = decode_to_memory(Path(), chosen, size=model.preprocessing)
        for problem in bad.values():
            print(problem)
        images = images[[row for row in range(len(images)) if row not in bad]]
        features += [model.embed(images[begin : begin + 16]) for begin in range(0, len(images), 16)]
        labels += [label] * len(images)
    np.savez(target, features=np.concatenate(features), labels=np.array(labels))
    print(f"{target}: {len(labels):,} images of {len(files)} classes", flush=True)


def _digest(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes()).digest()


# --- the page ---------------------------------------------------------------------------------------------------------


Lines = Sequence[dict[str, Any]]


def tables(stored: Lines) -> str:
    """Write the tables of the differences to the default, and one of accuracies for each set."""
    lines = [line for line in stored if line["part"] == "test"]
    names = sorted({line["set"] for line in lines})
    every = {name: max(line["classes"] for line in lines if line["set"] == name) for name in names}
    whole = [line for line in lines if line["classes"] == every[line["set"]]]
    found = ["", *_goal(whole), *_differences(whole)]
    for few in sorted({line["classes"] for line in lines if line not in whole}):
        found += ["", f"### {few} classes of each set", ""]
        found += _differences([line for line in lines if line["classes"] == few])
    for name in names:
        own = [line for line in whole if line["set"] == name]
        shots = _shots(own)
        images = {line["shots"]: line["images"] for line in own}
        found += ["", f"### {name}: {every[name]} classes", ""]
        found.append(_row(["classifier", *(f"{k or 'uneven'} ({images[k]:,})" for k in shots)]))
        found.append(_row(["---", *("---:" for _ in shots)]))
        for head, title in TITLES.items():
            cells = [_line(own, name, head, k) for k in shots]
            if any(cells):
                found.append(_row([title, *map(_cell, cells)]))
    return "\n".join([*found, ""])


def _shots(lines: Lines) -> list[int]:
    return [k for k in SHOTS if any(line["shots"] == k for line in lines)]


def _line(lines: Lines, name: str, head: str, shots: int) -> dict[str, Any] | None:
    key = {"set": name, "head": head, "shots": shots}
    return next((line for line in lines if key.items() <= line.items()), None)


class Difference(NamedTuple):
    """Accuracy of the default minus that of another classifier, on the same draws."""

    head: str
    mean: float
    error: float  # standard error over draws

    @classmethod
    def of(cls, lines: Lines, name: str, shots: int, heads: Iterable[str]) -> Difference | None:
        """Compare with the best of the classifiers; None where one of the draws is missing."""
        default, found = _line(lines, name, DEFAULT, shots), []
        for head in heads:
            other = _line(lines, name, head, shots)
            if default is None or other is None or other["draws"] != default["draws"] or len(default["draws"]) < 2:
                return None
            apart = [one - two for one, two in zip(default["accuracy"], other["accuracy"], strict=True)]
            found.append(cls(head, statistics.fmean(apart), statistics.stdev(apart) / len(apart) ** 0.5))
        return min(found, key=lambda one: one.mean)

    def reaches(self, most: float) -> bool:
        """Whether the default is at most so many points, or the standard error, below."""
        return self.mean >= -max(most, self.error)


def _differences(lines: Lines) -> list[str]:
    """Write a table of the default minus the best other classifier, and minus logistic regression; bold: too low."""
    shots = _shots(lines)
    found = [_row(["set", "`slda` minus", *(str(k or "uneven") for k in shots)])]
    found.append(_row(["---", "---", *("---:" for _ in shots)]))
    for title, heads, most in COMPARED:
        for name in sorted({line["set"] for line in lines}):
            cells = []
            for k in shots:
                apart = Difference.of(lines, name, k, heads)
                if apart is None:
                    cells.append("-")
                    continue
                text = f"{apart.mean:+.1f} ± {apart.error:.1f}"
                text = text if k not in PROMISED or apart.reaches(most) else f"**{text}**"
                cells.append(text if len(heads) == 1 else f"{text} ({TITLES[apart.head].partition(',')[0]})")
            found.append(_row([name, title, *cells]))
    return found


def _goal(lines: Lines) -> list[str]:
    """Say on how many sets and numbers of images the default is as close as it should be, and where it is not."""
    parts = []
    for title, heads, most in COMPARED:
        reached, missed = 0, []
        for name in sorted({line["set"] for line in lines}):
            for k in PROMISED:
                apart = Difference.of(lines, name, k, heads)
                if apart is not None and apart.reaches(most):
                    reached += 1
                elif apart is not None:
                    beside = f", {TITLES[apart.head].partition(',')[0]}" if len(heads) > 1 else ""
                    missed.append(f"{name} at {k} ({apart.mean:+.2f} ± {apart.error:.2f}{beside})")
        where = f"; not on {', '.join(missed)}" if missed else ""
        unit = "point" if most == 1 else "points"
        parts.append(f"within {most} {unit} of {title} in {reached} of {reached + len(missed)} cases{where}")
    return [
        f"At {', '.join(map(str, PROMISED[:-1]))} and {PROMISED[-1]} images per class, `slda` is {'; '.join(parts)}.",
        "",
    ]


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
    measuring.add_argument("--classes", type=int, help="of so many classes, drawn anew for each draw; default: all")
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
        heads, draws = options.heads.split(","), range(options.draws)
        measure(options.sets, heads, draws, options.validation, shots, options.classes)
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
