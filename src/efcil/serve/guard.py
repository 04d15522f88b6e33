"""Middleware for every request: host names, body limits, security headers and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from efcil.serve.hosts import is_allowed
from efcil.serve.limits import Limits
from efcil.serve.metrics import Metrics

READ_TIMEOUT = 20.0  # seconds without data within a request
SLOWEST = 8192  # bytes a second, averaged over a body after READ_TIMEOUT
DRAIN_TIMEOUT = 5.0  # seconds to discard a body that was refused for something else than its size
# The page loads no external resources; blob: is for previews of dropped images.
PAGE_POLICY = (
    "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class HeldBytes:
    """Bytes of all bodies under way; at the limit the largest body that is still coming is refused."""

    def __init__(self, limit: int):
        self._limit = limit
        self._bodies: set[_Body] = set()
        self._total = 0

    def add(self, body: _Body, count: int) -> None:
        """Count bytes of a body."""
        self._bodies.add(body)
        self._total += count
        if self._total > self._limit:
            coming = (one for one in self._bodies if not one.ended and not one.evicted)
            if largest := max(coming, key=lambda one: one.count, default=None):
                largest.evict()

    def remove(self, body: _Body) -> None:
        """Forget a body whose request was answered."""
        if body in self._bodies:
            self._bodies.remove(body)
            self._total -= body.count


class _Body:
    """Request body, limited in size and time."""

    def __init__(self, receive: Receive, headers: Headers, limit: int, held: HeldBytes):
        self._receive, self._limit, self._held = receive, limit, held
        length = headers.get("content-length", "")
        self._declared = int(length[:20]) if length.isdecimal() else 0
        self._expects_continue = "expect" in headers
        self._started = time.monotonic()
        self._timeout: asyncio.Timeout | None = None
        self.count, self.evicted, self._slow = 0, False, False
        self.ended = not self._declared and "transfer-encoding" not in headers  # one empty message is still to come

    async def receive(self) -> Message:
        """Return the next message; raise HTTPException on too many bytes or a slow client."""
        if self.ended:
            return await self._receive()  # the empty body, or a wait for the disconnect
        if self._declared > self._limit:
            raise self._too_large()
        latest = min(READ_TIMEOUT, self._started + READ_TIMEOUT + self.count / SLOWEST - time.monotonic())
        try:
            async with asyncio.timeout(latest) as self._timeout:
                message = await self._next()
        except TimeoutError:
            if self.evicted:
                raise _no_room() from None
            self._slow = True
            raise HTTPException(
                408, f"less than {SLOWEST:,} bytes per second, or none for {READ_TIMEOUT:.0f} seconds; send it again"
            ) from None
        finally:
            self._timeout = None
        if self.count > self._limit:
            raise self._too_large()
        if self.evicted and not self.ended:
            raise _no_room()
        return message

    def evict(self) -> None:
        """Refuse the rest of the body."""
        self.evicted = True
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def _next(self) -> Message:
        message = await self._receive()
        length = len(message.get("body", b""))
        self.count += length
        self.ended = not message.get("more_body", False)
        self._held.add(self, length)
        return message

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the request has more than {self._limit:,} bytes; send fewer or smaller images")

    async def finish(self) -> bool:
        """Return whether the connection can be used again after the answer.

        A body of a legal size that was refused for something else is discarded, as a client that is still sending does
        not read the response. Of one that is too large, too slow or in the way nothing more is read.
        """
        if self.ended:
            return True
        unread = self.evicted or self._slow or (self._expects_continue and not self.count)
        if unread or max(self._declared, self.count) > self._limit:
            return False
        count = self.count
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_TIMEOUT):
                while not self.ended and count <= self._limit:
                    message = await self._receive()
                    count += len(message.get("body", b""))
                    self.ended = not message.get("more_body", False)
        return self.ended


def _no_room() -> HTTPException:
    return HTTPException(503, "too many bytes of other requests are being read; try again later", {"Retry-After": "1"})


class Guard:
    """ASGI middleware of the service."""

    def __init__(self, app: ASGIApp, limits: Limits, metrics: Metrics, hosts: frozenset[str] = frozenset()):
        self.app, self.limits, self.metrics, self._hosts = app, limits, metrics, hosts
        self._held = HeldBytes(limits.held)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500
        sent = Headers(scope=scope)
        body = _Body(receive, sent, self.limits.bytes, self._held)

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                _add_headers(headers)
                if not await body.finish():
                    headers["connection"] = "close"
            await send(message)

        foreign = [host for host in sent.getlist("host") if not is_allowed(host, self._hosts)]
        app = JSONResponse({"detail": _FOREIGN}, 421) if foreign else self.app
        try:
            await app(scope, body.receive, answer)
        finally:
            self._held.remove(body)
            route = _route(scope)
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self.metrics.requests.labels(method, route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - started)


_FOREIGN = (
    "the service is not known by the name in the Host header; use its address, or start it with --allowed-host NAME"
)
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}


def _route(scope: Scope) -> str:
    """Return the route pattern of a request, never its path, to limit the number of labels."""
    if path := getattr(scope.get("route"), "path", None):
        return str(path)
    return "/page" if scope["path"].startswith("/page/") else "none"


def _add_headers(headers: MutableHeaders) -> None:
    for key, value in HEADERS.items():
        headers[key] = value
    html = headers.get("content-type", "").startswith("text/html")
    headers["content-security-policy"] = PAGE_POLICY if html else "default-src 'none'; frame-ancestors 'none'"
    headers["cache-control"] = "no-cache" if "etag" in headers else "no-store"  # only the page's files may be cached
