"""Middleware for every request: body limits, security headers and metrics."""

from __future__ import annotations

import asyncio
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from efcil.serve.limits import Limits
from efcil.serve.metrics import Metrics

READ_TIMEOUT = 60.0  # seconds without data within a request
DRAIN_TIMEOUT = 10.0  # seconds to discard the rest of a refused request
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


class _Body:
    """Size-limited request body."""

    def __init__(self, receive: Receive, headers: Headers, limit: int):
        self._receive, self._limit = receive, limit
        length = headers.get("content-length", "")
        self._declared = int(length) if length.isdigit() else 0
        self._expects_continue = "expect" in headers
        self.count, self.ended = 0, False

    async def receive(self) -> Message:
        """Return the next message; raise HTTPException on too many bytes or a timeout."""
        if self.ended:
            return await self._receive()  # waits for the disconnect
        if self._declared > self._limit:
            raise self._too_large()
        try:
            async with asyncio.timeout(READ_TIMEOUT):
                message = await self._next()
        except TimeoutError:
            raise HTTPException(
                408, f"no data received for {READ_TIMEOUT:.0f} seconds; send the request again"
            ) from None
        if self.count > self._limit:
            raise self._too_large()
        return message

    async def _next(self) -> Message:
        message = await self._receive()
        self.count += len(message.get("body", b""))
        self.ended = not message.get("more_body", False)
        return message

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the request has more than {self._limit:,} bytes; send fewer or smaller images")

    async def drain(self) -> None:
        """Discard the rest of a refused request, as a client that is still sending does not read the response.

        The connection is closed if the body is far beyond the limit.
        """
        if self.ended or self._declared > 4 * self._limit or (self._expects_continue and not self.count):
            return
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT):
                while not self.ended and self.count <= 4 * self._limit:
                    await self._next()
        except TimeoutError:
            pass


class Guard:
    """ASGI middleware of the service."""

    def __init__(self, app: ASGIApp, limits: Limits, metrics: Metrics):
        self.app, self.limits, self.metrics = app, limits, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500
        body = _Body(receive, Headers(scope=scope), self.limits.bytes)

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                await body.drain()
                _add_headers(MutableHeaders(scope=message))
            await send(message)

        try:
            await self.app(scope, body.receive, answer)
        finally:
            route = _route(scope)
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self.metrics.requests.labels(method, route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - started)


_METHODS = {"GET", "HEAD", "POST", "PUT", "IM2COL_CHANNELS", "DELETE", "OPTIONS"}


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
