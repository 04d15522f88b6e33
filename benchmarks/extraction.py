"""Features of pictures by `FeatureCache`, and by a bare loop over the same network: pictures per second, alternating.

Both see the same uint8 pictures in memory, 224 x 224, in batches of 16, with pretrained EfficientNet-Lite0 folded for
the CPU. The cache looks each picture up by its content and writes its features to a new directory.

    python benchmarks/extraction.py --out record.json --machine "2 cores of ..."
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from record import add_options, write_record

from efcil import models
from efcil.accel.backend import Backend
from efcil.training.feature_cache import FeatureCache
from efcil.training.image_batches import ImageBatches

NAME, BATCH = "efficientnet-lite0", 16


@torch.no_grad()
def main() -> None:
    """Time both ways in turn, by the clock and by seconds of computing, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pictures", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backend = Backend.choose("cpu")
    network = models.build(NAME, weights="pretrained").eval()
    wanted = models.preprocessing(NAME)
    shape = (options.pictures, 3, wanted.size, wanted.size)
    pictures = torch.from_numpy(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))
    pixels = ImageBatches(pictures, wanted.mean, wanted.std, backend)
    call = backend.inference(network).call

    def bare() -> None:
        for batch in pictures.split(BATCH):
            call((batch.float() * pixels.scale - pixels.offset).contiguous(memory_format=torch.channels_last))

    def cached() -> None:
        with tempfile.TemporaryDirectory() as folder:
            FeatureCache(network, backend, None, Path(folder)).features(pixels)

    found: dict[str, list[float]] = {"bare": [], "cached": []}
    bare()
    for _ in range(options.rounds):
        for name, way in (("bare", bare), ("cached", cached)):
            clock, computed = time.perf_counter(), time.process_time()
            way()
            clock, computed = time.perf_counter() - clock, time.process_time() - computed
            found[name].append(options.pictures / computed)
            print(f"{name}: {options.pictures / clock:.1f} pictures/s, {found[name][-1]:.1f} per second of computing")
    ratio = float(np.median(found["cached"]) / np.median(found["bare"]))
    print(f"cached / bare: {ratio:.3f}")
    write_record(options, __file__, sys.argv[1:], pictures_per_cpu_second=found, ratio=ratio)


if __name__ == "__main__":
    main()
