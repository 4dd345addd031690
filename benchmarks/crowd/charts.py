"""Acks over time in each round, and how long an update waits for its ack."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.crowd.figures import Figures
from benchmarks.outputs import COLOURS


def draw(figure: Any, figures: Figures) -> None:
    """Into a matplotlib figure: left the rounds, right the latencies."""
    left, right = figure.subplots(1, 2)
    last = len(figures.rounds) - 1
    for number, each in enumerate(figures.rounds):
        left.step(
            each.acks_s,
            np.arange(1, len(each.acks_s) + 1),
            where="post",
            color=COLOURS["ours"],
            alpha=0.35 + 0.65 * number / max(last, 1),
            label=f"round {each.round}",
        )
    left.set(xlabel="seconds since the round was opened", ylabel="updates accepted", ylim=(0, None), xlim=(0, None))
    left.legend(frameon=False)
    right.hist(figures.latencies_s, bins=60, color=COLOURS["third"])
    for row, share in enumerate((50, 95, 99)):
        at = float(np.quantile(figures.latencies_s, share / 100))
        right.axvline(at, color=COLOURS["limit"], linewidth=0.8)
        place = (at, 0.98 - 0.05 * row)  # one below the other, since p95 and p99 may be close
        axes = ("data", "axes fraction")
        right.annotate(f"p{share} {at:.2f} s ", place, xycoords=axes, ha="right", va="top", fontsize=8)
    right.set(xlabel="seconds from offer to ack", ylabel="updates")
    for each in (left, right):
        each.spines[["top", "right"]].set_visible(False)
