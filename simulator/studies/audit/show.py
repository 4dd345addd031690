"""A finding for people and for programs: the table, the sentences below it, JSON, and the trade-off curve as a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hushfleet.simulator.studies.audit.finding import Finding

_COLOURS = {"holds": "green", "VIOLATED": "bold red", "no claim": "yellow"}
_LEAST_SHOWN = 1e-3


def to_json(task: str, method: str, accounting: str, findings: Sequence[Finding]) -> str:
    return json.dumps(
        {
            "task": task,
            "method": method,
            "accounting": accounting,
            "violated": any(each.verdict == "VIOLATED" for each in findings),
            "findings": [each.to_dict() for each in findings],
        },
        indent=2,
        allow_nan=False,
    )


def print_findings(console: Console, title: str, findings: Sequence[Finding]) -> None:
    table = Table(title=title)
    for name in ("the adversary", "game", "trials", "epsilon", "claimed", "measured, at least", "verdict"):
        table.add_column(name, justify="right" if name in ("trials", "claimed", "measured, at least") else "left")
    for each in findings:
        verdict = f"[{_COLOURS[each.verdict]}]{each.verdict}[/]"
        if each.measured_round is not None:
            table.add_row(
                each.adversary, each.game, f"{each.trials:,}", "one round", shown(each.claimed_round),
                f"{shown(each.measured_round)}; {shown(each.measured_round_of_form)} *", verdict,
            )  # fmt: skip
            table.add_row("", "", "", f"{each.rounds} rounds", shown(each.claimed), f"{shown(each.measured)} *", "")
        else:
            table.add_row(
                each.adversary, each.game, f"{each.trials:,}", f"{each.rounds} rounds", shown(each.claimed),
                shown(each.measured), verdict,
            )  # fmt: skip
    console.print(table)
    for sentence in sentences(findings):
        console.print(escape(sentence), highlight=False)


def sentences(findings: Sequence[Finding]) -> list[str]:
    """What the numbers mean, and what they do not."""
    first = findings[0]
    most = math.log(max(first.trials, 4) / 4)
    said = [
        f"unit {first.unit}, delta {first.delta:g}; what is measured holds with confidence {first.confidence:.0%}",
        f"{first.trials:,} trials cannot show an epsilon above about {most:.1f} in one game, whatever the mechanism",
    ]
    if any(each.measured_round is not None for each in findings):
        said.append(
            "* if each round has noise of the form that is charged: its multiplier is then at most "
            + ", ".join(
                f"{shown(each.noise_measured)} (charged: {each.noise_claimed:.4g})"
                for each in findings
                if each.noise_measured is not None
            )
        )
    for each in findings:
        if each.refuted_at is not None:
            said.append(
                f"VIOLATED: what {each.adversary} can tell contradicts the ledger's epsilon at delta "
                f"{each.refuted_at:g}. The code adds less noise than it charges for, or shows something else: do not "
                "run this task where the promise matters"
            )
        if each.raw and math.isinf(each.claimed):
            said.append(f"no epsilon covers what leaves without noise: {', '.join(each.raw)}")
    return list(dict.fromkeys(said))


def shown(value: float | None) -> str:
    if value is None:
        return ""
    return "infinite" if math.isinf(value) else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def plot(path: Path, title: str, findings: Sequence[Finding]) -> None:
    """Errors of the adversary's tests at every threshold, and the curve below which the claim lets none be."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    drawn = [each for each in findings if each.scores is not None]
    figure, axes = plt.subplots(1, max(len(drawn), 1), figsize=(5 * max(len(drawn), 1), 4.6), squeeze=False)
    for axis, each in zip(axes[0], drawn, strict=False):
        inside, outside = np.sort(each.scores.inside), np.sort(each.scores.outside)
        thresholds = np.unique(np.concatenate((inside, outside)))
        false_positives = 1 - np.searchsorted(outside, thresholds, side="right") / len(outside)
        false_negatives = np.searchsorted(inside, thresholds, side="right") / len(inside)
        axis.plot(false_positives, false_negatives, label="measured", color="tab:blue")
        for point in each.points:
            axis.plot(*point, "o", color="tab:blue", markersize=4)
        grid = np.geomspace(_LEAST_SHOWN, 1, 200)
        axis.fill_between(grid, each.claim.curve(grid), color="tab:red", alpha=0.15, label="below the claim")
        axis.plot([0, 1], [1, 0], ":", color="grey", label="a coin")
        axis.set(xlabel="false positive rate", ylabel="false negative rate", xlim=(0, 1), ylim=(0, 1))
        axis.set_title(each.adversary)
        axis.title.set_fontsize(8)
        axis.legend(fontsize=8)
    figure.suptitle(f"{title}; dots: rates at most, {findings[0].confidence:.0%}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
