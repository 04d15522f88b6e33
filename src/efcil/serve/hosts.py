"""Names by which the service may be called: a page of another site must not reach it under the site's own name."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

from efcil.errors import ConfigError

_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_LONGEST = 300  # characters of a Host header


def allowed_names(host: str, named: Iterable[str]) -> frozenset[str]:
    """Return the names in `named`, the name listened on, and those of this machine if others can reach it.

    >>> sorted(allowed_names("127.0.0.1", ["Photos.example.org"]))
    ['localhost', 'photos.example.org']
    """
    names = {"localhost", host.lower()}
    for name in named:
        if not _NAME.fullmatch(name.lower()):
            raise ConfigError(f"--allowed-host {name}: not a host name; give it without scheme, port and path")
        names.add(name.lower())
    if not is_loopback(host):
        own = socket.gethostname().lower()
        names |= {own, f"{own}.local"}
    return frozenset(name for name in names if not _is_address(name))


def is_allowed(header: str, names: frozenset[str]) -> bool:
    """Return whether a Host header names this service: an address, which no other site can have, or an allowed name.

    >>> names = frozenset(["localhost"])
    >>> [is_allowed(host, names) for host in ("localhost:80", "127.0.0.1", "[::1]:80", "evil.example", "127.0.0.1.a")]
    [True, True, True, False, False]
    """
    if len(header) > _LONGEST:
        return False
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:/@\s]+)(:\d{0,5})?", header)
    if found is None:
        return False
    name = found[1].lower().removesuffix(".")
    return name in names or _is_address(name.strip("[]"))


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
