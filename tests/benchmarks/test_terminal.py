"""The film of a terminal."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET

import pytest

from benchmarks import terminal
from benchmarks.terminal import StyledText, TimedScreen

REDRAWN = r"print('first', end='', flush=True); print('\x1b[2K\x1b[1G \x1b[1;32m<1> & 2', end='')"
SVG = "{http://www.w3.org/2000/svg}"


def test_the_last_screen_is_what_the_command_left() -> None:
    *_, last = terminal.record([sys.executable, "-c", REDRAWN], columns=20, rows=3)
    assert last.screen == ((StyledText(1, "<1> & 2", "green", True),), (), ())


def test_a_command_that_fails_is_no_film() -> None:
    with pytest.raises(SystemExit, match="ended with exit code 3"):
        terminal.record([sys.executable, "-c", "raise SystemExit(3)"], columns=20, rows=3)


@pytest.mark.parametrize(("most", "kept"), [(9, [0, 1, 2, 3]), (3, [0, 2, 3])])
def test_each_screen_is_a_frame(most: int, kept: list[int]) -> None:
    title = StyledText(0, "<title>", "default", True)
    shown = [TimedScreen(float(at), ((title,), (StyledText(2, f"at {at}", "red", False),))) for at in range(4)]
    root = ET.fromstring(terminal.animated(shown, columns=20, frames=most))
    frames = [each for each in root.iter(f"{SVG}g") if each.get("class") == "frame"]
    lines = {f"#{each.get('id')}": "".join(each.itertext()) for each in root.iter(f"{SVG}g")}
    drawn = [[lines[use.get("href", "")] for use in frame] for frame in frames]
    assert drawn == [["<title>", f"at {at}"] for at in kept]
    style = "".join(root.find(f"{SVG}style").itertext())  # type: ignore[union-attr]  # one is there
    assert style.count("@keyframes") == len(kept)


def test_a_film_of_one_frame_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        terminal.main(["film.svg", "--frames", "1", "--", sys.executable, "-c", "print(1)"])
    assert "--frames 1: take 2 or more" in capsys.readouterr().err
