"""`efcil serve`: bind, warn, answer, and end tidily."""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket
import sys
from pathlib import Path

from efcil.errors import OptionError
from efcil.serve.limits import Limits

GRACE = 30  # seconds that running requests have to finish after SIGTERM
CONNECTIONS = 1024


def serve(
    model: Path,
    *,
    host: str,
    port: int,
    token: str | None,
    limits: Limits,
    device: str = "auto",
    threads: int | None = None,
    teach_threads: int | None = None,
    tls: tuple[Path, Path] | None = None,
) -> None:
    """Serve a model directory until SIGTERM or Ctrl-C."""
    # Before torch is loaded: threads that wait for each other must sleep, not spin, or a teaching on the same cores
    # keeps them from meeting and a picture takes a second.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        import python_multipart  # noqa: F401
        import uvicorn

        from efcil.serve.app import create_app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("efcil"):
            raise
        raise OptionError(f"efcil serve needs {error.name}: pip install 'efcil[serve]'") from None
    import torch

    from efcil.serve.service import Service

    if token is not None and (not token.strip() or not token.isascii()):
        raise OptionError("the token is empty or not ASCII; leave it out to have one made")
    for file in tls or ():
        if not file.is_file():
            raise OptionError(f"{file}: no such file; give both --tls-cert and --tls-key")
    if threads:
        torch.set_num_threads(threads)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    service = Service(model, limits=limits, device=device, teach_threads=teach_threads)
    made = token is None
    token = token or secrets.token_urlsafe(24)
    config = uvicorn.Config(
        create_app(service, token),
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=GRACE,
        ssl_certfile=tls[0] if tls else None,
        ssl_keyfile=tls[1] if tls else None,
    )
    with _bound(host, port) as listening:
        place = f"[{host}]" if ":" in host else host
        address = f"http{'s' * bool(tls)}://{place}:{listening.getsockname()[1]}"
        if not _loopback(host) and not tls:
            risk = "token and pictures travel unencrypted; use --tls-cert and --tls-key, or a proxy that has them"
            print(f"efcil: warning: {address} is open to other machines without TLS: {risk}", file=sys.stderr)
        print(f"serving {model} ({len(service.store.current.names)} classes) at {address}", flush=True)
        if made:
            print(f"token for teaching, shown only now: {token}", flush=True)
        uvicorn.Server(config).run(sockets=[listening])


def _loopback(host: str) -> bool:
    """Tell whether only this machine can connect.

    >>> [_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (")[0]  # without the address once more
        raise OptionError(f"--host {host} --port {port}: {why}; choose another with --host or --port") from None
