"""The report: one HTML file that needs nothing else, no network, no script, no font.

It opens with the answer to the question that every user asks, by how much federating beats training alone
and what the privacy of that is worth, and then shows the course of the run. It is made from a `Result` only.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from hushfleet.aggregator.results.report import layer_sections, privacy_sections, sections, traffic_section
from hushfleet.aggregator.results.report.glossary import MEANINGS
from hushfleet.aggregator.results.report.markup import Section, definitions
from hushfleet.aggregator.results.report.style import STYLE
from hushfleet.aggregator.results.report.timeline_section import timeline_section
from hushfleet.aggregator.results.report.timeline_style import STATE_STYLE
from hushfleet.aggregator.results.report.verdict import (
    Verdict,
    answer,
    judge,
    number,
    percent,
    points,
    privacy_answer,
    trade_answer,
)
from hushfleet.aggregator.results.result import Result, write_whole


def write_report(result: Result, path: Path) -> None:
    """Writes the report whole or not at all. Raises `StoreError`."""
    write_whole(path, render_report(result))


def render_report(result: Result) -> str:
    """The report as HTML text."""
    verdict = judge(result)
    over_time, other_forms = timeline_section(result), traffic_section.wire_sweep(result, verdict)
    parts = [
        sections.accuracy(result, verdict),
        sections.devices_against_alone(result, verdict),
        traffic_section.traffic(result),
        *([other_forms] if other_forms else []),
        *([over_time] if over_time else []),
        privacy_sections.privacy(result, verdict),
        privacy_sections.sweep(result, verdict),
        layer_sections.personalization(result),
        layer_sections.labels(result),
        sections.fleet(result),
        sections.run_facts(result),
        Section("meaning", "What the numbers mean", "In short.", definitions(MEANINGS)),
    ]
    links = " ".join(f'<a href="#{part.anchor}">{escape(part.title)}</a>' for part in parts)
    body = "\n".join(_section(part) for part in parts)
    title = f"{result.method} on {result.dataset}"
    under = (
        f"{result.devices} devices, {len(result.rounds)} rounds, {result.partition}, engine {result.engine}, "
        f"seed {'none' if result.seed is None else result.seed}"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} - Hushfleet</title><style>{STYLE}{STATE_STYLE}</style></head>\n<body><main>"
        f'<header><h1>{escape(title)}</h1><p class="under">{escape(under)}</p></header>\n'
        f"{_headline(result, verdict)}\n<nav>{links}</nav>\n"
        f"{body}\n</main></body></html>\n"
    )


def _headline(result: Result, verdict: Verdict) -> str:
    sentences = [
        answer(verdict),
        privacy_answer(verdict, devices=result.devices),
        trade_answer(result, verdict),
    ]
    if result.accounting == "as-published":
        sentences.append(
            "Accounting: as published. The mechanism runs as the paper has it; where its claim does not "
            "follow from the mechanism, these numbers are no proof. The strict variant is the one to rely on."
        )
    words = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences if sentence)
    tiles = (
        (
            points(verdict.gain_common),
            f"common test: {percent(verdict.own_common)}, alone {percent(verdict.alone_common)}",
        ),
        (
            points(verdict.gain_local),
            f"own data: {percent(verdict.own_local)}, alone {percent(verdict.alone_local)}",
        ),
        (number(verdict.epsilon_server), "epsilon_server, worst device"),
        (number(verdict.epsilon_release), "epsilon_release, worst device"),
    )
    cells = "".join(f"<li><b>{escape(big)}</b><span>{escape(small)}</span></li>" for big, small in tiles)
    return f'<div class="answer">{words}<ul class="tiles">{cells}</ul></div>'


def _section(part: Section) -> str:
    return (
        f'<section id="{part.anchor}"><h2>{escape(part.title)}</h2><p class="lead">{escape(part.lead)}</p>'
        f"{part.body}</section>"
    )
