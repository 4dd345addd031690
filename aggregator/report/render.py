"""Makes the report of a run from its `Result` only: one HTML file that needs no other file.

It begins with the answers to the questions of every user: how much better is federating than training alone, and how
strong is its privacy? Then it shows the course of the run.
"""

from __future__ import annotations

from pathlib import Path

from hushfleet.aggregator.report import page
from hushfleet.aggregator.report.readable import epsilon_number, number
from hushfleet.aggregator.report.sections import SECTIONS, ShownRun, read_picture
from hushfleet.aggregator.report.tables import PageCell
from hushfleet.aggregator.report.verdict import gain_cell, judge
from hushfleet.aggregator.report.words import sentences
from hushfleet.aggregator.results.result import Result, write_whole
from hushfleet.privacy.protection import protection

PARAGRAPHS = (("answer",), ("lost",), ("own_heads",), ("lifetime", "privacy", "trust"), ("trade",))


def write_report(result: Result, path: Path, *, seen: Path | None = None) -> None:
    """Writes the report completely or not at all. Raises `StoreError`.

    :param seen: the picture of `hushfleet invert`, if there is one.
    """
    write_whole(path, render_report(result, seen=read_picture(seen)))


def render_report(result: Result, *, seen: bytes | None = None) -> str:
    """Returns the report as HTML text.

    :param seen: PNG of what the server could see.
    """
    headline = judge(result)
    shown, told = ShownRun(result, headline, seen=seen), sentences(result, headline)
    rows = headline.rows if headline.own_heads else headline.rows[:2]
    return page.page(
        f"{result.method} on {result.dataset}",
        [found for section in SECTIONS if (found := section.of(shown)) is not None],
        under=shown.told("under"),
        answer=[text for names in PARAGRAPHS if (text := " ".join(told[name] for name in names if name in told))],
        tiles=[
            *((gain_cell(row.found.gain, row.verdict, " points"), shown.told("tile", row)) for row in rows),
            _epsilon_tile("epsilon_server", headline.epsilon_server),
            _epsilon_tile("epsilon_release", headline.epsilon_release),
        ],
    )


def _epsilon_tile(name: str, epsilon: float | None) -> tuple[PageCell, str]:
    """Returns the epsilon of the worst device, in the colour of its level of protection."""
    if epsilon is None:
        return PageCell(number(epsilon)), f"{name}, worst device"
    word = protection(epsilon)
    return PageCell(epsilon_number(epsilon), word.partition(" ")[0]), f"{name}, worst device: {word}"
