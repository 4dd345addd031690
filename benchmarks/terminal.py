"""Records a command in a terminal as one animated SVG, which browsers play without a script.

    python -m benchmarks.terminal docs/figures/demo.svg [--columns 100] [--rows 32] [--frames 36] -- hushfleet demo

The command runs in a pseudo-terminal; each changed screen is kept, long waits are shortened, and the last screen stays
for a while before the animation starts again.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import pyte

QUIET_S = 0.05
"""A screen is complete when no output has come for this long."""
SHORTEST_S, LONGEST_S, LAST_S = 0.3, 1.2, 6.0
"""Times for which a screen is shown: shortest, longest, last screen."""
WIDTH, HEIGHT, MARGIN = 8, 18, 12  # size of a character, and margin, in pixels
COLOURS = {
    "default": "#d8dee9", "black": "#3b4252", "red": "#e06c75", "green": "#98c379", "brown": "#e5c07b",
    "blue": "#61afef", "magenta": "#c678dd", "cyan": "#56b6c2", "white": "#d8dee9", "brightblack": "#7f8896",
    "brightred": "#e06c75", "brightgreen": "#98c379", "brightbrown": "#e5c07b", "brightblue": "#61afef",
    "brightmagenta": "#c678dd", "brightcyan": "#56b6c2", "brightwhite": "#ffffff",
}  # fmt: skip


class StyledText(NamedTuple):
    """Neighbouring characters of one line with the same style."""

    column: int
    text: str
    colour: str
    bold: bool


Screen = tuple[tuple[StyledText, ...], ...]


class TimedScreen(NamedTuple):
    """A screen, and the time of its appearance."""

    at_s: float
    screen: Screen


def record(command: Sequence[str], *, columns: int, rows: int) -> list[TimedScreen]:
    """Records the screens of a command until it ends, each different from the last. Raises `SystemExit` if it fails."""
    screen = pyte.Screen(columns, rows)
    stream, ours, theirs = pyte.ByteStream(screen), *pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    named = {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows)}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | named)
    os.close(theirs)
    found, began = list[TimedScreen](), time.monotonic()
    while True:
        if select.select([ours], [], [], QUIET_S)[0]:
            try:
                stream.feed(os.read(ours, 1 << 16))
            except OSError:  # on Linux: the other side was closed
                break
        elif not found or found[-1].screen != (now := _runs(screen)):
            found.append(TimedScreen(time.monotonic() - began, now if found else _runs(screen)))
    os.close(ours)
    found.append(TimedScreen(time.monotonic() - began, _runs(screen)))
    if code := process.wait():
        raise SystemExit(f"{' '.join(command)} ended with exit code {code}")
    return found


def _runs(screen: pyte.Screen) -> Screen:
    def lines() -> Iterator[tuple[StyledText, ...]]:
        for row in range(screen.lines):
            cells = [(column, screen.buffer[row][column]) for column in range(screen.columns)]
            alike = groupby(cells, lambda cell: (cell[1].fg, cell[1].bold))
            runs = ((list(those), fg, bold) for (fg, bold), those in alike)
            joined = (
                StyledText(those[0][0], "".join(cell.data for _, cell in those), fg, bold) for those, fg, bold in runs
            )
            yield tuple(run for run in joined if run.text.strip())

    return tuple(lines())


def animated(shown: Sequence[TimedScreen], *, columns: int, frames: int) -> str:
    """Returns the SVG of at most `frames` screens, including the last one."""
    step = max(1, -(-(len(shown) - 1) // (frames - 1)))
    kept = [*shown[:-1:step], shown[-1]]
    times = [min(max(later.at_s - one.at_s, SHORTEST_S), LONGEST_S) for one, later in pairwise(kept)] + [LAST_S]
    whole, begins = sum(times), [sum(times[:number]) for number in range(len(kept))]
    rows = max(number + 1 for each in kept for number, line in enumerate(each.screen) if line)
    width, height = columns * WIDTH + 2 * MARGIN, rows * HEIGHT + 2 * MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="13" '
        'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace">',
        "<style>text { white-space: pre } .frame { visibility: hidden; animation-iteration-count: infinite; "
        f"animation-duration: {whole:.2f}s; animation-timing-function: step-end }}",
    ]
    for number, (begin, lasts) in enumerate(zip(begins, times, strict=True)):
        first, after = 100 * begin / whole, 100 * (begin + lasts) / whole
        end = "" if number == len(kept) - 1 else f" {after:.3f}% {{ visibility: hidden }}"
        hidden = "" if number == 0 else "0% { visibility: hidden } "
        lines.append(f"@keyframes f{number} {{ {hidden}{first:.3f}% {{ visibility: visible }}{end} }}")
        lines.append(f"#f{number} {{ animation-name: f{number} }}")
    drawn = dict[
        tuple[int, tuple[StyledText, ...]], int
    ]()  # each line once: most lines do not change from one screen to the next
    places = [[drawn.setdefault(line, len(drawn)) for line in enumerate(each.screen) if line[1]] for each in kept]
    lines += ["</style>", "<defs>"]
    for (row, runs), number in drawn.items():
        texts = [_text(run, MARGIN + (row + 1) * HEIGHT - 5) for run in runs]
        lines.append(f'<g id="l{number}">{"".join(texts)}</g>')
    lines += ["</defs>", f'<rect width="{width}" height="{height}" rx="8" fill="#1f2430"/>']
    for number, place in enumerate(places):
        uses = "".join(f'<use href="#l{line}"/>' for line in place)
        lines.append(f'<g id="f{number}" class="frame">{uses}</g>')
    return "\n".join([*lines, "</svg>", ""])


def _text(run: StyledText, y: int) -> str:
    """Returns a run as SVG text with its width in a terminal, because fonts differ in width."""
    text = run.text.rstrip()
    start = len(text) - len(text.lstrip())
    text, x = text[start:], MARGIN + (run.column + start) * WIDTH
    weight = ' font-weight="bold"' if run.bold else ""
    colour = COLOURS.get(run.colour, f"#{run.colour}")
    return f'<text x="{x}" y="{y}" textLength="{len(text) * WIDTH}" fill="{colour}"{weight}>{escape(text)}</text>'


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the SVG")
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--frames", type=int, default=36, help="at most so many screens, two or more")
    parser.add_argument("command", nargs="+", help="after --")
    options = parser.parse_args(words)
    if options.frames < 2:
        parser.error(f"--frames {options.frames}: take 2 or more")
    if shutil.which(options.command[0]) is None:
        parser.error(f"there is no command {options.command[0]}")
    shown = record(options.command, columns=options.columns, rows=options.rows)
    options.out.write_text(animated(shown, columns=options.columns, frames=options.frames))
    print(f"{len(shown)} screens in {shown[-1].at_s:.0f} s; {options.out} has {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
