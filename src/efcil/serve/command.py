"""`efcil serve`: bind the socket, run the server and shut down gracefully."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import logging
import secrets
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from efcil.errors import ConfigError
from efcil.serve.limits import Limits

SHUTDOWN_TIMEOUT = 30  # seconds for running requests to finish after SIGTERM
TLS_SHUTDOWN_TIMEOUT = 2.0  # seconds to wait for a client's TLS close notification
MAX_CONNECTIONS = 1024


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
    try:
        import python_multipart  # noqa: F401
        import uvicorn

        from efcil.serve.app import create_app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("efcil"):
            raise
        raise ConfigError(f"efcil serve needs {error.name}: pip install 'efcil[serve]'") from None
    import torch

    from efcil.serve.service import Service

    if token is not None and (not token.strip() or not token.isascii()):
        raise ConfigError("the token is empty or not ASCII; omit it to generate one")
    if tls:
        _check_tls(*tls)
    if threads:
        torch.set_num_threads(threads)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    service = Service(model, limits=limits, device=device, teach_threads=teach_threads)
    generated = token is None
    token = token or secrets.token_urlsafe(24)
    config = uvicorn.Config(
        create_app(service, token),
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT,
        ssl_certfile=tls[0] if tls else None,
        ssl_keyfile=tls[1] if tls else None,
    )
    with _bind(host, port) as listener:
        place = f"[{host}]" if ":" in host else host
        address = f"http{'s' * bool(tls)}://{place}:{listener.getsockname()[1]}"
        if not _is_loopback(host) and not tls:
            risk = "token and images are sent unencrypted; use --tls-cert and --tls-key, or a TLS proxy"
            print(f"efcil: warning: {address} is reachable from other machines without TLS: {risk}", file=sys.stderr)
        print(f"serving {model} ({len(service.store.current.names)} classes) at {address}", flush=True)
        if generated:
            print(f"token for changes, shown only once: {token}", flush=True)
        server = uvicorn.Server(config)
        server.startup = functools.partial(_startup, server.startup)  # type: ignore[method-assign]
        server.run(sockets=[listener])


async def _startup(startup: Callable[..., Awaitable[None]], *, sockets: list[socket.socket]) -> None:
    """Start the server with a shorter TLS shutdown timeout than asyncio's 30 seconds per connection.

    Idle keep-alive connections would otherwise delay the shutdown.
    """
    loop = asyncio.get_running_loop()

    def create_server(*arguments: Any, **given: Any) -> Awaitable[Any]:
        options = {"ssl_shutdown_timeout": TLS_SHUTDOWN_TIMEOUT} if given.get("ssl") else {}
        return own(*arguments, **given, **options)

    own: Any = loop.create_server
    loop.create_server = create_server  # type: ignore[assignment,method-assign]
    await startup(sockets=sockets)


def _check_tls(certificate: Path, key: Path) -> None:
    """Raise ConfigError for an invalid certificate or key, before the model is loaded."""
    for file in (certificate, key):
        if not file.is_file():
            raise ConfigError(f"{file}: no such file; give both --tls-cert and --tls-key")

    def no_password() -> str:  # otherwise OpenSSL prompts on the terminal
        raise ConfigError(f"{key}: the key is encrypted; give one without a password, readable only by the service")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, no_password)
    except OSError as error:  # includes ssl.SSLError
        why = getattr(error, "reason", None) or error.strerror or "not readable"
        raise ConfigError(f"--tls-cert {certificate} --tls-key {key}: {why}; wanted matching PEM files") from None


def _is_loopback(host: str) -> bool:
    """Return whether only this machine can connect.

    >>> [_is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (")[0]  # without the repeated address
        raise ConfigError(f"--host {host} --port {port}: {why}; choose another with --host or --port") from None
