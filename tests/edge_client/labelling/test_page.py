"""The labelling page by real HTTP: what an owner does, and what a stranger, another site or a hostile file tries."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from hushfleet.edge_client.__main__ import main
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.labelling import server as server_module
from hushfleet.edge_client.labelling.desk import Desk
from hushfleet.edge_client.labelling.server import LabelServer
from hushfleet.edge_client.worker.predict import Prediction, predict
from hushfleet.errors import BadInput
from support.edge import Bench
from support.label_page import Browser, serving
from support.pictures import CLASSES, a_picture


@pytest.fixture
def inbox(board: DeviceConfig) -> Path:
    """With two images, one of them in a folder of its day."""
    folder = Path(board.data.inbox or "")
    a_picture(folder / "first.png", seed=1)
    a_picture(folder / "today/second.jpg", seed=2, size=(2000, 1000))
    return folder


@pytest.fixture
def server(board: DeviceConfig, inbox: Path) -> Iterator[LabelServer]:
    """Of a board whose client has not run yet, unless the test has the fixture `trained`."""
    with serving(Desk(board)) as server:
        yield server


@pytest.fixture
def owner(server: LabelServer) -> Browser:
    return Browser(server, server.token)


def files(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def test_a_tap_moves_an_image_into_its_class(trained: Bench, owner: Browser, inbox: Path, photographs: Path) -> None:
    _, shown = owner.ask("/next")
    assert (shown["waiting"], shown["image"], shown["undo"], tuple(shown["classes"])) == (
        2,
        "first.png",
        False,
        CLASSES,
    )
    expected = predict(trained.store, inbox / "first.png").classes[0]
    assert shown["guess"] == [expected[0], pytest.approx(expected[1])], (
        "the board's personalized model, as predict does"
    )
    assert shown["by"] == "the board's personalized model, of digits-test"
    content = (inbox / "first.png").read_bytes()
    status, shown = owner.tap("first.png", "stem")
    assert (status, shown["waiting"], shown["image"], shown["said"]) == (
        200,
        1,
        "today/second.jpg",
        "first.png is labelled stem.",
    )
    assert (photographs / "stem/first.png").read_bytes() == content
    status, shown = owner.tap("today/second.jpg", "")
    assert (shown["waiting"], shown["image"], shown["undo"]) == (0, None, True)
    assert files(inbox) == ["not-usable/second.jpg"]
    assert files(photographs) == ["leaf/leaf.png", "mould/mould.png", "stem/first.png"]


def test_taps_are_undone_the_last_first(owner: Browser, inbox: Path, photographs: Path) -> None:
    before = files(inbox), files(photographs)
    owner.tap("first.png", "leaf")
    owner.tap("today/second.jpg", "")
    _, shown = owner.ask("/undo")
    assert (shown["image"], shown["said"]) == ("today/second.jpg", "second.jpg waits again; it was put aside.")
    _, shown = owner.ask("/undo")
    assert (shown["image"], shown["said"]) == ("first.png", "first.png waits again; it was labelled leaf.")
    assert (files(inbox), files(photographs)) == before
    assert owner.ask("/undo") == (409, {"error": "there is no tap to undo"})


def test_a_tap_that_could_not_be_undone_can_be_undone_later(
    owner: Browser, inbox: Path, photographs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner.tap("first.png", "leaf")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", full)
        status, said = owner.ask("/undo")
        assert (status, "free some space" in said["error"]) == (409, True)
    _, shown = owner.ask("/undo")
    assert (shown["image"], shown["said"]) == ("first.png", "first.png waits again; it was labelled leaf.")


def test_an_image_that_is_known_does_not_come_in_twice(owner: Browser, inbox: Path, photographs: Path) -> None:
    (inbox / "first.png").write_bytes((photographs / "mould/mould.png").read_bytes())
    os.utime(inbox / "first.png", (1e9, 1e9))
    _, shown = owner.tap("first.png", "mould")
    assert shown["said"].startswith(f"first.png is there already (trained on): {photographs}/mould/mould.png.")
    assert files(photographs) == ["leaf/leaf.png", "mould/mould.png"]
    owner.ask("/undo")
    assert "first.png" in files(inbox)
    _, shown = owner.tap("first.png", "")
    assert shown["said"] == f"first.png is put aside. The same is still at {photographs}/mould/mould.png."


@pytest.mark.parametrize("is_held_out", [False, True])
def test_another_label_of_a_known_image_corrects_it(
    trained: Bench, board: DeviceConfig, inbox: Path, photographs: Path, tmp_path: Path, is_held_out: bool
) -> None:
    """The name is taken there, and one undo brings all back."""
    place = tmp_path / "test" if is_held_out else photographs
    former = a_picture(place / "mould/leaf.png", seed=7)
    a_picture(place / "leaf/leaf.png", seed=8)
    a_picture(inbox / "first.png", seed=7)
    a_picture(inbox / "not-usable/first.png", seed=9)
    os.utime(inbox / "first.png", (1e9, 1e9))
    board = replace(board, data=replace(board.data, held_out=str(tmp_path / "test")))
    with serving(Desk(board)) as server:
        owner, before = Browser(server, server.token), (files(place), files(inbox))
        _, shown = owner.tap("first.png", "leaf")
        [present] = {*files(place)} - {*before[0]}
        assert shown["said"] == (
            f"first.png was there already: {former} is now {place}/{present}. This copy was put aside."
        )
        assert present.startswith("leaf/leaf-")
        assert "mould/leaf.png" not in files(place)
        _, shown = owner.ask("/undo")
        assert shown["said"] == "first.png waits again; it was labelled leaf."
        assert (files(place), files(inbox)) == before


def test_a_tap_is_for_the_picture_that_was_shown(owner: Browser, inbox: Path, photographs: Path) -> None:
    """A camera may overwrite its last picture while a person looks at it."""
    _, shown = owner.ask("/next")
    a_picture(inbox / "first.png", seed=1, size=(9, 9))
    for label in ("leaf", ""):
        assert owner.tap("first.png", label, shown["version"]) == (
            409,
            {"error": "another picture has come under this name since it was shown; look again"},
        )
    assert owner.look("first.png", shown["version"])[0] == 409
    assert "first.png" in files(inbox)
    assert files(photographs) == ["leaf/leaf.png", "mould/mould.png"]
    _, shown = owner.ask("/next")
    assert owner.tap(shown["image"], "leaf", shown["version"])[0] == 200


def test_nothing_is_trained_on_before_a_tap(trained: Bench, owner: Browser, inbox: Path) -> None:
    runtime = trained.loaded
    assert len(runtime.data.samples()) == 2
    owner.ask("/next")
    owner.look("first.png")
    assert len(runtime.data.samples()) == 2
    owner.tap("first.png", "leaf")
    assert sorted(runtime.data.samples().y.tolist()) == [4, 4, 6]


def test_the_image_is_a_jpeg_that_the_board_has_made(owner: Browser, inbox: Path) -> None:
    """Upright and small; nothing that the camera wrote about place and time passes."""
    photo = Image.fromarray(np.zeros((600, 3000, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "at 52.5 N, 13.4 E"
    photo.save(inbox / "first.png", exif=exif)
    photo.save(inbox / "today/second.jpg", exif=exif, comment=b"at 52.5 N")
    os.utime(inbox / "first.png", (1e9, 1e9))
    status, content = owner.look("first.png")
    assert (status, owner.headers["Content-Type"], owner.headers["X-Content-Type-Options"]) == (
        200,
        "image/jpeg",
        "nosniff",
    )
    with Image.open(io.BytesIO(content)) as made:
        assert (made.format, made.size, dict(made.getexif())) == ("JPEG", (205, 1024), {})
    status, content = owner.look("today/second.jpg")
    assert status == 200
    assert b"52.5 N" not in content


def test_files_that_are_no_images_or_not_whole_are_not_shown(
    board: DeviceConfig, inbox: Path, photographs: Path
) -> None:
    (inbox / "page.html").write_text("<script>alert(1)</script>")
    os.utime(inbox / "page.html", (1, 1))
    (inbox / ".hidden.png").write_bytes((inbox / "first.png").read_bytes())
    os.link(inbox / "first.png", inbox / "not-settled.png")
    (inbox / "link.png").symlink_to(photographs / "leaf/leaf.png")
    (inbox / "folder").symlink_to(photographs)
    os.mkfifo(inbox / "pipe.png")
    no_text = os.fsdecode(b"caf\xe9.png")
    (inbox / no_text).write_bytes((inbox / "first.png").read_bytes())
    os.utime(inbox / no_text, (1, 1))
    shown = Desk(board).next()
    assert (shown.waiting, shown.image) == (3, "first.png")
    broken, unnamed = sorted(shown.unreadable)[::-1]
    assert broken.startswith(f"{inbox}/page.html cannot be read as an image")
    assert unnamed == "'caf\\udce9.png': the name has characters that cannot be shown; rename the file"
    os.utime(inbox / "first.png")
    assert Desk(board, settled_s=3600).next().image == "today/second.jpg"


@pytest.mark.parametrize(
    "name",
    [
        "../images/leaf/leaf.png", "today/../../images/leaf/leaf.png", "/etc/passwd", "..", "", ".", "link.png",
        "folder/leaf/leaf.png", "not-usable/aside.png", "first.png\0.jpg", "%2e%2e/images/leaf/leaf.png", "today",
    ],
)  # fmt: skip
def test_nothing_outside_of_the_inbox_is_shown_or_moved(
    owner: Browser, inbox: Path, photographs: Path, name: str
) -> None:
    (inbox / "link.png").symlink_to(photographs / "leaf/leaf.png")
    (inbox / "folder").symlink_to(photographs)
    a_picture(inbox / "not-usable/aside.png", seed=5)
    before = files(inbox), files(photographs)
    for said in (name, quote(name, safe=""), quote(name)):
        assert owner.look(said, owner.version(name))[0] == 409
    status, answer = owner.tap(name, "leaf")
    assert (status, answer["error"]) == (409, "this image does not wait any more; it may have been labelled elsewhere")
    assert (files(inbox), files(photographs)) == before
    for method in ("GET", "POST"):
        assert owner.ask(f"/{quote(name)}" if name else "/x", method=method)[0] in (404, 400)


@pytest.mark.parametrize("label", ["../inbox", "/tmp", "not a class", "leaf/../mould", "."])
def test_no_label_leads_out_of_the_folders(owner: Browser, inbox: Path, photographs: Path, label: str) -> None:
    status, answer = owner.tap("first.png", label)
    assert status == 409
    assert "is no class here" in answer["error"]
    assert files(photographs) == ["leaf/leaf.png", "mould/mould.png"]


@pytest.mark.parametrize("token", [None, "", "x" * 32, "é", "Bearer"])
def test_without_the_token_nothing_is_seen_or_done(server: LabelServer, inbox: Path, token: str | None) -> None:
    """Another site, too: a browser adds the token to nothing by itself, and no cookie stands for it."""
    stranger, before = Browser(server, None if token is None else quote(token)), files(inbox)
    for path in ("/next", "/image", "/undo", "/other", f"/next?token={server.token}"):
        status, answer = stranger.ask(path, json.dumps({"image": "first.png", "token": server.token}))
        assert (status, set(answer)) == (401, {"error"})
        assert stranger.ask(path, method="GET")[0] == 404
    for cookie in ({}, {"Cookie": f"token={server.token}"}, {"Origin": f"http://127.0.0.1:{server.server_address[1]}"}):
        body = json.dumps({"image": "first.png", "label": "leaf"})
        assert stranger.ask("/tap", body, **{"Content-Type": "text/plain"}, **cookie)[0] == 401
    assert files(inbox) == before
    status, _ = stranger.ask("/tap", method="OPTIONS", Origin="http://evil.example")
    assert status == 501
    assert not [name for name in stranger.headers if name.startswith("Access-Control")]


def test_the_page_holds_nothing_of_the_board_and_loads_nothing_from_elsewhere(server: LabelServer) -> None:
    stranger = Browser(server, None)
    for path in ("/", "/label.css", "/label.js"):
        status, content = stranger.ask(path, method="GET")
        assert status == 200
        assert server.token.encode() not in content
        assert b"//" not in content.replace(b"// ", b"").replace(b"http://127.0.0.1", b"")
        policy = stranger.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert (stranger.headers["Cache-Control"], stranger.headers["Referrer-Policy"]) == ("no-store", "no-referrer")
    assert b"onclick=" not in stranger.ask("/", method="GET")[1]
    assert b"innerHTML" not in stranger.ask("/label.js", method="GET")[1]


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"no json", {}, 400),
        (b"[1]", {}, 400),
        (b"[" * 60000, {}, 400),
        (b"\xff", {}, 400),
        (b'{"image": 7, "label": null}', {}, 409),
        (b"", {"Content-Length": "-1"}, 411),
        (b"", {"Content-Length": "9" * 30}, 413),
        (b"", {"Content-Length": str(1 << 20)}, 413),
    ],
)
def test_requests_that_are_none_are_refused(owner: Browser, body: bytes, headers: dict[str, str], status: int) -> None:
    assert owner.ask("/tap", body, **headers)[0] == status
    assert owner.ask("/next")[0] == 200


def test_the_log_shows_no_escapes_of_a_stranger_and_no_token(server: LabelServer, owner: Browser, caplog) -> None:
    caplog.set_level("DEBUG")
    with socket.create_connection(server.server_address[:2]) as stranger:
        stranger.sendall(b"GET /\x1b[31m\x9b HTTP/1.0\r\n\r\n")
        stranger.settimeout(60)
        assert stranger.recv(12) == b"HTTP/1.0 404"
    owner.ask("/next")
    assert r"GET /\x1b[31m" in caplog.text
    assert caplog.text.isascii()
    assert "\x1b" not in caplog.text
    assert server.token not in caplog.text


def test_clients_that_say_nothing_keep_nobody_out_for_ever(server: LabelServer, owner: Browser, monkeypatch) -> None:
    monkeypatch.setattr(server_module._Handler, "timeout", 0.2)
    idle = [socket.create_connection(server.server_address[:2]) for _ in range(24)]
    for each in idle:
        each.settimeout(60)
        assert each.recv(1) == b"", "it was turned away at once, or when its patience had ended"
        each.close()
    assert owner.ask("/next")[0] == 200


def test_a_model_that_cannot_guess_stops_nobody(trained: Bench, owner: Browser, monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise BadInput("the graph is gone")

    monkeypatch.setattr("hushfleet.edge_client.labelling.desk.predict", broken)
    status, shown = owner.ask("/next")
    assert (status, shown["guess"], shown["image"]) == (200, None, "first.png")


def test_a_guess_that_is_no_number_is_none(trained: Bench, owner: Browser, monkeypatch) -> None:
    """JSON has no NaN, and a browser could not read the answer."""
    prediction = Prediction("digits-test", "global", (("leaf", float("nan")),))
    monkeypatch.setattr("hushfleet.edge_client.labelling.desk.predict", lambda *_: prediction)
    status, shown = owner.ask("/next")
    assert (status, shown["guess"], shown["image"]) == (200, None, "first.png")


def test_a_picture_of_too_much_memory_keeps_no_other_back(board: DeviceConfig, inbox: Path, monkeypatch) -> None:
    def read(file: Path, **_: object) -> None:
        if file.name == "first.png":
            raise MemoryError

    monkeypatch.setattr("hushfleet.edge_client.labelling.class_folders.read_image", read)
    shown = Desk(board).next()
    assert (shown.image, shown.unreadable) == (
        "today/second.jpg",
        (f"{inbox}/first.png cannot be read as an image: it needs more memory than there is",),
    )


def test_an_inbox_that_is_gone_is_not_taken_for_an_empty_one(owner: Browser, inbox: Path) -> None:
    inbox.rename(inbox.with_name("elsewhere"))
    status, answer = owner.ask("/next")
    assert status == 409
    assert f"data.inbox = '{inbox}' cannot be read: No such file or directory" in answer["error"]
    inbox.with_name("elsewhere").rename(inbox)
    assert owner.ask("/next")[1]["waiting"] == 2


def test_what_the_owner_has_to_set_is_said(board: DeviceConfig, tmp_path: Path, capsys) -> None:
    with pytest.raises(BadInput, match=r'write inbox = "/path/to/inbox" into \[data\]'):
        Desk(replace(board, data=replace(board.data, inbox=None)))
    with pytest.raises(BadInput, match="there is no such folder; make it"):
        Desk(replace(board, data=replace(board.data, inbox=str(tmp_path / "none"))))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=f"127.0.0.1 port {port} cannot be listened on: Address already in use"):
            LabelServer(Desk(board), host="127.0.0.1", port=port)
    for port in (-1, 70000):
        with pytest.raises(BadInput, match=f"--port {port}: must be from 0 to 65535"):
            LabelServer(Desk(board), host="127.0.0.1", port=port)
    with pytest.raises(BadInput, match=r"192.0.2.1 port 0 cannot be listened on: .*; choose another --host"):
        LabelServer(Desk(board), host="192.0.2.1", port=0)


def test_the_command_prints_an_address_that_opens_the_page(
    board: DeviceConfig, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(LabelServer, "serve_forever", lambda server: None)
    file = tmp_path / "device.toml"
    file.write_text(
        '[device]\nid = "board-1"\nstate_dir = "state"\nallow_volatile_state = true\n'
        '[broker]\nurl = "mqtt://127.0.0.1:9"\n[data]\nkind = "folder"\n'
        'path = "images"\ninbox = "inbox"\n[limits]\nepsilon_server = 50.0\n'
    )
    assert main(["label", str(file), "--port", "0"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("label new images at http://127.0.0.1:")
    assert "ssh -L" in said
    assert main(["label", str(file), "--port", "0", "--host", "0.0.0.0"]) == 0
    assert (
        "the connection is not encrypted: whoever listens in on this network sees the images" in capsys.readouterr().out
    )
