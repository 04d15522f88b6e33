"""Frozen, adapted in the first teaching, or in each: accuracy on pictures that are unlike photographs.

Three updates of pretrained EfficientNet-Lite0 at 96 pixels on digits (10 classes) and glyphs (18), with a number of
pictures a class; accuracy on test pictures of all classes after each.

    python benchmarks/adapt.py --out record.json --machine "2 cores of ..."
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np
import torch
from record import add_options, write_record

from efcil import IncrementalClassifier
from efcil.data import digits, glyphs
from efcil.data.dataset import DataSet

SIZE, ROUNDS, TESTED = 96, 3, 20
ADAPT = ("none", "first", "always")


def measure(data: DataSet, adapt: str, pictures: int, seed: int) -> dict[str, Any]:
    """Teach the classes of a set in rounds; return the accuracy in percent after each, and the seconds of all."""
    draw = np.random.default_rng(seed)
    order = draw.permutation(len(data.class_names))
    rows = {c: draw.permutation(np.flatnonzero(data.train.labels == c))[:pictures] for c in order}
    tests = {c: np.flatnonzero(data.test.labels == c)[:TESTED] for c in order}
    model = IncrementalClassifier(size=SIZE, adapt=adapt, seed=seed, progress=False)
    accuracies, seconds, known = [], 0.0, []
    for lesson in np.array_split(order, ROUNDS):
        known += list(lesson)
        chosen = np.concatenate([rows[c] for c in lesson])
        names = [data.class_names[label] for label in data.train.labels[chosen]]
        began = time.process_time()
        model.learn(data.train.images[chosen].transpose(0, 2, 3, 1), names)
        seconds += time.process_time() - began
        asked = np.concatenate([tests[c] for c in known])
        answers = model.predict(data.test.images[asked].transpose(0, 2, 3, 1))
        truth = np.array([data.class_names[label] for label in data.test.labels[asked]])
        accuracies.append(round(100 * float((answers == truth).mean()), 2))
    return {"accuracy": accuracies, "cpu_seconds": round(seconds, 1)}


def main() -> None:
    """Measure and print each, then write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pictures", type=int, nargs="+", default=[10, 40], help="pictures a class")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sets = {"digits": digits.load(), "glyphs": glyphs.load(classes=18, size=32, train_per_class=40)}
    found = []
    for name, data in sets.items():
        for pictures in options.pictures:
            for adapt in ADAPT:
                for seed in options.seeds:
                    row = {"set": name, "pictures": pictures, "adapt": adapt, "seed": seed}
                    found.append(row | measure(data, adapt, pictures, seed))
                    print(found[-1], flush=True)
    write_record(options, __file__, sys.argv[1:], adapted=found)


if __name__ == "__main__":
    main()
