"""DPCR's closed forms in float32, as in the released code, on the saved features of a run.

    python research/float32_solves.py RUN [--ridge 200] [--epsilon 1e-9] [--out FILE.json]

RUN is the directory of `efcil compare dpcr ... --save-features`. Float32 and float64 are compared on the same features,
with explicit inverses on the CPU, projectors from singular values above zero, and means times the number of images per
class. The difference is the effect of the precision.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from efcil.experiment.specification import commit
from efcil.tensor_files import load_tensors


def projector(gram: Tensor) -> tuple[Tensor, int]:
    """Return the projector onto singular vectors with values above zero, and their number."""
    left, values, _ = torch.linalg.svd(gram)
    kept = left[:, values > 0]
    return kept @ kept.T, kept.shape[1]


def accuracies(files: list[Path], dtype: torch.dtype, ridge: float, epsilon: float, device: str) -> dict[str, Any]:
    """Return the accuracy after each task with all computations in `dtype`."""
    grams: list[Tensor] = []
    means: list[Tensor] = []
    counts: list[int] = []
    result: list[float] = []
    ranks: list[int] = []
    conditions: list[float] = []
    for index, file in enumerate(files):
        tensors, meta = load_tensors(file)
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        new, labels = tensors["new"].to(dtype), tensors["labels"]
        one = torch.eye(new.shape[1], dtype=dtype, device=device)
        if index:
            old = tensors["old"].to(dtype)
            scatter = epsilon * one + old.T @ old
            shift = torch.inverse(scatter.cpu()).to(device) @ (old.T @ new)
            spectrum = torch.linalg.eigvalsh(old.T.double() @ old.double())
            conditions.append(float(spectrum[-1] / spectrum[0].abs()))
            for k, gram in enumerate(grams):
                projected, rank = projector(gram)
                move = shift @ projected
                grams[k], means[k] = move.T @ gram @ move, means[k] @ move
                ranks.append(rank)
        for label in range(len(grams), len(grams) + meta["sizes"][index]):
            rows = new[labels == label]
            grams.append(rows.T @ rows)
            means.append(rows.mean(0))
            counts.append(len(rows))
        right = torch.stack([count * mean for count, mean in zip(counts, means, strict=True)], 1)
        weights = torch.inverse((torch.stack(grams).sum(0) + ridge * one).cpu()).to(device) @ right
        weights = weights / weights.norm(dim=0)
        scores = tensors["test"].to(dtype) @ weights
        result.append(100 * float((scores.argmax(1) == tensors["test_labels"]).double().mean()))
    return {
        "accuracy": result,
        "final": result[-1],
        "average": sum(result) / len(result),
        "ranks": [min(ranks, default=0), max(ranks, default=0)],
        "condition": conditions,
    }


def main(arguments: list[str] | None = None) -> int:
    """Print the results of both precisions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--ridge", type=float, default=200.0)
    parser.add_argument("--epsilon", type=float, default=1e-9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    files = sorted(asked.run.glob("**/features/task-*.safetensors"))
    if not files:
        parser.error(f"{asked.run} has no features; run it with --save-features")
    how: dict[str, Any] = {
        "command": f"python research/{Path(__file__).name} {asked.run.name} "
        f"--ridge {asked.ridge} --epsilon {asked.epsilon}",
        "device": asked.device,
        "commit": commit(),
    }
    for name, dtype in (("float32", torch.float32), ("float64", torch.float64)):
        how[name] = accuracies(files, dtype, asked.ridge, asked.epsilon, asked.device)
        print(f"{name}: final {how[name]['final']:.2f}, average {how[name]['average']:.2f}, {how[name]['ranks']}")
    if asked.out is not None:
        asked.out.write_text(json.dumps(how, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
