"""Simulates buffered rounds under the virtual clock: each free device starts with the newest version, without a cohort.

An attempt continues after a newer version is published, until its update is in a buffer or would be too stale. A device
that has not started to train when a newer version comes starts with the newer one, because the older model is no longer
served. While the schedule allows no open round, no device trains.
"""

from __future__ import annotations

import math
from typing import Any

from hushfleet.simulator.engines.clock.device import Attempt, ClockDevice
from hushfleet.simulator.engines.clock.engine import FleetClock
from hushfleet.simulator.engines.clock.events import OpenRound
from hushfleet.simulator.world.outcomes import Arrival
from hushfleet.wire.format.messages import Ack

_OFFERED_AGAIN_S = 5.0  # as a device does that receives no answer


class BufferedClock(FleetClock):
    """Runs through the versions of one fleet's model, once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._begun: dict[str, int] = {}  # the newest version that each device has started with
        self._too_late: list[tuple[str, int]] = []

    def _choose(self, round: int) -> list[str]:
        return list(self._by_name)

    def _told_of(self, cohort: list[str]) -> dict[str, Any]:
        return {"cohort_size": len(cohort), "buffer_size": self._rules.buffer_size}

    def _named(self, current: OpenRound | None) -> int:
        return 0

    def _takes_part(self, device: ClockDevice, current: OpenRound, heard_at: float) -> bool:
        attempt = device.attempt
        if attempt is None or not device.linked:
            return attempt is None
        if heard_at < attempt.train_at or self._is_stale(attempt, current):
            self._give_up(device, attempt)
        return device.attempt is None

    def _is_stale(self, attempt: Attempt, current: OpenRound) -> bool:
        return current.number - attempt.round > (self._rules.max_staleness or 0)

    # an attempt

    def _begin_attempt(self, device: ClockDevice, current: OpenRound, heard_at: float) -> None:
        if current.closing or current.rests or self._begun.get(device.name, 0) >= current.number:
            return
        self._begun[device.name] = current.number
        device.spent.chosen += 1
        super()._begin_attempt(device, current, heard_at)
        attempt = device.attempt
        if attempt is None:
            device.spent.declined += 1
        else:
            self._limit_training(device, attempt)

    def _limit_training(self, device: ClockDevice, attempt: Attempt) -> None:
        """Limits a training to `deadline_s` from its first batch."""
        attempt.deadline_at = attempt.train_at + min(self._rule.announced_deadline_s, self._window_s)
        if attempt.last_at > attempt.deadline_at:
            stops_at = device.times.boundary(attempt.train_at, attempt.deadline_at)
            self._queue.at(stops_at, self._run_out, device, device.number, attempt)

    def _go_on(self, device: ClockDevice, attempt: Attempt, linked_at: float, *, went_at: float | None) -> None:
        super()._go_on(device, attempt, linked_at, went_at=went_at)
        self._limit_training(device, attempt)

    def _run_out(self, device: ClockDevice, number: int, attempt: Attempt) -> None:
        """Gives up the attempt: the device has used all of `deadline_s` for its training."""
        if device.number == number and device.attempt is attempt:
            self._give_up(device, attempt)

    def _give_up(self, device: ClockDevice, attempt: Attempt) -> None:
        """Ends an attempt whose update is in no buffer, committed or not."""
        committed = self._accounts.commits_late(device, attempt, self._of(attempt))
        device.held = attempt.round - 1
        if not committed:
            device.spent.given_up += 1
            return
        device.spent.late += 1
        device.spent.unused[len(self.fleet)] += 1
        self._too_late.append((device.name, attempt.round))

    def _of(self, attempt: Attempt) -> OpenRound:
        """Returns the round that an attempt started with, for the accounts."""
        return OpenRound(attempt.round, 0.0, list(self._by_name))

    def _arrive(self, device: ClockDevice, number: int, current: OpenRound) -> None:
        attempt = device.attempt
        if device.number == number and attempt is not None and self._links.server_linked:
            self._busy_until = max(self._busy_until, self._queue.now) + self._costs.accept_s
            self._queue.at(self._busy_until, self._take, device, attempt, self._life)

    def _take(self, device: ClockDevice, attempt: Attempt, life: int) -> None:
        """Accepts the update, when it is its turn."""
        current, now = self._open, self._queue.now
        if life != self._life or device.attempt is not attempt or self._closed_rounds >= self._rules.rounds:
            return
        if current is None or current.closing:
            next_at = max(now + _OFFERED_AGAIN_S, self._calendar.opens(now))
            again_at = next_at if current is None else max(now, self._busy_until)
            self._queue.at(again_at, self._take, device, attempt, life)
            return
        if self._is_stale(attempt, current):
            self._give_up(device, attempt)
        else:
            self._rule.accept(device.name)
            arrival = Arrival(device.name, now, attempt.update_bytes, attempt.round)
            current.arrivals[f"{device.name} {attempt.round}"] = arrival
            self._accounts.end_attempt(device, attempt, now)
            self._accounts.charge(device, self._of(attempt))
            device.in_sync, device.free_at, device.held = True, now + device.times.latency_s, attempt.round - 1
            device.spent.used += 1
            device.spent.down_bytes += self._sizes.packet[Ack]
            self._queue.log("update", round=current.number, device=device.name)
            self._check_close(current)
        if device.linked:
            self._begin_attempt(device, current, device.free_at)

    def _fates(self, current: OpenRound, used: bool) -> dict[str, list[str]]:
        if current.number == self._rules.rounds or self._calendar.is_over(self._queue.now):
            for device in self.fleet:
                if device.attempt is not None:
                    self._give_up(device, device.attempt)
        for arrival in () if used else current.arrivals.values():  # after the schedule's last day
            self._by_name[arrival.device].spent.unused[len(self.fleet)] += 1
        self._stale, self._too_late = tuple(self._too_late), []
        return {"used": [], "late": [], "declined": list(current.declined), "lost": [], "given_up": []}

    def _wait_again(self, current: OpenRound) -> None:
        self._begin_waiting(current)
        for arrival in current.arrivals.values():
            self._rule.accept(arrival.device)

    # the schedule

    def _limit(self, current: OpenRound) -> None:
        super()._limit(current)
        if math.isfinite(self._window_s):
            self._queue.at(self._queue.now + self._window_s, self._check_close, current)

    def _close_round(self, current: OpenRound, life: int) -> None:
        super()._close_round(current, life)
        left_s = self._calendar.left_s(self._queue.now)
        if self._open is None and math.isfinite(left_s):
            self._queue.at(self._queue.now + left_s, self._stop_all)

    def _stop_all(self) -> None:
        """Stops all devices if the window ends between two versions; those that train an older version give up too."""
        if self._open is None:
            for device in self.fleet:
                self._stop(device)

    def _stop(self, device: ClockDevice) -> None:
        attempt = device.attempt
        super()._stop(device)
        if attempt is not None and device.attempt is None:
            device.spent.given_up += 1
            device.held = attempt.round - 1 if device.held == self._accounts.version else device.held

    def _end_rest(self, current: OpenRound) -> None:
        for name, begun in list(self._begun.items()):
            if (device := self._by_name[name]).attempt is None and device.committed_round != begun:
                del self._begun[name]  # it has spent nothing, so it may start with this version again
        super()._end_rest(current)

    # power and network

    def broke(self, device: ClockDevice, *, power: bool) -> None:
        self._accounts.hears_nothing(device)
        attempt, now = device.attempt, self._queue.now
        if attempt is None:
            return
        device.number += 1
        if not power:
            attempt.cut_at = now
        elif now >= attempt.commit_at:
            device.send_in_vain(attempt, now if attempt.cut_at is None else attempt.cut_at)
            self._accounts.charge(device, self._of(attempt))
        else:
            self._accounts.end_attempt(device, attempt, now)
            device.held = attempt.round - 1 if now >= attempt.train_at else device.held
            device.spent.lost += 1
            self._begun.pop(device.name)

    def _hear_of(self, device: ClockDevice, linked_at: float, *, went_at: float | None = None) -> None:
        self._greet(device)
        current, attempt = self._open, device.attempt
        if current is not None and current.rests:
            return
        if attempt is not None and current is not None and current.number != attempt.round:
            untrained = attempt.cut_at is not None and attempt.cut_at < attempt.model_at
            if untrained or self._is_stale(attempt, current):
                self._give_up(device, attempt)
        if device.attempt is not None:
            self._go_on(device, device.attempt, linked_at, went_at=went_at)
        elif current is not None:
            self._begin_late(device, current, linked_at)
