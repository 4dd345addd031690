"""A real headless Chromium, by its debugging protocol. A test file imports the fixture `tab`."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from support.tools import find

CHROMIUM = find("chromium")
TIMEOUT_S = 240.0


class Tab:
    """One page of the browser."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self.refused: list[str] = []
        (target,) = [t for t in self.do("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self._session = self.do("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Runtime"):
            self.do(f"{domain}.enable")

    _session: str | None = None

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        session = {} if self._session is None else {"sessionId": self._session}
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters, **session}))
        while True:
            message = json.loads(self._connection.recv(TIMEOUT_S))
            if message.get("method") == "Log.entryAdded":
                self.refused.append(message["params"]["entry"]["text"])
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    def value(self, expression: str) -> Any:
        return self.do("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression: str) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not self.value(expression):
            assert time.monotonic() < end, f"{expression}: {self.value('document.body.innerText')}"
            time.sleep(0.05)


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    process = subprocess.Popen(
        [*command, f"--user-data-dir={tmp_path / 'profile'}", "about:blank"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Debian's command is a script that starts the browser
    )
    try:
        assert process.stderr is not None
        url = next(found[0] for line in process.stderr if (found := re.findall(r"ws://\S+", line)))
        with connect(url, max_size=1 << 24) as connection:
            yield Tab(connection)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
