"""Colours and words of device states in the report: one palette for light, dark and paper.

Neighbours in a chart differ in lightness as well as in hue, so that they can be told apart with any colour vision
and in print. In the Gantt chart what is work is a thick bar and what is waiting a thin one.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hushfleet.aggregator.observe.timeline_marks import SERVERS
from hushfleet.aggregator.results.report.verdict import number
from hushfleet.aggregator.results.result import DeviceState, TimelineMark

_LIGHT = {
    "absent": "transparent",
    "ready": "#c9c0cd",
    "fetching": "#80caf8",
    "training": "#1055a6",
    "sending": "#159466",
    "accepted": "#b9eac4",
    "late": "#e78e1a",
    "declined": "#c774b3",
    "refused": "#9a2418",
    "sleeping": "#635d6c",
    "lost": "#16202a",
}
_DARK = {
    "absent": "transparent",
    "ready": "#4d3b5c",
    "fetching": "#386ca2",
    "training": "#7ab3f9",
    "sending": "#38d495",
    "accepted": "#184e36",
    "late": "#fba432",
    "declined": "#df9fd1",
    "refused": "#f96d5c",
    "sleeping": "#8a7d74",
    "lost": "#eefaec",
}
DARK_FILLS = ("training", "sending", "refused", "sleeping", "lost")
"""States whose colour takes text in the card's colour; on the others the text is as everywhere."""

WORDS: dict[DeviceState, str] = {
    "absent": "not seen yet",
    "ready": "ready, nothing to do",
    "fetching": "waiting for the model",
    "training": "training",
    "sending": "sending",
    "accepted": "accepted, waiting for others",
    "late": "late",
    "declined": "declined",
    "refused": "refused",
    "sleeping": "switched off",
    "lost": "lost",
}
OUTCOME_STATES = {
    "a": ("accepted", "accepted"),
    "l": ("late", "late"),
    "d": ("declined", "declined"),
    "r": ("refused", "refused"),
    "x": ("lost", "lost"),
    ".": ("ready", "not asked"),
    "-": ("absent", "away"),
}
"""Letter of an outcome: whose colour it has, and its name in a legend."""


_DONE = {
    "kill": ("power cut", "crash"),
    "stop": ("switched off", "stopped"),
    "cut": ("network cut", "cut off"),
    "start": ("switched on", "started again"),
    "out of reach": ("out of reach", "out of reach"),
}
"""What a mark says of a device, and of a server."""


def _variables(colors: dict[str, str]) -> str:
    return ":root { " + " ".join(f"--s-{state}: {color};" for state, color in colors.items()) + " }"


STATE_STYLE = "\n".join(
    [
        _variables(_LIGHT),
        f"@media (prefers-color-scheme: dark) {{ {_variables(_DARK)} }}",
        f"@media print {{ {_variables(_LIGHT)} }}",
        *(f".s-{state} {{ color: var(--s-{state}); }}" for state in WORDS),
        ".sf { fill: currentColor; } .ss { stroke: currentColor; fill: none; } .hit { fill: transparent; }",
        ".hole { stroke: var(--card); fill: none; }",
        ".down { fill: var(--s-refused); fill-opacity: .16; } .event { fill: var(--s-refused); stroke: var(--card); }",
        ".undone { stroke: var(--s-refused); stroke-width: 1.5; }",
        ".shut { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 3; }",
        "figure.wide { max-width: none; margin-bottom: 22px; } figure.wide svg { min-width: 680px; }",
        "figure.wide .note { max-width: none; }",
        ".state { display: inline-block; margin-right: 16px; white-space: nowrap; }",
        ".state::before { content: ''; display: inline-block; width: 18px; height: 11px; margin-right: 6px;"
        " background: currentColor; border: 1px solid var(--edge); }",
        ".state span { color: var(--soft); }",
        "@media print { figure.wide svg { min-width: 0; } }",
    ]
)


def state_legend(states: Sequence[tuple[str, str]]) -> str:
    """:param states: (the state whose colour is meant, what it is called here)."""
    keys = "".join(f'<li class="state s-{state}"><span>{escape(words)}</span></li>' for state, words in states)
    return f"<ul>{keys}</ul>"


def wide_figure(title: str, chart: str, legend: str = "", *, note: str = "") -> str:
    """A chart over the whole width of the page; on a narrow one it scrolls sideways."""
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        f'<figure class="wide"><figcaption>{escape(title)}</figcaption>{legend}'
        f'<div class="scroll">{chart}</div>{below}</figure>'
    )


def mark_words(mark: TimelineMark) -> str:
    """What was done, in a word or two."""
    device, server = _DONE.get(mark.what, (mark.what, mark.what))
    return server if mark.target in SERVERS else device


def mark_tip(mark: TimelineMark) -> str:
    """To whom, what, when, and for how long."""
    lasted = mark.end_s - mark.start_s
    back = f", undone after {number(lasted)} s" if lasted else ""
    return f"{mark.target}: {mark_words(mark)} at {number(mark.start_s)} s{back}"
