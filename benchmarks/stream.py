"""Throughput of streamed JPEG decoding: images per second of a folder, loaded as in training.

    python benchmarks/stream.py DIR [--name cub200] [--images 1500] [--workers N] [--size 256] [--batch 128] [--out F]

Images are letterboxed (`efcil.data.letterbox`), or squares with --squares.

- alone  the same worker processes decode the same files and discard them: an upper bound
- streamed  an epoch of random batches through `iter_rows`, into a tensor on the device, with `resized-crop` where there
            is a GPU (on a machine without one the augmentation would take the cores that decode)

Both alternate in one run; only the ratio is meaningful, as timings on a shared machine are noisy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch

from efcil import data as datasets
from efcil.data.augment import make_transform
from efcil.data.lazy import JOB, Decoder, LazyImageFolder
from efcil.data.workers import cores, pool_of, problem, starting
from efcil.training.image_store import LazyImages, iter_rows


def alone(pool: Any, root: Path, names: list[str], size: int, whole: bool) -> float:
    began = time.perf_counter()
    with starting():
        wrong = pool.map(problem, repeat(root), names, repeat(size), repeat(whole), chunksize=JOB)
    assert not any(wrong)
    return len(names) / (time.perf_counter() - began)


def streamed(images: LazyImages, batch: int, seed: int, crop: int) -> float:
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    on_gpu = images.device.type == "cuda"
    transform = make_transform("resized-crop", crop) if on_gpu else None
    source = torch.Generator(images.device).manual_seed(seed)
    began = time.perf_counter()
    count = 0
    for pixels in iter_rows(images, order.split(batch)):
        if transform is not None:
            transform.apply(pixels, transform.draw(len(pixels), source))
        count += len(pixels)
    if on_gpu:
        torch.cuda.synchronize()
    return count / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--name", default="cub200")
    parser.add_argument("--images", type=int, default=1500)
    parser.add_argument("--workers", type=int, default=cores())
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--squares", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    o = parser.parse_args()
    tree = datasets.module(o.name).scan(o.directory)
    names = [file.name for file in tree.files]
    chosen = np.random.default_rng(0).permutation(len(names))[: o.images]
    names = [names[i] for i in chosen]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pool = pool_of(o.workers)
    whole = not o.squares
    decoder = Decoder(tree.root, names, o.size, o.workers, whole)
    images = LazyImages(LazyImageFolder(decoder, np.arange(len(names))), device)
    alone(pool, tree.root, names[: 2 * JOB * o.workers], o.size, whole)  # start processes and fill the page cache
    streamed(images, o.batch, 0, 224)
    rates: dict[str, list[float]] = {"alone": [], "streamed": []}
    for number in range(o.repeats):
        rates["alone"].append(alone(pool, tree.root, names, o.size, whole))
        rates["streamed"].append(streamed(images, o.batch, number, 224))
    pool.shutdown()
    ratios = [s / a for s, a in zip(rates["streamed"], rates["alone"], strict=True)]
    for kind, values in rates.items():
        rate = statistics.median(values)
        print(f"{kind:9} {rate:7.0f} images/s, {rate / o.workers:6.0f} a core")
    print(f"streamed / alone: {statistics.median(ratios):.2f} (spread {max(ratios) - min(ratios):.2f})")
    if o.out:
        device_name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        raw = {"device": device_name, "workers": o.workers, "size": o.size, "batch": o.batch, "images": len(names)}
        raw["whole"] = whole
        o.out.write_text(json.dumps({**raw, "stream": {**rates, "ratio": ratios}}, indent=1) + "\n")


if __name__ == "__main__":
    main()
