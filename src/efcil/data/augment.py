"""Batched augmentation of uint8 images (n, channels, height, width), with equal results on CPU and CUDA.

A transform first draws random parameters for all images, then applies them as a pure function of each image, so results
do not depend on the chunk size.
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

Parameters = dict[str, Tensor]  # random parameters; the first dimension is the image

CHUNK_BYTES = {"cpu": 3 * 2**20, "cuda": 2**28}  # chunk size: CPU cache, part of GPU memory


class Transform(Protocol):
    """Random image transform in two steps, drawing and applying."""

    def draw(self, count: int, generator: torch.Generator) -> Parameters:
        """Draw the parameters of `count` images on the generator's device."""
        ...

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Transform uint8 images (n, channels, height, width) with these parameters, not in place."""
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
    """Draw parameters for all images and apply them in chunks, to bound memory.

    Args:
        images: (n, channels, height, width) uint8.
        transform: the transform to apply.
        generator: random generator; with a CPU generator, results are equal on all devices.
        chunk: images per chunk; by default as many as fit CHUNK_BYTES.

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
    """Apply transforms in sequence.

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
        """Apply the transforms in order to images (n, channels, height, width)."""
        for place, transform in enumerate(self.transforms):
            start = f"{place}."
            own = {name.removeprefix(start): value for name, value in parameters.items() if name.startswith(start)}
            images = apply(transform, images, own)
        return images


class RandomCrop:
    """Pad with zeros on all sides and crop the original size at a random position."""

    def __init__(self, padding: int) -> None:
        self.padding = padding

    def draw(self, count: int, generator: torch.Generator) -> Parameters:
        """Draw the top left corner (count, 2), row and column in the padded image."""
        size = (count, 2)
        return {"corner": torch.randint(2 * self.padding + 1, size, generator=generator, device=generator.device)}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Crop images (n, channels, height, width)."""
        row, column = parameters["corner"].unbind(1)
        return windows(functional.pad(images, (self.padding,) * 4), row, column, *images.shape[2:])


class RandomWindow:
    """Crop `size` x `size` at a random position.

    >>> images = torch.zeros(2, 3, 8, 6, dtype=torch.uint8)
    >>> augment(images, RandomWindow(4), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 4, 4])
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def draw(self, count: int, generator: torch.Generator) -> Parameters:
        """Draw the place of the top left corner (count, 2), a share of the rows and columns where it can be."""
        return {"place": torch.rand(count, 2, generator=generator, device=generator.device)}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Crop images (n, channels, height, width)."""
        height, width = images.shape[2:]
        if min(height, width) < self.size:
            raise ConfigError(f"train_crop={self.size} is larger than the images, {height} x {width}; lower it")
        down, right = parameters["place"].unbind(1)
        row, column = ((p.double() * (side - self.size + 1)).long() for p, side in ((down, height), (right, width)))
        return windows(images, row, column, self.size, self.size)


class HorizontalFlip:
    """Flip horizontally with probability 0.5."""

    def draw(self, count: int, generator: torch.Generator) -> Parameters:
        """Draw zero or one (count,)."""
        return {"flip": torch.randint(2, (count,), generator=generator, device=generator.device)}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Flip the selected images (n, channels, height, width)."""
        if images.device.type == "cpu":  # only the flipped half; indexing needs no sync on the CPU
            rows = parameters["flip"].nonzero()[:, 0]
            return images.index_copy(0, rows, images.index_select(0, rows).flip(-1))
        both = torch.cat([images, images.flip(-1)])
        return both.index_select(0, torch.arange(len(images), device=images.device) + len(images) * parameters["flip"])


class BrightnessJitter:
    """Multiply by a factor uniform in [1 - strength, 1 + strength]."""

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def draw(self, count: int, generator: torch.Generator) -> Parameters:
        """Draw the factors (count,)."""
        uniform = torch.rand(count, generator=generator, device=generator.device)
        return {"factor": 1 + self.strength * (2 * uniform - 1)}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Scale the brightness of images (n, channels, height, width)."""
        return brightness(images, parameters["factor"])


class RandomResizedCrop:
    """Crop a box of random area and aspect ratio and resize it to `size` x `size`, bilinear with antialias.

    Boxes are sampled as in torchvision: area uniform in `scale`, width / height log-uniform in `ratio`, ten attempts,
    then the largest central box. The result equals Pillow's `crop(box).resize(size, BILINEAR)` up to one gray level.
    """

    TRIES = 10

    def __init__(
        self, size: int, scale: tuple[float, float] = (0.08, 1.0), ratio: tuple[float, float] = (3 / 4, 4 / 3)
    ) -> None:
        self.size, self.scale, self.ratio = size, scale, ratio

    def draw(self, count: int, generator: torch.Generator) -> Parameters:
        """Draw relative area and ratio of ten attempts (count, 10), and relative position (count, 2) in [0, 1]."""
        tries = torch.rand(2, count, self.TRIES, generator=generator, device=generator.device)
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        return {
            "area": self.scale[0] + (self.scale[1] - self.scale[0]) * tries[0],
            "ratio": (low + (high - low) * tries[1]).exp(),
            "place": torch.rand(count, 2, generator=generator, device=generator.device),
        }

    def boxes(self, parameters: Parameters, height: int, width: int | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return top, left, height and width (n,) int64 of each box; images have one height and individual widths
        (n,)."""
        if isinstance(width, int):
            width = torch.full_like(parameters["area"][:, 0], width, dtype=torch.int64)
        area = parameters["area"] * (height * width)[:, None]
        tall, wide = (area / parameters["ratio"]).sqrt().round(), (area * parameters["ratio"]).sqrt().round()
        fits = (tall > 0) & (tall <= height) & (wide > 0) & (wide <= width[:, None])
        valid = fits.any(1)
        first = fits.int().argmax(1, keepdim=True)
        most_tall = (width.double() / self.ratio[0]).round().long().clamp(max=height)
        most_wide = torch.minimum(width, torch.full_like(width, round(height * self.ratio[1])))
        tall = tall.gather(1, first)[:, 0].long().where(valid, most_tall)
        wide = wide.gather(1, first)[:, 0].long().where(valid, most_wide)
        place = parameters["place"].double()
        top = (place[:, 0] * (height - tall + 1)).long().where(valid, (height - tall) // 2)
        left = (place[:, 1] * (width - wide + 1)).long().where(valid, (width - wide) // 2)
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
    """Undo the rotation of portrait images (n, channels, size, size), flagged by `is_portrait` (n,)."""
    return torch.where(is_portrait[:, None, None, None], squares.transpose(2, 3), squares)


def resize_boxes(
    images: Tensor, top: Tensor, left: Tensor, tall: Tensor, wide: Tensor, size: int, widths: Tensor | None = None
) -> Tensor:
    """Resize one box (n,) of each image (n, channels, height, width) to `size` x `size`, first columns, then rows.

    Pixels outside the box are ignored, as if cropping came first. With image `widths` (n,), neighbors of the box
    contribute to its edge pixels, as if resizing came first.

    It takes two matrix products with Pillow's triangle filter. Weights are multiples of 2**-16, so that sums are exact
    in float32 and results are identical on every device.
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
    """Return the weights (n, size, limit) of `limit` input pixels in `size` output pixels, which cover start to start +
    length.

    Only pixels in the half-open range `within` contribute; None: the covered ones.
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
    """Disable TF32, which would round the weights to eleven bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class CenterCrop:
    """Crop the central `size` x `size`, deterministically.

    Images with another short side than `short` are resized first, as by torchvision's `Resize(short)` and
    `CenterCrop(size)`.
    """

    def __init__(self, size: int, short: int | None = None) -> None:
        self.size, self.short = size, short

    def draw(self, count: int, generator: torch.Generator) -> Parameters:
        """Return no parameters."""
        return {}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Crop images (n, channels, height, width) to (n, channels, size, size)."""
        height, across = images.shape[2:]
        short = self.short or min(height, across)
        if short < self.size:
            raise ConfigError(
                f"center crop of size {self.size} is larger than the images, {height} x {across}; lower crop"
            )
        letterboxed = letterbox.is_letterboxed(images)
        if letterboxed:
            widths, is_portrait = letterbox.read_header(images)
            images = images[..., :-1]
        elif short == min(height, across):
            top, left = round((height - self.size) / 2), round((across - self.size) / 2)
            return images[:, :, top : top + self.size, left : left + self.size]
        else:
            widths = torch.full((len(images),), across, device=images.device)
        whole = letterboxed and short == height  # uncropped images at their stored size
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
    """Return half the margin of `size` in sides (n,), rounded half to even like Python's `round`."""
    return ((sides - size).double() / 2).round().long()


_JITTER = 63 / 255
_TRANSFORMS: dict[str, Callable[[int], Transform | None]] = {
    "none": lambda size: None,
    "cifar": lambda size: Compose([RandomCrop(4), HorizontalFlip()]),
    "cifar-brightness": lambda size: Compose([RandomCrop(4), HorizontalFlip(), BrightnessJitter(_JITTER)]),  # PyCIL's
    "cifar-autoaugment": lambda size: Compose(  # CIFAR-100 setting of the paper
        [RandomCrop(4), HorizontalFlip(), BrightnessJitter(_JITTER), AutoAugmentCifar10()]
    ),
    "digits": lambda size: RandomCrop(1),
    "glyphs": lambda size: Compose([RandomCrop(2), BrightnessJitter(_JITTER)]),  # no flip: characters
    "crop-flip": lambda size: Compose([RandomCrop(4), HorizontalFlip()]),
    "resized-crop": lambda size: Compose([RandomResizedCrop(size), HorizontalFlip()]),
}


def make_transform(name: str, size: int) -> Transform | None:
    """Return the training transform by name for images of `size` x `size`; None for "none".

    >>> make_transform("none", 32) is None, type(make_transform("digits", 8)).__name__
    (True, 'RandomCrop')
    """
    if name not in _TRANSFORMS:
        raise ConfigError(f"unknown augmentation '{name}'; {nearest(name, _TRANSFORMS)}")
    return _TRANSFORMS[name](size)
