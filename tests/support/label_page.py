"""The labelling page, and who sends requests to it."""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hushfleet.edge_client.labelling.desk import Desk, version_of
from hushfleet.edge_client.labelling.server import LabelServer


@contextmanager
def serving(desk: Desk) -> Iterator[LabelServer]:
    with LabelServer(desk, host="127.0.0.1", port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Browser:
    """Sends requests to the page.

    :param token: None: sends none.
    """

    def __init__(self, server: LabelServer, token: str | None) -> None:
        self._server, self._token = server, token

    def ask(self, path: str, body: bytes | str = b"{}", *, method: str = "POST", **headers: str) -> tuple[int, Any]:
        """Returns status and content: JSON as its value, anything else as bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self._server.server_address[1], timeout=60)
        if self._token is not None:
            headers = {"Authorization": f"Bearer {self._token}", **headers}
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        self.headers = dict(answer.getheaders())
        connection.close()
        return answer.status, json.loads(content) if "json" in self.headers["Content-Type"] else content

    def version(self, image: str) -> str:
        """Returns the present version of an image in the inbox, whatever the page has shown; empty: no such file."""
        with suppress(OSError, ValueError):
            return version_of(os.lstat(os.path.join(self._server.desk.config.data.inbox or "", image)))
        return ""

    def tap(self, image: str, label: str, version: str | None = None) -> tuple[int, Any]:
        version = self.version(image) if version is None else version
        return self.ask("/tap", json.dumps({"image": image, "label": label, "version": version}))

    def look(self, image: str, version: str | None = None) -> tuple[int, Any]:
        version = self.version(image) if version is None else version
        return self.ask("/image", json.dumps({"image": image, "version": version}))
