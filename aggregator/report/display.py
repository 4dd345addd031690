"""Shows the live display of a run.

On a terminal it is one panel that is redrawn; if the output is a file or a pipe, it is one plain line per round.
People with common colour blindness can distinguish the colours.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Self

from rich.columns import Columns
from rich.console import ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table as TerminalTable
from rich.text import Text

from hushfleet.aggregator.config.calendar import moment_text
from hushfleet.aggregator.report.console import Console
from hushfleet.aggregator.report.notebook import NotebookConsole
from hushfleet.aggregator.report.progress import format_time, moving
from hushfleet.aggregator.report.readable import (
    NOT_MEASURED,
    epsilon_number,
    number,
    percent,
    size,
)
from hushfleet.aggregator.results.fleet_state import Opening, RunState
from hushfleet.aggregator.rounds.shortfall import shortfall_text
from hushfleet.aggregator.storage.board import Activity
from hushfleet.privacy.protection import NEGLIGIBLE_ABOVE, protection
from hushfleet.privacy.terms import Accountant

MOST_NAMES = 16
SOFT, WARNING, BUSY, DONE = "bright_black", "#e0a33e", "#5aa9e6", "#4fb3a5"
COLORS: dict[Activity, str] = {
    "accepted": DONE, "sending": DONE, "training": BUSY, "fetching": BUSY, "ready": "default", "sleeping": SOFT,
    "late": WARNING, "declined": WARNING, "refused": "#e07b5a", "lost": SOFT, "absent": SOFT,
}  # fmt: skip


class FleetDisplay:
    """Shows a run while it is running; a context manager. Any thread may call it.

    :param console: the console to draw on; standard output by default.
    :param delta: the task's delta, for epsilon_release if events do not state it.
    """

    def __init__(
        self, *, console: Console | None = None, delta: float | None = None, accountant: Accountant = "exact"
    ) -> None:
        self.console = console or Console()
        self.state = RunState(delta=delta, accountant=accountant)
        # the time is estimated from the whole run, because a round may take hours
        columns = (BarColumn(None, complete_style=BUSY), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, expand=True, console=console, speed_estimate_period=math.inf)
        self._rounds = self._progress.add_task("rounds", total=None)
        self._lock = threading.Lock()
        self._redrawn = self.console.is_terminal or isinstance(self.console, NotebookConsole)
        self._shown, self._printed = ExitStack(), threading.Event()

    def __enter__(self) -> Self:
        self._printed = self._shown.enter_context(moving(self.console, self, self._under_way, stays=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()

    def apply(self, event: Mapping[str, Any]) -> None:
        """Processes one event of the run's log."""
        with self._lock:
            self.state.apply(event)
            kind = event.get("event")
            if kind == "run":  # the run may be resumed: the rounds before say nothing about its speed now
                self._progress.reset(self._rounds, completed=self.state.rounds_closed)
            if self._redrawn:
                return
            if kind == "run":
                line = self._start_line()
            elif kind == "round_close":
                line = self._round_line(event)
            elif kind in ("next_round", "pause", "waits"):
                line = self._waiting()
            else:  # a round in which all devices decline never closes
                line = self.state.take_news()
        if line:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
            self._printed.set()

    def replay(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Processes the log of a resumed run; its old warnings are not shown again."""
        for event in events:
            self.state.apply(event)
        self.state.take_news()

    def apply_metrics(self, device: str, metrics: Mapping[str, Any]) -> None:
        """Processes what one simulated device measured about itself."""
        with self._lock:
            self.state.apply_metrics(device, metrics)

    def __rich_console__(self, console: object, options: ConsoleOptions) -> RenderResult:
        with self._lock:
            yield self._panel()

    def _start_line(self) -> str:
        state = self.state
        where = f", broker {state.broker}" if state.broker else ""
        fleet = f"{state.device_count} devices, {state.rounds} rounds"
        return f"{state.task}: {state.method}, {fleet}, engine {state.engine}{where}"

    def _round_line(self, event: Mapping[str, Any]) -> str:
        state, wall = self.state, event.get("wall_s")
        measured = [pair for pair in _accuracies(state) if pair[1] != NOT_MEASURED]
        parts = [
            f"round {state.rounds_closed}/{state.rounds}",
            f"{event.get('participants', '?')} devices",
            f"{state.measure} " + (", ".join(f"{name} {words}" for name, words in measured) or NOT_MEASURED),
            f"epsilon_server {number(state.epsilon_server)}, epsilon_release {number(state.epsilon_release)}",
            f"up {size(state.round_bytes)}, down {size(event.get('downlink_bytes'))}",
            *([] if wall is None else [f"{wall:.1f} s"]),
            *(f"{count} {kind} so far" for kind, count in sorted(state.counted.items())),
        ]
        return " | ".join(parts)

    @property
    def _opening(self) -> Opening | None:
        """The next opening if its time is in the future, else None: then the round waits for devices."""
        opening = self.state.next_opening
        return None if opening is None or opening.at <= time.time() else opening

    @property
    def _is_waiting(self) -> bool:
        return self.state.paused or self._opening is not None or self.state.waiting is not None

    def _waiting(self) -> str:
        """Returns a text of what the next round waits for, or that training goes on."""
        state, at = self.state, self._opening
        if state.paused:
            return "training is paused by the operator"
        if state.waiting is not None and (at is None or state.waiting.is_certain):
            return shortfall_text(state.waiting, now=time.time())
        if at is None:
            return "training goes on"
        verb = "goes on" if at.round == state.open_round else "opens"
        return f"round {at.round} {verb} {moment_text(at.at, now=time.time(), zone=at.timezone)}"

    def _under_way(self) -> str:
        """Returns a line for a pipe to which nothing was written for a while; empty in a pause."""
        with self._lock:
            if self._is_waiting:
                return ""  # a line has reported it, and it may last for days
            left, counts = self._left_s(), Counter(self.state.states().values())
            if not self.state.rounds:
                return "waiting for the run's first event"
            parts = [
                f"round {self.state.round}/{self.state.rounds} goes on",
                ", ".join(f"{count} {name}" for name, count in counts.most_common()),
                *([] if not left else [f"about {format_time(left)} left"]),
            ]
        return " | ".join(parts)

    def _left_s(self) -> float | None:
        """Returns the seconds until the last round ends, at the speed so far."""
        state = self.state
        self._progress.update(self._rounds, total=state.rounds or None, completed=state.progress)
        return self._progress.tasks[0].time_remaining

    def _panel(self) -> Panel:
        state = self.state
        self._left_s()
        rows = TerminalTable.grid(padding=(0, 2), expand=True)
        rows.add_column(style=SOFT, width=8, no_wrap=True)
        rows.add_column(ratio=1, overflow="fold")
        rows.add_row("rounds", self._progress)
        rows.add_row("devices", self._devices())
        rows.add_row(state.measure, _pairs(_accuracies(state)))
        rows.add_row("privacy", self._privacy())
        rows.add_row("bytes", self._bytes())
        if self._is_waiting:
            rows.add_row("next", Text(self._waiting(), WARNING if state.paused else ""))
        if state.warnings:
            rows.add_row("notes", Text("\n".join(state.warnings[-3:]), WARNING, overflow="ellipsis", no_wrap=True))
        under = [state.task, state.engine and f"engine {state.engine}", state.broker, "finished" * state.finished]
        return Panel(
            rows,
            title=Text.assemble(("hushfleet ", "bold"), state.method or "waiting for a run"),
            title_align="left",
            subtitle=Text(", ".join(filter(None, under)), SOFT),
            subtitle_align="left",
            border_style=SOFT,
            padding=(0, 1),
        )

    def _devices(self) -> RenderableType:
        """Formats how many devices are in each state, with their names in a small fleet."""
        states = self.state.states()
        counts = Counter(states.values())
        present = sum(device.is_there for device in self.state.devices.values())
        devices = max(self.state.device_count, len(states))
        text = Text(f"{present} of {devices} present")
        for state in COLORS:
            if counts[state] and state != "ready":
                text.append(f", {counts[state]} {state}", COLORS[state])
        if not 0 < len(states) <= MOST_NAMES:
            return text
        cells = []
        for device, state in states.items():
            own = self.state.metrics.get(device, {}).get("accuracy_own_common")
            accuracy = f" {100 * own:.0f}\N{NO-BREAK SPACE}%" if isinstance(own, int | float) else ""
            cells.append(Text.assemble(device, " ", (state, COLORS[state]), (accuracy, SOFT), no_wrap=True))
        return Group(text, Columns(cells, padding=(0, 3), equal=True))

    def _privacy(self) -> Text:
        state = self.state
        pairs = [
            ("epsilon_server", epsilon_number(state.epsilon_server)),
            ("epsilon_release", number(state.epsilon_release)),
        ]
        text = _pairs([*pairs, *([] if state.snr_db is None else [("SNR", f"{number(state.snr_db)} dB")])])
        if state.epsilon_server is not None and state.epsilon_server > NEGLIGIBLE_ABOVE:
            why = f": {', '.join(state.raw_values)} leave without noise" if state.raw_values else ""
            text.append(f"\n{protection(state.epsilon_server)} against the server{why}", WARNING)
        return text

    def _bytes(self) -> Text:
        state = self.state
        up = state.uplink_bytes + (state.round_bytes if state.round > state.rounds_closed else 0)
        return _pairs([("up", size(up)), ("this round", size(state.round_bytes)), ("down", size(state.downlink_bytes))])


def _accuracies(state: RunState) -> list[tuple[str, str]]:
    return [
        ("own common", percent(state.mean_metric("accuracy_own_common"))),
        ("own data", percent(state.mean_metric("accuracy_own_local"))),
        ("global", percent(state.accuracy_global)),
    ]


def _pairs(pairs: list[tuple[str, str]]) -> Text:
    text = Text()
    for n, (name, value) in enumerate(pairs):
        text.append(("   " if n else "") + name + " ", SOFT)
        text.append("\N{EN DASH}" if value == NOT_MEASURED else value, "bold")
    return text
