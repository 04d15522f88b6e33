"""Decode image files of common formats into uint8 squares; the only module that decodes with Pillow."""

from __future__ import annotations

import io
import math
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from efcil.data.letterbox import max_width, pad
from efcil.data.preprocessing import Interpolation, Preprocessing
from efcil.errors import ConfigError, DataError

# Allowed formats, fewer than Pillow supports: an EPS upload, for example, would start Ghostscript.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
_HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")  # bytes 8 to 12, after "ftyp"
MAX_PIXELS = 178_956_970  # Pillow's own limit (two thirds of a GiB at four bytes per pixel)

# EXIF orientation (tag 274) -> transposition that makes the image upright; 1 is upright.
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


_STRIP = 64  # rows of an image that are converted at once
_RESAMPLING: dict[Interpolation, Image.Resampling] = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


class _SuppressWarnings:
    """Suppress warnings of Pillow about odd metadata and images above half its size limit.

    Real problems raise errors or are checked here. Warning filters are process-wide, so the first of several decoding
    threads sets them and the last one restores them.
    """

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = warnings.catch_warnings()
                self._before.__enter__()
                warnings.simplefilter("ignore")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._before.__exit__(None, None, None)


_quiet = _SuppressWarnings()


def read_image(
    source: str | os.PathLike[str] | bytes | Image.Image,
    size: int | Preprocessing,
    channels: int = 3,
    *,
    max_pixels: int = MAX_PIXELS,
    name: str | None = None,
    keep_aspect: bool = False,
) -> npt.NDArray[np.uint8]:
    """Decode an image into uint8 (channels, size, size): short side to `size`, center crop, alpha over white.

    `size` may also be what a backbone expects (`Preprocessing`): its crop, interpolation and, if it squashes, shape.
    With `keep_aspect` the image is letterboxed (`efcil.data.letterbox`), and only ends beyond 3:2 are cropped. `source`
    is a file, its bytes or a Pillow image (not modified); of an animation, the first frame is used. A file that is
    missing, truncated, damaged, not an image or larger than `max_pixels` raises DataError with `name`.

    >>> read_image(Image.new("RGBA", (30, 20), (255, 0, 0, 0)), 4)[:, 0, 0]
    array([255, 255, 255], dtype=uint8)
    """
    if channels not in (1, 3) or (isinstance(size, int) and size < 1):
        raise ConfigError(f"size must be at least 1 and channels 1 or 3, got size {size}, channels {channels}")
    wanted = Preprocessing.of(size)
    if keep_aspect and wanted != Preprocessing(wanted.size):
        raise ConfigError(f"a letterboxed image is not cropped or resampled as {wanted.decoding} asks for: give a size")
    if isinstance(source, Image.Image):
        name = name or getattr(source, "filename", "") or "image"
    elif isinstance(source, bytes):
        name = name or f"image of {len(source)} bytes"
    else:
        name = name or os.fspath(source)
    with _quiet:
        try:
            if isinstance(source, Image.Image):
                return _decode(source, wanted, channels, max_pixels, keep_aspect=keep_aspect)
            data: bytes | Path = source if isinstance(source, bytes) else Path(source)
            _refuse_empty(data)
            formats = _with_heif(FORMATS) if _is_heif(data) else FORMATS
            with Image.open(io.BytesIO(data) if isinstance(data, bytes) else data, formats=formats) as image:
                pixels = _decode(image, wanted, channels, max_pixels, keep_aspect=keep_aspect, fresh=True)
                if image.format == "PNG":
                    _refuse_endless(data)
                return pixels
        except DataError as error:
            raise DataError(f"{name}: {error}") from None
        except UnidentifiedImageError:
            raise DataError(f"{name}: not an image in a format that can be read ({', '.join(FORMATS)})") from None
        except Image.DecompressionBombError as error:
            raise DataError(f"{name}: {error}") from None
        except FileNotFoundError:
            raise DataError(f"{name}: no such file") from None
        except MemoryError:
            raise DataError(f"{name}: it takes too much memory to decode; make it smaller") from None
        except Exception as error:  # decoders raise arbitrary errors for damaged data
            if isinstance(error, OSError) and error.errno is not None:
                raise DataError(f"cannot read {name}: {error.strerror}") from error
            given = error.args[0] if error.args else ""  # bytes from some, which must not be shown as Python's
            why = given.decode("ascii", "replace") if isinstance(given, bytes) else str(error)
            what = "truncated" if "truncated" in why.lower() else "damaged"
            raise DataError(f"{name}: {what} image ({why or type(error).__name__})") from error


def _refuse_empty(data: bytes | Path) -> None:
    if (len(data) if isinstance(data, bytes) else data.stat().st_size) == 0:
        raise DataError("the file is empty")


def _is_heif(data: bytes | Path) -> bool:
    """Return whether the first bytes are those of a HEIC image."""
    if isinstance(data, bytes):
        head = data[:12]
    else:
        with open(data, "rb") as file:
            head = file.read(12)
    return head[4:8] == b"ftyp" and head[8:] in _HEIF_BRANDS


def _with_heif(formats: tuple[str, ...]) -> tuple[str, ...]:
    """Register HEIC support in Pillow on first use (optional extra)."""
    try:
        import pillow_heif
    except ImportError:
        raise DataError("HEIC images need pillow-heif: pip install 'efcil[heic]'") from None
    pillow_heif.register_heif_opener()
    return (*formats, "HEIF")


def _refuse_endless(data: bytes | Path) -> None:
    """Raise DataError for a PNG without end marker, which Pillow accepts if all pixels are present."""
    if b"IEND" not in (data if isinstance(data, bytes) else data.read_bytes()):
        raise DataError("truncated image (its end marker is missing)")


def _decode(
    image: Image.Image, wanted: Preprocessing, channels: int, max_pixels: int, *, keep_aspect: bool, fresh: bool = False
) -> npt.NDArray[np.uint8]:
    width, height = image.size
    if width * height > max_pixels:  # from the header, before memory is allocated
        raise DataError(f"image of {width} x {height} exceeds the limit of {max_pixels} pixels; make it smaller")
    size = wanted.size
    if fresh:
        # JPEG only: decode at 1/2, 1/4 or 1/8 of the size, but at least twice the target size for resize quality.
        least = math.ceil(2 * size / wanted.crop)
        image.draft(None, (least, least))
    image.load()
    orientation = _orientation(image)  # after load: PNG stores it at the end, and TIFF is rotated while loading
    image = _eight_bits(image, channels)
    if orientation in _UPRIGHT:
        image = image.transpose(_UPRIGHT[orientation])
    # Crop within resize: resizing first would turn a 1 x 100,000 image into 64 x 6,400,000 pixels.
    is_portrait = keep_aspect and image.size[1] > image.size[0]
    if is_portrait:
        image = image.transpose(Image.Transpose.TRANSPOSE)
    width, height = image.size
    short = min(width, height)
    across = min(width, short * max_width(size) / size) if keep_aspect else short
    wide = int(size * across / short)  # as torchvision's Resize rounds
    span, down = (width, height) if wanted.squash else (across * wanted.crop, short * wanted.crop)
    left, top = (width - span) / 2, (height - down) / 2
    resampling = _RESAMPLING[wanted.interpolation]
    image = image.resize((wide, size), resampling, box=(left, top, left + span, top + down))
    pixels = np.asarray(image)
    pixels = np.ascontiguousarray(pixels[None] if channels == 1 else pixels.transpose(2, 0, 1))
    return pad(pixels, is_portrait) if keep_aspect else pixels


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # ignore damaged metadata if the pixels are readable
        return 1


def _eight_bits(image: Image.Image, channels: int) -> Image.Image:
    """Convert any mode to RGB or L, with transparency over white."""
    if image.mode.startswith("I") or image.mode == "F":
        image = Image.fromarray(_scaled(np.asarray(image), sixteen=image.mode.startswith("I;16")))
    elif image.has_transparency_data:
        image = _over_white(image.convert("RGBA"))
    if image.mode != "RGB":
        image = image.convert("RGB")  # also for one channel: CMYK and palettes convert to L only via RGB
    return image if channels == 3 else image.convert("L")


def _over_white(image: Image.Image) -> Image.Image:
    """Compose an RGBA image over white, in strips: whole, it would take the memory of five."""
    width, height = image.size
    found = Image.new("RGB", image.size)
    for top in range(0, height, _STRIP):
        strip = image.crop((0, top, width, min(top + _STRIP, height)))
        white = Image.new("RGBA", strip.size, "white")
        found.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return found


def _scaled(values: npt.NDArray[np.generic], *, sixteen: bool) -> npt.NDArray[np.uint8]:
    """Scale values of high bit depth to 0 .. 255.

    16-bit images use the full range of their type. 32-bit and float images have no fixed range: values within 0 .. 1
    (float only), 0 .. 255 or 0 .. 65535 are interpreted as such, others are stretched from minimum to maximum.
    """

    def strips() -> Iterator[tuple[int, npt.NDArray[np.float64]]]:  # a whole image would take eight bytes per pixel
        for top in range(0, len(values), _STRIP):
            wide = values[top : top + _STRIP].astype(np.float64)
            wide[~np.isfinite(wide)] = 0.0
            yield top, wide

    if sixteen:
        low, high = 0.0, 65535.0
    else:
        low = min(float(wide.min()) for _, wide in strips())
        high = max(float(wide.max()) for _, wide in strips())
        if low >= 0 and high <= 65535:
            ranges = (1.0, 255.0, 65535.0) if np.issubdtype(values.dtype, np.floating) else (255.0, 65535.0)
            low, high = 0.0, next(top for top in ranges if high <= top)
    found = np.empty(values.shape, np.uint8)
    for top, wide in strips():
        found[top : top + _STRIP] = np.rint((wide - low) * (255.0 / ((high - low) or 1.0)))
    return found
