"""What happened to the fleet rather than in it: crashes, outages, and devices that were taken down on purpose.

A simulation writes what it does into `scenario.jsonl`; elsewhere the event log shows what the aggregator noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hushfleet.aggregator.observe.timeline_clock import RunClock
from hushfleet.aggregator.results.result import TimelineMark

MOST_DEVICE_MARKS = 2_000
SERVERS = ("broker", "aggregator")
_BROUGHT_BACK_BY = {"kill": "start", "stop": "start", "cut": "mend"}
_NOTICED_BEFORE_S, _NOTICED_AFTER_S = 5.0, 30.0


class Marks:
    """Collects marks; of devices at most `MOST_DEVICE_MARKS`, the first ones."""

    def __init__(self) -> None:
        self._marks: list[TimelineMark] = []
        self._of_devices = 0

    def add(self, start_s: float, end_s: float, what: str, target: str) -> None:
        if target not in SERVERS:
            self._of_devices += 1
            if self._of_devices > MOST_DEVICE_MARKS:
                return
        self._marks.append(TimelineMark(start_s=round(start_s, 3), end_s=round(end_s, 3), what=what, target=target))

    def add_scenario(self, scenario: Iterable[Mapping[str, Any]], clock: RunClock) -> None:
        """Pairs what took something down with what brought it back; `start` alone is a device that came late."""
        waiting: dict[tuple[str, str], tuple[float, str]] = {}
        for event in scenario:
            at, action, target = event.get("at"), event.get("action"), event.get("target")
            if not isinstance(at, int | float) or not isinstance(action, str) or not isinstance(target, str):
                continue
            moment = clock.of(float(at))
            if action in _BROUGHT_BACK_BY:
                waiting[target, _BROUGHT_BACK_BY[action]] = (moment, action)
            elif action in _BROUGHT_BACK_BY.values():
                began, what = waiting.pop((target, action), (moment, action))
                self.add(began, moment, what, target)
        for (target, _), (began, what) in waiting.items():
            self.add(began, clock.now, what, target)

    def without_repetitions(self) -> list[TimelineMark]:
        """By time. The scenario is exact about the servers, so what the log noticed of the same crash is left out."""
        kills = [mark for mark in self._marks if mark.target in SERVERS and mark.what == "kill"]

        def is_repetition(mark: TimelineMark) -> bool:
            return mark.what not in _BROUGHT_BACK_BY and any(
                kill.target == mark.target
                and kill.start_s - _NOTICED_BEFORE_S <= mark.end_s
                and mark.start_s <= kill.end_s + _NOTICED_AFTER_S
                for kill in kills
            )

        kept = [mark for mark in self._marks if not is_repetition(mark)]
        return sorted(kept, key=lambda mark: (mark.start_s, mark.target))
