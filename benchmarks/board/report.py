"""What is shown of the figures: tables, goals, a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.board.stopwatch import SECTIONS
from benchmarks.outputs import COLOURS

GOAL_MODEL = "fashion-mnist-cnn"
GOAL_METHOD = "dp-fedavg"
MOST_MIB = 90.0
MOST_TIMES = 1.2
MOST_START_S = 2.0
_SIDES = {"ours": "ours", "PyTorch in our loop": "other", "plain PyTorch": "second"}
_PARTS = ("#1b7f5c", "#7fbfa4", "#c8782a", "#e3b27c", "#4a6fb5", "#94aedb", "#8a8a8a", "#333333", "#b05a7a", "#d9d9d9")

Figures = dict[str, Any]


class Goal(NamedTuple):
    """`found` is to be at most `most`."""

    name: str
    found: float
    most: float

    @property
    def met(self) -> bool:
        return self.found <= self.most


def each_case(models: Sequence[Figures]) -> Iterator[tuple[Figures, str, Figures]]:
    """(the model's figures, the method's name, the method's figures)."""
    for model in models:
        for method, figures in model["methods"].items():
            yield model, method, figures


def step_times(step: Figures, side: str) -> float:
    """A step of ours in steps of `side`."""
    return step["ours"]["cpu_ms"] / step[side]["cpu_ms"]


def goals(figures: Figures) -> list[Goal]:
    found = []
    for model, method, each in each_case(figures["models"]):
        if model["model"] == GOAL_MODEL and method == GOAL_METHOD:
            found.append(Goal(f"{GOAL_MODEL}: MiB resident, training", each["trained_peak_mib"], MOST_MIB))
            found.append(Goal(f"{GOAL_MODEL}: MiB resident, the whole round", each["round_peak_mib"], MOST_MIB))
    for model, method, each in each_case(figures["models"]):
        if method == GOAL_METHOD:
            for side in ("PyTorch in our loop", "plain PyTorch"):
                found.append(Goal(f"{model['model']}: a step, of {side}", step_times(each["step"], side), MOST_TIMES))
    starts = [each["start"]["start_s"] for _, _, each in each_case(figures["models"])]
    return [*found, Goal("cold start, s, the quickest", min(starts), MOST_START_S)]


def show(figures: Figures, console: Console) -> None:
    for table in (_steps(figures), _memory(figures), _rounds(figures), _starts(figures), _installed(figures)):
        console.print(table)
    table = Table(title="Goals", title_justify="left")
    for name in ("goal", "found", "at most", ""):
        table.add_column(name, justify="left" if name == "goal" else "right")
    for goal in figures["goals"]:
        table.add_row(goal["name"], f"{goal['found']:.2f}", f"{goal['most']:g}", "met" if goal["met"] else "MISSED")
    console.print(table)


def _steps(figures: Figures) -> Table:
    table = _table("A local training step, CPU ms on one thread", *_SIDES, "ours of our loop", "ours of plain")
    for model, method, each in each_case(figures["models"]):
        step = each["step"]
        shown = [f"{step[side]['cpu_ms']:.2f}" for side in _SIDES]
        ratios = [f"{step_times(step, side):.2f}" for side in ("PyTorch in our loop", "plain PyTorch")]
        table.add_row(model["model"], method, *shown, *ratios)
    return table


def _memory(figures: Figures) -> Table:
    columns = ("ready", "trained", "after rounds", "plain PyTorch", "its imports")
    table = _table("Peak memory, MiB resident (VmHWM)", *columns)
    for model, method, each in each_case(figures["models"]):
        plain = model["plain PyTorch"]
        mib = (each["start"]["mib"], each["trained_peak_mib"], each["round_peak_mib"])
        table.add_row(
            model["model"], method, *(f"{value:.1f}" for value in (*mib, plain["peak_mib"], plain["import_mib"]))
        )
    return table


def _rounds(figures: Figures) -> Table:
    table = _table("A whole round: CPU ms of each part", *SECTIONS, "sum", "on the wall", "plain PyTorch")
    for model, method, each in each_case(figures["models"]):
        done = each["round"]
        parts = [f"{done['parts'][section]['cpu_ms']:.1f}" for section in SECTIONS]
        plain = model["plain PyTorch"]["round"]["cpu_ms"]
        table.add_row(model["model"], method, *parts, f"{done['cpu_ms']:.1f}", f"{done['wall_ms']:.1f}", f"{plain:.1f}")
    return table


def _starts(figures: Figures) -> Table:
    table = Table(title="Start of a process, s", title_justify="left")
    for name in ("", "wall", "CPU"):
        table.add_column(name, justify="right" if name else "left")
    for name, each in figures["starting"]["imports"].items():
        table.add_row(f"import: {name}", f"{each['wall_s']:.2f}", f"{each['cpu_s']:.2f}")
    for model in figures["models"]:
        start = min((each["start"] for each in model["methods"].values()), key=lambda each: each["start_s"])
        table.add_row(f"to ready: {model['model']}", f"{start['start_s']:.2f}", f"{start['cpu_s']:.2f}")
    for name, spent in figures["starting"]["packages_ms"].items():
        table.add_row(f"  of the client's imports: {name}", f"{spent / 1000:.3f}", "")
    return table


def _installed(figures: Figures) -> Table:
    table = Table(title="Installed, MiB", title_justify="left")
    table.add_column("distribution")
    table.add_column("MiB", justify="right")
    sizes = figures["installed_mib"]
    for name, mib in sizes["edge"].items():
        table.add_row(name, f"{mib:.1f}")
    for name, each in sizes.items():
        table.add_row(f"{name}, all", f"{sum(each.values()):.0f}")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("model", "method"):
        table.add_column(name)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def draw(figures: Figures, canvas: Any) -> None:
    """Steps beside PyTorch's, peaks, and the parts of a round."""
    cases = list(each_case(figures["models"]))
    names = [f"{model['model']}\n{method}" for model, method, _ in cases]
    left, middle, right = canvas.subplots(1, 3, sharey=True)
    places = range(len(cases))
    for offset, (side, colour) in enumerate(_SIDES.items()):
        values = [each["step"][side]["cpu_ms"] for _, _, each in cases]
        left.barh([place + 0.27 * (offset - 1) for place in places], values, 0.25, color=COLOURS[colour], label=side)
    left.set_xscale("log")
    left.set_yticks(list(places), names, fontsize=7)
    left.invert_yaxis()
    left.set_xlabel("a training step, CPU ms")
    left.legend(fontsize=7)
    for offset, (label, colour, peak_of) in enumerate(
        (
            ("ours", "ours", lambda model, each: each["round_peak_mib"]),
            ("plain PyTorch", "second", lambda model, each: model["plain PyTorch"]["peak_mib"]),
        )
    ):
        values = [peak_of(model, each) for model, _, each in cases]
        middle.barh(
            [place + 0.4 * (offset - 0.5) for place in places], values, 0.38, color=COLOURS[colour], label=label
        )
    middle.axvline(MOST_MIB, color=COLOURS["limit"], linewidth=1, linestyle=":")
    middle.set_xlabel("peak, MiB")
    middle.legend(fontsize=7)
    done = [0.0] * len(cases)
    for section, colour in zip(SECTIONS, _PARTS, strict=True):
        values = [100 * each["round"]["parts"][section]["cpu_ms"] / each["round"]["cpu_ms"] for _, _, each in cases]
        right.barh(list(places), values, left=done, color=colour, label=section)
        done = [before + value for before, value in zip(done, values, strict=True)]
    right.set_xlabel("a round's CPU time, %")
    right.legend(fontsize=6, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
