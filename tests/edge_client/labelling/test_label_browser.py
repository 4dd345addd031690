"""The labelling page in a real headless Chromium: on a telephone, by keyboard, and without its token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.labelling.desk import Desk
from hushfleet.edge_client.labelling.heard import heard_name
from hushfleet.edge_client.labelling.server import LabelServer
from hushfleet.edge_client.labelling.spectrogram import SIZE
from support.browser import Tab, tab
from support.edge import Bench
from support.label_page import serving
from support.pictures import CLASSES, a_picture
from support.sound_board import LENGTH, RATE, a_clip, device_toml, hearing, hears

__all__ = ["device_toml", "hearing", "hears", "tab"]
pytestmark = pytest.mark.needs("chromium")
READY = "!document.getElementById('image').hidden && !busy"


@pytest.fixture
def server(trained: Bench, board: DeviceConfig) -> Iterator[LabelServer]:
    for number in range(5):
        a_picture(Path(board.data.inbox or "") / f"{number}.jpg", seed=number, size=(640, 480))
    with serving(Desk(board)) as server:
        yield server


def press(tab: Tab, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        code = {"Enter": 13}.get(key, ord(key[0].upper()))
        tab.do(
            "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text="\r" if code == 13 else key
        )


def files(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def test_an_owner_labels_by_taps_and_keys(
    tab: Tab, server: LabelServer, board: DeviceConfig, photographs: Path
) -> None:
    tab.do("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=2, mobile=True)
    tab.do("Page.navigate", url=server.describe()[0].rpartition(" ")[2])
    tab.until(f"typeof busy !== 'undefined' && {READY}")
    assert tab.value("document.documentElement.scrollWidth") <= 390
    assert tab.value("document.getElementById('waiting').textContent") == "5 images wait"
    assert tab.value("document.querySelectorAll('#classes button').length") == len(CLASSES)
    heights = tab.value(
        "JSON.stringify([...document.querySelectorAll('button')].filter(b => !b.hidden).map(b => b.offsetHeight))"
    )
    assert min(json.loads(heights)) >= 44, "large enough for a thumb"
    guess = tab.value("document.getElementById('guess').firstChild.textContent")
    assert guess in CLASSES
    assert tab.value("document.getElementById('image').naturalWidth") == 640
    # A double tap labels one image, however fast the next one is there.
    tab.value(
        """const before = shown, poll = setInterval(() => {
          if (shown === before || document.getElementById('image').hidden) return;
          clearInterval(poll);
          document.querySelectorAll('#classes button')[9].click();
          window.tappedTwice = true;
        }, 1);
        for (const _ of [1, 2]) document.querySelectorAll('#classes button')[9].click()"""
    )
    tab.until("window.tappedTwice && " + READY)
    assert tab.value("shown.waiting") == 4
    assert "stem/0.jpg" in files(photographs)
    press(tab, "5")
    tab.until("shown.waiting === 3 && " + READY)
    assert "leaf/1.jpg" in files(photographs)
    press(tab, "u")
    tab.until("shown.waiting === 4 && " + READY)
    assert "leaf/1.jpg" not in files(photographs)
    guess = tab.value("shown.guess[0]")
    press(tab, "Enter")
    tab.until("shown.waiting === 3 && " + READY)
    assert f"{guess}/1.jpg" in files(photographs)
    press(tab, "0")
    tab.until("shown.waiting === 2 && " + READY)
    tab.do("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
    assert tab.value("document.documentElement.scrollWidth") <= 1280
    press(tab, "1")
    tab.until("shown.waiting === 1 && " + READY)
    press(tab, "1")
    tab.until("shown.waiting === 0 && !busy")
    assert tab.value("document.getElementById('question').textContent") == "All new images are done"
    assert tab.value("document.getElementById('choices').hidden")
    assert tab.refused == [], "the content security policy stopped nothing of ours"


def test_an_owner_hears_clips_and_marks_false_alarms(tab: Tab, hears: DeviceConfig, device_toml: Path) -> None:
    inbox = device_toml.with_name("inbox")
    a_clip(inbox / "new.wav", "tone", "quiet")
    a_clip(inbox / "alarms/buzz" / heard_name(0.0, 0.75), "buzz")
    ready = f"typeof busy !== 'undefined' && {READY}"
    with serving(Desk(hears)) as server:
        tab.do("Page.navigate", url=server.describe()[0].rpartition(" ")[2])
        tab.until(ready)
        assert tab.value("document.getElementById('waiting').textContent") == "1 clip waits"
        assert tab.value("document.getElementById('image').naturalWidth") == SIZE[0]
        tab.until("document.getElementById('clip').readyState > 0")
        assert tab.value("document.getElementById('clip').duration") == 2 * LENGTH / RATE
        press(tab, "p")
        tab.until("document.getElementById('clip').played.length > 0")
        press(tab, "3")
        tab.until("shown.waiting === 0 && !busy")
        assert tab.value("document.getElementById('clip').hidden")
        assert files(inbox.with_name("sounds")) == ["tone/new.wav"]
    with serving(Desk(hears, wrong=True)) as server:
        tab.do("Page.navigate", url=server.describe()[0].rpartition(" ")[2])
        tab.until(f"{ready} && shown.wrong")
        assert tab.value("document.getElementById('question').textContent") == "Was this buzz?"
        assert tab.value("document.getElementById('guess').textContent") == "buzzEnter75 % sure, by this board"
        assert tab.value("document.getElementById('aside').firstChild.textContent") == "None of these"
        press(tab, "0")
        tab.until("shown.waiting === 0 && !busy")
        assert tab.value("document.getElementById('question').textContent") == "All new alarms are done"
    assert files(inbox.with_name("sounds")) == [f"none of these/{heard_name(0.0, 0.75)}", "tone/new.wav"]
    assert tab.refused == []


def test_another_address_says_what_to_open(tab: Tab, server: LabelServer) -> None:
    tab.do("Page.navigate", url=f"http://127.0.0.1:{server.server_address[1]}/#wrong")
    tab.until(
        "document.getElementById('said')?.textContent.startsWith('open the whole address that hushfleet-edge label')"
    )
    assert tab.value("document.getElementById('image').hidden")
