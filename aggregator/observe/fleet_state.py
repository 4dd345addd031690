"""Where a fleet stands, gathered from the run's events: what a display shows, without any drawing.

Events come from the aggregator's log (`events`), and in a simulation each device's own metrics
come beside them. Unknown events and missing fields are passed over, so that a display of one version reads
the log of the next.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from hushfleet.privacy.accounting.epsilon import Accountant, Step, epsilon

STATES = ("done", "training", "ready", "sleeping", "declined", "refused", "lost")
KEPT_WARNINGS = 5


@dataclass
class FleetState:
    """All that a display shows. `apply` and `apply_metrics` change it, everything else only reads.

    :param delta: for epsilon_release, which is computed from the rounds' multipliers where the events do not
        state it; the `run` event may bring it as well. Likewise `accountant`.
    """

    delta: float | None = None
    accountant: Accountant = "exact"
    task: str = ""
    method: str = ""
    unit: str = "device"
    engine: str = ""
    broker: str = ""
    rounds: int = 0
    devices: int = 0
    raw_values: tuple[str, ...] = ()
    round: int = 0
    rounds_closed: int = 0
    finished: bool = False
    opened_at: float | None = None
    cohort: frozenset[str] = frozenset()
    uplink_bytes: int = 0
    round_bytes: int = 0
    downlink_bytes: int = 0
    accuracy_global: float | None = None
    loss: float | None = None
    snr_db: float | None = None
    epsilon_server: float | None = None
    epsilon_release: float | None = None
    metrics: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    counted: Counter[str] = field(default_factory=Counter)
    _presence: dict[str, str] = field(default_factory=dict)
    _answers: dict[str, str] = field(default_factory=dict)
    _walls: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    _release: list[Step] = field(default_factory=list)
    _warned: dict[tuple[int, str], tuple[str, int]] = field(default_factory=dict)

    def apply(self, event: Mapping[str, Any]) -> None:
        """Takes in one event."""
        handler = getattr(self, f"_on_{event.get('event')}", None)
        if handler:
            handler(event)

    def apply_metrics(self, device: str, metrics: Mapping[str, Any]) -> None:
        """Takes in what one simulated device measured about itself in its newest round."""
        self.metrics[device] = {**self.metrics.get(device, {}), **metrics}
        self._see_epsilon(metrics.get("epsilon_server"))

    def state_of(self, device: str) -> str:
        """One of `STATES`: the answer to the open round if there is one, else how the device is present."""
        if device in self._answers:
            return self._answers[device]
        presence = self._presence.get(device, "ready")
        if presence == "ready" and device in self.cohort and not self.finished:
            return "training"
        return presence

    def states(self) -> dict[str, str]:
        """Every known device's state, by device id."""
        known = sorted({*self._presence, *self.cohort, *self.metrics})
        return {device: self.state_of(device) for device in known}

    def mean_metric(self, name: str) -> float | None:
        """The mean over devices of a metric's newest values."""
        values = [m[name] for m in self.metrics.values() if isinstance(m.get(name), int | float)]
        return fmean(values) if values else None

    def seconds_left(self, now: float) -> float | None:
        """Estimated from the last rounds; None before the first has closed."""
        if not self._walls or not self.rounds:
            return None
        running = max(0.0, now - self.opened_at) if self.opened_at is not None else 0.0
        wall = median(self._walls)
        return max(0.0, (self.rounds - self.rounds_closed) * wall - min(running, wall))

    @property
    def warnings(self) -> list[str]:
        """The newest ones; what happens to many devices in a round is one line with their number."""
        told = [f"{words}, and {count - 1:,} more" if count > 1 else words for words, count in self._warned.values()]
        return told[-KEPT_WARNINGS:]

    @property
    def progress(self) -> float:
        """Rounds done, with the share of the cohort that has answered the open one."""
        answered = len(self._answers.keys() & self.cohort) / len(self.cohort) if self.cohort else 0.0
        return self.rounds_closed + (answered if self.round > self.rounds_closed else 0.0)

    def _on_run(self, event: Mapping[str, Any]) -> None:
        for name in ("task", "method", "unit", "engine", "broker", "delta", "accountant", "rounds"):
            if event.get(name) is not None:
                setattr(self, name, event[name])
        self.raw_values = tuple(event.get("raw_values", ()))
        devices = event.get("devices", 0)
        self.devices = devices if isinstance(devices, int) else len(devices)

    def _on_presence(self, event: Mapping[str, Any]) -> None:
        device, state = event.get("device", "?"), event.get("state", "ready")
        before = self._presence.get(device)
        self._presence[device] = state if state in STATES else "ready"
        if state == "lost" and before in ("ready", "training"):
            self._warn("lost", f"{device} lost its connection")

    def _on_round_open(self, event: Mapping[str, Any]) -> None:
        self.round = event.get("round", self.round + 1)
        self.cohort = frozenset(event.get("cohort", ()))
        self.opened_at = event.get("at")
        self.round_bytes = 0
        self._answers = {}

    def _on_update(self, event: Mapping[str, Any]) -> None:
        device, code = event.get("device", "?"), event.get("code", "accepted")
        if code == "duplicate":
            return
        if code == "accepted":
            self._answers[device] = "done"
            self.round_bytes += event.get("bytes") or 0
            self._see_epsilon(event.get("epsilon_server"))
        else:
            self._answers.setdefault(device, "refused")
            self._warn("refused", f"refused {device}: {code}{_because(event)}", code=code)

    def _on_decline(self, event: Mapping[str, Any]) -> None:
        device, code = event.get("device", "?"), event.get("code", "?")
        self._answers[device] = "declined"
        self._warn("declined", f"{device} declined: {code}{_because(event)}", code=code)

    def _on_refused(self, event: Mapping[str, Any]) -> None:
        code = event.get("code", "?")
        self._warn("refused", f"refused {event.get('device') or 'a stranger'}: {code}", code=code)

    def _on_quarantine(self, event: Mapping[str, Any]) -> None:
        self._warn("quarantine", f"{event.get('device', '?')} is out of the run{_because(event)}")

    def _on_round_close(self, event: Mapping[str, Any]) -> None:
        self.rounds_closed = event.get("round", self.rounds_closed + 1)
        self.round = max(self.round, self.rounds_closed)
        self.round_bytes = event.get("uplink_bytes") or self.round_bytes
        self.uplink_bytes += self.round_bytes
        self.downlink_bytes += event.get("downlink_bytes") or 0
        for name in ("accuracy_global", "loss", "snr_db"):
            if event.get(name) is not None:
                setattr(self, name, event[name])
        if event.get("wall_s"):
            self._walls.append(event["wall_s"])
        self._see_release(event)
        self.opened_at = None

    def _on_finished(self, event: Mapping[str, Any]) -> None:
        self.finished = True

    def _see_epsilon(self, value: object) -> None:
        if isinstance(value, int | float):
            self.epsilon_server = max(self.epsilon_server or 0.0, float(value))

    def _see_release(self, event: Mapping[str, Any]) -> None:
        multiplier = event.get("multiplier_release")
        if self.raw_values:
            self.epsilon_release = math.inf
        elif event.get("epsilon_release") is not None:
            self.epsilon_release = float(event["epsilon_release"])
        elif self.unit == "record":  # which no other device's noise hides
            self.epsilon_release = self.epsilon_server
        elif multiplier is not None and self.delta:
            step = Step(float(multiplier), event.get("sample_rate", 1.0), event.get("steps", 1))
            self._release.append(step)
            self.epsilon_release = epsilon(self._release, delta=self.delta, accountant=self.accountant)

    def _warn(self, kind: str, words: str, *, code: str = "") -> None:
        self.counted[kind] += 1
        key = (self.round, f"{kind} {code}")
        first, count = self._warned.get(key, (f"round {self.round}: {words}" if self.round else words, 0))
        self._warned[key] = (first, count + 1)
        if len(self._warned) > KEPT_WARNINGS:
            del self._warned[next(iter(self._warned))]


def _because(event: Mapping[str, Any]) -> str:
    return f" ({event['reason']})" if event.get("reason") else ""
