"""Makes the report of a run from its `Result` only: one HTML file that needs no other file.

It begins with the answers to the questions of every user: how much better is federating than training alone, and how
strong is its privacy? Then it shows the course of the run.
"""

from __future__ import annotations

from pathlib import Path

from hushfleet.aggregator.results.report import page, sections
from hushfleet.aggregator.results.report.answers import answers_section
from hushfleet.aggregator.results.report.readable import epsilon_number, number, percent
from hushfleet.aggregator.results.report.verdict import (
    VERDICTS,
    ComparedRow,
    answer,
    gain_cell,
    judge,
    lifetime_answer,
    lost_answer,
    own_head_answer,
    privacy_answer,
    trade_answer,
    trust_answer,
)
from hushfleet.aggregator.results.result import Result, write_whole
from hushfleet.privacy.protection import protection

__all__ = ["render_report", "write_report"]


def write_report(result: Result, path: Path, *, seen: Path | None = None) -> None:
    """Writes the report completely or not at all. Raises `StoreError`.

    :param seen: the picture of `hushfleet invert`, if there is one.
    """
    write_whole(path, render_report(result, seen=sections.read_picture(seen)))


def render_report(result: Result, *, seen: bytes | None = None) -> str:
    """Returns the report as HTML text.

    :param seen: PNG of what the server could see.
    """
    headline = judge(result)
    sentences = [
        answer(result, headline),
        lost_answer(result),
        own_head_answer(result),
        " ".join(
            [
                lifetime_answer(result, headline),
                privacy_answer(headline, devices=result.devices),
                trust_answer(result),
            ]
        ).strip(),
        trade_answer(result, headline),
    ]
    parts = [
        sections.accuracy(result, headline),
        sections.devices_against_alone(result, headline),
        sections.seeds(result),
        answers_section(result),
        sections.privacy(result, headline),
        None if seen is None else sections.seen(seen),
        sections.privacy_sweep(result, headline),
        sections.traffic(result),
        sections.rounds_over_time(result),
        sections.fleet(result),
        # folded sections: for authors of methods, and for reference
        sections.course(result),
        sections.layers(result),
        sections.labels(result),
        sections.run_facts(result),
        sections.meaning(result),
    ]
    return page.page(
        f"{result.method} on {result.dataset}",
        [section for part in parts if (section := page.present(part)) is not None],
        under=_under(result),
        answer=[sentence for sentence in sentences if sentence],
        tiles=[
            *map(_tile, headline.rows if headline.own_heads else headline.rows[:2]),
            _epsilon_tile("epsilon_server", headline.epsilon_server),
            _epsilon_tile("epsilon_release", headline.epsilon_release),
        ],
    )


def _tile(row: ComparedRow) -> tuple[page.PageCell, str]:
    """Returns the gain in the colour of its verdict; for a model that has learned nothing, this verdict."""
    found, close = row.found, f"{VERDICTS['close']}; " * (row.verdict == "close")
    chance = f", chance {percent(found.chance)}" * (row.verdict == "nothing")
    reached = f"{close}{row.name}: {percent(found.federated)}, alone {percent(found.alone)}{chance}"
    return gain_cell(found.gain, row.verdict, " points"), reached


def _epsilon_tile(name: str, epsilon: float | None) -> tuple[page.PageCell, str]:
    """Returns the epsilon of the worst device, in the colour of its level of protection."""
    if epsilon is None:
        return page.PageCell(number(epsilon)), f"{name}, worst device"
    word = protection(epsilon)
    return page.PageCell(epsilon_number(epsilon), word.partition(" ")[0]), f"{name}, worst device: {word}"


def _under(result: Result) -> str:
    """Returns the line below the title: the run and its date."""
    date = [] if result.recorded_at is None else [f"{result.recorded_at[:16].replace('T', ' ')} UTC"]
    fleet = [] if result.federation is None else [f"federation {result.federation}"]
    seed = [] if result.seed is None else [f"seed {result.seed}"]
    size = [f"{result.devices} devices", f"{len(result.rounds)} rounds", result.partition, f"engine {result.engine}"]
    return ", ".join([*date, f"task {result.task}", *fleet, *size, *seed])
