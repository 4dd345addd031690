"""The report of a table: one HTML file that needs nothing else, no network, no script, no font."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hushfleet.aggregator.results.report.markup import Section, definitions
from hushfleet.aggregator.results.report.style import STYLE
from hushfleet.simulator.engines.clock.cli import shown_time
from hushfleet.simulator.studies.reproduce.chart import dots
from hushfleet.simulator.studies.reproduce.recipe import Paper
from hushfleet.simulator.studies.reproduce.shown import epsilon, epsilons, number, ours, rank_words, raw_words, waiting
from hushfleet.simulator.studies.reproduce.table import Block, PaperTable, measured_as

_STYLE = """
.labels { list-style: none; padding: 0; margin: 0 0 12px; }
.labels li { border-left: 4px solid var(--c2); padding: 2px 10px; margin: 0 0 6px; }
figure.wide { max-width: 680px; margin-top: 14px; }
.dot::before {
  content: ""; display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 6px;
  border: 2px solid var(--soft);
}
.dot.own::before { border-color: var(--c1); background: var(--c1); }
.dot { margin-right: 16px; white-space: nowrap; display: inline-block; }
td.open { color: var(--soft); } td.worse { color: var(--c2); } td.better { color: var(--c3); }
tr.first td { border-top: 2px solid var(--edge); }
.orders { margin: 10px 0 0; padding-left: 1.2em; font-size: .9rem; }
"""


def render_page(table: PaperTable, paper: Paper) -> str:
    """The report as HTML text."""
    title = f"{paper.name}, {table.entry.label}"
    blocks = sorted(table.blocks, key=lambda block: not block.begun)  # those with something to see come first
    parts = [*(_block(table, block, place) for place, block in enumerate(blocks)), *_open(table), _about(table)]
    links = " ".join(f'<a href="#{part.anchor}">{escape(part.title)}</a>' for part in parts)
    sections = "\n".join(
        f'<section id="{part.anchor}"><h2>{escape(part.title)}</h2><p class="lead">{escape(part.lead)}</p>'
        f"{part.body}</section>"
        for part in parts
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} - Hushfleet</title><style>{STYLE}{_STYLE}</style></head>\n<body><main>"
        f'<header><h1>{escape(title)}: {escape(table.entry.recipe.title)}</h1>'
        f'<p class="under">{escape(paper.source)}</p></header>\n'
        f"{_headline(table)}\n<nav>{links}</nav>\n{sections}\n</main></body></html>\n"
    )


def _headline(table: PaperTable) -> str:
    rankings = [ranking for block in table.blocks for ranking in block.rankings]
    same = sum(ranking.paper == ranking.ours for ranking in rankings)
    first = sum(ranking.paper[0] == ranking.ours[0] for ranking in rankings)
    gaps = [abs(square.difference) for square in table.squares if square.difference is not None]
    tiles = [(f"{table.done} of {table.asked}", "cells finished")]
    if gaps:
        tiles.append((f"{sum(gaps) / len(gaps):.1f} points", "mean distance from the paper"))
    if rankings:
        tiles.append((f"{first} of {len(rankings)}", "columns where the paper's best is ours too"))
        tiles.append((f"{same} of {len(rankings)}", "columns with the paper's whole order"))
    claim = table.entry.recipe.claim
    whose = "The paper: " if any(square.paper is not None for square in table.squares) else ""
    words = f"<p>{whose}{escape(claim)}</p>" if claim else ""
    labels = "".join(f"<li>{escape(label)}</li>" for label in table.labels)
    cells = "".join(f"<li><b>{escape(big)}</b><span>{escape(small)}</span></li>" for big, small in tiles)
    return f'<div class="answer">{words}<ul class="labels">{labels}</ul><ul class="tiles">{cells}</ul></div>'


def _block(table: PaperTable, block: Block, place: int) -> Section:
    lead = f"Accuracy in percent: {measured_as(table.entry, block.metric)}."
    if block.reading and block.reading.note:
        lead += f" Reading: {block.reading.note}."
    chart = dots(block)
    printed = any(square.paper is not None for square in block.squares.values())
    paper, caption = ('<li class="dot">paper</li>', "Paper and ours") if printed else ("", "Accuracy")
    keys = f'<ul>{paper}<li class="dot own">ours; the band spans the seeds</li></ul>'
    plot = f'<figure class="wide"><figcaption>{caption}</figcaption>{keys}{chart}</figure>' if chart else ""
    columns = {column.id: column.title for column in block.columns}
    orders = "".join(
        f"<li>{escape(columns[ranking.column])}: {escape(rank_words(ranking))}</li>" for ranking in block.rankings
    )
    orders = f'<p class="note">Order of the methods, best first:</p><ul class="orders">{orders}</ul>' if orders else ""
    notes = [f"{row.title}: {row.note}." for row in block.rows if row.note]
    notes += [f"{row.title}: measured as {measured_as(table.entry, row.metric)}." for row in block.rows if row.metric]
    notes += [f"{block.group.title}, {row}: {where}." for row, where in block.group.quoted.items()]
    below = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    if block.begun:
        return Section(f"part-{place}", block.title, lead, plot + _table(block) + below + orders)
    summary = "<summary>nothing of it was run here; the paper's numbers</summary>"
    folded = f"<details>{summary}{_table(block)}{below}</details>"
    return Section(f"part-{place}", block.title, lead, folded)


_HEAD = ("method", "", "paper", "ours", "difference", "paper's ε", "ε server", "ε release", "seeds")


def _table(block: Block) -> str:
    lines = []
    for row in block.rows:
        squares = [
            (column, square) for column in block.columns if (square := block.squares.get((row.id, column.id)))
        ]
        for place, (column, square) in enumerate(squares):
            gap = square.difference
            shown = ours(square)
            cells = [
                (row.title if place == 0 else "", ""),
                (column.title, ""),
                (number(square.paper), ""),
                (shown or waiting(square), "" if shown else "open"),
                ("" if gap is None else f"{gap:+.2f}", "" if gap is None else ("better" if gap > 0 else "worse")),
                (epsilon(square.paper_epsilon), ""),
                *((words, "") for words in epsilons(square)),
                (f"{len(square.seeds)} of {square.asked}", "" if shown else "open"),
            ]
            tds = "".join(f'<td{css and f" class={css}"}>{escape(text)}</td>' for text, css in cells)
            lines.append(f'<tr class="first">{tds}</tr>' if place == 0 else f"<tr>{tds}</tr>")
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in _HEAD)
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll"><table class="names-2">{body}</table></div>'


def _open(table: PaperTable) -> Sequence[Section]:
    reasons: dict[str, list[str]] = {}
    left: dict[str, float] = {}
    for block in table.blocks:
        titles = {row.id: row.title for row in block.rows}
        columns = {column.id: column.title for column in block.columns}
        for square in block.squares.values():
            if square.open:
                name = f"{block.title}: {titles[square.row]} at {columns[square.column]}"
                reasons.setdefault(square.open, []).append(name)
                left[square.open] = left.get(square.open, 0.0) + (square.estimate_s or 0.0)
    if not reasons:
        return ()
    facts = []
    for reason, names in reasons.items():
        more = f" and {len(names) - 6} more" if len(names) > 6 else ""
        time = f" Estimated: {shown_time(left[reason])} on one core." if left[reason] else ""
        facts.append((f"{len(names)} cells", f"{reason}.{time} {'; '.join(names[:6])}{more}."))
    lead = "Cells without a number or with fewer seeds, and why."
    return (Section("open", "What is open", lead, definitions(facts)),)


def _about(table: PaperTable) -> Section:
    recipe = table.entry.recipe
    facts = [
        ("what the paper leaves open", recipe.readings_text or "nothing of weight"),
        *((f"reading: {each.title}", each.note) for each in recipe.readings),
        ("paper's ε", "what the paper prints"),
        ("ε server", "what the ledger says of the worst device, against whoever sees single updates"),
        ("ε release", "the same, against whoever sees only the aggregate models"),
        *([("inf (x)", raw.removeprefix("inf (x): "))] if (raw := raw_words(table.squares)) else []),
        ("spread", "standard deviation over seeds"),
    ]
    return Section("about", "How to read this", "Settings, readings and words.", definitions(facts))
