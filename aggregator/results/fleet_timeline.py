"""Defines the timeline in `result.json`: rounds, each device's states over time, and the events that disturbed them."""

from __future__ import annotations

from typing import Literal, Self, get_args

from pydantic import model_validator

from hushfleet.aggregator.results.json_record import Count, JsonRecord, Measured, Seconds

Activity = Literal[
    "absent", "ready", "fetching", "training", "sending", "accepted", "late", "declined", "refused", "sleeping", "lost"
]
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
OUTCOMES = {
    "a": "accepted",
    "l": "late",
    "d": "declined",
    "r": "refused",
    "x": "lost",
    ".": "not asked",
    "-": "not there",
}
"""The outcomes of a device in a round, by the letters of `FleetTimeline.outcomes`."""


class FleetRound(JsonRecord):
    """A round in the timeline; `device_seconds` count until the next one opens, the other numbers until it closes.

    :param median_s: time from the opening to the accepted update, the median over the devices that were present.
    :param slowest_tenth_s: the mean of the slowest tenth of these devices, at least one.
    """

    round: Count
    opened_s: Seconds
    closed_s: Seconds
    median_s: Measured = None
    slowest_tenth_s: Measured = None
    device_seconds: dict[Activity, Seconds] = {}


class TimelineMark(JsonRecord):
    """Something that happened to the fleet: `what` (`down`, `cut`, `kill`, `stop`, `start`, ...) to `target`."""

    start_s: Seconds
    end_s: Seconds
    what: str
    target: str


class FleetTimeline(JsonRecord):
    """The states of each device over time, in seconds since the run's first event; lists are in the order of `devices`.

    :param timed: whether the log has events of training and sending; else only `rounds` and `outcomes` are meaningful.
    :param outcomes: a letter of `OUTCOMES` for each of `rounds`.
    :param seconds: how long each device was in each state, from the opening of the first round to the end.
    :param spans: `(start_s, end_s, state)`, without a gap from 0 to `end_s`; empty if there are too many.
    """

    timed: bool
    end_s: Seconds
    devices: list[str]
    rounds: list[FleetRound]
    outcomes: list[str]
    seconds: list[dict[Activity, Seconds]] = []
    spans: list[list[tuple[Seconds, Seconds, Activity]]] = []
    spans_left_out: Count = 0
    marks: list[TimelineMark] = []

    @model_validator(mode="after")
    def _lists_fit_together(self) -> Self:
        for name in ("outcomes", "seconds", "spans"):
            values = getattr(self, name)
            if (values or name == "outcomes") and len(values) != len(self.devices):
                raise ValueError(f"{name} has {len(values)} entries for {len(self.devices)} devices")
        for device, letters in zip(self.devices, self.outcomes, strict=True):
            if len(letters) != len(self.rounds) or not OUTCOMES.keys() >= set(letters):
                raise ValueError(
                    f"the outcomes of {device} are {letters!r}; there must be one of {''.join(OUTCOMES)!r} "
                    f"for each of {len(self.rounds)} rounds"
                )
        return self
