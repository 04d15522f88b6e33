"""What one request may ask for."""

from __future__ import annotations

from dataclasses import dataclass, fields

from efcil.errors import ConfigError

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """Upper limits; a request beyond one is refused before the memory or the time is spent."""

    bytes: int = 64 * MIB  # of a request's body
    unpacked: int = 256 * MIB  # of all that a zip unpacks to
    pixels: int = 40_000_000  # of a picture
    predict_files: int = 64  # pictures of a request for predictions
    teach_files: int = 1_000  # pictures of a teaching
    waiting: int = 1_024  # pictures that wait for their forward pass, of all requests together

    def __post_init__(self) -> None:
        for field in fields(self):
            if (value := getattr(self, field.name)) < 1:
                raise ConfigError(f"limit {field.name} must be at least 1, got {value}")
