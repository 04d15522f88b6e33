"""One image, of any kind that people keep in folders, as a uint8 square: the only place that calls Pillow to decode."""

from __future__ import annotations

import io
import os
import threading
import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from efcil.data.letterbox import max_width, pad
from efcil.errors import ConfigError, DataError

# What may be opened. Not everything that Pillow knows: an EPS upload, for one, would start Ghostscript.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
_HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")  # behind "ftyp", bytes 8 to 12
MAX_PIXELS = 178_956_970  # where Pillow itself refuses to go on (two thirds of a GiB at its four bytes a pixel)

# Orientation (EXIF tag 274) -> what has to be done to see the picture upright; 1 is upright already.
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


class _SuppressWarnings:
    """No warnings while a picture is decoded: they are of odd metadata and of images of half Pillow's limit.

    What matters is an error or is checked here. The filters belong to the whole process: of threads that decode at once
    the first sets them and the last sets them back, or one would end the silence of another, or leave its own behind.
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
    size: int,
    channels: int = 3,
    *,
    max_pixels: int = MAX_PIXELS,
    name: str | None = None,
    keep_aspect: bool = False,
) -> npt.NDArray[np.uint8]:
    """Decode an image into uint8 (channels, size, size): short side to `size`, center crop, alpha over white.

    With `whole` nothing but ends beyond 3:2 is cut off, and the picture comes in a frame (`efcil.data.letterbox`).

    `source` is a file, its bytes or a Pillow image (which is left as it is); of an animation the first frame counts.
    A file that is missing, truncated, damaged, not an image or larger than `max_pixels` raises DataError with `name`.

    >>> read_image(Image.new("RGBA", (30, 20), (255, 0, 0, 0)), 4)[:, 0, 0]
    array([255, 255, 255], dtype=uint8)
    """
    if size < 1 or channels not in (1, 3):
        raise ConfigError(f"size must be at least 1 and channels 1 or 3, got size {size}, channels {channels}")
    if isinstance(source, Image.Image):
        name = name or getattr(source, "filename", "") or "image"
    elif isinstance(source, bytes):
        name = name or f"image of {len(source)} bytes"
    else:
        name = name or os.fspath(source)
    with _quiet:
        try:
            if isinstance(source, Image.Image):
                return _decode(source, size, channels, max_pixels, keep_aspect=keep_aspect)
            data: bytes | Path = source if isinstance(source, bytes) else Path(source)
            _refuse_empty(data)
            formats = _with_heif(FORMATS) if _is_heif(data) else FORMATS
            with Image.open(io.BytesIO(data) if isinstance(data, bytes) else data, formats=formats) as image:
                pixels = _decode(image, size, channels, max_pixels, keep_aspect=keep_aspect, fresh=True)
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
        except Exception as error:  # decoders answer damaged data with nearly every kind of error
            if isinstance(error, OSError) and error.errno is not None:
                raise DataError(f"{name}: cannot be read: {error.strerror}") from error
            what = "truncated" if "truncated" in str(error).lower() else "damaged"
            raise DataError(f"{name}: {what} image ({str(error) or type(error).__name__})") from error


def _refuse_empty(data: bytes | Path) -> None:
    if (len(data) if isinstance(data, bytes) else data.stat().st_size) == 0:
        raise DataError("the file is empty")


def _is_heif(data: bytes | Path) -> bool:
    """Whether it is a HEIC photograph, by its first bytes."""
    if isinstance(data, bytes):
        head = data[:12]
    else:
        with open(data, "rb") as file:
            head = file.read(12)
    return head[4:8] == b"ftyp" and head[8:] in _HEIF_BRANDS


def _with_heif(formats: tuple[str, ...]) -> tuple[str, ...]:
    """Teach Pillow to read HEIC, with an extra; it is registered when the first such picture comes."""
    try:
        import pillow_heif
    except ImportError:
        raise DataError("HEIC pictures need pillow-heif: pip install 'efcil[heic]'") from None
    pillow_heif.register_heif_opener()
    return (*formats, "HEIF")


def _refuse_endless(data: bytes | Path) -> None:
    """Pillow takes a PNG that was cut behind its last pixel; cut it is all the same."""
    if b"IEND" not in (data if isinstance(data, bytes) else data.read_bytes()):
        raise DataError("truncated image (its end mark is missing)")


def _decode(
    image: Image.Image, size: int, channels: int, max_pixels: int, *, keep_aspect: bool, fresh: bool = False
) -> npt.NDArray[np.uint8]:
    width, height = image.size
    if width * height > max_pixels:  # known from the header, before any memory is spent
        raise DataError(f"{width} x {height} pixels are more than the limit of {max_pixels}; make the image smaller")
    if fresh:
        # JPEG only: decode at 1/2, 1/4 or 1/8 of the size. Twice the wanted size leaves the resize something to filter.
        image.draft(None, (2 * size, 2 * size))
    image.load()
    orientation = _orientation(image)  # after load: PNG keeps it at the end, and TIFF is turned while it is loaded
    image = _eight_bits(image, channels)
    if orientation in _UPRIGHT:
        image = image.transpose(_UPRIGHT[orientation])
    # The square is cut by the resize itself. To resize first would make 64 x 6,400,000 pixels of a 1 x 100,000 image.
    is_portrait = keep_aspect and image.size[1] > image.size[0]
    if is_portrait:
        image = image.transpose(Image.Transpose.TRANSPOSE)
    width, height = image.size
    short = min(width, height)
    kept = min(width, short * max_width(size) / size) if keep_aspect else short
    left, top = (width - kept) / 2, (height - short) / 2
    wide = int(size * kept / short)  # as torchvision's Resize rounds
    image = image.resize((wide, size), Image.Resampling.BILINEAR, box=(left, top, left + kept, top + short))
    pixels = np.asarray(image)
    pixels = np.ascontiguousarray(pixels[None] if channels == 1 else pixels.transpose(2, 0, 1))
    return pad(pixels, is_portrait) if keep_aspect else pixels


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged metadata are no reason to refuse sound pixels
        return 1


def _eight_bits(image: Image.Image, channels: int) -> Image.Image:
    """RGB or L of any mode, transparent parts white."""
    if image.mode.startswith("I") or image.mode == "F":
        image = Image.fromarray(_scaled(np.asarray(image), sixteen=image.mode.startswith("I;16")))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("RGB")  # also for one channel: CMYK and palettes know the way to L only through RGB
    return image if channels == 3 else image.convert("L")


def _scaled(values: npt.NDArray[np.generic], *, sixteen: bool) -> npt.NDArray[np.uint8]:
    """Deep values as 0 .. 255.

    16-bit images use the whole range of their type. 32-bit and float images have no such range: values that fit
    0 .. 1 (float only), 0 .. 255 or 0 .. 65535 are read so, anything else is stretched from its least to its greatest.
    """
    wide = values.astype(np.float64)
    wide[~np.isfinite(wide)] = 0.0
    low, high = float(wide.min()), float(wide.max())
    if sixteen:
        low, high = 0.0, 65535.0
    elif low >= 0 and high <= 65535:
        ranges = (1.0, 255.0, 65535.0) if np.issubdtype(values.dtype, np.floating) else (255.0, 65535.0)
        low, high = 0.0, next(top for top in ranges if high <= top)
    return np.rint((wide - low) * (255.0 / ((high - low) or 1.0))).astype(np.uint8)
