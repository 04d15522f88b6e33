"""What a backbone expects of a picture: side, crop, interpolation and normalization of its input.

It travels with the backbone (`efcil.models.preprocessing`): weights are worth little behind another normalization, and
up to ten points less behind another one than theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from efcil.errors import ConfigError

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
INTERPOLATIONS: tuple[Interpolation, ...] = ("nearest", "bilinear", "bicubic", "lanczos")

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # used for all photographs


@dataclass(frozen=True)
class Preprocessing:
    """How a picture becomes the input of a network; the defaults are those of a network that is trained from scratch.

    >>> Preprocessing(224, crop=0.875, interpolation="bicubic").decoding
    '224px-0.875-bicubic'
    """

    size: int
    """Side of the square input in pixels."""
    crop: float = 1.0
    """Share of the picture's short side that the side of the central square takes; the rest is cut off."""
    interpolation: Interpolation = "bilinear"
    """How pixels are resampled, always antialiased."""
    squash: bool = False
    """Whether the whole picture is squeezed into a square instead of cropped."""
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Subtracted from each channel (red, green, blue), of pixels in [0, 1]."""
    std: tuple[float, ...] = IMAGENET_STD
    """By which each channel is divided afterwards."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size must be at least 1, got {self.size}")
        if not 0 < self.crop <= 1:
            raise ConfigError(f"crop is {self.crop}; wanted a share of the short side above 0, at most 1")
        if self.interpolation not in INTERPOLATIONS:
            raise ConfigError(f"interpolation: unknown name '{self.interpolation}'; take {', '.join(INTERPOLATIONS)}")
        if len(self.mean) != len(self.std) or min(self.std) <= 0:
            raise ConfigError(f"mean {self.mean} and std {self.std}: wanted as many of both, all std above 0")

    @classmethod
    def of(cls, size: int | Preprocessing) -> Preprocessing:
        """Return the preprocessing itself, or the usual one for squares of `size` pixels."""
        return size if isinstance(size, Preprocessing) else cls(size)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Preprocessing:
        """Read what `to_dict` wrote.

        >>> Preprocessing.from_dict(Preprocessing(32).to_dict()) == Preprocessing(32)
        True
        """
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in document.items()}
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @property
    def decoding(self) -> str:
        """What decides the stored pixels, in a word for the names of files; the normalization comes after them."""
        parts = [f"{self.size}px"]
        if (self.crop, self.interpolation, self.squash) != (1.0, "bilinear", False):
            parts += ["squash" if self.squash else f"{self.crop:.6g}", self.interpolation]
        return "-".join(parts)

    def with_size(self, size: int | None) -> Preprocessing:
        """Return the same for another side; None: the same."""
        return self if size is None else replace(self, size=size)
