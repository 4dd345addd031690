"""Derives the state of a fleet from the run's events, for displays and for the outcomes of its rounds.

The aggregator sees little of a device: that it is present (`presence`), that it trains, that it begins to send
(`offer`), and the answer to its update. A device's state follows from these and from its part in the open round:

    fetching   in the cohort, not training yet: the plan and the global model are being sent to it
    training   the device reports that it trains
    sending    has trained, or has offered its update
    accepted   its update is in the store; it waits for the next round
    late       the round closed without it, although it was present; never in a buffered round, which waits for nobody
    declined, refused    its own answer, the aggregator's answer
    ready      present, and the round does not need it
    sleeping, lost       has disconnected on purpose, has lost its connection
    absent     not seen yet

Unknown events and missing fields are ignored, so that one version can read the log of the next.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, NamedTuple

from hushfleet.aggregator.results.answers import EvaluationRow, evaluation_of
from hushfleet.aggregator.results.result import LostRounds
from hushfleet.aggregator.storage.board import Activity, Rejection
from hushfleet.losses import ACCURACY
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.privacy.terms import Accountant

KEPT_WARNINGS = 5
_STAYS_SENDING = ("store-full", "state-unknown", "late", "not-in-cohort")
Event = Mapping[str, Any]
Presence = Literal["absent", "ready", "training", "sleeping", "lost"]
Participation = Literal["none", "asked", "working", "offered", "accepted", "declined", "refused", "late"]
Outcome = Literal["accepted", "late", "declined", "refused", "lost"]


@dataclass
class SeenDevice:
    """One device: its presence, its part in the newest round, the state that follows from both, and what it has done.

    :param board: its profile, as it has said.
    :param last_seen: unix seconds of its last message; None if there was none.
    :param rounds: number of its accepted updates, and `sent_bytes` their size.
    :param epsilon: the largest epsilon_server that they have declared.
    :param decline: its newest one, and `refusal` the newest refusal of its update; None after an accepted update.
    """

    presence: Presence = "absent"
    part: Participation = "none"
    board: str = ""
    last_seen: float | None = None
    rounds: int = 0
    sent_bytes: int = 0
    epsilon: float | None = None
    decline: Rejection | None = None
    refusal: Rejection | None = None

    @property
    def is_open(self) -> bool:
        """Whether an answer is still expected."""
        return self.part in ("asked", "working", "offered")

    @property
    def is_there(self) -> bool:
        """Whether the device is connected according to the events."""
        return self.presence in ("ready", "training")

    @property
    def state(self) -> Activity:
        """The state that follows from presence and part."""
        if self.presence != "ready" and self.presence != "training":
            return self.presence
        if self.part in ("accepted", "declined", "refused", "late"):
            return self.part
        if self.presence == "training":
            return "training"
        return "ready" if self.part == "none" else "fetching" if self.part == "asked" else "sending"


class Opening(NamedTuple):
    """When a round opens, or a resting round continues: unix seconds `at`, and the time zone of the schedule."""

    round: int
    at: float
    timezone: str


@dataclass(frozen=True)
class Shortfall:
    """Numbers of devices of a fleet, while the next round waits because too few can take part.

    :param able: they can take part.
    :param min_devices: a round opens with so many; `min_updates`: so many updates make a model, and no number below
        `least_updates` can be set.
    :param spent: they cannot pay before their period ends, at `frees` (unix seconds); `spent_for_good`: never.
    :param declined: they declined a round for a reason that still holds.
    :param unlisted: not in the membership list of secure aggregation.
    """

    round: int
    able: int
    min_devices: int
    min_updates: int
    least_updates: int = 1
    absent: int = 0
    unlisted: int = 0
    declined: int = 0
    spent: int = 0
    frees: float | None = None
    spent_for_good: int = 0
    timezone: str = "UTC"

    @property
    def needed(self) -> int:
        return max(self.min_devices, self.min_updates)

    @property
    def is_certain(self) -> bool:
        """Whether the round would wait even if all absent devices came."""
        return self.able + self.absent < self.needed


class FleetState:
    """The state of every device, updated by each event. `is_timed`: the log has events of training and sending."""

    def __init__(self) -> None:
        self.devices: dict[str, SeenDevice] = {}
        self.open_round: int | None = None
        self.buffer_size = 0  # of the open round; 0: it is not buffered
        self.is_timed = False

    def apply(self, event: Event) -> None:
        """Processes one event."""
        handler = getattr(self, f"_on_{event.get('event')}", None)
        if handler:
            handler(event)

    def _outcome(self, device: SeenDevice) -> Outcome | None:
        """Returns the outcome of the open round for a device, as if it closed now; None if it was not needed."""
        if device.part in ("accepted", "declined", "refused", "late"):
            return device.part
        if not device.is_open or self.buffer_size:  # a buffered round waits for nobody
            return None
        return "late" if device.is_there else "lost"

    def _close(self, number: int) -> None:
        """Closes the round: no further answer counts."""
        for device in self.devices.values():
            outcome = self._outcome(device)
            device.part = "none" if outcome is None or outcome == "lost" else outcome
        self.open_round = None

    def _device(self, name: str) -> SeenDevice:
        return self.devices.setdefault(name, SeenDevice())

    def _speaker(self, event: Event) -> SeenDevice | None:
        """Returns the device of a message, and marks it as present and no longer training."""
        name = event.get("device")
        if not isinstance(name, str):
            return None
        device = self._device(name)
        device.presence = "ready"
        _hear(device, event)
        return device

    def _on_presence(self, event: Event) -> None:
        name, state = event.get("device"), event.get("state")
        if state not in ("ready", "training", "sleeping", "lost") or not isinstance(name, str):
            return
        device = self._device(name)
        if state == "training":
            self.is_timed = True
            if device.part == "asked":
                device.part = "working"
        elif state != "ready" and device.part == "working":
            device.part = "asked"  # nothing was committed: it must train again
        # The broker says that a device is lost, and repeats all former states to an aggregator that starts.
        if state in ("ready", "training") or (state == "sleeping" and device.is_there):
            _hear(device, event)
        device.board = str(event.get("board") or device.board)
        device.presence = state

    def _on_round_open(self, event: Event) -> None:
        number, cohort = event.get("round"), event.get("cohort")
        if not isinstance(number, int) or number < 0 or not isinstance(cohort, list | None):
            return
        if cohort is None:  # secure aggregation, whose devices are not named
            members = [device for device in self.devices.values() if device.is_there]
        else:
            members = [self._device(str(name)) for name in cohort]
        if number != self.open_round:  # else it was opened before, and continues after a restart
            if self.open_round is not None:
                self._close(self.open_round)
            self.open_round, size = number, event.get("buffer_size")
            self.buffer_size = size if isinstance(size, int) else 0
            for device in self.devices.values():
                device.part = "none"
        for device in members:
            if device.part == "none":
                device.part = "asked"
            if device.presence == "absent":
                device.presence = "ready"

    def _on_offer(self, event: Event) -> None:
        if (device := self._speaker(event)) is not None:
            self.is_timed = True
            if event.get("round") == self.open_round and device.is_open:
                device.part = "offered"

    def _on_update(self, event: Event) -> None:
        device, code = self._speaker(event), event.get("code", "accepted")
        if device is None:
            return
        if code == "accepted":
            device.rounds, device.sent_bytes = device.rounds + 1, device.sent_bytes + (event.get("bytes") or 0)
            device.decline = device.refusal = None
            device.epsilon = _highest(device.epsilon, event.get("epsilon_server"))
        elif code != "duplicate":
            device.refusal = _rejection(event)
        if event.get("round") != self.open_round:
            return
        if code in ("accepted", "duplicate"):
            device.part = "accepted"
        elif device.is_open and code not in _STAYS_SENDING:
            device.part = "refused"

    def _on_decline(self, event: Event) -> None:
        device = self._speaker(event)
        if device is not None:
            device.decline = _rejection(event)
            if event.get("round") == self.open_round and device.is_open:
                device.part = "declined"

    def _on_round_close(self, event: Event) -> None:
        if self.open_round is not None and event.get("round") == self.open_round:
            self._close(self.open_round)


class RunState(FleetState):
    """Everything that a display shows. `apply` and `apply_metrics` change it, everything else only reads.

    :param delta: for epsilon_release, which is computed from the rounds' multipliers if the events do not state it;
        the `run` event may also set it. The same holds for `accountant`.
    """

    def __init__(self, *, delta: float | None = None, accountant: Accountant = "exact") -> None:
        super().__init__()
        self.delta, self.accountant = delta, accountant
        self.task = self.method = self.engine = self.broker = ""
        self.unit, self.measure = "device", ACCURACY
        self.rounds = self.device_count = self.round = self.rounds_closed = 0
        self.uplink_bytes = self.round_bytes = self.downlink_bytes = 0
        self.accuracy_global: float | None = None
        self.evaluation: EvaluationRow | None = None
        self.snr_db: float | None = None
        self.epsilon_server: float | None = None
        self._epsilon_release: float | None = None
        self.raw_values: tuple[str, ...] = ()
        self.finished = self.paused = False
        self.next_opening: Opening | None = None
        self.waiting: Shortfall | None = None
        self.lost: LostRounds | None = None
        self.metrics: dict[str, Mapping[str, Any]] = {}
        self.counted: Counter[str] = Counter()
        self._release: Counter[tuple[float, float]] = Counter()  # steps by multiplier and sample rate
        self._is_composed = True
        self._warned: dict[tuple[int, str], tuple[str, int]] = {}
        self._news = ""

    def apply_metrics(self, device: str, metrics: Mapping[str, Any]) -> None:
        """Processes what one simulated device measured about itself in its newest round."""
        self.metrics[device] = {**self.metrics.get(device, {}), **metrics}
        self._see_epsilon(metrics.get("epsilon_server"))

    def states(self) -> dict[str, Activity]:
        """Returns every device's state, by id. In a log without training events, fetching devices count as training."""
        states = {name: device.state for name, device in sorted(self.devices.items())}
        return {name: "training" if s == "fetching" and not self.is_timed else s for name, s in states.items()}

    def mean_metric(self, name: str) -> float | None:
        """Returns the mean over devices of a metric's newest values."""
        values = [m[name] for m in self.metrics.values() if isinstance(m.get(name), int | float)]
        return fmean(values) if values else None

    @property
    def warnings(self) -> list[str]:
        """The newest warnings; the same warning for many devices in a round is one line with their number."""
        told = [f"{words}, and {count - 1:,} more" if count > 1 else words for words, count in self._warned.values()]
        return told[-KEPT_WARNINGS:]

    def take_news(self) -> str:
        """Returns the newest event's warning once, if it is the first of its kind in the round; else an empty text."""
        news, self._news = self._news, ""
        return news

    @property
    def epsilon_release(self) -> float | None:
        """Epsilon against readers of the models, of a device that took part in all rounds; composed only when it is
        read, because a log that is read again may have thousands of rounds."""
        if not self._is_composed and self.delta:
            steps = [Step(*how, count) for how, count in self._release.items()]
            self._epsilon_release = epsilon(steps, delta=self.delta, accountant=self.accountant)
        self._is_composed = True
        return self._epsilon_release

    @property
    def progress(self) -> float:
        """Closed rounds, plus the share of the cohort that has answered the open one, or of the buffer that is full."""
        if self.open_round is not None and self.buffer_size:
            accepted = sum(device.part == "accepted" for device in self.devices.values())
            return self.rounds_closed + min(1.0, accepted / self.buffer_size)
        asked = [device for device in self.devices.values() if device.part != "none"]
        if self.open_round is None or not asked:
            return self.rounds_closed
        return self.rounds_closed + sum(not device.is_open for device in asked) / len(asked)

    def _on_run(self, event: Event) -> None:
        for name in ("task", "method", "unit", "engine", "broker", "delta", "accountant", "rounds", "measure"):
            if event.get(name) is not None:
                setattr(self, name, event[name])
        self.raw_values = tuple(event.get("raw_values", ()))
        self.device_count = event.get("devices", 0)
        # the aggregator reports them again if they still hold
        self.paused, self.next_opening, self.waiting = False, None, None

    def _on_presence(self, event: Event) -> None:
        name = event.get("device")
        if event.get("state") == "lost" and name in self.devices and self.devices[name].is_there:
            self._warn("lost", f"{name} lost its connection")
        super()._on_presence(event)

    def _on_round_open(self, event: Event) -> None:
        super()._on_round_open(event)
        self.next_opening = self.waiting = None
        self.finished = False  # a task that ended by its schedule continues if the schedule was changed
        self.round, self.round_bytes = event.get("round", self.round + 1), 0

    def _on_update(self, event: Event) -> None:
        code = event.get("code", "accepted")
        if code == "accepted":
            self.round_bytes += event.get("bytes") or 0
            self._see_epsilon(event.get("epsilon_server"))
        elif code != "duplicate":
            self._warn("refused", f"refused {event.get('device', '?')}: {code}{_because(event)}", code=code)
        super()._on_update(event)

    def _on_decline(self, event: Event) -> None:
        code = event.get("code", "?")
        self._warn("declined", f"{event.get('device', '?')} declined: {code}{_because(event)}", code=code)
        super()._on_decline(event)

    def _on_refused(self, event: Event) -> None:
        code = event.get("code", "?")
        self._warn("refused", f"refused {event.get('device') or 'a stranger'}: {code}", code=code)

    def _on_next_round(self, event: Event) -> None:
        number, opens = event.get("round"), event.get("opens")
        if isinstance(number, int) and isinstance(opens, int | float):
            self.next_opening = Opening(number, float(opens), str(event.get("timezone") or "UTC"))

    def _on_waits(self, event: Event) -> None:
        with suppress(TypeError):  # of another version
            self.waiting = Shortfall(**{name: value for name, value in event.items() if name not in ("event", "at")})

    def _on_pause(self, event: Event) -> None:
        self.paused = event.get("state") == "on"

    def _on_round_extended(self, event: Event) -> None:
        self.next_opening = None
        self._warn("extended", f"too few updates ({event.get('accepted', '?')}) at the deadline, which is set anew")

    def _on_quarantine(self, event: Event) -> None:
        self._warn("quarantine", f"{event.get('device', '?')} is out of the run{_because(event)}")

    def _on_round_close(self, event: Event) -> None:
        super()._on_round_close(event)
        self.rounds_closed = event.get("round", self.rounds_closed + 1)
        self.round = max(self.round, self.rounds_closed)
        self.round_bytes = event.get("uplink_bytes") or self.round_bytes
        self.uplink_bytes += self.round_bytes
        self.downlink_bytes += event.get("downlink_bytes") or 0
        for name in ("accuracy_global", "snr_db"):
            if event.get(name) is not None:
                setattr(self, name, event[name])
        self._see_release(event)
        if isinstance(event.get("lost"), dict):
            self.lost = LostRounds.of(event["lost"])
        if event.get("asked") == "evaluation" and event.get("answer"):
            self.evaluation = evaluation_of(
                event["answer"], event["answer_stds"], round=self.rounds_closed, devices=event["participants"]
            )

    def _on_finished(self, event: Event) -> None:
        self.finished, self.waiting = True, None
        if event.get("reason"):
            self._warn("ended", f"ended after {self.rounds_closed} of {self.rounds} rounds: {event['reason']}")

    def _see_epsilon(self, value: object) -> None:
        self.epsilon_server = _highest(self.epsilon_server, value)

    def _see_release(self, event: Event) -> None:
        multiplier = event.get("multiplier_release")
        if self.raw_values:
            self._epsilon_release, self._is_composed = math.inf, True
        elif event.get("epsilon_release") is not None:
            self._epsilon_release, self._is_composed = float(event["epsilon_release"]), True
        elif self.unit == "record":  # no other device's noise hides a record
            self._epsilon_release, self._is_composed = self.epsilon_server, True
        elif multiplier is not None and self.delta:
            self._release[float(multiplier), event.get("sample_rate", 1.0)] += event.get("steps", 1)
            self._is_composed = False

    def _warn(self, kind: str, words: str, *, code: str = "") -> None:
        self.counted[kind] += 1
        key = (self.round, f"{kind} {code}")
        first, count = self._warned.get(key, (f"round {self.round}: {words}" if self.round else words, 0))
        self._warned[key] = (first, count + 1)
        if not count:
            self._news = first
        if len(self._warned) > KEPT_WARNINGS:
            del self._warned[next(iter(self._warned))]


def _because(event: Event) -> str:
    return f" ({event['reason']})" if event.get("reason") else ""


def _hear(device: SeenDevice, event: Event) -> None:
    device.last_seen = _number(event.get("at"), device.last_seen)
    device.board = str(event.get("board") or device.board)


def _number(value: object, otherwise: Any) -> Any:
    return value if isinstance(value, int | float) else otherwise


def _highest(before: float | None, value: object) -> float | None:
    return max(before or 0.0, float(value)) if isinstance(value, int | float) else before


def _rejection(event: Event) -> Rejection:
    return Rejection(int(_number(event.get("round"), 0)), str(event.get("code")), str(event.get("reason") or ""))
