"""AutoAugment's CIFAR-10 policy on batches (Cubuk et al., "AutoAugment: Learning Augmentation Strategies ...", 2019).

Every operation is a function of uint8 images (n, channels, height, width) and, if it has one, an amount per image (n,).
Each reproduces Pillow's arithmetic (truncation, fixed point), so results equal Pillow's on any device. The policy
gathers the images of each operation, applies it to all of them at once and scatters the result, without a loop over
images.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from efcil.errors import ConfigError

FILL = 128  # fill value of geometric operations
LEVELS = 10

Step = tuple[str, float, int]  # operation, probability, level (0 if it has none)

CIFAR10_POLICY: tuple[tuple[Step, Step], ...] = (
    (("Invert", 0.1, 0), ("Contrast", 0.2, 6)),
    (("Rotate", 0.7, 2), ("TranslateX", 0.3, 9)),
    (("Sharpness", 0.8, 1), ("Sharpness", 0.9, 3)),
    (("ShearY", 0.5, 8), ("TranslateY", 0.7, 9)),
    (("AutoContrast", 0.5, 0), ("Equalize", 0.9, 0)),
    (("ShearY", 0.2, 7), ("Posterize", 0.3, 7)),
    (("Color", 0.4, 3), ("Brightness", 0.6, 7)),
    (("Sharpness", 0.3, 9), ("Brightness", 0.7, 9)),
    (("Equalize", 0.6, 0), ("Equalize", 0.5, 0)),
    (("Contrast", 0.6, 7), ("Sharpness", 0.6, 5)),
    (("Color", 0.7, 7), ("TranslateX", 0.5, 8)),
    (("Equalize", 0.3, 0), ("AutoContrast", 0.4, 0)),
    (("TranslateY", 0.4, 3), ("Sharpness", 0.2, 6)),
    (("Brightness", 0.9, 6), ("Color", 0.2, 8)),
    (("Solarize", 0.5, 2), ("Invert", 0.0, 0)),
    (("Equalize", 0.2, 0), ("AutoContrast", 0.6, 0)),
    (("Equalize", 0.2, 0), ("Equalize", 0.6, 0)),
    (("Color", 0.9, 9), ("Equalize", 0.6, 0)),
    (("AutoContrast", 0.8, 0), ("Solarize", 0.2, 8)),
    (("Brightness", 0.1, 3), ("Color", 0.7, 0)),
    (("Solarize", 0.4, 5), ("AutoContrast", 0.9, 0)),
    (("TranslateY", 0.9, 9), ("TranslateY", 0.7, 9)),
    (("AutoContrast", 0.9, 0), ("Solarize", 0.8, 3)),
    (("Equalize", 0.8, 0), ("Invert", 0.1, 0)),
    (("TranslateY", 0.7, 9), ("AutoContrast", 0.9, 0)),
)


# Point operations; those that depend on channel statistics use a lookup table of 256 values per channel.


def invert(images: Tensor) -> Tensor:
    """Return 255 - value."""
    return 255 - images


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest `bits` (n,) bits of each value."""
    mask = 256 - 2 ** (8 - bits.long())
    return images & mask.to(torch.uint8)[:, None, None, None]


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert the values at or above `threshold` (n,)."""
    above = images.short() >= threshold.ceil().short()[:, None, None, None]
    return above.view(torch.uint8).mul_(255).bitwise_xor_(images)  # 255 - value flips all bits


CACHED = 32  # images of 32 x 32 per block in float32: 0.4 MB


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with black: 0 gives black, 1 the image; `factor` is (n,)."""
    factor = factor.float()[:, None, None, None]
    if images.device.type != "cpu":
        return _truncated(images * factor)
    result = torch.empty_like(images)  # in blocks on the CPU, so that float32 intermediates stay in the cache
    for block in range(0, len(images), CACHED):
        rows = slice(block, block + CACHED)
        result[rows] = images[rows].float().mul_(factor[rows]).clamp_(0, 255)
    return result


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the mean gray value: 0 gives gray, 1 the image; `factor` is (n,)."""
    pixels = images.float()
    total = grey(pixels).flatten(1).sum(1, dtype=torch.float64)  # integers: exact in any order
    mean = (total / (images.shape[2] * images.shape[3]) + 0.5).floor().float()[:, None, None, None]
    return _truncated(_blend(mean, pixels, factor))


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel to 0 .. 255; a constant channel stays."""
    flat = images.flatten(2).flatten(0, 1)  # (n * channels, pixels)
    value = torch.arange(256, dtype=torch.float64, device=images.device)
    low, high = flat.amin(1, keepdim=True).double(), flat.amax(1, keepdim=True).double()
    scale = 255.0 / (high - low).clamp_(min=1)  # float64 as in Pillow: truncation depends on the last bit
    table = torch.where(high > low, (value * scale - low * scale).clamp_(0, 255), value).to(torch.uint8)
    return table.gather(1, flat.long()).view(images.shape)


def equalize(images: Tensor) -> Tensor:
    """Equalize the histogram of each channel with Pillow's integer rule."""
    flat = images.flatten(2).flatten(0, 1)  # (n * channels, pixels)
    index = flat.long()
    one = torch.ones((), dtype=torch.int32, device=images.device)
    histogram = torch.zeros(len(flat), 256, dtype=torch.int32, device=images.device)
    histogram.scatter_add_(1, index, one.expand(index.shape))  # integers: independent of order
    last = histogram.gather(1, flat.amax(1, keepdim=True).long())
    step = (flat.shape[1] - last) // 255
    below = histogram.cumsum(1, dtype=torch.int32) - histogram
    table = ((below + step // 2).double() / step.clamp(min=1)).clamp_(max=255).to(torch.uint8)
    same = torch.arange(256, dtype=torch.uint8, device=images.device)
    return torch.where(step > 0, table, same).gather(1, index).view(images.shape)


# Operations that mix channels or neighbors.


def grey(pixels: Tensor) -> Tensor:
    """Return integer-valued luma (n, 1, height, width) of float32 pixels (n, 1 or 3, height, width), as in Pillow."""
    if pixels.shape[1] == 1:
        return pixels
    if pixels.shape[1] != 3:
        raise ConfigError(
            f"color operations need images of 1 or 3 channels, got {pixels.shape[1]}; use another augmentation"
        )
    red, green, blue = pixels.unsqueeze(1).unbind(2)
    luma = (red * 19595).add_(green * 38470).add_(blue * 7471).add_(32768)  # below 2**24: exact in float32
    return luma.mul_(2.0**-16).floor_()


def color(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the gray image: 0 gives gray, 1 the image; `factor` is (n,)."""
    pixels = images.float()
    return _truncated(_blend(grey(pixels), pixels, factor))


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image smoothed by (1 1 1, 1 5 1, 1 1 1) / 13 except its border; `factor` (n,): 1 gives the
    image."""
    width = images.shape[3]
    if min(images.shape[2:]) < 3:
        return images
    pixels = images.float()
    line = (
        pixels.flatten()
    )  # sums over the flattened images; values that cross an edge lie in a border, which is replaced
    total = (line[:-2] + line[1:-1]).add_(line[2:])
    total = (
        (total[: -2 * width] + total[width:-width]).add_(total[2 * width :]).add_(line[width + 1 : -width - 1], alpha=4)
    )
    smooth = torch.empty_like(pixels)
    # An integer over 13 is never halfway between two integers, so float32 rounds like Pillow.
    torch.floor(total.mul_(1 / 13).add_(0.5), out=smooth.view(-1)[width + 1 : -width - 1])
    smooth[:, :, :: images.shape[2] - 1] = pixels[:, :, :: images.shape[2] - 1]
    smooth[..., :: width - 1] = pixels[..., :: width - 1]
    return _truncated(_blend(smooth, pixels, factor))


def _blend(start: Tensor, end: Tensor, factor: Tensor) -> Tensor:
    return (end - start).mul_(factor.float()[:, None, None, None]).add_(start)


def _truncated(pixels: Tensor) -> Tensor:
    return pixels.clamp_(0, 255).to(torch.uint8)


# Geometric operations.


def windows(images: Tensor, row: Tensor, column: Tensor, height: int, width: int) -> Tensor:
    """Crop `height` x `width` from images (n, channels, .., ..) at `row` (n,) and `column` (n,)."""
    n, channels, tall, wide = images.shape
    plane = torch.arange(n * channels, device=images.device).view(n, channels, 1)
    line = plane * tall + row[:, None, None] + torch.arange(height, device=images.device)  # (n, channels, height)
    start = (line * wide + column[:, None, None]).flatten()
    return _runs(images, start, width).view(n, channels, height, width)


def _runs(images: Tensor, start: Tensor, length: int) -> Tensor:
    """Return contiguous bytes (m, length) from each `start` (m,)."""
    # An overlapping view has every run of bytes as a row, so cropping is row indexing.
    runs = images.contiguous().as_strided((max(images.numel() - length + 1, 0), length), (1, 1))
    return runs.index_select(0, start)


def translate_x(images: Tensor, share: Tensor) -> Tensor:
    """Translate left by a fraction `share` (n,) of the width, in whole pixels."""
    height, width = images.shape[2:]
    column = (share.double() * width + 0.5).floor().long().clamp_(-width, width) + width
    padded = functional.pad(images, (width, width, 0, 0), value=FILL)
    return windows(padded, torch.zeros_like(column), column, height, width)


def translate_y(images: Tensor, share: Tensor) -> Tensor:
    """Translate up by a fraction `share` (n,) of the height, in whole pixels."""
    height, width = images.shape[2:]
    row = (share.double() * height + 0.5).floor().long().clamp_(-height, height) + height
    padded = functional.pad(images, (0, 0, height, height), value=FILL)
    return windows(padded, row, torch.zeros_like(row), height, width)


def rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """Rotate counter-clockwise about the center by `degrees` (n,), nearest neighbor."""
    angle = -torch.deg2rad(degrees.double())
    cos, sin = angle.cos(), angle.sin()
    x, y = images.shape[3] / 2, images.shape[2] / 2
    return _affine(images, cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y)


def _affine(images: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor) -> Tensor:
    """Sample pixel (x, y) at (a x + b y + c, d x + e y + f), nearest neighbor, in Pillow's 16.16 fixed point; all
    (n,)."""
    _, channels, height, width = images.shape
    x = torch.arange(width, dtype=torch.int32, device=images.device)
    y = torch.arange(height, dtype=torch.int32, device=images.device)[:, None]
    from_x = (_fixed(c + a * 0.5 + b * 0.5) + _fixed(b) * y + _fixed(a) * x) >> 16
    from_y = (_fixed(f + d * 0.5 + e * 0.5) + _fixed(e) * y + _fixed(d) * x) >> 16
    outside = (from_x < 0) | (from_x >= width) | (from_y < 0) | (from_y >= height)
    index = (from_y * width + from_x).masked_fill_(outside, 0).flatten(1).long()[:, None]
    moved = images.flatten(2).gather(2, index.expand(-1, channels, -1)).view(images.shape)
    return moved.masked_fill_(outside[:, None], FILL)


def _fixed(value: Tensor) -> Tensor:
    return (value * 65536 + 0.5).floor().to(torch.int32)[:, None, None]


def shear_x(images: Tensor, slope: Tensor) -> Tensor:
    """Shear: translate row y left by `slope` (n,) * y, bicubic."""
    return shear_y(images.transpose(2, 3), slope).transpose(2, 3)


def shear_y(images: Tensor, slope: Tensor) -> Tensor:
    """Shear: translate column x up by `slope` (n,) * x, with one-dimensional bicubic interpolation (a = -1).

    Each column is cropped once as a run of bytes, and the four taps are slices of it.
    """
    n, channels, height, width = images.shape
    x = torch.arange(width, device=images.device)[:, None]
    y = torch.arange(height, dtype=torch.float64, device=images.device)
    place = slope.double()[:, None, None] * (x + 0.5) + (y + 0.5)  # (n, width, height), pixel centers at halves
    outside = (place < 0) | (place >= height)
    first = (place - 0.5).floor()
    d = (place - 0.5 - first)[:, None]  # float64 as in Pillow
    top = first[:, :, :1]
    ahead = (first - top - y)[:, None]  # 0, or -1 or 1 by rounding at integer positions
    margin = height + 3
    columns = images.transpose(2, 3)  # (n, channels, width, height), edges repeated beyond it
    above, below = (columns[..., k : k + 1].expand(-1, -1, -1, margin) for k in (0, height - 1))
    start = (top[:, None, :, 0].clamp(-height, height) + margin - 2).long().expand(-1, channels, -1).reshape(-1)
    flat = torch.cat([above, columns, below], 3)
    line = torch.arange(n * channels * width, device=images.device) * (height + 2 * margin)
    runs = _runs(flat, line + start, height + 5).view(n, channels, width, height + 5).double()

    def tap(k: int) -> Tensor:  # (n, channels, width, height): the k-th row from the one at or above
        return runs[..., k + 2 : k + 2 + height]

    taps = [tap(k) for k in (-1, 0, 1, 2)]
    if bool((ahead != 0).any()):
        later, sooner = ahead > 0, ahead < 0
        taps = [tap(k).where(~later, tap(k + 1)).where(~sooner, tap(k - 1)) for k in (-1, 0, 1, 2)]
    v1, v2, v3, v4 = taps
    cubic, square = (v2 - v1).sub_(v3).add_(v4), (v1 - v2).mul_(2).add_(v3).sub_(v4)
    moved = cubic.mul_(d).add_(square).mul_(d).add_(v3 - v1).mul_(d).add_(v2)
    return _truncated(moved).masked_fill_(outside[:, None], FILL).transpose(2, 3).contiguous()


# The policy.


def _spread(start: float, stop: float) -> tuple[float, ...]:
    return tuple(start + (stop - start) * level / (LEVELS - 1) for level in range(LEVELS))


AMOUNTS: dict[str, tuple[float, ...]] = {  # by level, for operations with an amount
    "ShearX": _spread(0, 0.3),
    "ShearY": _spread(0, 0.3),
    "TranslateX": _spread(0, 150 / 331),
    "TranslateY": _spread(0, 150 / 331),
    "Rotate": _spread(0, 30),
    "Color": _spread(0, 0.9),
    "Contrast": _spread(0, 0.9),
    "Sharpness": _spread(0, 0.9),
    "Brightness": _spread(0, 0.9),
    "Posterize": tuple(float(round(bits)) for bits in _spread(8, 4)),
    "Solarize": _spread(256, 0),
}
ENHANCING = ("Color", "Contrast", "Sharpness", "Brightness")  # the factor is 1 + sign * amount
UNSIGNED = ("Posterize", "Solarize")

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Invert": lambda images, _: invert(images),
    "AutoContrast": lambda images, _: autocontrast(images),
    "Equalize": lambda images, _: equalize(images),
    "Posterize": posterize,
    "Solarize": solarize,
    "Brightness": brightness,
    "Contrast": contrast,
    "Color": color,
    "Sharpness": sharpness,
    "ShearX": shear_x,
    "ShearY": shear_y,
    "TranslateX": translate_x,
    "TranslateY": translate_y,
    "Rotate": rotate,
}


def amount(operation: str, level: int, sign: int = 1) -> float:
    """Return the argument of an operation at a level.

    >>> amount("Rotate", 9, -1), amount("Posterize", 7, -1), round(amount("Color", 3, -1), 6)
    (-30.0, 5.0, 0.7)
    """
    if operation not in AMOUNTS:
        return 0.0
    value = AMOUNTS[operation][level]
    return value if operation in UNSIGNED else float(operation in ENHANCING) + sign * value


@functools.cache
def _cifar10_tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return operation indices (25, 2), probabilities (25, 2) and amounts for signs -1 and +1 (25, 2, 2)."""
    numbers = {name: number for number, name in enumerate(OPERATIONS)}
    steps = CIFAR10_POLICY
    return (
        torch.tensor([[numbers[name] for name, _, _ in row] for row in steps], device=device),
        torch.tensor([[probability for _, probability, _ in row] for row in steps], device=device),
        torch.tensor(
            [[[amount(name, level, sign) for sign in (-1, 1)] for name, _, level in row] for row in steps],
            dtype=torch.float64,
            device=device,
        ),
    )


class AutoAugmentCifar10:
    """Apply to each image one of 25 pairs of operations, each with its own probability."""

    def draw(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw the policy row (count,), uniform numbers for the probabilities (count, 2) and signs 0 or 1 (count,
        2)."""
        device = generator.device
        return {
            "row": torch.randint(len(CIFAR10_POLICY), (count,), generator=generator, device=device),
            "chance": torch.rand(count, 2, generator=generator, device=device),
            "sign": torch.randint(2, (count, 2), generator=generator, device=device),
        }

    def apply(self, images: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        """Apply both operations of each policy row in turn to images (n, channels, height, width)."""
        operations, probabilities, amounts = _cifar10_tables(images.device)
        row = parameters["row"]
        skipped = len(OPERATIONS)
        number = operations[row].masked_fill_(parameters["chance"] >= probabilities[row], skipped)  # (n, 2)
        value = amounts[row].gather(2, parameters["sign"][..., None]).squeeze(2)  # (n, 2)
        everything = torch.arange(skipped, device=images.device)
        counts = (number[:, :, None] == everything).sum(0).tolist()  # the only device synchronization
        order = number.argsort(dim=0, stable=True)  # group images by operation, skipped ones last
        back = order.argsort(dim=0)
        for step, sizes in enumerate(counts):
            moves = order[:, 0] if step == 0 else back[:, step - 1][order[:, step]]
            images = images.index_select(0, moves)
            parts = torch.split_with_sizes(images[: sum(sizes)], sizes)
            values = torch.split_with_sizes(value[order[: sum(sizes), step], step], sizes)
            for operation, part, amount_of in zip(OPERATIONS.values(), parts, values, strict=True):
                if len(part):
                    part.copy_(operation(part, amount_of))
        return images.index_select(0, back[:, -1])
