"""Rendered characters: synthetic color images of up to about five hundred classes and any size.

A class is a character. Images vary in font, size, position, slant, rotation, colors, shading and noise. Each image has
its own seed, independent of the number and order of images.
"""

from __future__ import annotations

import functools
import math
import unicodedata
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from efcil.data.dataset import DataSet, ImageSet
from efcil.errors import ConfigError, DataError

# Code points in the order in which classes are taken. Chosen once: in at least six of the fonts below, and no two alike
# in any pair of fonts when cropped and brought to one size (so no c beside C, no Cyrillic A beside the Latin one);
# tests/data/test_digits_glyphs.py measures that anew.
_CODE_POINTS = (
    "30-39",  # digits
    "41-48 4A-4E 50-5A",  # Latin capital letters
    "61-62 64-6B 6D-6E 70-72 74 79",  # Latin small letters
    "393-394 39E 3A3 3A6 3A8-3A9 3B1-3B2 3B4-3B7 3B9-3BE 3C2-3C6 3C9",  # Greek
    "402 404 409-40B 411 414 416 419 41B 426-42B 42D-42F 438-439 444 44C 462 46A 473-474",  # Cyrillic
    "21 23-26 3F-40 A3-A5 A7 A9 AE B1 B6 D7 F7 20AC 2116 2122",  # punctuation and currency
    "C6 D8 DE-DF E6 F0 FE 14A 152-153 18F 250 252 254 264-265 26F 28C 28E 292 295",  # more Latin and phonetic
    "532-53B 53D-541 543-547 549-54C 54E-550 552 554 556",  # Armenian capital letters
    "565 568-569 56C-56F 571 573-574 576 579-57B 57E 583-584 586",  # Armenian small letters
    "10D0-10DD 10DF-10E7 10E9-10EA 10ED 10EF-10F0",  # Georgian
    "2200-2205 2207-2209 220B-220C 220F 221A-221B 221D-221E 2220-2222 2225 2227 2229 222C-222E 2234-2235 2248",  # maths
    "2260-2265 2282-228B 2295-2299 229E 22A0 22A2-22A3 22A5 22C3-22C4 22C6-22C8",
    "2190-2199 21A9-21AC 21AE-21B5 21BA-21BB 21C4-21C5 21D0-21D5",  # arrows
    "25A3-25A5 25A7-25A8 25B2-25B3 25B6-25B7 25BC-25BD 25C0-25C1 25C6 25CA-25CB 25D0-25D5",  # shapes
    "25E2-25E5 25E7-25EA",
    "2600-2604 2606-2608 260A-260F 2611 2613-262F 2638-263A 263C-265E 2660-2662 2664-2665 2667-266F",  # pictures
    "2681 2683 2685 2690-269C 2701-2704 2706-2709 270C-2714 2716-2722 2724-2727 2729-2736 2739-273B 273E-2746",
    "2748-274A 2756",
    "2102 210D 2111 2115 2118-211A 211C-211D 2124 2135-2138",  # letter-like
)
_FONTS = tuple(
    family + style
    for family, styles in {
        "DejaVuSans": ("", "-Bold", "-Oblique", "-BoldOblique"),
        "DejaVuSansMono": ("", "-Bold", "-Oblique", "-BoldOblique"),
        "DejaVuSerif": ("", "-Bold", "-Italic", "-BoldItalic"),
        "STIXGeneral": ("", "Bol", "Italic", "BolIta"),
    }.items()
    for style in styles
)
# Computer Modern uses TeX's symbol order; only its letters and digits have Unicode positions.
_ASCII_FONTS = ("cmr10", "cmb10", "cmss10", "cmtt10", "cmti10")

_LUMA = np.array([0.299, 0.587, 0.114])
_CONTRAST = 0.4  # minimum brightness difference of foreground and background, in [0, 1]
_TRIES = 8  # foreground colors to try: the first with enough contrast, else the best


def characters() -> tuple[str, ...]:
    """Return the characters of all classes, in class order.

    >>> "".join(characters()[:16])
    '0123456789ABCDEF'
    """
    points: list[int] = []
    for span in " ".join(_CODE_POINTS).split():
        first, _, last = span.partition("-")
        points.extend(range(int(first, 16), int(last or first, 16) + 1))
    return tuple(map(chr, points))


def load(
    classes: int = 100, size: int = 32, train_per_class: int = 100, test_per_class: int = 20, seed: int = 0
) -> DataSet:
    """Render `classes` characters as images of `size` x `size` pixels in three channels.

    Rendering is deterministic: image i of class c depends only on (seed, part, c, i, size) and the versions of FreeType
    and NumPy.

    >>> data = load(classes=3, size=16, train_per_class=4, test_per_class=2)
    >>> data.train.images.shape, data.test.labels.tolist(), data.class_names[2]
    ((12, 3, 16, 16), [0, 0, 1, 1, 2, 2], 'DIGIT TWO')
    """
    available = characters()
    for name, value, least in (
        ("classes", classes, 2),
        ("size", size, 8),
        ("train_per_class", train_per_class, 1),
        ("test_per_class", test_per_class, 1),
        ("seed", seed, 0),
    ):
        if value < least:
            raise ConfigError(f"glyphs: {name} is {value}; wanted {least} or more")
    if classes > len(available):
        raise DataError(f"glyphs: {classes} classes requested, but at most {len(available)} are available")
    counts = (train_per_class, test_per_class)
    parts = [np.empty((classes * count, 3, size, size), np.uint8) for count in counts]
    ramp = ((np.arange(size) + 0.5) / size - 0.5).astype(np.float32)
    for label, character in enumerate(available[:classes]):
        masks = _masks(character, size)
        for part, (images, count) in enumerate(zip(parts, counts, strict=True)):
            for index in range(count):
                source = np.random.SeedSequence(seed, spawn_key=(part, label, index))
                _draw(images[label * count + index], masks, ramp, np.random.Generator(np.random.PCG64(source)))
    train, test = (
        ImageSet(images, np.repeat(np.arange(classes, dtype=np.int64), count))
        for images, count in zip(parts, counts, strict=True)
    )
    mean, std = _channel_statistics(train.images)
    names = tuple(unicodedata.name(character) for character in available[:classes])
    return DataSet(name="glyphs", class_names=names, train=train, test=test, mean=mean, std=std)


def _draw(
    out: npt.NDArray[np.uint8], masks: list[Image.Image], ramp: npt.NDArray[np.float32], rng: np.random.Generator
) -> None:
    """Draw a randomly transformed and colored mask into `out` (3, size, size)."""
    size = len(ramp)
    mask = masks[rng.integers(len(masks))]
    draw = rng.random(9)
    scale = 0.72 + 0.38 * draw[0]  # of the mask, whose longer side is 0.8 of the image size
    turn = math.radians(20 * draw[1] - 10)
    slant = 0.2 * draw[2] - 0.1
    room = 0.5 * size * (1 - 0.8 * scale) + 0.04 * size  # the character may be slightly clipped
    center_x, center_y = size / 2 + room * (2 * draw[3] - 1), size / 2 + room * (2 * draw[4] - 1)
    cos, sin = math.cos(turn) / scale, math.sin(turn) / scale
    a, b, d, e = cos + slant * sin, sin - slant * cos, -sin, cos  # from image to mask coordinates
    c = mask.width / 2 - a * center_x - b * center_y
    f = mask.height / 2 - d * center_x - e * center_y
    moved = mask.transform((size, size), Image.Transform.AFFINE, (a, b, c, d, e, f), Image.Resampling.BILINEAR)
    ink_share = np.asarray(moved, np.float32) * np.float32(1 / 255)

    ground, inks = rng.random(3), rng.random((_TRIES, 3))
    contrast = np.abs((inks - ground) @ _LUMA)
    ink = inks[np.argmax(contrast >= _CONTRAST) if (contrast >= _CONTRAST).any() else np.argmax(contrast)]
    angle, strength = 2 * math.pi * draw[5], np.float32(0.4 * draw[6])
    shade = strength * (np.float32(math.cos(angle)) * ramp + np.float32(math.sin(angle)) * ramp[:, None])
    opacity = np.float32(0.75 + 0.25 * draw[7])
    image = rng.standard_normal((3, size, size), np.float32)
    image *= np.float32(0.01 + 0.07 * draw[8])
    image += shade
    image += ground.astype(np.float32)[:, None, None]
    image += (ink - ground).astype(np.float32)[:, None, None] * (opacity * ink_share)
    image *= 255
    np.rint(image, out=image)
    np.clip(image, 0, 255, out=image)
    out[...] = image


def _masks(character: str, size: int) -> list[Image.Image]:
    """Render a character in every font that has it, cropped, the longer side 0.8 of the image size."""
    masks = []
    for font in _fonts_with(character, 3 * size):
        left, top, right, bottom = map(int, font.getbbox(character))
        canvas = Image.new("L", (right - left + 2, bottom - top + 2))
        ImageDraw.Draw(canvas).text((1 - left, 1 - top), character, fill=255, font=font)
        canvas = canvas.crop(canvas.getbbox())
        ratio = 0.8 * size / max(canvas.size)
        width, height = (max(1, round(side * ratio)) for side in canvas.size)
        padded = Image.new("L", (width + 2, height + 2))  # empty border for interpolation
        padded.paste(canvas.resize((width, height), Image.Resampling.BOX), (1, 1))
        masks.append(padded)
    return masks


def _fonts_with(character: str, pixels: int) -> list[ImageFont.FreeTypeFont]:
    """Open every font that has the character."""
    point = ord(character)
    names = [name for name in _FONTS if point in _coverage(name)]
    if character.isascii() and character.isalnum():
        names += _ASCII_FONTS
    return [_font(name, pixels) for name in names]


@functools.lru_cache(maxsize=64)
def _font(name: str, pixels: int) -> ImageFont.FreeTypeFont:
    # the basic layout; the other one needs an optional library of Pillow
    return ImageFont.truetype(str(_font_file(name)), pixels, layout_engine=ImageFont.Layout.BASIC)


@functools.lru_cache(maxsize=64)
def _coverage(name: str) -> frozenset[int]:
    """Return the code points of a font."""
    from matplotlib.ft2font import FT2Font  # slow import

    return frozenset(FT2Font(str(_font_file(name))).get_charmap())


def _font_file(name: str) -> Path:
    import matplotlib  # not pyplot, which would select a backend

    path = Path(matplotlib.get_data_path(), "fonts", "ttf", f"{name}.ttf")
    if not path.is_file():
        raise DataError(f"glyphs: the font {path} is missing; reinstall matplotlib, which includes it")
    return path


def _channel_statistics(images: npt.NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute mean and standard deviation per channel, of pixels in [0, 1], from exact counts of the 256 values."""
    value = np.arange(256) / 255
    means, deviations = [], []
    for channel in range(images.shape[1]):
        share = np.bincount(images[:, channel].ravel(), minlength=256) / images[:, channel].size
        means.append(float(share @ value))
        deviations.append(math.sqrt(share @ (value - means[-1]) ** 2))
    return tuple(means), tuple(deviations)
