"""Shows findings: a table, the sentences below it, JSON for programs, and a page with the trade-off curve."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
from rich.markup import escape
from rich.table import Table

from hushfleet.aggregator.report import page, tables
from hushfleet.aggregator.report.charts import titled
from hushfleet.aggregator.report.console import Console
from hushfleet.simulator.studies.audit.finding import Finding, whole_task
from hushfleet.simulator.studies.templates import filled

_COLOURS = {"holds": "green", "VIOLATED": "bold red", "no claim": "yellow"}
_HEAD = ("the adversary", "game", "trials", "epsilon", "claimed", "measured, at least", "verdict")
_LEAST_SHOWN = 1e-3


def to_json(task: str, method: str, accounting: str, findings: Sequence[Finding]) -> str:
    plain = {
        "task": task,
        "method": method,
        "accounting": accounting,
        **whole_task(findings).to_dict(),
        "violated": any(each.verdict == "VIOLATED" for each in findings),
        "findings": [each.to_dict() for each in findings],
    }
    return json.dumps(plain, indent=2, allow_nan=False)


def print_findings(console: Console, title: str, findings: Sequence[Finding]) -> None:
    table = Table(title=title)
    for name in _HEAD:
        table.add_column(name, justify="right" if name in ("trials", "claimed", "measured, at least") else "left")
    for line in _lines(findings):
        table.add_row(*line[:-1], f"[{_COLOURS[line[-1]]}]{line[-1]}[/]" if line[-1] else "")
    console.print(table)
    for sentence in sentences(findings):
        console.print(escape(sentence), highlight=False)


def _lines(findings: Sequence[Finding]) -> list[list[str]]:
    """Returns the table's lines, with the columns of `_HEAD`."""
    lines = []
    for each in findings:
        first, rounds = [each.adversary, each.game, f"{each.trials:,}"], _rounds(each.rounds)
        together = [rounds, format_epsilon(each.claimed), format_epsilon(each.measured)]
        measured = f"{format_epsilon(each.measured_round)}; {format_epsilon(each.measured_round_of_form)} *"
        one = "one round" if len(set(each.claim.charges)) == 1 else "the costliest round"
        lines.append([*first, one, format_epsilon(each.claimed_round), measured, each.verdict])
        lines.append(["", "", "", *together[:2], f"{together[2]} *", ""])
    if any(each.asks for each in findings) and not all(each.asks for each in findings):
        whole = whole_task(findings)
        numbers = format_epsilon(whole.claimed), f"{format_epsilon(whole.measured)} *"
        lines.append(["both", "", "", f"all {_rounds(whole.rounds)}", *numbers, ""])
    return lines


def _rounds(count: int) -> str:
    return f"{count} round" + "s" * (count != 1)


def sentences(findings: Sequence[Finding]) -> list[str]:
    """Returns sentences that explain what the numbers mean, and what they do not mean."""
    text = filled(
        __name__,
        "sentences.txt.j2",
        {"epsilon": format_epsilon},
        first=findings[0],
        findings=findings,
        most=math.log(max(findings[0].trials, 4) / 4),
        infinity=math.inf,
    )
    return list(dict.fromkeys(text.splitlines()))


def format_epsilon(value: float) -> str:
    return "infinite" if math.isinf(value) else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def render_page(title: str, findings: Sequence[Finding]) -> str:
    """Returns the findings as HTML: the table, and the trade-off curve of each game of two worlds."""
    plots = [_plot(each) for each in findings]
    lead = f"Errors of the adversary's tests at every threshold; dots: rates at most, {findings[0].confidence:.0%}."
    table = tables.Table(_HEAD, _lines(findings), names=2)
    sections = [
        page.Section("findings", "Claimed and measured", "Of each adversary.", [table]),
        page.Section("trade-off", "Trade-off", lead, plots),
    ]
    found = list(dict.fromkeys(each.adversary for each in findings if each.verdict == "VIOLATED"))
    answer = f"VIOLATED, by an adversary that has: {'; '.join(found)}" if found else "No claim was contradicted."
    return page.page(f"Audit: {title}", sections, answer=[answer, *sentences(findings)])


def _plot(found: Finding) -> page.Plot:
    """Plots the adversary's errors at each threshold, and the claim's curve, below which no errors are possible."""
    inside, outside = np.sort(found.scores.inside), np.sort(found.scores.outside)
    thresholds = np.unique(np.concatenate((inside, outside)))
    false_positives = 1 - np.searchsorted(outside, thresholds, side="right") / len(outside)
    false_negatives = np.searchsorted(inside, thresholds, side="right") / len(inside)
    grid = np.geomspace(_LEAST_SHOWN, 1, 200)
    shown = {"type": "scatter", "mode": "lines"}
    points = {"x": [point[0] for point in found.points], "y": [point[1] for point in found.points]}
    blue = {"color": page.BLUE}
    traces = [
        {"x": grid.tolist(), "y": np.asarray(found.claim.curve(grid)).tolist(), "fill": "tozeroy",
         "name": "below the claim", "line": {"color": page.ORANGE, "width": 1}},
        {"x": [0, 1], "y": [1, 0], "name": "a coin", "line": {"color": page.SOFT, "dash": "dot"}},
        {"x": false_positives.tolist(), "y": false_negatives.tolist(), "name": "measured", "line": blue},
        {**points, "mode": "markers", "name": "rates at most", "marker": {**blue, "size": 8}},
    ]  # fmt: skip
    axes = {"xaxis": "false positive rate", "yaxis": "false negative rate"}
    layout = {axis: {**titled(words), "range": [0, 1]} for axis, words in axes.items()}
    return page.Plot([shown | each for each in traces], layout, f"{found.adversary}; {found.game}")
