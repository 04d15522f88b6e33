"""Every kind of image becomes the square it shows; what is damaged is refused with its name."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from efcil.data.decode import read_image
from efcil.data.preprocessing import Preprocessing
from efcil.errors import ConfigError, DataError
from messages import raises


def picture(width: int = 60, height: int = 40) -> Image.Image:
    """A smooth picture without any symmetry."""
    y, x = np.mgrid[0:height, 0:width]
    red, green = 255 * x / width, 255 * y / height
    blue = 255 * np.exp(-((x - width / 4) ** 2 + (y - height / 3) ** 2) / 100)
    return Image.fromarray(np.stack([red, green, blue], axis=2).astype(np.uint8))


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def square(image: Image.Image, size: int) -> np.ndarray:
    """Resize, then crop: the textbook order, for sizes at which both are exact."""
    width, height = image.size
    scale = size / min(width, height)
    image = image.resize((round(width * scale), round(height * scale)), Image.Resampling.BILINEAR)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return np.asarray(image.crop((left, top, left + size, top + size))).transpose(2, 0, 1)


@pytest.mark.parametrize("shape", [(60, 40), (40, 60), (40, 40), (200, 40)])
def test_short_side_then_center_crop(shape: tuple[int, int]) -> None:
    image = picture(*shape)
    for size in (20, 40, 80):
        result = read_image(image, size)
        assert result.shape == (3, size, size)
        assert result.dtype == np.uint8
        assert result.flags.c_contiguous
        np.testing.assert_array_equal(result, square(image, size))


@pytest.mark.parametrize("shape", [(1, 1000), (1000, 1), (3, 5), (1, 1), (2, 7)])
def test_odd_shapes(shape: tuple[int, int]) -> None:
    result = read_image(encoded(Image.new("RGB", shape, (10, 20, 30)), "PNG"), 64)
    assert (result == np.array([10, 20, 30])[:, None, None]).all()
    assert result.shape == (3, 64, 64)


def test_the_middle_of_a_very_long_image_costs_no_memory() -> None:
    pixels = np.zeros((1, 100_001, 3), np.uint8)
    pixels[0, 50_000] = (200, 100, 50)
    np.testing.assert_array_equal(read_image(Image.fromarray(pixels), 17)[:, 8, 8], (200, 100, 50))


def test_file_bytes_and_pillow_image_agree(tmp_path: Path) -> None:
    path = tmp_path / "fünf.png"
    picture().save(path)
    expected = read_image(picture(), 20)
    for source in (path, str(path), path.read_bytes(), Image.open(path)):
        np.testing.assert_array_equal(read_image(source, 20), expected)


# --- modes

RED = (200, 100, 50)


@pytest.mark.parametrize(
    ("image", "kind", "expected"),
    [
        (Image.new("RGB", (9, 7), RED), "PNG", RED),
        (Image.new("1", (9, 7), 1), "PNG", (255, 255, 255)),
        (Image.new("L", (9, 7), 77), "PNG", (77, 77, 77)),
        (Image.new("L", (9, 7), 77), "PPM", (77, 77, 77)),
        (Image.new("LA", (9, 7), (0, 0)), "PNG", (255, 255, 255)),
        (Image.new("LA", (9, 7), (100, 255)), "PNG", (100, 100, 100)),
        (Image.new("RGBA", (9, 7), (*RED, 255)), "PNG", RED),
        (Image.new("RGBA", (9, 7), (*RED, 0)), "PNG", (255, 255, 255)),
        (Image.new("RGBA", (9, 7), (0, 0, 0, 51)), "PNG", (204, 204, 204)),
        (Image.new("RGBA", (9, 7), (0, 0, 0, 51)), "WEBP", (204, 204, 204)),
        (Image.new("RGB", (9, 7), RED).convert("P", palette=Image.Palette.ADAPTIVE), "PNG", RED),
        (Image.new("RGB", (9, 7), RED).convert("P", palette=Image.Palette.ADAPTIVE), "GIF", RED),
        (Image.new("RGB", (9, 7), RED), "BMP", RED),
        (Image.new("RGB", (9, 7), RED), "TIFF", RED),
        (Image.new("CMYK", (9, 7), (0, 255, 255, 0)), "TIFF", (255, 0, 0)),
        (Image.new("I;16", (9, 7), 128 * 257), "PNG", (128, 128, 128)),
        (Image.new("I;16", (9, 7), 40), "TIFF", (0, 0, 0)),
        (Image.new("I;16B", (9, 7), 200 * 257), "TIFF", (200, 200, 200)),
        (Image.new("I", (9, 7), 200), "TIFF", (200, 200, 200)),
        (Image.new("I", (9, 7), 200 * 257), "TIFF", (200, 200, 200)),
        (Image.new("F", (9, 7), 0.6), "TIFF", (153, 153, 153)),
        (Image.new("F", (9, 7), 153.0), "TIFF", (153, 153, 153)),
        (Image.new("F", (9, 7), -5.0), "TIFF", (0, 0, 0)),
    ],
    ids=lambda value: value.mode if isinstance(value, Image.Image) else str(value),
)
def test_every_mode(image: Image.Image, kind: str, expected: tuple[int, int, int]) -> None:
    result = read_image(encoded(image, kind, **({"lossless": True} if kind == "WEBP" else {})), 5)
    assert (result == np.array(expected)[:, None, None]).all(), result[:, 0, 0]


def test_a_cmyk_jpeg_keeps_its_colors() -> None:
    result = read_image(encoded(Image.new("CMYK", (32, 32), (0, 255, 255, 0)), "JPEG", quality=95), 8)
    assert np.abs(result[:, 4, 4].astype(int) - (255, 0, 0)).max() <= 4


def test_a_transparent_palette_entry_is_white() -> None:
    image = Image.new("P", (8, 8), 0)
    image.putpalette([200, 100, 50, 0, 0, 255])
    image.paste(1, (0, 0, 4, 8))
    result = read_image(encoded(image, "PNG", transparency=0), 8)
    np.testing.assert_array_equal(result[:, 3, 1], (0, 0, 255))
    np.testing.assert_array_equal(result[:, 3, 6], (255, 255, 255))
    # several half transparent entries: Pillow warns here on the way to RGB
    result = read_image(encoded(image, "PNG", transparency=bytes([0, 255])), 8)
    np.testing.assert_array_equal(result[:, 3, 6], (255, 255, 255))


def test_floats_outside_every_usual_range_are_stretched() -> None:
    values = np.array([[-1000.0, 0.0], [1000.0, np.nan]], np.float32)
    np.testing.assert_array_equal(read_image(Image.fromarray(values), 2)[0], [[0, 128], [255, 128]])


def test_one_channel() -> None:
    result = read_image(Image.new("RGBA", (9, 7), (0, 0, 0, 51)), 5, channels=1)
    assert result.shape == (1, 5, 5)
    assert (result == 204).all()


def test_the_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime", "blue")]
    for kind in ("GIF", "PNG", "TIFF"):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        np.testing.assert_array_equal(read_image(data, 4)[:, 0, 0], (255, 0, 0))


# --- JPEG at a fraction of its size, and orientation


def test_a_large_jpeg_is_decoded_small_and_looks_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    image = picture(1600, 1200)
    drafts: list[tuple[int, int]] = []
    plugin = type(Image.open(io.BytesIO(encoded(image, "JPEG"))))
    draft = plugin.draft

    def seen(self: Any, mode: Any, size: Any) -> Any:
        result = draft(self, mode, size)
        drafts.append(self.size)
        return result

    monkeypatch.setattr(plugin, "draft", seen)
    result = read_image(encoded(image, "JPEG", quality=95), 64)
    assert drafts == [(200, 150)]
    assert np.abs(result.astype(int) - square(image, 64).astype(int)).mean() < 1.5


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_orientation_agrees_with_image_ops(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(picture(), kind, exif=exif, **options)
    with Image.open(io.BytesIO(data)) as image:
        expected = square(ImageOps.exif_transpose(image).convert("RGB"), 20)
    np.testing.assert_array_equal(read_image(data, 20), expected)
    plain = read_image(encoded(picture(), kind, **options), 20)
    assert (orientation == 1) == np.array_equal(read_image(data, 20), plain)  # the picture has no symmetry


def test_orientation_of_a_drafted_jpeg() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = picture(600, 800)
    data = encoded(upright.transpose(Image.Transpose.ROTATE_90), "JPEG", quality=95, exif=exif)
    assert np.abs(read_image(data, 32).astype(int) - square(upright, 32).astype(int)).mean() < 1.5


def test_damaged_exif_does_not_spoil_a_sound_image() -> None:
    data = encoded(picture(), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01\x03\0\xff\xff\xff\xff\x06")
    np.testing.assert_array_equal(read_image(data, 20), read_image(encoded(picture(), "JPEG"), 20))


# --- what is refused


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("PNG", {}),
        ("BMP", {}),
        ("GIF", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("WEBP", {}),
        ("PPM", {}),
    ],
)
def test_a_beginning_of_a_file_is_refused_or_has_every_pixel(kind: str, options: dict[str, Any]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), kind, **options)
    whole = read_image(data, 15)
    messages = []
    ends = range(0, len(data), 7)
    for end in ends:
        try:
            np.testing.assert_array_equal(read_image(data[:end], 15, name="cut.img"), whole)
        except DataError as error:
            messages.append(str(error))
    assert len(messages) >= 0.95 * len(ends)
    assert all(message.startswith("cut.img: ") for message in messages)


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_a_truncated_file_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"half.{suffix}"
    picture(300, 200).save(path)
    data = path.read_bytes()
    for end in (len(data) // 2, -30, -10, -4 if suffix == "jpg" else -9):
        path.write_bytes(data[:end])
        with raises(DataError, path):
            read_image(path, 32)
    path.write_bytes(data + b"more behind the end")
    assert read_image(path, 32).shape == (3, 32, 32)


def test_what_is_not_an_image_is_named(tmp_path: Path) -> None:
    path = tmp_path / "note.jpg"
    path.write_text("not a picture at all\n" * 20)
    with pytest.raises(DataError, match=r"note\.jpg: not an image"):
        read_image(path, 32)
    path.write_bytes(b"")
    with raises(DataError, path):
        read_image(path, 32)
    with raises(DataError, tmp_path / "gone.jpg"):
        read_image(tmp_path / "gone.jpg", 32)
    with raises(DataError, tmp_path, "Is a directory"):
        read_image(tmp_path, 32)
    with raises(DataError, "3 bytes"):
        read_image(b"abc", 32)


def test_formats_that_run_other_programs_are_refused() -> None:
    with raises(DataError, "JPEG", "PNG"):
        read_image(encoded(picture(), "EPS"), 32)


def test_a_damaged_png_is_refused() -> None:
    data = bytearray(encoded(picture(), "PNG"))
    data[data.index(b"IDAT") + 4] ^= 0xFF  # the head of the compressed stream
    with raises(DataError, len(data)):
        read_image(bytes(data), 32)


def test_an_image_over_the_limit_is_refused_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(picture(100, 100), "PNG")
    assert read_image(data, 8, max_pixels=10_000).shape == (3, 8, 8)

    def load(self: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(type(Image.open(io.BytesIO(data))), "load", load)
    with raises(DataError, "big.png", "100 x 100", 9999):
        read_image(data, 8, max_pixels=9_999, name="big.png")


@pytest.mark.parametrize("width", [15_000, 40_000])
def test_a_decompression_bomb_is_refused(width: int) -> None:
    # A header is enough: a bitmap that claims 15,000 x 15,000 or more pixels and has none.
    head = bytearray(encoded(Image.new("RGB", (1, 1)), "BMP"))
    head[18:22] = head[22:26] = width.to_bytes(4, "little")
    with raises(DataError, width**2, 178956970):
        read_image(bytes(head), 8)


@pytest.mark.parametrize(("size", "channels"), [(0, 3), (-1, 3), (8, 2), (8, 4)])
def test_impossible_options(size: int, channels: int) -> None:
    with raises(ConfigError, "size", size, "channels", channels):
        read_image(picture(), size, channels)


def test_a_pillow_image_is_left_as_it_is() -> None:
    image = Image.open(io.BytesIO(encoded(picture(800, 600), "JPEG")))
    read_image(image, 16)
    assert image.size == (800, 600)
    assert image.getpixel((0, 0)) is not None  # not closed


def test_a_backbones_preprocessing_decides_crop_and_resampling():
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8))
    own = Preprocessing(14, crop=0.7, interpolation="bicubic")
    wanted = picture.resize((14, 14), Image.Resampling.BICUBIC, box=(24, 9, 66, 51))
    assert (read_image(picture, own).transpose(1, 2, 0) == np.asarray(wanted)).all()
    squashed = picture.resize((14, 14), Image.Resampling.BILINEAR)
    assert (read_image(picture, Preprocessing(14, squash=True)).transpose(1, 2, 0) == np.asarray(squashed)).all()
    assert (read_image(picture, Preprocessing(14)) == read_image(picture, 14)).all()
    with raises(ConfigError, "letterboxed", "14px-0.7-bicubic"):
        read_image(picture, own, keep_aspect=True)


def test_a_large_jpeg_is_not_decoded_below_what_its_crop_needs(tmp_path):
    coarse = np.random.default_rng(0).integers(0, 256, (30, 30, 3), dtype=np.uint8)
    picture = Image.fromarray(coarse).resize((1500, 1500), Image.Resampling.BICUBIC)
    picture.save(tmp_path / "a.jpg", quality=95)
    own = Preprocessing(56, crop=0.2, interpolation="bicubic")
    with Image.open(tmp_path / "a.jpg") as whole:
        whole.load()
        wanted = read_image(whole, own).astype(float)
    assert np.abs(read_image(tmp_path / "a.jpg", own) - wanted).mean() < 4


@pytest.mark.parametrize(
    "wrong",
    [{"size": 0}, {"crop": 0.0}, {"crop": 1.1}, {"interpolation": "cubic"}, {"std": (0.0,) * 3}, {"std": (1.0,)}],
)
def test_a_preprocessing_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Preprocessing(**{"size": 8} | wrong)
