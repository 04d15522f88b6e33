"""Upper bound of every shift: accuracy of the last backbone with exact class statistics.

    python tools/oracle.py RUN METHODS --data DIR [--out FILE.json]

RUN is the directory of a complete run or comparison. The features of all training images, including old tasks, are
computed with its last backbone, and each method learns them as one task without any shift. The gap of a method to this
bound is due to shift estimation; the remaining gap to joint training is due to the learner.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from efcil import data as datasets
from efcil.accel.backend import Backend
from efcil.core.metrics import count_correct
from efcil.errors import EfcilError, RunError
from efcil.experiment.reevaluate import config_of, experiment_of
from efcil.experiment.specification import commit
from efcil.features import TaskFeatures
from efcil.learners import LEARNERS
from efcil.protocol import Evaluator
from efcil.tasks import TaskStream, class_order
from efcil.tensor_files import load_tensors
from efcil.training.extraction import extract
from efcil.training.image_batches import ImageBatches
from efcil.training.image_store import to_device
from efcil.trajectory import Trajectory


def measured(run: Path, names: list[str], directory: Path | None, backend: Backend) -> dict[str, dict[str, float]]:
    """Return the accuracy of each method after the last task on all, old and new classes."""
    home = run / "trajectory" if (run / "trajectory" / "config.yaml").exists() else run
    config = config_of(home)
    experiment = experiment_of(config["run"], names, [])
    whole = datasets.load(experiment.dataset, directory, experiment.data)
    data = whole.split_validation(experiment.val_fraction, experiment.seed) if experiment.val_fraction else whole
    stream = TaskStream(
        data.train, class_order(experiment.order, data.class_names), experiment.sizes(len(data.class_names))
    )
    last = home / "checkpoints" / f"task-{len(stream):02d}.safetensors"
    if not last.exists():
        raise RunError(f"{last} does not exist; finish the run with --resume")
    tensors, _ = load_tensors(last)
    learner = LEARNERS[experiment.learner](experiment.training, data.channels, backend, experiment.seed, data.size)
    own = {k.removeprefix("learner."): v for k, v in tensors.items() if k.startswith("learner.")}
    learner.load_state({k: v.to(backend.device) for k, v in own.items()})
    evaluator = Evaluator(data, stream, backend)
    seen, labels = evaluator.test_images(len(stream) - 1)
    everything = stream.upto(len(stream) - 1)
    images = ImageBatches(to_device(everything.images, backend.device), data.mean, data.std, backend, data.short)
    shown = extract(learner.feature_extractor(learner.backbone), seen, backend, learner.options.crop)
    trajectory = Trajectory(None, experiment.methods, freezes=True)  # no earlier backbone is needed
    labels_of = backend.tensor(everything.labels)
    trajectory.update(TaskFeatures(0, labels_of, experiment.seed, learner, images, learner.transform(data.size)))
    found = {}
    for label in trajectory.parts:
        hits, _, _ = count_correct(trajectory.logits(label, shown), labels, evaluator.task_of_class)
        totals = evaluator.totals()
        found[label] = {
            "A_f": 100 * sum(hits.tolist()) / sum(totals),
            "old": 100 * sum(hits.tolist()[:-1]) / max(1, sum(totals[:-1])),
            "new": 100 * hits.tolist()[-1] / totals[-1],
        }
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("methods")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    backend = Backend.choose(asked.device)
    try:
        found = measured(asked.run, asked.methods.split(","), asked.data, backend)
    except EfcilError as error:
        parser.error(str(error))
    for label, one in found.items():
        print(f"{label}: with true statistics {one['A_f']:.2f}, old classes {one['old']:.2f}, new {one['new']:.2f}")
    if asked.out is not None:
        about: dict[str, Any] = {
            "command": f"python tools/oracle.py RUN {asked.methods}",
            "run": asked.run.name,
            "device": backend.name,
            "commit": commit(),
        }
        asked.out.write_text(json.dumps({**about, "oracle": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    with torch.no_grad():
        raise SystemExit(main())
