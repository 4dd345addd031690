"""The live display of a run, and the summary table at its end.

On a terminal it is one calm panel that redraws itself; where the output is a file or a pipe it is one plain
line a round. Colours are told apart with common colour blindness, and every state has its own sign as well.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hushfleet.aggregator.observe.fleet_state import STATES, FleetState
from hushfleet.aggregator.results.report.traffic_section import wire_words
from hushfleet.aggregator.results.report.verdict import (
    MEANINGLESS_EPSILON,
    answer,
    judge,
    number,
    percent,
    points,
    privacy_answer,
    received,
    size,
    trade_answer,
)
from hushfleet.aggregator.results.result import Result
from hushfleet.privacy.accounting.epsilon import Accountant

MOST_NAMES = 16
MOST_CELL_ROWS = 8
SIGNS = {
    "done": ("●", "#", "#4fb3a5"),
    "training": ("◐", "~", "#5aa9e6"),
    "ready": ("○", "o", "default"),
    "sleeping": ("z", "z", "bright_black"),
    "declined": ("▽", "-", "#e0a33e"),
    "refused": ("×", "x", "#e07b5a"),
    "lost": ("·", ".", "bright_black"),
}


class FleetDisplay:
    """Shows a run while it goes on; a context manager. Safe to feed from any thread.

    :param console: where to draw; standard output by default.
    :param delta: the task's delta, for epsilon_release where events do not state it.
    :param clock: unix seconds, as the events' `at`.
    """

    def __init__(
        self,
        *,
        console: Console | None = None,
        delta: float | None = None,
        accountant: Accountant = "exact",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.console = console or Console()
        self.state = FleetState(delta=delta, accountant=accountant)
        self._clock = clock
        self._lock = threading.Lock()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(self, console=self.console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def apply(self, event: Mapping[str, Any]) -> None:
        """Takes in one event of the run's log."""
        with self._lock:
            self.state.apply(event)
            if self.console.is_terminal:
                return
            kind = event.get("event")
            line = self._start_line() if kind == "run" else self._round_line(event) if kind == "round_close" else ""
        if line:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def apply_metrics(self, device: str, metrics: Mapping[str, Any]) -> None:
        """Takes in what one simulated device measured about itself."""
        with self._lock:
            self.state.apply_metrics(device, metrics)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self._lock:
            yield self._panel(console, options.max_width)

    def _start_line(self) -> str:
        state = self.state
        where = f", broker {state.broker}" if state.broker else ""
        fleet = f"{state.devices} devices, {state.rounds} rounds"
        return f"{state.task}: {state.method}, {fleet}, engine {state.engine}{where}"

    def _round_line(self, event: Mapping[str, Any]) -> str:
        state = self.state
        wall = event.get("wall_s")
        parts = [
            f"round {state.rounds_closed}/{state.rounds}",
            f"{event.get('participants', len(state.cohort))} devices",
            "accuracy " + ", ".join(f"{name} {percent(value)}" for name, value in _accuracies(state)),
            f"epsilon_server {number(state.epsilon_server)}, epsilon_release {number(state.epsilon_release)}",
            f"up {size(state.round_bytes)}, down {size(event.get('downlink_bytes'))}",
        ]
        if wall is not None:
            parts.append(f"{wall:.1f} s")
        parts += [f"{count} {kind} so far" for kind, count in sorted(state.counted.items())]
        return " | ".join(parts)

    def _panel(self, console: Console, width: int) -> Panel:
        state = self.state
        rows = Table.grid(padding=(0, 2), expand=True)
        rows.add_column(style="bright_black", width=8, no_wrap=True)
        rows.add_column(ratio=1, overflow="fold")
        rows.add_row("rounds", self._progress())
        rows.add_row("devices", self._counts())
        rows.add_row("", self._cells(console, width - 14))
        rows.add_row("accuracy", _pairs([(name, percent(value)) for name, value in _accuracies(state)]))
        rows.add_row("privacy", self._privacy())
        rows.add_row("bytes", self._bytes())
        if state.warnings:
            last = Text("\n".join(state.warnings[-3:]), style="#e0a33e", overflow="ellipsis", no_wrap=True)
            rows.add_row("notes", last)
        title = Text.assemble(("hushfleet ", "bold"), state.method or "waiting for a run")
        under = ", ".join(
            part for part in (state.task, state.engine and f"engine {state.engine}", state.broker) if part
        )
        return Panel(
            rows,
            title=title,
            title_align="left",
            subtitle=Text(under, "bright_black"),
            subtitle_align="left",
            border_style="bright_black",
            padding=(0, 1),
        )

    def _progress(self) -> RenderableType:
        state = self.state
        line = Table.grid(padding=(0, 2), expand=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        bar = ProgressBar(total=max(1, state.rounds), completed=state.progress, complete_style="#5aa9e6")
        if state.finished:
            told = "finished"
        else:
            left = state.seconds_left(self._clock())
            told = "estimating" if left is None else f"about {_clock_text(left)} left"
        line.add_row(bar, f"{state.rounds_closed}/{state.rounds or '?'}  {told}")
        return line

    def _counts(self) -> Text:
        states = self.state.states()
        counts = Counter(states.values())
        present = len(states) - counts["lost"]
        text = Text(f"{present} of {max(self.state.devices, len(states))} present")
        for name in STATES:
            if counts[name] and name != "ready":
                text.append(f", {counts[name]} {name}", SIGNS[name][2])
        return text

    def _cells(self, console: Console, width: int) -> RenderableType:
        sign = 0 if "utf" in console.encoding.lower() else 1
        states = self.state.states()
        if len(states) <= MOST_NAMES:
            names = [self._named_cell(device, state, sign) for device, state in states.items()]
            return Columns(names, padding=(0, 3), equal=True) if names else Text("none yet", "bright_black")
        room = max(1, width) * MOST_CELL_ROWS
        shown, stands_for = list(states.values()), ""
        if len(shown) > room:  # a cell then stands for several devices, in the order of their states
            step = math.ceil(len(shown) / room)
            shown = sorted(shown, key=STATES.index)[::step]
            stands_for = f"   one sign: {step} devices"
        cells = Text(overflow="fold")
        for state in shown:
            cells.append(SIGNS[state][sign], SIGNS[state][2])
        there = [name for name in STATES if name in shown]
        legend = Text("  ".join(f"{SIGNS[name][sign]} {name}" for name in there) + stands_for, "bright_black")
        return Group(cells, legend)

    def _named_cell(self, device: str, state: str, sign: int) -> Text:
        text = Text(no_wrap=True)
        text.append(SIGNS[state][sign] + " ", SIGNS[state][2])
        text.append(device, "bright_black" if state == "lost" else "")
        own = self.state.metrics.get(device, {}).get("accuracy_own_common")
        if isinstance(own, int | float):
            text.append(f" {100 * own:.0f}\N{NO-BREAK SPACE}%", "bright_black")
        return text

    def _privacy(self) -> Text:
        state = self.state
        text = _pairs(
            [
                ("epsilon_server", number(state.epsilon_server)),
                ("epsilon_release", number(state.epsilon_release)),
                *([("SNR", f"{number(state.snr_db)} dB")] if state.snr_db is not None else []),
            ]
        )
        if state.epsilon_server is not None and state.epsilon_server > MEANINGLESS_EPSILON:
            why = f": {', '.join(state.raw_values)} leave without noise" if state.raw_values else ""
            text.append(f"\nno meaningful protection against the server{why}", "#e0a33e")
        return text

    def _bytes(self) -> Text:
        state = self.state
        open_round = state.round > state.rounds_closed
        up = state.uplink_bytes + (state.round_bytes if open_round else 0)
        return _pairs(
            [
                ("up", size(up)),
                ("this round", size(state.round_bytes)),
                ("down", size(state.downlink_bytes)),
            ]
        )


def summary_table(result: Result) -> RenderableType:
    """The end of a run on a terminal: federated against alone, the two epsilons, and what they mean."""
    verdict = judge(result)
    table = Table(title=f"{result.method} on {result.dataset}, {result.devices} devices, {len(result.rounds)} rounds")
    table.add_column("accuracy")
    for name in ("federated", "alone", "difference"):
        table.add_column(name, justify="right")
    rows = (
        ("own models, common test", verdict.own_common, verdict.alone_common, verdict.gain_common),
        ("own models, own data", verdict.own_local, verdict.alone_local, verdict.gain_local),
    )
    for name, own, alone, gain in rows:
        table.add_row(name, percent(own), percent(alone), points(gain))
    table.add_row("global model, common test", percent(verdict.global_common), "", "")
    sent = result.uplink_bytes
    epsilons = ", ".join(f"{name} {words}" for name, words in verdict.epsilons)
    facts = Text(
        f"{epsilons}, delta {number(verdict.delta)}, {result.accounting}, accountant {result.accountant}; "
        f"sent up {size(sent)}{_form(result)}, {received(result)}"
    )
    told = (answer(verdict), privacy_answer(verdict, devices=result.devices), trade_answer(result, verdict))
    return Group(table, facts, *(Text(words, "" if n else "bold") for n, words in enumerate(told) if words))


def _form(result: Result) -> str:
    """` (2.3 bits per parameter; quantized, step 1 of the noise)`, as far as it is known."""
    bits = [] if result.bits_per_value is None else [f"{number(result.bits_per_value)} bits per parameter"]
    parts = [*bits, *([wire_words(result.wire)] if result.wire else [])]
    return f" ({'; '.join(parts)})" if parts else ""


def _accuracies(state: FleetState) -> list[tuple[str, float | None]]:
    return [
        ("own common", state.mean_metric("accuracy_own_common")),
        ("own data", state.mean_metric("accuracy_own_local")),
        ("global", state.accuracy_global),
    ]


def _pairs(pairs: list[tuple[str, str]]) -> Text:
    text = Text()
    for n, (name, value) in enumerate(pairs):
        text.append(("   " if n else "") + name + " ", "bright_black")
        text.append("\N{EN DASH}" if value == "not measured" else value, "bold")
    return text


def _clock_text(seconds: float) -> str:
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
