"""A fleet's rounds on a virtual clock: rows of moments, and the field's own rules for opening and closing a round.

Nothing waits and nothing is trained. Devices are rows of moments (`device.Part`), disturbed by the schedule that the
live engine plays as well (`links`); `aggregator.closing` and `aggregator.cohort` decide, as in the field, when a round
opens, with whom, when it is extended and when it closes. The aggregator checks one update after the other, as they
arrive.

Simplified: aggregator and broker have all the network that they need, and a device without a network whose round
closes meanwhile goes on until its own deadline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from aggregator.closing import ClosingRule, least_devices, may_open
from aggregator.cohort import choose_cohort
from hushfleet.errors import HushfleetError
from hushfleet.task import RoundSection
from simulator.clock.accounts import Accounts
from simulator.clock.agenda import Agenda
from simulator.clock.broadcast import Broadcasts
from simulator.clock.device import Device, Part
from simulator.clock.device_time import Costs
from simulator.clock.links import LinkOptions, Links
from simulator.clock.outcome import Arrival, RoundOutcome
from simulator.clock.sizes import Sizes
from simulator.schedule import Playback, Schedule

_PATIENCE_S = 90 * 86400.0
_MOST_EXTENSIONS = 1000
_HAIR_S = 1e-6  # after a moment that is a sum, so that rounding does not put it before it


class FleetClock:
    """Runs through the rounds of one fleet, once.

    :param fleet: new devices, in the fleet's order.
    :param seed: of the task: it chooses cohorts as in the field, and draws the waits before new connections.
    :param noting: whether outcomes carry the events for a log.
    """

    def __init__(
        self,
        rules: RoundSection,
        fleet: Sequence[Device],
        *,
        costs: Costs,
        sizes: Sizes,
        schedule: Schedule,
        seed: int,
        options: LinkOptions | None = None,
        noting: bool = False,
    ) -> None:
        self.fleet = fleet
        self._rules, self._costs, self._sizes, self._seed = rules, costs, sizes, seed
        self._by_name = {device.name: device for device in fleet}
        self._agenda = Agenda(noting=noting)
        self._accounts = Accounts(sizes, self._agenda)
        self._playback = Playback(schedule)
        self._links = Links(fleet, self._agenda, self, seed=seed, options=options or LinkOptions())
        self._least = least_devices(rules, devices=len(fleet))
        self._rule = ClosingRule(rules, least_ready=self._least)
        self._present: set[str] = set()
        self._version = 0  # of the global model
        self._broadcasts = Broadcasts()
        self._round = 0
        self._open = False
        self._closing = False
        self._opened_at = self._idle_since = 0.0
        self._cohort: list[str] = []
        self._arrivals: dict[str, Arrival] = {}
        self._declined: dict[str, None] = {}
        self._outcome: RoundOutcome | None = None
        self._busy_until = 0.0  # the aggregator's thread
        self._life = 0  # of the aggregator: what it was about to do in an earlier one is void
        self._went_at: float | None = None

    def rounds(self) -> Iterator[RoundOutcome]:
        """One round after the other. Raises `HushfleetError` where none opens, or closes, any more."""
        for device in self.fleet:
            if device.name not in self._playback.absent:
                self._links.start(device)
        while self._round < self._rules.rounds or self._open:
            yield self._next_outcome()
        for device in self.fleet:
            self._accounts.end(device)

    def _next_outcome(self) -> RoundOutcome:
        agenda, self._outcome = self._agenda, None
        give_up_at = agenda.now + _PATIENCE_S
        while self._outcome is None:
            at = min(self._playback.next_s, agenda.next_s)
            if at > give_up_at or self._rule.extensions > _MOST_EXTENSIONS:
                raise HushfleetError(self._stuck())
            if self._playback.next_s <= at:
                agenda.now = max(agenda.now, at)
                for action in self._playback.due(agenda.now):
                    self._links.act(action)
            else:
                agenda.advance()
        return self._outcome

    def _stuck(self) -> str:
        if not self._open:
            return (
                f"round {self._round + 1} never opens: {len(self._present)} devices are present, and {self._least} "
                "are needed; set round.min_devices to what can be there at once"
            )
        return (
            f"round {self._round} never closes: after {self._rule.extensions + 1} deadlines {self._rule.accepted} "
            f"updates of {len(self._cohort)} devices have come, and round.min_updates = {self._rules.min_updates}"
        )

    # a round

    def _open_round(self) -> None:
        """Opens the next round if enough devices are there."""
        now = self._agenda.now
        if self._open or self._round >= self._rules.rounds or not self._links.server_linked:
            return
        if not may_open(
            self._rules,
            len(self._present),
            least=self._least,
            closed_rounds=self._round,
            waited_s=now - self._idle_since,
        ):
            return
        self._round += 1
        self._open, self._opened_at = True, now
        self._cohort = choose_cohort(self._present, size=self._rules.cohort_size, seed=self._seed, round=self._round)
        self._arrivals, self._declined = {}, {}
        self._begin_waiting()
        self._agenda.note(now, "round_open", round=self._round, cohort=self._cohort)
        plan_bytes = self._accounts.announced(len(self._cohort))
        begin = []
        for name in self._cohort:
            device = self._by_name[name]
            device.spent.chosen += 1
            if device.linked:
                times = device.times
                heard_at = now + times.latency_s + plan_bytes * times.down_s_per_byte
                begin.append((max(heard_at, device.free_at, device.task_at) + times.latency_s, name, heard_at))
        for _, name, heard_at in sorted(begin):  # in the order of their wants, which may share a broadcast
            self._begin_part(self._by_name[name], heard_at)
        self._playback.round_opened(self._round, now)

    def _begin_waiting(self) -> None:
        self._rule.begin(self._cohort, now=self._agenda.now)
        self._agenda.at(self._rule.deadline, self._check_close, self._round)

    def _begin_part(self, device: Device, heard_at: float) -> None:
        """A linked device of the cohort hears of the open round."""
        began_at = max(heard_at, device.free_at, device.task_at)
        if not device.times.enough_memory:
            says_at = began_at + device.times.latency_s
            reason = "the task needs more memory than this device gives"
            self._agenda.at(says_at, self._decline, device, self._round, "memory", reason)
            return
        part = device.lay_out(
            round=self._round,
            began_at=began_at,
            deadline_at=max(heard_at, device.free_at) + self._rule.announced_deadline_s,
            sizes=self._sizes,
            broadcasts=None if device.held == self._version else self._broadcasts,
        )
        self._agenda.at(part.arrive_at, self._arrive, device, device.number)

    def _arrive(self, device: Device, number: int) -> None:
        """The last byte of an update is at the aggregator, which takes it in its turn."""
        if device.number != number or not self._open or self._closing or not self._links.server_linked:
            return
        self._busy_until = max(self._busy_until, self._agenda.now) + self._costs.accept_s
        self._agenda.at(self._busy_until, self._accept, device, self._round, self._life)

    def _accept(self, device: Device, round: int, life: int) -> None:
        part = device.part
        if life != self._life or round != self._round or not self._open or self._closing or part is None:
            return
        now = self._agenda.now
        self._rule.accept(device.name)
        self._arrivals[device.name] = Arrival(device.name, now, part.update_bytes)
        self._end_part(device, part, now)
        self._charge(device)
        device.in_sync, device.free_at = True, now + device.times.latency_s
        device.spent.used += 1
        self._accounts.acknowledged(device)
        self._agenda.note(now, "update", round=round, device=device.name)
        self._check_close(round)

    def _decline(self, device: Device, round: int, code: str, reason: str) -> None:
        if round != self._round or not self._open or not device.linked or not self._rule.expects(device.name):
            return
        self._rule.answer(device.name)
        self._declined[device.name] = None
        self._agenda.note(self._agenda.now, "decline", round=round, device=device.name, code=code, reason=reason)
        self._check_close(round)

    def _check_close(self, round: int) -> None:
        if round != self._round or not self._open or self._closing or not self._links.server_up:
            return
        now = self._agenda.now
        decision = self._rule.decide(now, ready=len(self._present))
        if decision == "close":
            self._closing = True
            # at once: updates that have come and were not looked at yet are late
            self._busy_until = now + self._costs.close_s
            self._agenda.at(self._busy_until, self._close_round, self._life)
        elif decision == "extend":
            self._agenda.at(self._rule.deadline, self._check_close, round)
            self._extend()

    def _extend(self) -> None:
        """Who still trains gives up at its own deadline and begins anew; who has not begun has more time."""
        now = self._agenda.now
        self._agenda.note(now, "round_extended", round=self._round, accepted=self._rule.accepted)
        plan_bytes = self._accounts.announced(len(self._cohort))
        for name in self._cohort:
            device, part = self._by_name[name], self._by_name[name].part
            if part is None or not device.linked or not self._rule.expects(name):
                continue
            times = device.times
            heard_at = now + times.latency_s + plan_bytes * times.down_s_per_byte
            if heard_at < part.train_at:
                part.deadline_at = heard_at + self._rule.announced_deadline_s
            elif part.last_at > part.deadline_at:
                stops_at = times.boundary(part.train_at, part.deadline_at)
                self._agenda.at(stops_at + times.latency_s, self._begin_anew, device, device.number, stops_at)

    def _begin_anew(self, device: Device, number: int, stopped_at: float) -> None:
        part = device.part
        if part is None or device.number != number or not self._open or not device.linked:
            return
        self._end_part(device, part, stopped_at)
        device.free_at = stopped_at
        self._decline(device, self._round, "busy", "the round's deadline passed before training had ended")
        if not self._closing:
            self._begin_part(device, stopped_at)

    def _close_round(self, life: int) -> None:
        if life != self._life:
            return
        agenda = self._agenda
        used = self._rule.accepted >= self._rules.min_updates
        late, given_up, lost = [], [], []
        for name in self._cohort:
            device = self._by_name[name]
            if name in self._arrivals:
                if not used:
                    device.spent.unused[len(self._cohort)] += 1
                continue
            part = device.part
            if part is not None and self._commits_late(device, part):
                late.append(name)
                device.spent.late += 1
                device.spent.unused[len(self._cohort)] += 1
            elif name in self._declined:
                device.spent.declined += 1
            elif part is None:
                lost.append(name)
                device.spent.lost += 1
            else:
                given_up.append(name)
                device.spent.given_up += 1
        self._open = self._closing = False
        if used:
            self._version += 1
            self._broadcasts = Broadcasts()
        self._idle_since = agenda.now
        self._outcome = RoundOutcome(
            round=self._round,
            opened_s=self._opened_at,
            closed_s=agenda.now,
            cohort=tuple(self._cohort),
            arrivals=tuple(self._arrivals.values()),
            late=tuple(late),
            given_up=tuple(given_up),
            declined=tuple(name for name in self._declined if name not in self._arrivals and name not in late),
            lost=tuple(lost),
            extensions=self._rule.extensions,
            used=used,
            notes=tuple(agenda.notes_until(agenda.now)),
        )
        self._open_round()
        if not self._open:
            self._accounts.announced(0)
            agenda.at(agenda.now + self._rules.deadline_s + _HAIR_S, self._open_round)

    def _commits_late(self, device: Device, part: Part) -> bool:
        """Ends a part whose round is over; True if its update was, or still is, committed."""
        ending = device.ending(part, self._agenda.now)
        device.free_at = ending.free_at
        self._end_part(device, part, ending.computed_until, sent_until=ending.sent_until)
        if ending.committed:
            self._charge(device)
        return ending.committed

    def _end_part(self, device: Device, part: Part, until: float, *, sent_until: float | None = None) -> None:
        self._accounts.part_ended(
            device,
            part,
            computed_until=until,
            sent_until=until if sent_until is None else sent_until,
            broadcasts=self._broadcasts,
        )
        if until >= part.train_at:
            device.held = self._version
        device.part = None
        device.number += 1

    def _charge(self, device: Device) -> None:
        """The device has committed its update of this round."""
        if device.committed_round != self._round:
            device.committed_round = self._round
            device.participations += 1
            device.in_sync = False
            device.spent.charged[len(self._cohort)] += 1

    # power and network, told by `Links`

    def came(self, device: Device, *, linked_at: float) -> None:
        self._accounts.linked(device, len(self._cohort) if self._open else 0)
        if device.fresh:
            device.fresh = False
            device.free_at, device.task_at = linked_at, linked_at + device.times.load_s
            if not device.has_task:
                device.has_task = True
                device.task_at += device.times.fetch_s
                self._accounts.task_fetched(device)
        if self._links.server_linked:
            self._hear_of(device, linked_at)
            self._open_round()

    def broke(self, device: Device, *, power: bool) -> None:
        self._accounts.unlinked(device)
        part, now = device.part, self._agenda.now
        if part is None:
            return
        device.number += 1
        if not power:
            part.cut_at = now
        elif now >= part.commit_at:
            self._accounts.sent_in_vain(device, part, now if part.cut_at is None else part.cut_at)
            self._charge(device)
        else:
            self._end_part(device, part, now)

    def missed(self, device: Device, state: Literal["lost", "sleeping"]) -> None:
        self._present.discard(device.name)
        self._lose(device)
        self._accounts.note_presence(device, state)

    def server_went(self) -> None:
        self._life += 1
        self._closing = False
        self._went_at = self._agenda.now
        self._present.clear()

    def server_came(self) -> None:
        now, went_at, self._went_at = self._agenda.now, self._went_at, None
        if went_at is None:
            self._agenda.note(now, "link", state="up")
        else:
            self._agenda.note(now, "run")
            self._busy_until = now
            self._rule = ClosingRule(self._rules, least_ready=self._least)
            if self._open:
                self._begin_waiting()
                for name in self._arrivals:
                    self._rule.accept(name)
                self._rule.answer(*self._declined)
        for device in self.fleet:
            if device.linked:
                self._hear_of(device, now, went_at=went_at)
            elif went_at is not None:
                self._lose(device)
        if self._open:
            self._check_close(self._round)
        else:
            self._open_round()

    def _lose(self, device: Device) -> None:
        self._rule.lost(device.name, now=self._agenda.now)
        if self._rule.expects(device.name):
            self._agenda.at(self._agenda.now + self._rule.grace_s + _HAIR_S, self._check_close, self._round)

    def _hear_of(self, device: Device, linked_at: float, *, went_at: float | None = None) -> None:
        """A linked device and the aggregator find each other, for the first time or again.

        :param went_at: when the aggregator was killed, if that is why; transfers that were open then begin anew.
        """
        if device.name not in self._present:
            self._present.add(device.name)
            self._accounts.note_presence(device, "ready")
        self._rule.back(device.name)
        if not self._open or self._closing or not self._rule.expects(device.name):
            return
        part, times = device.part, device.times
        if part is None:
            plan_s = self._sizes.plan_wire_bytes(len(self._cohort)) * times.down_s_per_byte
            self._begin_part(device, linked_at + plan_s)
            return
        if device.committed_round == self._round:  # in an earlier life; the plan says that it is still wanted
            device.send_again(part, device.task_at)
        elif part.cut_at is not None:
            device.resume(part, linked_at, self._broadcasts)
        elif went_at is not None and part.commit_at <= linked_at:
            self._accounts.sent_in_vain(device, part, linked_at)
            device.send_again(part, linked_at + 2 * times.latency_s)
        elif went_at is not None and part.wanted_at is not None and went_at < device.holds_model_at(part):
            pass_at = device.holds_model_at(part) - times.model_s - times.latency_s
            if pass_at > went_at:
                part.delay(self._broadcasts.want(linked_at + times.latency_s) - pass_at)
        device.number += 1
        self._agenda.at(part.arrive_at, self._arrive, device, device.number)
