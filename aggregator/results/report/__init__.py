"""The report of a run, made from its `Result` only: one HTML file that needs nothing else.

It opens with the answer to the question that every user asks, by how much federating beats training alone and what the
privacy of that is worth, and then shows the course of the run.
"""

from __future__ import annotations

from pathlib import Path

from hushfleet.aggregator.results.report import page, sections
from hushfleet.aggregator.results.report.timeline import timeline_section
from hushfleet.aggregator.results.report.verdict import answer, judge, privacy_answer, trade_answer
from hushfleet.aggregator.results.report.words import number, percent, points
from hushfleet.aggregator.results.result import Result, write_whole

__all__ = ["render_report", "write_report"]


def write_report(result: Result, path: Path) -> None:
    """Writes the report whole or not at all. Raises `StoreError`."""
    write_whole(path, render_report(result))


def render_report(result: Result) -> str:
    """The report as HTML text."""
    headline = judge(result)
    common, local = headline.common, headline.local
    sentences = [answer(headline), privacy_answer(headline, devices=result.devices), trade_answer(result, headline)]
    if result.accounting == "as-published":
        sentences.append(
            "Accounting: as published. The mechanism runs as the paper has it; where its claim does not "
            "follow from the mechanism, these numbers are no proof. The strict variant is the one to rely on."
        )
    parts = [
        sections.accuracy(result, headline),
        sections.devices_against_alone(result, headline),
        sections.traffic(result),
        sections.wire_sweep(result, headline),
        timeline_section(result),
        sections.privacy(result, headline),
        sections.privacy_sweep(result, headline),
        sections.layers(result),
        sections.labels(result),
        sections.fleet(result),
        sections.run_facts(result),
        sections.meaning(),
    ]
    return page.page(
        f"{result.method} on {result.dataset}",
        [part for part in parts if part],
        under=f"{result.devices} devices, {len(result.rounds)} rounds, {result.partition}, engine {result.engine}, "
        f"seed {'none' if result.seed is None else result.seed}",
        answer=[sentence for sentence in sentences if sentence],
        tiles=[
            (points(common.gain), f"common test: {percent(common.federated)}, alone {percent(common.alone)}"),
            (points(local.gain), f"own data: {percent(local.federated)}, alone {percent(local.alone)}"),
            (number(headline.epsilon_server), "epsilon_server, worst device"),
            (number(headline.epsilon_release), "epsilon_release, worst device"),
        ],
    )
