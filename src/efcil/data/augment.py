"""Augmentation of whole batches of uint8 images (n, channels, height, width), the same on the CPU and on CUDA.

A transform draws its random numbers for all images first and applies them afterwards as a pure function of each image,
so that splitting the work into chunks never changes a byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from efcil.data import letterbox
from efcil.data.autoaugment import AutoAugmentCifar10, brightness, windows
from efcil.errors import ConfigError, TrainingError, nearest

Parameters = dict[str, Tensor]  # random numbers; the first dimension is the image

CHUNK_BYTES = {"cpu": 3 * 2**20, "cuda": 2**28}  # pixels worked on at once: the CPU's cache, a part of the GPU's memory


class Transform(Protocol):
    """A random change of images, in two steps."""

    def draw(self, count: int, generator: torch.Generator) -> Parameters:
        """Draw the random numbers of `count` images on the generator's device."""
        ...

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Change images (n, channels, height, width) uint8 by the numbers drawn for them; the input stays as it is."""
        ...


def draw(transform: Transform, count: int, generator: torch.Generator) -> Parameters:
    """Return a transform's random numbers; it must draw for each of `count` images."""
    drawn = transform.draw(count, generator)
    for name, value in drawn.items():
        if len(value) != count:
            raise TrainingError(
                f"the transform {type(transform).__name__} drew {len(value)} values of {name} for {count} images; it "
                "must draw one for each"
            )
    return drawn


def apply(transform: Transform, images: Tensor, drawn: Parameters) -> Tensor:
    """Return images as they were drawn to be changed; a transform must give as many as it gets."""
    found = transform.apply(images, drawn)
    if len(found) != len(images):
        raise TrainingError(
            f"the transform {type(transform).__name__} returned {len(found)} images for {len(images)}; it must return "
            "one for each: for several views of an image set `views` in the learner"
        )
    return found


def augment(images: Tensor, transform: Transform, generator: torch.Generator, chunk: int | None = None) -> Tensor:
    """Draw for all images, then apply in chunks, which bounds the memory and does not change the result.

    Args:
        images: (n, channels, height, width) uint8.
        transform: what to do.
        generator: source of all randomness; with one on the CPU the result is the same for images on any device.
        chunk: images at a time; by default as many as CHUNK_BYTES hold.

    >>> images = torch.arange(8, dtype=torch.uint8).view(2, 1, 2, 2)
    >>> augment(images, RandomCrop(1), torch.Generator().manual_seed(0), chunk=1).shape
    torch.Size([2, 1, 2, 2])
    """
    if chunk is None:
        chunk = max(1, CHUNK_BYTES.get(images.device.type, 2**24) // max(1, math.prod(images.shape[1:])))
    parameters = {name: value.to(images.device) for name, value in draw(transform, len(images), generator).items()}
    starts = range(0, max(len(images), 1), chunk)
    parts = (
        apply(transform, images[i : i + chunk], {name: value[i : i + chunk] for name, value in parameters.items()})
        for i in starts
    )
    first = next(parts)
    if len(starts) == 1:
        return first
    result = first.new_empty(len(images), *first.shape[1:])
    result[:chunk] = first
    for i, part in zip(starts[1:], parts, strict=True):
        result[i : i + chunk] = part
    return result


class Compose:
    """Transforms one after another.

    >>> Compose([HorizontalFlip()]).draw(2, torch.Generator().manual_seed(0)).keys()
    dict_keys(['0.flip'])
    """

    def __init__(self, transforms: Sequence[Transform]) -> None:
        self.transforms = tuple(transforms)

    def draw(self, count: int, generator: torch.Generator) -> Parameters:
        """The numbers of all parts, each name preceded by the place of its part."""
        drawn = enumerate(draw(transform, count, generator) for transform in self.transforms)
        return {f"{place}.{name}": value for place, part in drawn for name, value in part.items()}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Apply the parts in order to images (n, channels, height, width)."""
        for place, transform in enumerate(self.transforms):
            start = f"{place}."
            own = {name.removeprefix(start): value for name, value in parameters.items() if name.startswith(start)}
            images = apply(transform, images, own)
        return images


class RandomCrop:
    """Pad with zeros on all sides and cut out the old size somewhere."""

    def __init__(self, padding: int) -> None:
        self.padding = padding

    def draw(self, count: int, generator: torch.Generator) -> Parameters:
        """Upper left corner (count, 2), row and column in the padded image."""
        size = (count, 2)
        return {"corner": torch.randint(2 * self.padding + 1, size, generator=generator, device=generator.device)}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Crop images (n, channels, height, width)."""
        row, column = parameters["corner"].unbind(1)
        return windows(functional.pad(images, (self.padding,) * 4), row, column, *images.shape[2:])


class HorizontalFlip:
    """Mirror left and right with probability one half."""

    def draw(self, count: int, generator: torch.Generator) -> Parameters:
        """Zero or one (count,)."""
        return {"flip": torch.randint(2, (count,), generator=generator, device=generator.device)}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Mirror some of the images (n, channels, height, width)."""
        if images.device.type == "cpu":  # half the images, where asking which costs nothing
            rows = parameters["flip"].nonzero()[:, 0]
            return images.index_copy(0, rows, images.index_select(0, rows).flip(-1))
        both = torch.cat([images, images.flip(-1)])
        return both.index_select(0, torch.arange(len(images), device=images.device) + len(images) * parameters["flip"])


class BrightnessJitter:
    """Multiply by a factor uniform in 1 - strength .. 1 + strength."""

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def draw(self, count: int, generator: torch.Generator) -> Parameters:
        """Factor (count,)."""
        uniform = torch.rand(count, generator=generator, device=generator.device)
        return {"factor": 1 + self.strength * (2 * uniform - 1)}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Brighten or darken images (n, channels, height, width)."""
        return brightness(images, parameters["factor"])


class RandomResizedCrop:
    """Cut out a box of random area and shape and resize it to `size` x `size`, bilinear with antialias.

    The box is drawn as torchvision draws it: area uniform in `scale`, width / height log-uniform in `ratio`, ten tries,
    then the largest central box. The result is that of Pillow's `crop(box).resize(size, BILINEAR)` within one level.
    """

    TRIES = 10

    def __init__(
        self, size: int, scale: tuple[float, float] = (0.08, 1.0), ratio: tuple[float, float] = (3 / 4, 4 / 3)
    ) -> None:
        self.size, self.scale, self.ratio = size, scale, ratio

    def draw(self, count: int, generator: torch.Generator) -> Parameters:
        """Share of the area and ratio of ten tries (count, 10), place (count, 2) in 0 .. 1."""
        tries = torch.rand(2, count, self.TRIES, generator=generator, device=generator.device)
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        return {
            "area": self.scale[0] + (self.scale[1] - self.scale[0]) * tries[0],
            "ratio": (low + (high - low) * tries[1]).exp(),
            "place": torch.rand(count, 2, generator=generator, device=generator.device),
        }

    def boxes(self, parameters: Parameters, height: int, width: int | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Top, left, height, width (n,) int64 of the box of each image, all of one height, each of its width (n,)."""
        if isinstance(width, int):
            width = torch.full_like(parameters["area"][:, 0], width, dtype=torch.int64)
        area = parameters["area"] * (height * width)[:, None]
        tall, wide = (area / parameters["ratio"]).sqrt().round(), (area * parameters["ratio"]).sqrt().round()
        fits = (tall > 0) & (tall <= height) & (wide > 0) & (wide <= width[:, None])
        found = fits.any(1)
        first = fits.int().argmax(1, keepdim=True)
        most_tall = (width.double() / self.ratio[0]).round().long().clamp(max=height)
        most_wide = torch.minimum(width, torch.full_like(width, round(height * self.ratio[1])))
        tall = tall.gather(1, first)[:, 0].long().where(found, most_tall)
        wide = wide.gather(1, first)[:, 0].long().where(found, most_wide)
        place = parameters["place"].double()
        top = (place[:, 0] * (height - tall + 1)).long().where(found, (height - tall) // 2)
        left = (place[:, 1] * (width - wide + 1)).long().where(found, (width - wide) // 2)
        return top, left, tall, wide

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Crop and resize images (n, channels, height, width) to (n, channels, size, size)."""
        height, across = images.shape[2:]
        if not letterbox.is_letterboxed(images):
            return resize_boxes(images, *self.boxes(parameters, height, across), self.size)
        width, is_portrait = letterbox.read_header(images)
        ratio = parameters["ratio"]
        rotated = {**parameters, "ratio": torch.where(is_portrait[:, None], 1 / ratio, ratio)}
        return _rotate_back(resize_boxes(images[..., :-1], *self.boxes(rotated, height, width), self.size), is_portrait)


def _rotate_back(squares: Tensor, is_portrait: Tensor) -> Tensor:
    """Stand squares (n, channels, size, size) of pictures that lie on their side (n,) up again."""
    return torch.where(is_portrait[:, None, None, None], squares.transpose(2, 3), squares)


def resize_boxes(
    images: Tensor, top: Tensor, left: Tensor, tall: Tensor, wide: Tensor, size: int, widths: Tensor | None = None
) -> Tensor:
    """Resize one box (n,) of each image (n, channels, height, width) to `size` x `size`, first across, then down.

    Nothing outside the box counts, as when it is cut out first. With `widths` (n,) of the pictures it is the other way
    round: what lies next to the box has its part in the pixels at its edge, as when a resized picture is cut.

    Two matrix products with Pillow's triangle filter. Weights are multiples of 2**-16, so that every sum is exact in
    float32 and the result does not depend on the order of adding: the same bytes on every device.
    """
    n, channels, height, width = images.shape
    beside = None if widths is None else (torch.zeros_like(widths), widths)
    above = None if widths is None else (torch.zeros_like(widths), torch.full_like(widths, height))
    across = _triangle(left, wide, width, size, beside).transpose(1, 2)  # (n, width, size)
    down = _triangle(top, tall, height, size, above)[:, None]  # (n, 1, size, height)
    with _full_precision():
        narrow = (images.float().flatten(1, 2) @ across).add_(0.5).floor_().view(n, channels, height, size)
        return (down @ narrow).add_(0.5).floor_().to(torch.uint8)


def _triangle(
    start: Tensor, length: Tensor, limit: int, size: int, within: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Weight (n, size, limit) of `limit` pixels in each of `size` new ones, which cover start .. start + length.

    Pixels that count are those from the first to before the second of `within`; None: those that are covered.
    """
    begin, end = (edge[:, None, None] for edge in within or (start, start + length))
    start, length = start[:, None, None], length[:, None, None]
    scale = length.double() / size
    center = start + (torch.arange(size, device=start.device)[:, None] + 0.5) * scale  # (n, size, 1)
    pixel = torch.arange(limit, device=start.device)  # (limit,)
    distance = (pixel + 0.5 - center).float().abs_()
    weight = (1 - distance / scale.clamp(min=1).float()).clamp_(min=0)
    weight = weight.masked_fill_((pixel < begin) | (pixel >= end), 0).mul_(2.0**16).round_()
    return (weight / weight.sum(2, keepdim=True)).mul_(2.0**16).round_().mul_(2.0**-16)


@contextmanager
def _full_precision() -> Iterator[None]:
    """Keep matrix products out of TF32, which would cut the weights to eleven bits, whatever training asked for."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class CenterCrop:
    """Cut the middle `size` x `size` out; nothing is random.

    Images may be stored larger than they are looked at: those whose short side is not `short` get it first, as by
    torchvision's `Resize(short)` and `CenterCrop(size)`.
    """

    def __init__(self, size: int, short: int | None = None) -> None:
        self.size, self.short = size, short

    def draw(self, count: int, generator: torch.Generator) -> Parameters:
        """Nothing."""
        return {}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Crop images (n, channels, height, width) to (n, channels, size, size)."""
        height, across = images.shape[2:]
        short = self.short or min(height, across)
        if short < self.size:
            raise ConfigError(f"a center crop of {self.size} needs images at least that large, got {height} x {across}")
        letterboxed = letterbox.is_letterboxed(images)
        if letterboxed:
            widths, is_portrait = letterbox.read_header(images)
            images = images[..., :-1]
        elif short == min(height, across):
            top, left = round((height - self.size) / 2), round((across - self.size) / 2)
            return images[:, :, top : top + self.size, left : left + self.size]
        else:
            widths = torch.full((len(images),), across, device=images.device)
        whole = letterboxed and short == height  # as stored
        cut = self._crop(images, widths, short) if whole else self._resize_and_crop(images, widths, short)
        return _rotate_back(cut, is_portrait) if letterboxed else cut

    def _crop(self, images: Tensor, widths: Tensor, short: int) -> Tensor:
        top, first = round((short - self.size) / 2), _margin(widths, self.size)
        columns = first[:, None] + torch.arange(self.size, device=images.device)
        rows = images[:, :, top : top + self.size]
        return rows.gather(3, columns[:, None, None].expand(*rows.shape[:3], self.size))

    def _resize_and_crop(self, images: Tensor, widths: Tensor, short: int) -> Tensor:
        heights = torch.full_like(widths, images.shape[2])
        least = torch.minimum(heights, widths)
        boxes = []
        for side in (heights, widths):
            new = side * short // least  # as torchvision's Resize rounds
            pixel = side.double() / new
            boxes.append((_margin(new, self.size) * pixel, self.size * pixel))
        (top, tall), (left, wide) = boxes
        return resize_boxes(images, top, left, tall, wide, self.size, widths)


def _margin(sides: Tensor, size: int) -> Tensor:
    """Return what is left of `size` in sides (n,), halved: to even, as Python's `round`."""
    return ((sides - size).double() / 2).round().long()


_JITTER = 63 / 255
_TRANSFORMS: dict[str, Callable[[int], Transform | None]] = {
    "none": lambda size: None,
    "cifar": lambda size: Compose([RandomCrop(4), HorizontalFlip()]),
    "cifar-brightness": lambda size: Compose([RandomCrop(4), HorizontalFlip(), BrightnessJitter(_JITTER)]),  # PyCIL's
    "cifar-autoaugment": lambda size: Compose(  # the paper's CIFAR-100 setting, in its order
        [RandomCrop(4), HorizontalFlip(), BrightnessJitter(_JITTER), AutoAugmentCifar10()]
    ),
    "digits": lambda size: RandomCrop(1),
    "glyphs": lambda size: Compose([RandomCrop(2), BrightnessJitter(_JITTER)]),  # no flip: characters
    "crop-flip": lambda size: Compose([RandomCrop(4), HorizontalFlip()]),
    "resized-crop": lambda size: Compose([RandomResizedCrop(size), HorizontalFlip()]),
}


def make_transform(name: str, size: int) -> Transform | None:
    """The training transform of that name for images of `size` x `size`; None for "none".

    >>> make_transform("none", 32) is None, type(make_transform("digits", 8)).__name__
    (True, 'RandomCrop')
    """
    if name not in _TRANSFORMS:
        raise ConfigError(f"unknown augmentation '{name}'; {nearest(name, _TRANSFORMS)}")
    return _TRANSFORMS[name](size)
