"""Limits of requests."""

from __future__ import annotations

from dataclasses import dataclass, fields

from efcil.errors import ConfigError

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """Upper limits, checked before memory or time is spent."""

    bytes: int = 64 * MIB  # request body
    held: int = 192 * MIB  # bodies of all requests under way
    unpacked: int = 256 * MIB  # decompressed size of a zip
    pixels: int = 40_000_000  # per image
    predict_files: int = 64  # images per prediction request
    teach_files: int = 1_000  # images per update
    waiting: int = 1_024  # queued images of all requests; a quarter of it of those that take longer to decode ...
    waiting_slow: int = 64  # ... and fewer of the slow ones
    decode_seconds: int = 10  # of one core, per image
    decode_memory: int = 640 * MIB  # per image
    concurrent_decodes: int = 4  # images of one request
    connections: int = 1_024  # at once
    connections_per_address: int = 256

    def __post_init__(self) -> None:
        for field in fields(self):
            if (value := getattr(self, field.name)) < 1:
                raise ConfigError(f"limit {field.name} is {value}; wanted 1 or more")
