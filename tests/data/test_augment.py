"""Batched augmentation against Pillow, image by image, and the laws of drawing and chunking."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from efcil.accel.backend import Backend
from efcil.data.augment import (
    BrightnessJitter,
    CenterCrop,
    Compose,
    HorizontalFlip,
    RandomCrop,
    RandomResizedCrop,
    RandomWindow,
    Transform,
    augment,
    make_transform,
    resize_boxes,
)
from efcil.data.autoaugment import AMOUNTS, CIFAR10_POLICY, OPERATIONS, UNSIGNED, AutoAugmentCifar10, amount
from efcil.data.letterbox import pad
from efcil.errors import ConfigError, TrainingError
from efcil.training.image_batches import ImageBatches
from efcil.training.loader import epoch_batches, several_epochs
from messages import raises

SIGNED_AMOUNTS = {  # (level, sign) of every amount an operation can get
    name: [(level, sign) for level in range(10) for sign in ((1,) if name in UNSIGNED else (-1, 1))]
    if name in AMOUNTS
    else [(0, 1)]
    for name in OPERATIONS
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(channels: int = 3, height: int = 32, width: int = 32) -> Tensor:
    """Noise, smooth noise, constants, gradients, two levels, one odd pixel: (n, channels, height, width)."""
    generator = seeded(3)
    shape = (channels, height, width)
    noise = torch.randint(256, (6, *shape), generator=generator)
    dark = torch.randint(90, (3, *shape), generator=generator) + 40
    coarse = torch.rand(6, channels, 5, 5, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1) * 255
    constant = torch.tensor([0, 1, 127, 128, 255]).view(-1, 1, 1, 1).expand(-1, *shape)
    across = torch.linspace(0, 255, width).expand(shape)
    down = torch.linspace(200, 30, height)[:, None].expand(shape)
    levels = torch.where(noise[:2] > 128, 200, 13)
    odd = torch.full((1, *shape), 77)
    odd[:, :, height // 2, width // 3] = 78
    channel = torch.arange(channels).view(-1, 1, 1) * 60 + across / 4
    stacked = [noise, dark, smooth, constant, across[None], down[None], levels, odd, channel[None]]
    return torch.cat([part.to(torch.uint8) for part in stacked])


def to_pillow(image: Tensor) -> Image.Image:
    return Image.fromarray(image[0].numpy() if len(image) == 1 else image.permute(1, 2, 0).contiguous().numpy())


def from_pillow(image: Image.Image) -> Tensor:
    array = torch.from_numpy(np.array(image))
    return array[None] if array.dim() == 2 else array.permute(2, 0, 1)


def affine(image: Image.Image, matrix: tuple[float, ...], resample: Image.Resampling) -> Image.Image:
    fill = (128,) * len(image.getbands())
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, resample, fillcolor=fill if len(fill) > 1 else 128
    )


def rotated(image: Image.Image, degrees: float) -> Image.Image:
    return image.rotate(degrees, Image.Resampling.NEAREST, fillcolor=128 if image.mode == "L" else (128, 128, 128))


NEAREST, BICUBIC = Image.Resampling.NEAREST, Image.Resampling.BICUBIC
PILLOW: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "Invert": lambda image, _: ImageOps.invert(image),
    "AutoContrast": lambda image, _: ImageOps.autocontrast(image),
    "Equalize": lambda image, _: ImageOps.equalize(image),
    "Posterize": lambda image, bits: ImageOps.posterize(image, int(bits)),
    "Solarize": lambda image, threshold: ImageOps.solarize(image, threshold),
    "Brightness": lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    "Contrast": lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    "Color": lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    "Sharpness": lambda image, factor: ImageEnhance.Sharpness(image).enhance(factor),
    "ShearX": lambda image, slope: affine(image, (1, slope, 0, 0, 1, 0), BICUBIC),
    "ShearY": lambda image, slope: affine(image, (1, 0, 0, slope, 1, 0), BICUBIC),
    "TranslateX": lambda image, share: affine(image, (1, 0, share * image.width, 0, 1, 0), NEAREST),
    "TranslateY": lambda image, share: affine(image, (1, 0, 0, 0, 1, share * image.height), NEAREST),
    "Rotate": rotated,
}


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 32, 32), (3, 21, 40)], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_is_pillows_at_every_level(name: str, shape: tuple[int, int, int]) -> None:
    images = pictures(*shape)
    before = images.clone()
    for level, sign in SIGNED_AMOUNTS[name]:
        value = amount(name, level, sign)
        ours = OPERATIONS[name](images, torch.full((len(images),), value, dtype=torch.float64))
        theirs = torch.stack([from_pillow(PILLOW[name](to_pillow(image), value)) for image in images])
        assert torch.equal(ours, theirs), (name, value)  # the arithmetic is Pillow's own: no tolerance
    assert torch.equal(images, before)


def test_operations_take_one_amount_per_image() -> None:
    images = pictures()
    for name, operation in OPERATIONS.items():
        values = torch.tensor([amount(name, i % 10, 1 - 2 * (i % 2)) for i in range(len(images))], dtype=torch.float64)
        together = operation(images, values)
        alone = torch.cat([operation(images[i : i + 1], values[i : i + 1]) for i in range(len(images))])
        assert torch.equal(together, alone), name


def test_policy_table() -> None:
    text = """Invert .1 0, Contrast .2 6 | Rotate .7 2, TranslateX .3 9 | Sharpness .8 1, Sharpness .9 3 |
    ShearY .5 8, TranslateY .7 9 | AutoContrast .5 0, Equalize .9 0 | ShearY .2 7, Posterize .3 7 |
    Color .4 3, Brightness .6 7 | Sharpness .3 9, Brightness .7 9 | Equalize .6 0, Equalize .5 0 |
    Contrast .6 7, Sharpness .6 5 | Color .7 7, TranslateX .5 8 | Equalize .3 0, AutoContrast .4 0 |
    TranslateY .4 3, Sharpness .2 6 | Brightness .9 6, Color .2 8 | Solarize .5 2, Invert 0 0 |
    Equalize .2 0, AutoContrast .6 0 | Equalize .2 0, Equalize .6 0 | Color .9 9, Equalize .6 0 |
    AutoContrast .8 0, Solarize .2 8 | Brightness .1 3, Color .7 0 | Solarize .4 5, AutoContrast .9 0 |
    TranslateY .9 9, TranslateY .7 9 | AutoContrast .9 0, Solarize .8 3 | Equalize .8 0, Invert .1 0 |
    TranslateY .7 9, AutoContrast .9 0"""
    rows = [[step.split() for step in row.split(",")] for row in text.split("|")]
    wanted = tuple(tuple((name, float(chance), int(level)) for name, chance, level in row) for row in rows)
    assert len(wanted) == 25
    assert wanted == CIFAR10_POLICY


def test_amounts() -> None:
    assert [amount("Posterize", level) for level in range(10)] == [8, 8, 7, 7, 6, 6, 5, 5, 4, 4]
    assert AMOUNTS["Solarize"] == pytest.approx(np.linspace(256, 0, 10))
    assert AMOUNTS["TranslateX"] == pytest.approx(np.linspace(0, 150 / 331, 10))
    assert amount("Rotate", 9, -1) == -30
    assert amount("ShearY", 9) == pytest.approx(0.3)
    assert amount("Sharpness", 9, -1) == pytest.approx(0.1)


def test_policy_follows_its_draws() -> None:
    images = pictures().repeat(20, 1, 1, 1)
    drawn = AutoAugmentCifar10().draw(len(images), seeded())
    ours = AutoAugmentCifar10().apply(images, drawn)
    for i, image in enumerate(images):
        expected = to_pillow(image)
        for step, (name, probability, level) in enumerate(CIFAR10_POLICY[int(drawn["row"][i])]):
            if drawn["chance"][i, step] < probability:
                expected = PILLOW[name](expected, amount(name, level, 2 * int(drawn["sign"][i, step]) - 1))
        assert torch.equal(ours[i], from_pillow(expected)), i


def test_policy_draws_are_uniform() -> None:
    count = 50_000
    drawn = AutoAugmentCifar10().draw(count, seeded(1))
    rows = torch.bincount(drawn["row"], minlength=25)
    assert len(rows) == 25
    assert ((rows - count / 25).abs() < 5 * math.sqrt(count / 25)).all()  # five standard deviations
    assert (drawn["sign"].float().mean(0) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(count)
    for probability in (0.1, 0.5, 0.9):
        assert ((drawn["chance"] < probability).float().mean(0) - probability).abs().max() < 5 * 0.5 / math.sqrt(count)
    both = torch.stack([drawn["chance"][:, 0], drawn["chance"][:, 1], drawn["sign"][:, 0], drawn["row"]]).float()
    assert (torch.corrcoef(both) - torch.eye(4)).abs().max() < 5 / math.sqrt(count)


def test_random_crop_is_pillows() -> None:
    images = pictures(3, 20, 32)
    drawn = RandomCrop(4).draw(len(images), seeded())
    ours = RandomCrop(4).apply(images, drawn)
    for image, (row, column), crop in zip(images, drawn["corner"].tolist(), ours, strict=True):
        wanted = to_pillow(image).crop(
            (column - 4, row - 4, column - 4 + 32, row - 4 + 20)
        )  # Pillow puts zeros outside
        assert torch.equal(crop, from_pillow(wanted))
    corners = Counter(map(tuple, RandomCrop(1).draw(9000, seeded()).pop("corner").tolist()))
    assert set(corners) == {(row, column) for row in range(3) for column in range(3)}
    assert all(abs(seen - 1000) < 160 for seen in corners.values())


def test_random_windows_are_parts_of_the_image_everywhere_equally_often() -> None:
    images = torch.arange(5 * 7, dtype=torch.uint8).view(1, 1, 5, 7).expand(3000, 2, 5, 7)
    found = RandomWindow(4).apply(images, RandomWindow(4).draw(3000, seeded()))
    assert found.shape == (3000, 2, 4, 4)
    corners = Counter(found[:, 0, 0, 0].tolist())
    assert set(corners) == {7 * row + column for row in range(2) for column in range(4)}
    assert all(abs(seen - 375) < 100 for seen in corners.values())
    for part in found:
        row, column = divmod(int(part[0, 0, 0]), 7)
        assert torch.equal(part, images[0, :, row : row + 4, column : column + 4])
    last = RandomWindow(4).apply(images[:1], {"place": torch.full((1, 2), 1 - 2**-24)})
    assert int(last[0, 0, -1, -1]) == 34
    with raises(ConfigError, "train_crop=6", "5 x 7"):
        RandomWindow(6).apply(images, {"place": torch.zeros(3000, 2)})


def test_flip() -> None:
    images = pictures()
    ours = HorizontalFlip().apply(images, {"flip": torch.arange(len(images)) % 2})
    assert torch.equal(ours[::2], images[::2])
    assert torch.equal(ours[1::2], images[1::2].flip(3))
    assert HorizontalFlip().draw(10_000, seeded())["flip"].float().mean() == pytest.approx(0.5, abs=0.025)


def test_brightness_jitter_is_pillows() -> None:
    images = pictures()
    drawn = BrightnessJitter(63 / 255).draw(len(images), seeded())
    ours = BrightnessJitter(63 / 255).apply(images, drawn)
    for image, factor, result in zip(images, drawn["factor"].tolist(), ours, strict=True):
        assert torch.equal(result, from_pillow(ImageEnhance.Brightness(to_pillow(image)).enhance(factor)))
    factors = BrightnessJitter(0.25).draw(10_000, seeded())["factor"]
    assert factors.min() == pytest.approx(0.75, abs=1e-3)
    assert factors.max() == pytest.approx(1.25, abs=1e-3)
    assert factors.mean() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("size", "shape"), [(32, (3, 24, 24)), (24, (3, 96, 70)), (7, (1, 128, 128)), (48, (3, 40, 56))], ids=str
)
def test_random_resized_crop_is_pillows(size: int, shape: tuple[int, int, int]) -> None:
    """Up and down, against crop then resize as in torchvision: `resize(box=...)` alone would read beyond the box."""
    images = pictures(*shape)
    transform = RandomResizedCrop(size)
    drawn = transform.draw(len(images), seeded())
    ours = transform.apply(images, drawn)
    assert ours.shape == (len(images), shape[0], size, size)
    far = []
    for image, result, top, left, tall, wide in zip(images, ours, *transform.boxes(drawn, *shape[1:]), strict=True):
        box = tuple(int(edge) for edge in (left, top, left + wide, top + tall))
        wanted = to_pillow(image).crop(box).resize((size, size), Image.Resampling.BILINEAR)
        far.append((result.int() - from_pillow(wanted).int()).abs())
    assert torch.stack(far).max() <= 1  # sums near a half: weights have 16 bits here, 22 in Pillow
    assert (torch.stack(far) > 0).float().mean() < 0.02


def test_whole_image_at_its_size_is_kept() -> None:
    images = pictures()
    zero, size = torch.zeros(len(images), dtype=torch.long), torch.full((len(images),), 32)
    assert torch.equal(resize_boxes(images, zero, zero, size, size, 32), images)


def test_resize_ignores_the_precision_of_training() -> None:
    images = pictures()
    drawn = RandomResizedCrop(20).draw(len(images), seeded())
    exact = RandomResizedCrop(20).apply(images, drawn)
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(RandomResizedCrop(20).apply(images, drawn), exact)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_random_resized_crop_boxes() -> None:
    transform = RandomResizedCrop(32)
    top, left, tall, wide = transform.boxes(transform.draw(20_000, seeded()), 200, 200)
    assert ((top >= 0) & (left >= 0) & (tall > 0) & (wide > 0) & (top + tall <= 200) & (left + wide <= 200)).all()
    area, ratio = tall * wide / 200**2, wide / tall
    assert 0.08 * 0.95 < area.min() < 0.1
    assert area.max() > 0.97
    assert 3 / 4 * 0.97 < ratio.min() < 0.77
    assert 4 / 3 / 1.03 < ratio.max() < 4 / 3 * 1.03
    assert ratio.log().mean() == pytest.approx(0, abs=0.01)
    small = area < 0.2
    assert (left[small] / (200 - wide[small])).mean() == pytest.approx(0.5, abs=0.03)


def test_random_resized_crop_falls_back_to_the_center() -> None:
    transform = RandomResizedCrop(8, scale=(4.0, 4.0))  # never fits
    drawn = transform.draw(3, seeded())
    assert [edge.tolist() for edge in transform.boxes(drawn, 30, 30)] == [[0] * 3, [0] * 3, [30] * 3, [30] * 3]
    assert [int(edge[0]) for edge in transform.boxes(drawn, 30, 90)] == [0, 25, 30, 40]
    assert [int(edge[0]) for edge in transform.boxes(drawn, 90, 30)] == [25, 0, 40, 30]


def test_center_crop() -> None:
    images = pictures(1, 9, 12)
    assert torch.equal(augment(images, CenterCrop(5), seeded()), images[:, :, 2:7, 4:9])
    with raises(ConfigError, 10, "9 x 12"):
        augment(images, CenterCrop(10), seeded())


NAMES = ["cifar", "cifar-brightness", "cifar-autoaugment", "digits", "glyphs", "crop-flip", "resized-crop"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("channels", [1, 3])
def test_chunks_and_seeds(name: str, channels: int) -> None:
    images = pictures(channels)
    before = images.clone()
    transform = make_transform(name, 24)
    assert transform is not None
    whole = augment(images, transform, seeded())
    for chunk in (1, 7, len(images), 1000):
        assert torch.equal(augment(images, transform, seeded(), chunk=chunk), whole), chunk
    assert torch.equal(images, before)
    assert not torch.equal(augment(images, transform, seeded(1)), whole)
    assert whole.shape == (len(images), channels, *(2 * [24 if name == "resized-crop" else 32]))
    assert len(augment(images[:0], transform, seeded())) == 0


def test_names() -> None:
    assert make_transform("none", 32) is None
    chain = make_transform("cifar-autoaugment", 32)
    assert isinstance(chain, Compose)
    assert [type(part).__name__ for part in chain.transforms] == [
        "RandomCrop",
        "HorizontalFlip",
        "BrightnessJitter",
        "AutoAugmentCifar10",
    ]
    with raises(ConfigError, "'cifar-autoaugmnt'", "'cifar-autoaugment'"):
        make_transform("cifar-autoaugmnt", 32)


def test_color_of_two_channels_is_refused() -> None:
    with raises(ConfigError, 1, 3, 2):
        OPERATIONS["Color"](pictures(2)[:1], torch.ones(1))


@pytest.mark.cuda
@pytest.mark.parametrize("name", NAMES)
def test_cuda_gives_the_same_bytes(name: str) -> None:
    images = pictures().repeat(20, 1, 1, 1)
    transform = make_transform(name, 24)
    assert transform is not None
    assert torch.equal(augment(images.cuda(), transform, seeded()).cpu(), augment(images, transform, seeded()))


@pytest.mark.cuda
@pytest.mark.parametrize("transform", [RandomResizedCrop(24), CenterCrop(24)], ids=lambda t: type(t).__name__)
def test_cuda_gives_the_same_bytes_of_whole_pictures(transform: Transform) -> None:
    shown, widths = pictures(3, 32, 48).numpy(), (40, 45)
    lying = [pad(picture[:, :, :width], width == 40) for picture in shown for width in widths]
    frames = torch.from_numpy(np.stack(lying))
    assert torch.equal(augment(frames.cuda(), transform, seeded()).cpu(), augment(frames, transform, seeded()))


# --- transforms of others ---------------------------------------------------------------------------------------------


class Repeated:
    """Returns every image several times, or only some of them."""

    def __init__(self, share: float) -> None:
        self.share = share

    def draw(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {}

    def apply(self, images: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        return torch.cat([images, images])[: round(self.share * len(images))]


class DrawnFor(Repeated):
    """Draws for several images more or less than there are."""

    def __init__(self, more: int) -> None:
        super().__init__(1)
        self.more = more

    def draw(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {"place": torch.rand(count + self.more, generator=generator)}


def by_image_batches(transform: Transform, images: Tensor) -> Iterator[Tensor]:
    pixels = ImageBatches(images, (0.5,) * 3, (0.5,) * 3, Backend.choose("cpu"))
    return pixels.augmented(transform, seeded()).batches(4)


def by_epochs(transform: Transform, images: Tensor) -> Iterator[object]:
    return epoch_batches(images, torch.zeros(len(images)), transform, 4, "keep", seeded())


WAYS = {
    "features": by_image_batches,
    "training": by_epochs,
    "epochs at once": lambda transform, images: iter(
        several_epochs(images, torch.zeros(len(images)), transform, 4, "keep", [seeded()])
    ),
    "all at once": lambda transform, images: iter([augment(images, transform, seeded(), chunk=4)]),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_transform_must_return_as_many_images_as_it_gets(way: str, inside: bool) -> None:
    images = torch.zeros(8, 3, 8, 8, dtype=torch.uint8)

    def first(transform: Transform) -> object:
        return next(WAYS[way](Compose([HorizontalFlip(), transform]) if inside else transform, images))

    for share in (2, 1.5, 0.5, 0):
        with raises(TrainingError, "Repeated", "views"):
            first(Repeated(share))
    for more in (1, -1):
        with raises(TrainingError, "DrawnFor", "place", 8 + more, 8):
            first(DrawnFor(more))
    assert first(Repeated(1)) is not None
    assert first(DrawnFor(0)) is not None
