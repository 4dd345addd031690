"""The status page and /metrics, by HTTP; `test_browser.py` looks at it in a real browser."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import StreamingResponse

from hushfleet.aggregator.fleet.create import create_fleet
from hushfleet.aggregator.fleet.page import app as app_module
from hushfleet.aggregator.fleet.page import server as server_module
from hushfleet.aggregator.fleet.page.app import COOKIE, MAX_STREAMS, EventStream, page_app
from hushfleet.aggregator.fleet.page.render import MOST_BOARDS, PARTS, page, render_parts
from hushfleet.aggregator.fleet.page.server import PageServer, page_token, page_url
from hushfleet.aggregator.fleet.trust.folder import BrokerPart, FleetConfig, PagePart
from hushfleet.aggregator.fleet.trust.own_certificates import lost_names
from hushfleet.aggregator.fleet.view import FleetView
from hushfleet.aggregator.fleet.watching.metrics import METRICS, metrics
from hushfleet.errors import BadInput, StoreError
from hushfleet.wire.format.messages import RefusedCode
from support.desk import TASK, until
from support.fleet_views import HOSTILE, a_board, a_view

TOKEN = "a-token-of-this-test"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


class Shown:
    """What the page is made of; a test may change it."""

    def __init__(self) -> None:
        self.view: FleetView | None = a_view()

    def __call__(self) -> FleetView:
        if self.view is None:
            raise StoreError("the registry is damaged")
        return self.view


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def server(shown: Shown) -> Iterator[PageServer]:
    with PageServer(shown, TOKEN, host="127.0.0.1", port=0) as running:
        yield running


def get(
    server: PageServer, path: str, headers: dict[str, str] | None = None, *, method: str = "GET"
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/", "/events", "/metrics", "/page.js", "/?token=", "/?token=wrong", "/none"])
def test_nothing_is_shown_without_the_token(server: PageServer, path: str) -> None:
    forged = f"{COOKIE}={TOKEN}"
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Cookie": forged}):
        status, answered, text = get(server, path, headers)
        assert status == 401
        assert "greenhouse" not in text
        assert "set-cookie" not in answered


def test_the_token_becomes_a_cookie_and_leaves_the_address(server: PageServer) -> None:
    for path in ("/", "//elsewhere.example/"):
        status, headers, _ = get(server, f"{path}?token={TOKEN}")
        assert (status, headers["location"]) == (303, "/")
    cookie, *flags = headers["set-cookie"].split("; ")
    assert TOKEN not in cookie
    assert {"HttpOnly", "Secure", "Path=/"} <= set(flags)
    status, headers, text = get(server, "/", {"Cookie": cookie})
    assert status == 200
    assert "8 of 12 boards are there" in text
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert "unsafe" not in headers["content-security-policy"]
    assert (headers["referrer-policy"], headers["cache-control"]) == ("no-referrer", "no-store")
    for file in ("/look.css", "/page.css", "/page.js"):
        assert get(server, file, {"Cookie": cookie})[0] == 200
    assert "server" not in headers


def test_connections_without_the_token_do_not_take_the_services_files(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enrolment and lock-outs are in the same process."""
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 4)
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(20)]
    assert sum(not is_closed(each) for each in idle) == 4
    for each in idle:
        each.close()

    def answers() -> bool:
        with contextlib.suppress(ConnectionError):
            return get(server, "/metrics", BEARER)[0] == 200
        return False

    until(answers)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: a", b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET /"])
def test_half_a_request_does_not_keep_others_out_for_ever(
    shown: Shown, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(server_module, "REQUEST_S", 0.2)
    with PageServer(shown, TOKEN, host="127.0.0.1", port=0) as running, contextlib.ExitStack() as stack:
        for _ in range(4):
            idle = stack.enter_context(socket.create_connection(("127.0.0.1", running.port), timeout=30))
            idle.sendall(sent)

        def answers() -> bool:
            with contextlib.suppress(ConnectionError):
                return get(running, "/metrics", BEARER)[0] == 200
            return False

        until(answers)


def test_requests_of_strangers_write_nothing_into_the_log(shown: Shown, capfd: pytest.CaptureFixture[str]) -> None:
    """The log of the fleet service is a file without a limit, and anyone can send such requests all day."""
    upgrade = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with PageServer(shown, TOKEN, host="127.0.0.1", port=0) as running:
        for sent, status in ((b"\0\r\n\r\n", b"400"), (upgrade, b"401")):
            with socket.create_connection(("127.0.0.1", running.port), timeout=30) as stranger:
                stranger.sendall(sent)
                assert stranger.recv(12) == b"HTTP/1.1 " + status
    assert capfd.readouterr().err == ""


def test_a_reader_of_changes_is_not_cut_off(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its one request is old, and still being answered."""
    monkeypatch.setattr(server_module, "REQUEST_S", 0.1)
    with PageServer(shown, TOKEN, host="127.0.0.1", port=0) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
        connection.request("GET", "/events", headers=BEARER)
        stream = events(connection.getresponse())
        assert set(next(stream)["parts"]) == set(PARTS)
        for rounds in (12, 13):  # each is sent a second later at most, after many looks
            view = a_view()
            shown.view = replace(view, boards=(replace(view.boards[0], rounds=rounds), *view.boards[1:]))
            assert set(next(stream)["parts"]) == {"boards"}
        connection.close()


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.5)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_the_address_of_a_fleet_that_has_an_ipv6_address(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(TASK)
    folder = create_fleet(tmp_path / "f", FleetConfig("f", BrokerPart(("2001:DB8:0::1",))), tmp_path / "t.toml")
    assert page_url(folder).startswith("https://[2001:DB8:0::1]:8443/?token=")
    assert lost_names(folder) == [], "however it is written"


def test_it_only_reads(server: PageServer) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert get(server, "/", BEARER, method=method)[0] == 405


def test_a_folder_that_cannot_be_read_is_told(server: PageServer, shown: Shown) -> None:
    shown.view = None
    status, _, text = get(server, "/", BEARER)
    assert (status, text) == (503, "the registry is damaged\n")


def test_no_text_from_outside_is_markup() -> None:
    view = replace(a_view(), federation=HOSTILE)
    html = page(view, render_parts(view))
    assert "<script>document" not in html
    assert "<img" not in html
    assert html.count("&lt;script&gt;document") == 4  # the title, the headline, a place, a reason
    assert "http://" not in html
    assert "https://" not in html


def test_a_large_fleet_is_listed_in_part_and_those_that_need_somebody_come_first() -> None:
    calm = [replace(a_board(1), device=f"board-{number:05}") for number in range(2 * MOST_BOARDS)]
    full = replace(a_board(1, disk_percent=90), device="zz-full")
    parts = render_parts(a_view(*calm, full))
    names = re.findall("<td><b>([^<]*)", parts["boards"])
    assert names == ["zz-full"] + [board.device for board in calm[: MOST_BOARDS - 1]]
    assert f"{MOST_BOARDS} of {2 * MOST_BOARDS + 1} boards are listed" in parts["boards"]
    assert "zz-full" in parts["attention"]
    assert f"{2 * MOST_BOARDS + 1} accepted" in parts["round"]
    assert "boards are listed" not in render_parts(a_view(*calm[:MOST_BOARDS]))["boards"]


def test_parts_do_not_change_with_the_time_alone() -> None:
    view = a_view()
    assert render_parts(view) == render_parts(replace(view, at=view.at + 5))
    for empty in (FleetView("new", view.at), replace(view, run=None, rollout=None, boards=())):
        assert set(render_parts(empty)) == set(PARTS)


def events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in answer:
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))


def test_changes_are_sent_as_they_happen(server: PageServer, shown: Shown) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/events", headers=BEARER)
    answer = connection.getresponse()
    assert answer.headers["content-type"].startswith("text/event-stream")
    stream = events(answer)
    assert set(next(stream)["parts"]) == set(PARTS)
    view = a_view()
    boards = (replace(view.boards[0], rounds=12), *view.boards[1:])
    shown.view = replace(view, boards=boards)
    changed = next(stream)["parts"]
    assert set(changed) == {"boards"}
    assert '<td data-name="rounds">12</td>' in changed["boards"]
    connection.close()


def test_a_stream_ends_where_the_folder_cannot_be_read(
    server: PageServer, shown: Shown, caplog: pytest.LogCaptureFixture
) -> None:
    """A browser asks again every 3 seconds: each time there was a traceback in the log."""
    shown.view = None
    assert get(server, "/events", BEARER)[::2] == (200, "")
    assert caplog.records == []


def test_a_token_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(TASK)
    folder = create_fleet(tmp_path / "f", FleetConfig("f", BrokerPart(("b",))), tmp_path / "t.toml")
    (folder.service / "page.token").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match=r"page\.token cannot be read: .*remove it"):
        page_token(folder)


class CountedWithItsFirstLine(StreamingResponse):
    """An event stream as 0.3.0 counted it."""

    def __init__(self, lines: AsyncIterator[str], open_streams: set[Any]) -> None:
        async def counted() -> AsyncIterator[str]:
            open_streams.add(self)
            try:
                async for line in lines:
                    yield line
            finally:
                open_streams.discard(self)

        super().__init__(counted(), media_type="text/event-stream")


@pytest.mark.parametrize(("stream", "let_in"), [(CountedWithItsFirstLine, 70), (EventStream, MAX_STREAMS)])
def test_those_who_look_at_once_are_counted_at_once(
    monkeypatch: pytest.MonkeyPatch, shown: Shown, stream: type[StreamingResponse], let_in: int
) -> None:
    """70 requests in one turn of the loop: before a stream's first line is made, all of them have been answered."""
    monkeypatch.setattr(app_module, "EventStream", stream)

    async def look() -> tuple[int, int]:
        app, gone, statuses = page_app(shown, TOKEN), asyncio.Event(), list[int]()

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        def request() -> asyncio.Task[None]:
            headers = [(name.lower().encode(), value.encode()) for name, value in BEARER.items()]
            scope = {"type": "http", "method": "GET", "path": "/events", "query_string": b"", "headers": headers}
            return asyncio.create_task(app(scope, receive, send))

        many = [request() for _ in range(70)]
        while len(statuses) < 70:
            await asyncio.sleep(0.01)
        gone.set()
        await asyncio.gather(*many)
        before = statuses.count(200)
        await request()  # who has gone makes room
        return before, statuses[-1]

    assert asyncio.run(look()) == (let_in, 200)


def test_metrics_are_those_that_are_described(server: PageServer) -> None:
    status, headers, text = get(server, "/metrics", BEARER)
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/plain")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert set(families) == {name.removesuffix("_total") for name in METRICS}
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values["hushfleet_boards", "declined"] == 2
    assert values["hushfleet_board_disk_used_ratio", "greenhouse-05"] == 0.9
    assert values["hushfleet_declines_total", "budget"] == 3
    assert values["hushfleet_declines_total", "memory"] == 0, "Prometheus misses the first step of one that begins at 1"
    assert {values["hushfleet_refusals_total", code] for code in get_args(RefusedCode)} == {0, 1, 4}
    assert values["hushfleet_rollout_returned", "0.4.0"] == 1
    assert ("hushfleet_board_epsilon_server", "greenhouse-07") not in values, "what is not known is left out"
    assert families["hushfleet_boards_urgent"].samples[0].value == sum(board.is_urgent for board in a_view().boards)


def test_metrics_of_a_fleet_that_has_nothing_yet() -> None:
    text = metrics(FleetView("new", 0.0)).decode()
    assert "hushfleet_boards_pending 0.0" in text
    assert "hushfleet_epsilon_server " not in text.replace("# HELP hushfleet_epsilon_server ", "").replace(
        "# TYPE hushfleet_epsilon_server ", ""
    )


def test_a_fleet_serves_its_page_over_tls_with_its_own_certificate(tmp_path: Path) -> None:
    (tmp_path / "task.toml").write_text(TASK)
    config = FleetConfig("greenhouse", BrokerPart(("127.0.0.1",)), page=PagePart("127.0.0.1", 1))
    folder = create_fleet(tmp_path / "greenhouse", config, tmp_path / "task.toml")
    token = page_token(folder)
    assert page_token(folder) == token
    assert (folder.service / "page.token").stat().st_mode & 0o777 == 0o600
    assert page_url(folder) == f"https://127.0.0.1:1/?token={token}"
    files = {"cert_file": folder.service / "page.pem", "key_file": folder.service / "page.key"}
    trusted = ssl.create_default_context(cafile=folder.ca / "ca.pem")
    with PageServer(a_view, token, host="127.0.0.1", port=0, **files) as running:
        connection = http.client.HTTPSConnection("127.0.0.1", running.port, timeout=30, context=trusted)
        connection.request("GET", f"/?token={token}")
        assert connection.getresponse().status == 303
        connection.close()
        with pytest.raises(BadInput, match="cannot listen on"):
            PageServer(a_view, token, host="127.0.0.1", port=running.port)
    with pytest.raises(BadInput, match="not a certificate and its key"):
        PageServer(a_view, token, host="127.0.0.1", port=0, cert_file=files["key_file"], key_file=files["cert_file"])
