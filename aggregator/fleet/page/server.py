"""Serves the status page beside the fleet service, over TLS with the fleet's own certificate."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from hushfleet import atomic_file
from hushfleet.aggregator.fleet.page.app import page_app
from hushfleet.aggregator.fleet.trust.folder import FleetFolder, url_host
from hushfleet.aggregator.fleet.view import FleetView
from hushfleet.aggregator.fleet.watching.watch import FleetWatch
from hushfleet.errors import BadInput

TOKEN_FILE = "page.token"
TOKEN_BYTES = 24
MAX_CONNECTIONS = 256
REQUEST_S = 20.0
"""A connection must send a whole request in this time, or it is closed."""


def page_token(folder: FleetFolder) -> str:
    """Returns the token of the page. It is made once, and kept in `service/page.token`, which only its owner may read.

    Raises `BadInput` if it cannot be read, and `StoreFull`.
    """
    file = folder.service / TOKEN_FILE
    if not file.exists():
        token = secrets.token_urlsafe(TOKEN_BYTES)
        atomic_file.write_whole(file, f"{token}\n".encode(), durable=True, mode=0o600)
    try:
        token = file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{file} cannot be read: {error}; remove it, and a new token is made") from error
    if not token:
        raise BadInput(f"{file} is empty; remove it, and a new token is made")
    return token


def page_url(folder: FleetFolder) -> str:
    """Returns the address for a browser. Anyone who has it can look at the fleet."""
    return f"https://{url_host(folder.config.broker.names[0])}:{folder.config.page.port}/?token={page_token(folder)}"


class PageServer:
    """Serves the page in a thread of its own until it is closed; a context manager.

    :param make_view: called in one thread only.
    :param cert_file: PEM; None: without TLS, for tests.
    :param key_file: PEM; None: without TLS.
    :param port: 0 takes a free one.

    Raises `BadInput` if the address is in use, or if the files are not a certificate and its key.
    """

    def __init__(
        self,
        make_view: Callable[[], FleetView],
        token: str,
        *,
        host: str,
        port: int,
        cert_file: Path | None = None,
        key_file: Path | None = None,
    ) -> None:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = _LimitedSocket(socket.create_server((host, port), family=family))
        except OSError as error:
            raise BadInput(f"[page]: cannot listen on {host} port {port}: {error.strerror}") from error
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            page_app(make_view, token),
            http=_ImpatientProtocol,
            ws="none",
            lifespan="off",
            log_level="error",  # a warning for each wrong request of a stranger would fill the disk
            access_log=False,  # it would hold the token
            server_header=False,
            loop="asyncio",  # another one might not call `_LimitedSocket.accept`
            timeout_graceful_shutdown=1,
            ssl_certfile=cert_file,
            ssl_keyfile=key_file,
        )
        try:
            config.load()
        except OSError as error:  # ssl.SSLError is one
            self._socket.close()
            raise BadInput(f"{cert_file} and {key_file} are not a certificate and its key: {error}") from error
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="page", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, folder: FleetFolder) -> Self:
        """Serves the page of the fleet in `folder` with the settings in fleet.toml."""
        watch: list[FleetWatch] = []

        def make_view() -> FleetView:
            if not watch:
                watch.append(FleetWatch(folder))
            return watch[0].view()

        page = folder.config.page
        files = {"cert_file": folder.service / "page.pem", "key_file": folder.service / "page.key"}
        return cls(make_view, page_token(folder), host=page.host, port=page.port, **files)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _LimitedSocket(socket.socket):
    """Accepts `MAX_CONNECTIONS` at a time; otherwise strangers could use up the service's file descriptors."""

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(fileno=listening.detach())
        self._accepted = list[socket.socket]()

    def accept(self) -> tuple[socket.socket, Any]:
        came, address = super().accept()
        self._accepted = [each for each in self._accepted if each.fileno() >= 0]  # -1: it was closed
        if len(self._accepted) >= MAX_CONNECTIONS:
            came.close()
            raise BlockingIOError  # as if nobody had come
        self._accepted.append(came)
        return came, address


class _ImpatientProtocol(H11Protocol):
    """Closes a connection on which no whole request came and none is answered; `MAX_CONNECTIONS` of these, also of
    telephones that have gone, would keep all others out. Uvicorn limits only the time between two requests."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._before = self.cycle  # None: nothing was asked yet
        self._timer = self.loop.call_later(REQUEST_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        newest = self.cycle
        if newest is self._before and (newest is None or newest.response_complete):
            self.transport.close()
            return
        self._before, self._timer = newest, self.loop.call_later(REQUEST_S, self._look)
