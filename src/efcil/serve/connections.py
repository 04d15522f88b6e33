"""Connections, bounded in number and in the time that a client may let the service wait."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections import Counter
from typing import Any

HEADER_TIMEOUT = 10.0  # seconds from the connection, or the first byte of a further request, to the end of its headers
WRITE_TIMEOUT = 30.0  # seconds in which a client takes nothing of its answer
SMALL_CHUNKS = 200  # chunks of a body, whatever their size; each takes time of the event loop
BYTES_PER_CHUNK = 128  # on average of all further chunks
SAID_AGAIN = 600.0  # seconds until the log says again that there are too many connections
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
log = logging.getLogger("efcil.serve")


def sender(address: str) -> str:
    """Return what counts as one sender: an IPv4 address, or the /64 network that one customer has of IPv6.

    >>> sender("2001:db8::1") == sender("2001:db8::2"), sender("::ffff:10.0.0.1")
    (True, '10.0.0.1')
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # a socket without address
        return address
    if isinstance(found, ipaddress.IPv6Address):
        return str(found.ipv4_mapped or ipaddress.IPv6Address(int(found) >> 64 << 64))
    return str(found)


class Connection:
    """What the bookkeeping knows of a connection; the protocol of `protocol_type` is one."""

    sender: str
    waiting: float | None  # since when the service waits for the client; None while it works for it

    def drop(self) -> None:
        """Close the connection at once."""
        raise NotImplementedError


class Connections:
    """Open connections. At a limit the client that lets the service wait the longest makes room for a new one."""

    def __init__(self, limit: int, per_sender: int):
        self.limit, self._per_sender = limit, per_sender
        self._open: set[Connection] = set()
        self._count: Counter[str] = Counter()
        self._said = -SAID_AGAIN

    def __len__(self) -> int:
        return len(self._open)

    def add(self, new: Connection) -> bool:
        """Count a connection; False if there is no room for it."""
        if self._count[new.sender] >= self._per_sender:
            room = self._drop(
                [one for one in self._open if one.sender == new.sender], f"{new.sender} has as many as it may"
            )
        else:
            room = len(self._open) < self.limit or self._drop(list(self._open), f"all {self.limit:,} are taken")
        if room:
            self._open.add(new)
            self._count[new.sender] += 1
        return room

    def remove(self, old: Connection) -> None:
        """Forget a connection."""
        if old in self._open:
            self._open.remove(old)
            self._count[old.sender] -= 1
            if not self._count[old.sender]:
                del self._count[old.sender]

    def _drop(self, among: list[Connection], why: str) -> bool:
        self.say(f"connections: {why}; those that keep the service waiting are closed for new ones")
        idle = [(-self._count[one.sender], one.waiting, one) for one in among if one.waiting is not None]
        if not idle:
            return False
        oldest = min(idle, key=lambda item: item[:2])[2]
        self.remove(oldest)
        oldest.drop()
        return True

    def say(self, text: str) -> None:
        """Log a message, unless one was logged of late: an attack must not fill the disk."""
        if time.monotonic() - self._said >= SAID_AGAIN:
            self._said = time.monotonic()
            log.warning("%s", text)

    def handle_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Exception handler of the event loop: say once that there are no descriptors left."""
        if "socket.accept()" in context.get("message", ""):
            self.say(f"no connection can be accepted ({context.get('exception')}); those that are open are served")
        else:
            loop.default_exception_handler(context)


def protocol_type(connections: Connections) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol with the limits of `connections` and timeouts for each connection.

    It is the one of h11, which bounds the head of a request at 64 KiB; httptools takes as much as comes.
    """
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    base: Any = H11Protocol

    class BoundedProtocol(base, Connection):  # type: ignore[misc]
        _header_timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None

        def __init__(self, *arguments: Any, **given: Any):
            super().__init__(*arguments, **given)
            self._next_event, self.conn.next_event = self.conn.next_event, self._next_bounded
            self._chunks = self._bytes = 0

        def _next_bounded(self) -> Any:
            """Return the next event of the request; refuse a body of many small chunks."""
            event = self._next_event()
            if isinstance(event, h11.Request):
                self._chunks = self._bytes = 0
            elif isinstance(event, h11.Data):
                self._chunks += event.chunk_start
                self._bytes += len(event.data)
                if self._chunks > SMALL_CHUNKS + self._bytes // BYTES_PER_CHUNK:
                    raise h11.RemoteProtocolError("too many small chunks")
            return event

        def send_400_response(self, msg: str) -> None:
            """Answer what is no HTTP, or end the connection if an answer to the request is on its way already."""
            if self.cycle is not None:  # whose answer nobody can be sent any more
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                super().send_400_response(msg)
            else:
                self.drop()

        def connection_made(self, transport: asyncio.Transport) -> None:
            peer = transport.get_extra_info("peername")
            self.sender, self.waiting = sender(peer[0]) if peer else "", time.monotonic()
            super().connection_made(transport)
            if connections.add(self):
                self._wait_for_headers()
            else:
                transport.write(_FULL)
                transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            connections.remove(self)
            self._cancel_timers()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before:
                self._cancel_header_timer()
            elif self._header_timer is None and (before is None or before.response_complete):
                self._wait_for_headers()  # the first byte of a further request
            self._note_waiting()

        def on_response_complete(self) -> None:
            before = self.cycle
            super().on_response_complete()  # begins the next request if it has come already
            self.waiting = time.monotonic()
            if self.cycle is not before:
                self._note_waiting()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._write_timer = self.loop.call_later(WRITE_TIMEOUT, self.drop)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None

        def drop(self) -> None:
            if self.transport is not None:
                self.transport.abort()

        def _wait_for_headers(self) -> None:
            self._header_timer = self.loop.call_later(HEADER_TIMEOUT, self.drop)

        def _note_waiting(self) -> None:
            """Keep since when the service waits: not while it works on a request that has come whole."""
            working = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
            if working:
                self.waiting = None
            elif self.waiting is None:
                self.waiting = time.monotonic()

        def _cancel_header_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _cancel_timers(self) -> None:
            self._cancel_header_timer()
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None

    return BoundedProtocol
