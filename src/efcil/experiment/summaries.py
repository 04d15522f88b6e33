"""Summaries: what is written of each method of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from efcil.accel.backend import Backend
from efcil.core.metrics import AccuracyMatrix
from efcil.experiment.specification import Experiment
from efcil.report.load import TIMING

Summary = dict[str, Any]


def summary_header(
    experiment: Experiment,
    label: str,
    sizes: Sequence[int],
    seconds: float,
    backend: Backend,
    command: str,
    commit: str,
    concurrent_runs: int = 1,
) -> Summary:
    """Return what a summary says of a method beside its accuracies."""
    method, options = experiment.methods[label]
    return {
        "method": label,
        "title": method.title,
        "preset": experiment.preset,
        "dataset": experiment.eval_split,
        "tasks": len(sizes),
        "task_sizes": list(sizes),
        "order": experiment.order,
        "seed": experiment.seed,
        "seconds": round(seconds, 3),
        **backend.description,
        "concurrent_runs": concurrent_runs,
        "commit": commit,
        "command": command,
        "options": options.model_dump(mode="json"),
        "training": experiment.training.model_dump(mode="json"),
        "data": experiment.data.model_dump(mode="json"),
    }


def with_accuracies(
    header: Summary, experiment: Experiment, label: str, matrices: Mapping[str, AccuracyMatrix]
) -> Summary:
    """Add a method's accuracies; with several classifiers those of each, and the main one's in front."""
    method, options = experiment.methods[label]
    heads = {head: matrices[f"{label}/{head}"].summary() for head in method.heads}
    if not heads:
        return header | matrices[label].summary()
    return header | heads[method.default_head(options)] | {"head": method.default_head(options), "heads": heads}


def same_result(summary: Any, expected: Summary) -> bool:
    """Whether a stored summary says what is expected, but for when and how fast it was computed."""
    aside = dict.fromkeys((*TIMING, "commit", "command"))
    return isinstance(summary, dict) and {**summary, **aside} == {**json.loads(json.dumps(expected)), **aside}
