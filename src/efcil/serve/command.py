"""`efcil serve`: bind the socket, run the server and shut down gracefully."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efcil.errors import ConfigError, printable
from efcil.platform_support import open_files
from efcil.serve.connections import Connections, protocol_type
from efcil.serve.hosts import allowed_names, is_loopback
from efcil.serve.limits import Limits

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

SHUTDOWN_TIMEOUT = 30  # seconds for running requests to finish after SIGTERM
TLS_SHUTDOWN_TIMEOUT = 2.0  # seconds to wait for a client's TLS close notification
TLS_HANDSHAKE_TIMEOUT = 10.0  # seconds for a client to complete it
BACKLOG = 256
_LONGEST = 200  # characters of a host that are repeated
RESERVED = 128  # descriptors for the model, its updates and decoding; the others are for connections
_TLS_TIMEOUTS = {"ssl_shutdown_timeout": TLS_SHUTDOWN_TIMEOUT, "ssl_handshake_timeout": TLS_HANDSHAKE_TIMEOUT}


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
    allowed_hosts: Sequence[str] = (),
) -> None:
    """Serve a model directory until SIGTERM or Ctrl-C."""
    try:
        import uvicorn  # noqa: F401

        from efcil.serve.app import create_app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("efcil"):
            raise
        raise ConfigError(f"efcil serve needs {error.name}: pip install 'efcil[serve]'") from None
    import torch

    from efcil.serve.service import Service

    if token is not None and (not token.strip() or not token.isascii()):
        raise ConfigError("the token is empty or not ASCII; omit it to generate one")
    names = allowed_names(host, allowed_hosts)
    if tls:
        _check_tls(*tls)
    if threads:
        torch.set_num_threads(threads)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    service = Service(model, limits=limits, device=device, teach_threads=teach_threads)
    generated = token is None
    token = token or secrets.token_urlsafe(24)
    connections = Connections(_most_connections(limits.connections), limits.connections_per_address)
    server = make_server(create_app(service, token, names), connections, tls)
    with _bind(host, port) as listener:
        service.store.hold()  # until the server has stopped; another service is refused before an address is printed
        place = f"[{host}]" if ":" in host else host
        address = f"http{'s' * bool(tls)}://{place}:{listener.getsockname()[1]}"
        if not is_loopback(host) and not tls:
            risk = "token and images are sent unencrypted; use --tls-cert and --tls-key, or a TLS proxy"
            print(f"efcil: warning: {address} is reachable from other machines without TLS: {risk}", file=sys.stderr)
        count = len(service.store.current.names)
        what = f"{count} class{'es' * (count != 1)}" if count else "no classes yet: the page teaches the first ones"
        if service.store.read_only:
            print(f"efcil: note: the model cannot be changed: {service.store.read_only}", file=sys.stderr)
        print(f"serving {printable(str(model))} ({what}) at {address}", flush=True)
        if generated:
            print(f"token for changes, shown only once: {token}", flush=True)
        server.run(sockets=[listener])


def make_server(app: FastAPI, connections: Connections, tls: tuple[Path, Path] | None = None) -> uvicorn.Server:
    """Return the HTTP server of an application."""
    import uvicorn

    config = uvicorn.Config(
        app,
        http=protocol_type(connections),
        loop="asyncio",  # whose messages about descriptors `Connections.handle_exception` knows
        ws="none",
        log_config=None,
        log_level="error",  # a warning for every wrong request would let strangers fill the disk
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT,
        ssl_certfile=tls[0] if tls else None,
        ssl_keyfile=tls[1] if tls else None,
    )
    server = uvicorn.Server(config)
    server.startup = functools.partial(_startup, server.startup, connections)  # type: ignore[method-assign]
    return server


async def _startup(
    startup: Callable[..., Awaitable[None]], connections: Connections, *, sockets: list[socket.socket]
) -> None:
    """Start the server with shorter TLS timeouts than asyncio's 60 and 30 seconds per connection.

    Silent clients would otherwise hold descriptors, and idle keep-alive connections delay the shutdown.
    """
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(connections.handle_exception)

    def create_server(*arguments: Any, **given: Any) -> Awaitable[Any]:
        options = dict(_TLS_TIMEOUTS) if given.get("ssl") else {}
        return own(*arguments, **given, **options)

    own: Any = loop.create_server
    loop.create_server = create_server  # type: ignore[assignment,method-assign]
    await startup(sockets=sockets)


def _most_connections(wanted: int) -> int:
    """Return the limit of connections; fewer where a process may open few files."""
    files = open_files()
    return wanted if files is None else max(8, min(wanted, files - RESERVED))


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


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    where = f"--host {host[:_LONGEST]} --port {port}"
    try:
        if b"\0" in host.encode("idna"):
            raise UnicodeError("a null character")
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except UnicodeError:
        raise ConfigError(f"{where}: not a name of a host; choose another with --host") from None
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (")[0]  # without the repeated address
        raise ConfigError(f"{where}: {why}; choose another with --host or --port") from None
