"""Serves the labelling page from a small HTTP server on the board, which uses only the standard library.

The printed address ends in `#TOKEN`, which a browser never sends. The page's script sends the token as a header of
each request. Therefore another site that the owner visits can neither read an image nor cause a tap: it does not know
the token, and a browser never adds it by itself. The page, its style and its script contain no data of the board, and
everybody may load them. No script, style or image from elsewhere is loaded.
"""

from __future__ import annotations

import errno
import hmac
import json
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from hushfleet.edge_client.labelling.desk import Desk, Shown
from hushfleet.errors import BadInput
from hushfleet.output import one_line

LOCAL = ("127.0.0.1", "::1", "localhost")
TOKEN_BYTES = 24
MAX_BODY_BYTES = 1 << 16
MAX_CONNECTIONS = 16
PATIENCE_S = 20.0  # with a client that sends nothing
_PAGE = Path(__file__).parent / "page"
_FILES = {
    "/": ("label.html", "text/html; charset=utf-8"),
    "/label.css": ("label.css", "text/css; charset=utf-8"),
    "/label.js": ("label.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src blob:; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TEXTS = dict.fromkeys(("image", "label", "version"), "")
_ROUTES: dict[str, Callable[[Desk, dict[str, str]], Shown | bytes]] = {
    "/next": lambda desk, _: desk.next(),
    "/image": lambda desk, given: desk.preview(given["image"], given["version"]),
    "/clip": lambda desk, given: desk.clip(given["image"], given["version"]),
    "/tap": lambda desk, given: desk.tap(given["image"], given["label"], given["version"]),
    "/undo": lambda desk, _: desk.undo(),
}
"""Requests that need the token, all of them POST: path -> the answer, from the texts that were sent."""
_KINDS = {"/image": "image/jpeg", "/clip": "audio/wav"}

_log = logging.getLogger("hushfleet.edge")


class LabelServer(ThreadingHTTPServer):
    """Serves the page until it is closed; a context manager.

    :param port: 0 takes a free one.

    Raises `BadInput` if the server cannot listen on the address.
    """

    daemon_threads = True
    request_queue_size = 4 * MAX_CONNECTIONS

    def __init__(self, desk: Desk, *, host: str, port: int) -> None:
        self.desk, self.at_the_desk = desk, threading.Lock()
        self.token = secrets.token_urlsafe(TOKEN_BYTES)
        """The secret that opens the page; a new one at each start."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            other = "another --port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "another --host"
            raise BadInput(f"{host} port {port} cannot be listened on: {error.strerror}; choose {other}") from error
        except OverflowError as error:
            raise BadInput(f"--port {port}: must be from 0 to 65535") from error

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's asks for this board's name, and waits if no DNS answers

    def describe(self) -> list[str]:
        """Returns the lines that tell a person where the page is."""
        host, port = str(self.server_address[0]), self.server_address[1]
        name = _own_address() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        clips = self.desk.config.data.kind == "sound"
        what = "alarms" if self.desk.wrong else "new clips" if clips else "new images"
        gets = "hears the clips" if clips else "sees the images"
        lines = [f"label {what} at http://{name}:{port}/#{self.token}", "Ctrl-C ends it"]
        if host in LOCAL:
            return [*lines, f"from another machine: ssh -L {port}:127.0.0.1:{port} BOARD, then the same address"]
        return [*lines, f"the connection is not encrypted: whoever listens in on this network {gets}"]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a request to the labelling page broke off", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: LabelServer
    server_version, sys_version = "hushfleet", ""
    timeout = PATIENCE_S

    def do_GET(self) -> None:
        if file := _FILES.get(self.path.partition("?")[0]):
            self._send(HTTPStatus.OK, (_PAGE / file[0]).read_bytes(), file[1])
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()):
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "the request has no length")
        elif len(length) > 9 or int(length) > MAX_BODY_BYTES:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the request is too large")
        else:
            try:  # before the token is checked: an answer to a request that is not read may not arrive
                given = dict(json.loads(self.rfile.read(int(length)) or b"{}"))
            except (ValueError, TypeError, RecursionError):
                self._refuse(HTTPStatus.BAD_REQUEST, "the request is no JSON object")
            else:
                self._answer({name: str(value) for name, value in given.items()})

    def _answer(self, given: dict[str, str]) -> None:
        """Answers one request at a time, if it has the token."""
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        if kind != "Bearer" or not hmac.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode()):
            return self._refuse(HTTPStatus.UNAUTHORIZED, "open the whole address that hushfleet-edge label has printed")
        if (route := _ROUTES.get(self.path)) is None:
            return self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")
        try:
            with self.server.at_the_desk:
                made = route(self.server.desk, _TEXTS | given)
        except BadInput as error:
            self._refuse(HTTPStatus.CONFLICT, str(error))
        except Exception as error:
            _log.exception("a request to the labelling page failed")
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"something went wrong on the board: {error}")
        else:
            if isinstance(made, bytes):
                self._send(HTTPStatus.OK, made, _KINDS[self.path])
            else:
                self._send(HTTPStatus.OK, asdict(made))

    def _refuse(self, status: HTTPStatus, words: str) -> None:
        self._send(status, {"error": one_line(words)})

    def _send(self, status: HTTPStatus, content: bytes | dict[str, Any], kind: str = "application/json") -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        _log.debug("%s", ascii(format % arguments)[1:-1])  # escape sequences of others must not reach the terminal


def _own_address() -> str:
    """Returns this board's address in the local network, without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address of documentation (RFC 5737)
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])
