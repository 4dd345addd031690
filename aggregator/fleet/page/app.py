"""The status page as an ASGI application. It only reads, and it answers nobody without the token.

The token comes once, in the address; after that a cookie made from it is used, so that the token leaves the address
bar. Prometheus sends it as a bearer token. No script, style or image from elsewhere is loaded, and the content security
policy allows none, so that no text from a board can run.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hushfleet.aggregator.fleet.page.render import LOOK, TEMPLATES, page, render_parts
from hushfleet.aggregator.fleet.view import FleetView
from hushfleet.aggregator.fleet.watching.metrics import CONTENT_TYPE, metrics
from hushfleet.errors import HushfleetError

COOKIE = "__Host-hushfleet"
COOKIE_DAYS = 30
EVERY_S = 1.0
ALIVE_S = 15.0
MAX_STREAMS = 64
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Rendered(NamedTuple):
    """A view with the HTML of its parts."""

    view: FleetView
    parts: dict[str, str]


class Source:
    """Makes the newest view for all readers, at most once a second, always in the same thread.

    :param make_view: reads the fleet's folder.
    """

    def __init__(self, make_view: Callable[[], FleetView]) -> None:
        self._make_view = make_view
        self._thread = ThreadPoolExecutor(1, "fleet-view")  # SQLite's connections belong to one thread
        self._lock = asyncio.Lock()
        self._newest: Rendered | None = None
        self._made_at = -float("inf")

    async def newest(self) -> Rendered:
        async with self._lock:
            if self._newest is None or time.monotonic() - self._made_at >= EVERY_S:
                loop = asyncio.get_running_loop()
                self._newest = await loop.run_in_executor(self._thread, self._make)
                self._made_at = time.monotonic()
            return self._newest

    def _make(self) -> Rendered:
        view = self._make_view()
        return Rendered(view, render_parts(view))


class EventStream(StreamingResponse):
    """Server-sent events, counted in `open_streams` from the request on, because the first lines come later."""

    def __init__(self, lines: AsyncIterator[str], open_streams: set[EventStream]) -> None:
        super().__init__(lines, media_type="text/event-stream")
        self._open_streams = open_streams
        open_streams.add(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._open_streams.discard(self)


def page_app(make_view: Callable[[], FleetView], token: str) -> Starlette:
    """Makes the application.

    :param token: opens the page.
    """
    source, streams = Source(make_view), set[EventStream]()

    async def show(request: Request) -> Response:
        seen = await source.newest()
        return HTMLResponse(page(seen.view, seen.parts))

    async def prometheus(request: Request) -> Response:
        return Response(metrics((await source.newest()).view), media_type=CONTENT_TYPE)

    async def events(request: Request) -> Response:
        if len(streams) >= MAX_STREAMS:
            return PlainTextResponse("too many look at this page at once\n", 503)
        return EventStream(changes(), streams)

    async def changes() -> AsyncIterator[str]:
        """Yields server-sent events (WHATWG HTML, 9.2): changed parts as JSON; a comment after `ALIVE_S` of silence."""
        sent: dict[str, str] = {}
        said_at = 0.0
        while True:
            try:
                seen, now = await source.newest(), time.monotonic()
            except HushfleetError:
                return  # the browser shows that it is not live, and asks again; a reload shows the reason
            changed = {name: html for name, html in seen.parts.items() if sent.get(name) != html}
            if changed:
                yield f"data: {json.dumps({'at': seen.view.at, 'parts': changed})}\n\n"
            elif now - said_at >= ALIVE_S:
                yield ": still there\n\n"
            else:
                await asyncio.sleep(EVERY_S)
                continue
            sent, said_at = seen.parts, now

    files = {
        "/look.css": (LOOK.read_text("utf-8"), "text/css"),
        "/page.css": ((TEMPLATES / "page.css").read_text("utf-8"), "text/css"),
        "/page.js": ((TEMPLATES / "page.js").read_text("utf-8"), "text/javascript"),
    }

    async def file(request: Request) -> Response:
        text, kind = files[request.url.path]
        return Response(text, media_type=kind)

    return Starlette(
        routes=[
            Route("/", show),
            Route("/events", events),
            Route("/metrics", prometheus),
            *(Route(path, file) for path in files),
        ],
        middleware=[Middleware(Guard, token=token)],
        exception_handlers={HushfleetError: _broken},
    )


async def _broken(request: Request, error: Exception) -> Response:
    return PlainTextResponse(f"{error}\n", 503)


class Guard:
    """Refuses requests without the token, and sets the headers of every answer."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = _digest(token)
        self._cookie = hmac.new(token.encode(), b"hushfleet page", hashlib.sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._answer(HTTPConnection(scope))(scope, receive, guarded)

    def _answer(self, connection: HTTPConnection) -> ASGIApp:
        given = connection.query_params.get("token")
        if given is not None and self._is_token(given):
            response = RedirectResponse("/", 303)  # not to the path: //host leads elsewhere
            response.set_cookie(
                COOKIE, self._cookie, max_age=COOKIE_DAYS * 86400, path="/", secure=True, httponly=True, samesite="lax"
            )
            return response
        cookie = connection.cookies.get(COOKIE, "")
        if hmac.compare_digest(_digest(cookie), _digest(self._cookie)) or self._is_bearer(connection.headers):
            return self._app
        headers = {"WWW-Authenticate": 'Bearer realm="hushfleet"'}
        words = "This page needs its token. On the fleet's machine: hushfleet fleet status DIR --page\n"
        return PlainTextResponse(words, 401, headers)

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(_digest(text), self._token)

    def _is_bearer(self, headers: Headers) -> bool:
        kind, _, token = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and self._is_token(token.strip())


def _digest(text: str) -> bytes:
    """Hashes a text, so that comparing takes the same time for texts of all lengths."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
