"""Speed of "cifar-autoaugment" on 32 x 32 images: our batched version against Pillow image by image.

OMP_NUM_THREADS=1 python benchmarks/augment.py --count 10000 --device cpu
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps

from efcil.data.augment import augment, make_transform
from efcil.data.autoaugment import CIFAR10_POLICY, FILL, amount

GREY = (FILL, FILL, FILL)
MIN_RATIO = 5.0  # per core, against Pillow


def _affine(image: Image.Image, matrix: tuple[float, ...], resample: Image.Resampling) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, resample, fillcolor=GREY)


PILLOW: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "Invert": lambda image, _: ImageOps.invert(image),
    "AutoContrast": lambda image, _: ImageOps.autocontrast(image),
    "Equalize": lambda image, _: ImageOps.equalize(image),
    "Posterize": lambda image, bits: ImageOps.posterize(image, int(bits)),
    "Solarize": lambda image, threshold: ImageOps.solarize(image, math.ceil(threshold)),
    "Brightness": lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    "Contrast": lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    "Color": lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    "Sharpness": lambda image, factor: ImageEnhance.Sharpness(image).enhance(factor),
    "ShearY": lambda image, slope: _affine(image, (1, 0, 0, slope, 1, 0), Image.Resampling.BICUBIC),
    "TranslateX": lambda image, share: _affine(image, (1, 0, share * image.width, 0, 1, 0), Image.Resampling.NEAREST),
    "TranslateY": lambda image, share: _affine(image, (1, 0, 0, 0, 1, share * image.height), Image.Resampling.NEAREST),
    "Rotate": lambda image, degrees: image.rotate(degrees, Image.Resampling.NEAREST, fillcolor=GREY),
}


def pillow_chain(pixels: np.ndarray, draw: random.Random) -> np.ndarray:
    """Apply the same transforms to one image (height, width, 3) with Pillow, as in a data loader worker."""
    image = Image.fromarray(pixels)
    left, top = draw.randint(-4, 4), draw.randint(-4, 4)
    image = image.crop((left, top, left + image.width, top + image.height))  # zero padding
    if draw.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    image = ImageEnhance.Brightness(image).enhance(draw.uniform(1 - 63 / 255, 1 + 63 / 255))
    for name, probability, level in draw.choice(CIFAR10_POLICY):
        if draw.random() < probability:
            image = PILLOW[name](image, amount(name, level, draw.choice((-1, 1))))
    return np.asarray(image)


def measure(count: int, device: str, repeats: int = 3) -> dict[str, float]:
    """Return images per second of both (best of `repeats` after warm-up, one CPU thread) and their ratio."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    generator = torch.Generator(device).manual_seed(0)
    images = torch.randint(256, (count, 3, 8, 8), generator=generator, device=device).to(torch.uint8)
    images = images.repeat_interleave(4, 2).repeat_interleave(4, 3)  # smooth patches instead of white noise
    transform = make_transform("cifar-autoaugment", 32)
    assert transform is not None

    def ours() -> None:
        augment(images, transform, generator)
        if images.is_cuda:
            torch.cuda.synchronize()

    few = min(count, 3000)
    arrays = np.ascontiguousarray(images[:few].permute(0, 2, 3, 1).cpu().numpy())
    draw = random.Random(0)

    def pillow() -> None:
        for pixels in arrays:
            pillow_chain(pixels, draw)

    # Thread CPU time, which other processes affect less; both versions alternate.
    clock = time.process_time if images.device.type == "cpu" else time.perf_counter
    seconds = {ours: float("inf"), pillow: float("inf")}
    for turn in range(repeats + 1):
        for run in seconds:
            start = clock()
            run()
            seconds[run] = min(seconds[run], clock() - start) if turn else seconds[run]  # the first turn is warm-up
    torch.set_num_threads(threads)
    fast, slow = count / seconds[ours], few / seconds[pillow]
    return {"images_per_second": fast, "pillow_images_per_second": slow, "ratio": fast / slow}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--check", action="store_true", help="fail below MIN_RATIO times Pillow's speed")
    options = parser.parse_args()
    result = measure(options.count, options.device, repeats=6)  # best of six turns on a shared machine
    print(json.dumps({name: round(value, 2) for name, value in result.items()}))
    if options.check and result["ratio"] < MIN_RATIO:
        sys.exit(f"augmentation: {result['ratio']:.2f} times Pillow's speed, wanted {MIN_RATIO}")
