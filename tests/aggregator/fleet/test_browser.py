"""The status page in a real headless Chromium, by its debugging protocol."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from hushfleet.aggregator.fleet.page.server import PageServer
from hushfleet.aggregator.fleet.view import FleetView
from support.fleet_views import a_view
from support.tools import find

CHROMIUM = find("chromium")
TIMEOUT_S = 240.0
pytestmark = pytest.mark.needs("chromium")


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


@pytest.mark.slow
def test_the_page_is_live_safe_and_fits_a_telephone(tab: Tab) -> None:
    shown: list[FleetView] = [a_view()]
    with PageServer(lambda: shown[-1], "token", host="127.0.0.1", port=0) as server:
        tab.do("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=2, mobile=True)
        tab.do("Page.navigate", url=f"http://localhost:{server.port}/?token=token")
        tab.until("document.getElementById('live')?.textContent === 'live'")
        assert tab.value("location.search") == "", "the token has left the address"
        assert tab.value("document.cookie") == "", "no script sees the cookie"
        assert tab.value("document.title") == "greenhouse - Hushfleet", "no text from a board has run"
        assert tab.value("document.querySelectorAll('img, section script').length") == 0
        assert tab.value("document.documentElement.scrollWidth") <= 390
        assert tab.value("getComputedStyle(document.querySelector('.boards thead')).display") == "none"
        assert tab.value("document.querySelector('time').textContent").endswith("ago")
        shown.append(replace(shown[0], boards=(replace(shown[0].boards[0], device="greenhouse-new"),)))
        tab.until("document.querySelector('.boards td b').textContent === 'greenhouse-new'")
        tab.do("Emulation.setDeviceMetricsOverride", width=1200, height=900, deviceScaleFactor=1, mobile=False)
        assert tab.value("document.documentElement.scrollWidth") <= 1200
        assert tab.value("getComputedStyle(document.querySelector('.boards thead')).display") != "none"
        assert tab.refused == [], "the content security policy stopped nothing of ours"
    tab.until("document.getElementById('live').textContent.startsWith('not live')")
