"""Extract golden results from runs and models: the part of the goldens that depends on internals.

`tools/goldens.py` defines and compares cases; this module runs a case and converts it to plain values: digests of
weights, class statistics and classifiers, logits of a fixed test batch, accuracy matrices.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from efcil.accel.backend import Backend
from efcil.classifiers.gaussian import RidgeAndGaussian
from efcil.classifiers.mahalanobis import Mahalanobis
from efcil.core.linear_algebra import pack_symmetric
from efcil.core.mahalanobis import LowRankMetric
from efcil.data import glyphs
from efcil.data.dataset import ImageSet
from efcil.errors import ModelError
from efcil.experiment.reporters import Reporter
from efcil.experiment.run import Run, RunOptions
from efcil.experiment.specification import ExperimentSpec, resolve
from efcil.product import IncrementalClassifier
from efcil.training.extraction import extract
from efcil.trajectory import Trajectory

BATCH = 16  # test images whose logits are compared
KNOWN_AS = {"means": "mean"}  # name in a method -> common name


def digest(tensors: Mapping[str, Tensor] | Tensor) -> str:
    """Return the SHA-256 of tensors with names, dtypes and shapes."""
    found = hashlib.sha256()
    named = {"": tensors} if isinstance(tensors, Tensor) else tensors
    for name in sorted(named):
        tensor = named[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return found.hexdigest()[:24]


def _kept(trajectory: Trajectory, label: str) -> dict[str, str]:
    """Return digests of a classifier's state, with statistics as count, mean and full Gram."""
    part = trajectory.parts[label]
    state = part.classifier.state_dict()
    if isinstance(part.classifier, Mahalanobis):
        c = part.classifier
        return {"centers": digest(c.centers), **_factors(c.factors)}
    if part.tracks:
        stats = trajectory.tracks[part.tracks[0]].stats
        assert stats is not None
        state |= {"count": stats.count, "mean": stats.mean} | ({"gram": stats.gram} if part.method.keeps_gram else {})
        if isinstance(part.classifier, RidgeAndGaussian):
            state["moves"] = stats.moves
    return {KNOWN_AS.get(key, key): digest(value) for key, value in state.items()}


def _factors(factors: Sequence[Tensor | LowRankMetric]) -> dict[str, str]:
    """Return the digest of the Cholesky factors, together, and of each metric of low rank, by position."""
    whole = [factor for factor in factors if isinstance(factor, Tensor)]
    found = {"factors_packed": digest(pack_symmetric(torch.stack(whole).mT))} if whole else {}
    return found | {f"metric {i}": digest(f._asdict()) for i, f in enumerate(factors) if not isinstance(f, Tensor)}


def _logits(values: Tensor) -> dict[str, Any]:
    return {"digest": digest(values), "values": [[round(float(v), 9) for v in row] for row in values.double()]}


class _Killer(Reporter):
    """Kill this process after an epoch; tell where a run goes on."""

    def __init__(self, at: tuple[int, int] | None):
        self.at, self.notes = at, []  # type: ignore[var-annotated]

    def on_epoch(self, report: Any) -> None:
        if self.at == (report.task, report.epoch):
            os.kill(os.getpid(), signal.SIGKILL)

    def note(self, text: str) -> None:
        self.notes.append(text)


def run(case: Mapping[str, Any], out: Path, resume: bool, kill_at: tuple[int, int] | None) -> dict[str, Any]:
    """Run a trajectory with its methods; return the results."""
    overrides = tuple(f"{key}={value}" for key, value in case["set"].items())
    request = ExperimentSpec(
        tuple(case["methods"]),
        case["dataset"],
        tasks=case["tasks"],
        order=case["order"],
        overrides=overrides,
        allow_uneven=case.get("allow_uneven", False),
    )
    reporter = _Killer(kill_at)
    backend = Backend.choose("cpu")
    one = Run(resolve(request), out, backend, reporter, RunOptions(compare=True, checkpoint_seconds=0.0))
    one.execute(resume)
    r = one.learner
    seen, _ = one.evaluator.test_images(case["tasks"] - 1)
    images = torch.arange(0, len(seen.images), max(1, len(seen.images) // BATCH))[:BATCH]
    batch = seen.with_images(seen.images[images])
    methods = {}
    for label, part in one.trajectory.parts.items():
        backbone = r.first_backbone if part.first_backbone else r.backbone
        features = extract(r.feature_extractor(backbone), batch, backend, r.options.crop)
        scores = one.trajectory.logits(label, features)
        methods[label] = {
            "kept": _kept(one.trajectory, label),
            "logits": _logits(scores),
            "correct": one.matrices[label].correct.tolist(),
            "correct5": one.matrices[label].correct5.tolist(),
        }
    weights = r.student.state_dict()
    return {
        "backbone": digest({k.removeprefix("backbone."): v for k, v in weights.items() if k.startswith("backbone.")}),
        "head": digest({k.removeprefix("head."): v for k, v in weights.items() if k.startswith("head.")}),
        "methods": methods,
        "went_on": [note for note in reporter.notes if "resuming" in note],
    }


def _model(model: IncrementalClassifier, pictures: Any) -> dict[str, Any]:
    state = model._snapshot.state
    weights = state.weights
    return {
        "backbone": digest({k.removeprefix("backbone."): v for k, v in weights.items() if k.startswith("backbone.")}),
        "head": digest({k.removeprefix("head."): v for k, v in weights.items() if k.startswith("head.")}),
        "kept": _kept(model._snapshot.trajectory, model.method) if state.classes else {},
        "temperature": state.temperature,
        "classes": [[record.name, record.images, record.recall] for record in state.classes],
        "logits": _logits(torch.from_numpy(model.predict_proba(pictures))),
    }


def teach(case: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Learn, learn again, learn one class, forget, save, load; freeze, update two copies, merge."""
    data = glyphs.load(classes=8, size=24, train_per_class=24, test_per_class=2, seed=0)
    pictures = data.test.images

    def part(classes: dict[int, slice]) -> tuple[Any, list[str]]:
        rows = torch.cat(
            [torch.from_numpy((data.train.labels == c).nonzero()[0])[chosen] for c, chosen in classes.items()]
        ).numpy()
        chosen = ImageSet(data.train.images[rows], data.train.labels[rows])
        return chosen.images, [data.class_names[label] for label in chosen.labels]

    everything, first = slice(None), slice(0, 16)
    model = IncrementalClassifier(
        case["method"], width=4, size=24, epochs=2, device="cpu", progress=False, options=case.get("options")
    )
    found: dict[str, Any] = {}
    model.learn(*part({0: first, 1: everything, 2: everything}))
    found["teach"] = _model(model, pictures)
    try:
        model.learn(*part({0: slice(16, 24), 3: everything, 4: everything}))
        found["again"] = _model(model, pictures)
    except ModelError:
        model.learn(*part({3: everything, 4: everything}))
        found["again, new classes only"] = _model(model, pictures)
    try:
        model.learn(*part({5: everything}))
        found["one class"] = _model(model, pictures)
    except ModelError:
        found["one class"] = "refused"
    model.save(out / "model")
    try:
        model.forget(data.class_names[1])
        found["forget"] = _model(model, pictures)
    except ModelError:
        found["forget"] = "refused"
    model.save(out / "changed")
    found["load"] = _model(IncrementalClassifier.load(out / "changed", device="cpu"), pictures)
    try:
        one, other = (IncrementalClassifier.load(out / "model", device="cpu").freeze() for _ in range(2))
        one.learn(*part({6: everything}))
        other.learn(*part({7: everything}))
        found["frozen"] = _model(one, pictures)
        found["merge"] = _model(one.merge(other), pictures)
    except ModelError:
        found["merge"] = "refused"
    return found
