"""Simulates a fleet's rounds on a virtual clock, with the field's own rules for opening and closing a round.

Nothing waits and nothing is trained. A device's attempt is a list of times (`device.Attempt`), disturbed by the same
schedule that the live engine plays (`links`). The aggregator's own `policy` and `cohort` decide when a round opens,
with which devices, when it is extended and when it closes. It checks one update after the other, as they arrive.

Simplified: aggregator and broker have unlimited network, and a device without a network whose round closes meanwhile
continues until its own deadline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from hushfleet.aggregator.config.round_section import RoundSection
from hushfleet.aggregator.rounds.policy import choose_cohort, closing_rule, least_devices
from hushfleet.errors import HushfleetError
from hushfleet.simulator.engines.clock.accounts import Accounts
from hushfleet.simulator.engines.clock.calendar import Calendar
from hushfleet.simulator.engines.clock.device import Attempt, Broadcasts, ClockDevice
from hushfleet.simulator.engines.clock.events import EventQueue, OpenRound, stuck
from hushfleet.simulator.engines.clock.links import Links
from hushfleet.simulator.schedule import Playback, Schedule
from hushfleet.simulator.world.outcomes import Arrival, ClockRound
from hushfleet.simulator.world.run import LinkOptions
from hushfleet.simulator.world.sizes import Download, Sizes
from hushfleet.simulator.world.times import Costs
from hushfleet.wire.format.messages import Ack

_LONGEST_ROUND_S = 90 * 86400.0
_MOST_EXTENSIONS = 1000
_ROUNDING_S = 1e-6  # added to a time that is a sum, so that rounding does not make it too early


class FleetClock:
    """Runs through the rounds of one fleet, once.

    :param fleet: new devices, in the fleet's order.
    :param seed: the task's seed; it chooses cohorts as in the field, and draws the waits before new connections.
    :param calendar: calendar of the task's schedule; None: rounds follow each other.
    :param logging: whether closed rounds carry the events for a log.
    """

    def __init__(
        self,
        rules: RoundSection,
        fleet: Sequence[ClockDevice],
        *,
        costs: Costs,
        sizes: Sizes,
        schedule: Schedule,
        seed: int,
        calendar: Calendar | None = None,
        options: LinkOptions | None = None,
        logging: bool = False,
    ) -> None:
        self.fleet = fleet
        self._rules, self._costs, self._sizes, self._seed = rules, costs, sizes, seed
        self._by_name = {device.name: device for device in fleet}
        self._calendar = calendar or Calendar()
        self._queue = EventQueue(logging=logging)
        self._accounts = Accounts(self._queue, sizes)
        self._playback = Playback(schedule)
        self._links = Links(fleet, self._queue, self, seed=seed, options=options or LinkOptions())
        self._least = least_devices(rules, devices=len(fleet))
        self._rule = closing_rule(rules, least_ready=self._least)
        self._present: set[str] = set()
        self._broadcasts: dict[int, Broadcasts] = {}  # by number of differences; 0: of the whole model
        self._rate = 1.0  # the probability with which each device is drawn
        self._closed_rounds, self._ended = 0, False  # ended: the schedule's last window is over
        self._open: OpenRound | None = None
        self._stale: tuple[tuple[str, int], ...] = ()
        self._closed: ClockRound | None = None
        self._busy_until, self._life = 0.0, 0  # of the aggregator; events of an earlier process are ignored
        self._went_at: float | None = None

    def rounds(self) -> Iterator[ClockRound]:
        """Yields one round after the other. Raises `HushfleetError` if a round never opens or never closes."""
        for device in self.fleet:
            if device.name not in self._playback.absent:
                self._links.start(device)
        while self._closed_rounds < self._rules.rounds and (closed := self._next_round()) is not None:
            yield closed
        if self._open is not None:
            self._fates(self._open, False)
        for device in self.fleet:
            if device.on:
                device.spent.on_s += self._queue.now - device.on_since
            self._accounts.hears_nothing(device)

    def _next_round(self) -> ClockRound | None:
        queue, self._closed = self._queue, None
        give_up_at = self._calendar.opens(queue.now) + _LONGEST_ROUND_S
        while self._closed is None and not self._ended:
            at = min(self._playback.next_s, queue.next_s)
            if at > give_up_at or self._rule.extensions > _MOST_EXTENSIONS:
                words = stuck(self._open, self._closed_rounds + 1, len(self._present), self._least, self._rule)
                raise HushfleetError(words)
            if self._playback.next_s <= at:
                queue.now = max(queue.now, at)
                for action in self._playback.due(queue.now):
                    self._links.act(action)
            else:
                queue.advance()
        return self._closed

    # a round

    def _open_round(self) -> None:
        """Opens the next round if enough devices are present."""
        now, rules, closed = self._queue.now, self._rules, self._closed_rounds
        if self._open is not None or closed >= rules.rounds or not self._links.server_linked:
            return
        present, least = len(self._present), self._least
        if not self._calendar.may_open(now, rules, present, least=least, closed_rounds=closed, rate=self._rate):
            self._ended = closed > 0 and self._calendar.is_over(now)
            if (again := self._calendar.look_again(now, rules)) is not None:
                self._queue.at(again, self._open_round)
            return
        self._calendar.opened(now)
        cohort = self._choose(closed + 1)
        self._open = OpenRound(closed + 1, now, cohort)
        self._begin_waiting(self._open)
        self._queue.log("round_open", round=closed + 1, **self._told_of(cohort))
        plan_bytes = self._accounts.announce(self._named(self._open))
        begin = []
        for name in cohort:
            device = self._by_name[name]
            heard_at = now + device.times.heard_after(plan_bytes)
            if self._takes_part(device, self._open, heard_at) and device.linked:
                begin.append((max(heard_at, device.free_at, device.task_at) + device.times.latency_s, name, heard_at))
        for _, name, heard_at in sorted(begin):  # in the order of their wants, which may share a broadcast
            self._begin_attempt(self._by_name[name], self._open, heard_at)
        self._playback.round_opened(closed + 1, now)

    def _takes_part(self, device: ClockDevice, current: OpenRound, heard_at: float) -> bool:
        """Counts this device of the cohort when a round opens; returns whether the device starts with the round."""
        device.spent.chosen += 1
        return True

    def _choose(self, round: int) -> list[str]:
        return choose_cohort(self._present, size=self._rules.cohort_size, seed=self._seed, round=round)

    def _told_of(self, cohort: list[str]) -> dict[str, Any]:
        """Returns the log's fields about the cohort."""
        return {"cohort": cohort}

    def _named(self, current: OpenRound | None) -> int:
        """Returns the number of devices that the plan names."""
        return 0 if current is None else current.size

    def _begin_waiting(self, current: OpenRound) -> None:
        self._rule.begin(current.cohort, now=self._queue.now)
        self._limit(current)

    def _limit(self, current: OpenRound) -> None:
        """Limits the round's waiting to the end of its window."""
        self._window_s = self._calendar.left_s(self._queue.now)
        self._rule.close_by(self._queue.now + self._window_s)
        self._queue.at(self._rule.deadline, self._check_close, current)

    def _wait_again(self, current: OpenRound) -> None:
        """Starts waiting again after a restart of the aggregator."""
        self._begin_waiting(current)
        for name in current.arrivals:
            self._rule.accept(name)
        for name, code in current.declined.items():
            self._rule.decline(name, code)

    def _takes(self, current: OpenRound) -> bool:
        """Returns whether this round is open, and not about to be closed."""
        return self._open is current and not current.closing

    def _collects(self, current: OpenRound) -> bool:
        """Returns whether the round accepts updates."""
        return self._takes(current)

    def _is_over(self, current: OpenRound) -> bool:
        """Returns whether the round closes, when it waits for no device any more."""
        return True

    def _is_used(self, current: OpenRound) -> bool:
        """Returns whether the round makes a new global model."""
        return len(current.arrivals) >= self._rules.min_updates

    def _begin_attempt(self, device: ClockDevice, current: OpenRound, heard_at: float) -> None:
        """Starts the attempt of a linked device of the cohort that hears of the open round, or lets it decline."""
        began_at = max(heard_at, device.free_at, device.task_at)
        if not device.times.enough_memory:
            says_at = began_at + device.times.latency_s
            reason = "the task needs more memory than this device gives"
            self._queue.at(says_at, self._decline, device, current, "memory", reason)
            return
        download = self._download(device)
        attempt = device.lay_out(
            round=current.number,
            began_at=began_at,
            deadline_at=max(heard_at, device.free_at) + min(self._rule.announced_deadline_s, self._window_s),
            sizes=self._sizes,
            download=download,
            broadcasts=download and self._broadcasts.setdefault(download.differences, Broadcasts()),
        )
        self._queue.at(attempt.arrive_at, self._arrive, device, device.number, current)

    def _download(self, device: ClockDevice) -> Download | None:
        """Returns the download with which the device receives the global model; None if it holds the model."""
        if device.held == self._accounts.version:
            return None
        return self._sizes.download(None if device.held < 0 else self._accounts.version - device.held)

    def _arrive(self, device: ClockDevice, number: int, current: OpenRound) -> None:
        """Puts an update whose last byte has arrived into the aggregator's queue."""
        if device.number == number and self._collects(current) and self._links.server_linked:
            self._busy_until = max(self._busy_until, self._queue.now) + self._costs.accept_s
            self._queue.at(self._busy_until, self._accept, device, current, self._life)

    def _accept(self, device: ClockDevice, current: OpenRound, life: int) -> None:
        attempt, now = device.attempt, self._queue.now
        if life != self._life or not self._collects(current) or attempt is None:
            return
        self._rule.accept(device.name)
        current.arrivals[device.name] = Arrival(device.name, now, attempt.update_bytes, attempt.round)
        self._accounts.end_attempt(device, attempt, now)
        self._accounts.charge(device, current)
        device.in_sync, device.free_at = True, now + device.times.latency_s
        device.spent.used += 1
        device.spent.down_bytes += self._sizes.packet[Ack]
        self._queue.log("update", round=current.number, device=device.name)
        self._check_close(current)

    def _decline(self, device: ClockDevice, current: OpenRound, code: str, reason: str) -> None:
        if not self._collects(current) or not device.linked or not self._rule.expects(device.name):
            return
        self._rule.decline(device.name, code)
        current.declined[device.name] = code
        self._queue.log("decline", round=current.number, device=device.name, code=code, reason=reason)
        self._check_close(current)

    def _check_close(self, current: OpenRound) -> None:
        if not self._takes(current) or current.rests or not self._links.server_up:
            return
        now, over = self._queue.now, self._calendar.left_s(self._queue.now) <= 0
        if over and not self._rule.extensions and self._collects(current):
            self._rule.ask_again()  # in the next window
        decision = self._rule.decide(now, ready=len(self._present))
        if decision == "close" and self._is_over(current):
            current.closing = True
            # without delay: updates that have arrived but are not checked yet are late
            self._busy_until = now + self._costs.close_s
            self._queue.at(self._busy_until, self._close_round, current, self._life)
        elif over and self._collects(current):
            self._rest(current)
        elif decision == "extend":
            self._limit(current)
            self._extend(current)

    def _rest(self, current: OpenRound) -> None:
        """Rests a round whose window has ended with too few updates: no device trains until the next window."""
        goes_on, current.rests = self._calendar.goes_on(self._queue.now), True
        self._ended = math.isinf(goes_on) and self._closed_rounds > 0
        self._queue.at(goes_on, self._end_rest, current)
        for name in current.cohort:
            self._stop(self._by_name[name])

    def _stop(self, device: ClockDevice) -> None:
        """Stops a training because no round is open; a committed update is sent later."""
        attempt = device.attempt
        if attempt is not None and not (ending := device.ending(attempt, self._queue.now)).committed:
            device.free_at = ending.free_at
            self._accounts.end_attempt(device, attempt, ending.computed_until)

    def _end_rest(self, current: OpenRound) -> None:
        current.rests = False
        self._rule.ask_again()
        self._rule.wait_longer(self._queue.now)
        self._limit(current)
        self._queue.log("round_extended", round=current.number, accepted=self._rule.accepted)
        self._accounts.announce(self._named(current))
        for name in current.cohort:
            if self._by_name[name].linked:
                self._hear_of(self._by_name[name], self._queue.now)
        self._check_close(current)

    def _extend(self, current: OpenRound) -> None:
        """Extends a round: a device that trains gives up at its deadline and starts again; others have more time."""
        now = self._queue.now
        self._queue.log("round_extended", round=current.number, accepted=self._rule.accepted)
        plan_bytes = self._accounts.announce(self._named(current))
        if not self._collects(current):
            return
        for name in current.cohort:
            device, attempt = self._by_name[name], self._by_name[name].attempt
            if attempt is None or not device.linked:
                continue
            times = device.times
            heard_at = now + times.heard_after(plan_bytes)
            if heard_at < attempt.train_at:
                attempt.deadline_at = heard_at + self._rule.announced_deadline_s
            elif attempt.last_at > attempt.deadline_at:
                stops_at = times.boundary(attempt.train_at, attempt.deadline_at)
                self._queue.at(stops_at + times.latency_s, self._begin_anew, device, device.number, current, stops_at)

    def _begin_anew(self, device: ClockDevice, number: int, current: OpenRound, stopped_at: float) -> None:
        attempt = device.attempt
        if attempt is None or device.number != number or self._open is not current or not device.linked:
            return
        self._accounts.end_attempt(device, attempt, stopped_at)
        device.free_at = stopped_at
        self._decline(device, current, "busy", "the round's deadline passed before training had ended")
        if not (current.closing or current.rests):
            self._begin_attempt(device, current, stopped_at)

    def _close_round(self, current: OpenRound, life: int) -> None:
        if life != self._life:
            return
        now, used = self._queue.now, self._is_used(current)
        fates = self._fates(current, used)
        self._open, self._closed_rounds, self._calendar.idle_since = None, current.number, now
        if used:
            self._accounts.version += 1
            self._broadcasts = {}
        self._closed = ClockRound(
            round=current.number,
            opened_s=current.opened_s,
            closed_s=now,
            cohort=tuple(current.cohort),
            arrivals=tuple(current.arrivals.values()),
            late=tuple(fates["late"]),
            given_up=tuple(fates["given_up"]),
            declined=tuple(name for name in current.declined if name in fates["declined"]),
            lost=tuple(fates["lost"]),
            extensions=self._rule.extensions,
            used=used,
            events=tuple(self._queue.logged()),
            stale=self._stale,
        )
        self._open_round()
        if self._open is None:
            self._accounts.announce(0)
            self._queue.at(now + self._rules.deadline_s + _ROUNDING_S, self._open_round)

    def _fates(self, current: OpenRound, used: bool) -> dict[str, list[str]]:
        """Ends the attempts of a closing round; returns the names by the field of `Spent` that counts them."""
        return self._accounts.fates(current, [self._by_name[name] for name in current.cohort], used=used)

    # power and network, called by `Links`

    def link_up(self, device: ClockDevice, *, linked_at: float) -> None:
        """Tells the aggregator of a device whose link is up since `linked_at`."""
        self._accounts.count_link(device, linked_at=linked_at, named=self._named(self._open))
        if self._links.server_linked:
            self._hear_of(device, linked_at)
            self._open_round()

    def broke(self, device: ClockDevice, *, power: bool) -> None:
        """Handles a link that ended now; `power`: because the device lost its power."""
        self._accounts.hears_nothing(device)
        attempt, now, current = device.attempt, self._queue.now, self._open
        if attempt is None or current is None:
            return
        device.number += 1
        if not power:
            attempt.cut_at = now
        elif now >= attempt.commit_at:
            device.send_in_vain(attempt, now if attempt.cut_at is None else attempt.cut_at)
            self._accounts.charge(device, current)
        else:
            self._accounts.end_attempt(device, attempt, now)

    def missed(self, device: ClockDevice, state: Literal["lost", "sleeping"]) -> None:
        """Tells the aggregator that a device is gone."""
        self._present.discard(device.name)
        self._lose(device)
        self._accounts.presence(device, state)

    def server_went(self) -> None:
        """Handles that the aggregator was killed; everything that it had in memory is lost."""
        self._life += 1
        if self._open is not None:
            self._open.closing = False
        self._went_at = self._queue.now
        self._present.clear()

    def server_came(self) -> None:
        """Handles that the aggregator is connected, again or after a new start."""
        now, current = self._queue.now, self._open
        went_at, self._went_at = self._went_at, None
        if went_at is None:
            self._queue.log("link", state="up")
        else:
            self._queue.log("run")
            self._busy_until = self._calendar.idle_since = now
            self._queue.at(now + self._rules.deadline_s + _ROUNDING_S, self._open_round)
            self._rule = closing_rule(self._rules, least_ready=self._least)
            if current is not None:
                self._wait_again(current)
        for device in self.fleet:
            if device.linked:
                self._hear_of(device, now, went_at=went_at)
            elif went_at is not None:
                self._lose(device)
        if current is not None:
            self._check_close(current)
        else:
            self._open_round()

    def _lose(self, device: ClockDevice) -> None:
        self._rule.lost(device.name, now=self._queue.now)
        if self._open is not None and self._rule.expects(device.name):
            self._queue.at(self._queue.now + self._rule.grace_s + _ROUNDING_S, self._check_close, self._open)

    def _hear_of(self, device: ClockDevice, linked_at: float, *, went_at: float | None = None) -> None:
        """Handles a linked device and the aggregator that find each other, for the first time or again.

        :param went_at: when the aggregator was killed, if this is the reason; open transfers then start again.
        """
        self._greet(device)
        current, attempt = self._open, device.attempt
        if current is None or current.rests or not self._collects(current):
            return
        if attempt is not None:
            self._go_on(device, attempt, linked_at, went_at=went_at)
        elif self._rule.expects(device.name):
            self._begin_late(device, current, linked_at)

    def _greet(self, device: ClockDevice) -> None:
        """Tells the aggregator that a device is present."""
        if device.name not in self._present:
            self._present.add(device.name)
            self._accounts.presence(device, "ready")
        self._rule.back(device.name)

    def _begin_late(self, device: ClockDevice, current: OpenRound, linked_at: float) -> None:
        """Starts an attempt of a device whose link is up since `linked_at`, after it has read the retained plan."""
        plan_s = self._sizes.plan_wire_bytes(self._named(current)) * device.times.down_s_per_byte
        self._begin_attempt(device, current, linked_at + plan_s)

    def _go_on(self, device: ClockDevice, attempt: Attempt, linked_at: float, *, went_at: float | None) -> None:
        """Continues an attempt that was disturbed because a link, a process or the aggregator ended."""
        times = device.times
        if device.committed_round == attempt.round:  # by an earlier process; the plan still asks for the update
            device.send_again(attempt, device.task_at)
        elif attempt.cut_at is not None:
            device.resume(attempt, linked_at)
        elif went_at is not None and attempt.commit_at <= linked_at:
            device.send_in_vain(attempt, linked_at)
            device.send_again(attempt, linked_at + 2 * times.latency_s)
        elif went_at is not None and attempt.broadcasts is not None and went_at < attempt.pass_at:
            attempt.delay(attempt.broadcasts.want(linked_at + times.latency_s) - attempt.pass_at)
        device.number += 1
        self._queue.at(attempt.arrive_at, self._arrive, device, device.number, self._open)
