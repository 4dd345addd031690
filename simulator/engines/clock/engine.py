"""A fleet's rounds on a virtual clock: rows of moments, and the field's own rules for opening and closing a round.

Nothing waits and nothing is trained. Devices are rows of moments (`device.Part`), disturbed by the schedule that the
live engine plays as well (`links`); `policy` and `cohort` decide, as in the field, when a round
opens, with whom, when it is extended and when it closes. The aggregator checks one update after the other, as they
arrive.

Simplified: aggregator and broker have all the network that they need, and a device without a network whose round
closes meanwhile goes on until its own deadline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from hushfleet.aggregator.config.task import RoundSection
from hushfleet.aggregator.rounds.cohort import choose_cohort
from hushfleet.aggregator.rounds.policy import ClosingRule, least_devices, may_open
from hushfleet.errors import HushfleetError
from hushfleet.simulator.engines.clock.accounts import Accounts
from hushfleet.simulator.engines.clock.agenda import Agenda
from hushfleet.simulator.engines.clock.broadcast import Broadcasts
from hushfleet.simulator.engines.clock.device import Device, Part
from hushfleet.simulator.engines.clock.device_time import Costs
from hushfleet.simulator.engines.clock.links import LinkOptions, Links
from hushfleet.simulator.engines.clock.outcome import Arrival, OpenRound, RoundOutcome
from hushfleet.simulator.engines.clock.sizes import Download, Sizes
from hushfleet.simulator.schedule import Playback, Schedule

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
        self._broadcasts: dict[int, Broadcasts] = {}  # of so many differences, or (0) of the whole model
        self._closed_rounds = 0
        self._open: OpenRound | None = None
        self._idle_since = 0.0
        self._outcome: RoundOutcome | None = None
        self._busy_until = 0.0  # the aggregator's thread
        self._life = 0  # of the aggregator: what it was about to do in an earlier one is void
        self._went_at: float | None = None

    def rounds(self) -> Iterator[RoundOutcome]:
        """One round after the other. Raises `HushfleetError` where none opens, or closes, any more."""
        for device in self.fleet:
            if device.name not in self._playback.absent:
                self._links.start(device)
        while self._closed_rounds < self._rules.rounds:
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
        if self._open is None:
            return (
                f"round {self._closed_rounds + 1} never opens: {len(self._present)} devices are present, and "
                f"{self._least} are needed; set round.min_devices to what can be there at once"
            )
        return (
            f"round {self._open.number} never closes: after {self._rule.extensions + 1} deadlines "
            f"{self._rule.accepted} updates of {self._open.size} devices have come, and round.min_updates = "
            f"{self._rules.min_updates}"
        )

    # a round

    def _open_round(self) -> None:
        """Opens the next round if enough devices are there."""
        now, rules, closed = self._agenda.now, self._rules, self._closed_rounds
        if self._open is not None or closed >= rules.rounds or not self._links.server_linked:
            return
        present, waited_s = len(self._present), now - self._idle_since
        if not may_open(rules, present, least=self._least, closed_rounds=closed, waited_s=waited_s):
            return
        cohort = choose_cohort(self._present, size=rules.cohort_size, seed=self._seed, round=closed + 1)
        self._open = OpenRound(closed + 1, now, cohort)
        self._begin_waiting(self._open)
        self._agenda.note(now, "round_open", round=closed + 1, cohort=cohort)
        plan_bytes = self._accounts.announced(len(cohort))
        begin = []
        for name in cohort:
            device = self._by_name[name]
            device.spent.chosen += 1
            if device.linked:
                heard_at = now + device.times.heard_after(plan_bytes)
                begin.append((max(heard_at, device.free_at, device.task_at) + device.times.latency_s, name, heard_at))
        for _, name, heard_at in sorted(begin):  # in the order of their wants, which may share a broadcast
            self._begin_part(self._by_name[name], self._open, heard_at)
        self._playback.round_opened(closed + 1, now)

    def _begin_waiting(self, current: OpenRound) -> None:
        self._rule.begin(current.cohort, now=self._agenda.now)
        self._agenda.at(self._rule.deadline, self._check_close, current)

    def _takes(self, current: OpenRound) -> bool:
        """Whether this round is open, and not about to be closed."""
        return self._open is current and not current.closing

    def _begin_part(self, device: Device, current: OpenRound, heard_at: float) -> None:
        """A linked device of the cohort hears of the open round."""
        began_at = max(heard_at, device.free_at, device.task_at)
        if not device.times.enough_memory:
            says_at = began_at + device.times.latency_s
            reason = "the task needs more memory than this device gives"
            self._agenda.at(says_at, self._decline, device, current, "memory", reason)
            return
        download = self._download(device)
        part = device.lay_out(
            round=current.number,
            began_at=began_at,
            deadline_at=max(heard_at, device.free_at) + self._rule.announced_deadline_s,
            sizes=self._sizes,
            download=download,
            broadcasts=download and self._broadcasts.setdefault(download.differences, Broadcasts()),
        )
        self._agenda.at(part.arrive_at, self._arrive, device, device.number, current)

    def _download(self, device: Device) -> Download | None:
        """What brings the global model to the device; None if it holds it."""
        if device.held == self._version:
            return None
        return self._sizes.download(None if device.held < 0 else self._version - device.held)

    def _arrive(self, device: Device, number: int, current: OpenRound) -> None:
        """The last byte of an update is at the aggregator, which takes it in its turn."""
        if device.number == number and self._takes(current) and self._links.server_linked:
            self._busy_until = max(self._busy_until, self._agenda.now) + self._costs.accept_s
            self._agenda.at(self._busy_until, self._accept, device, current, self._life)

    def _accept(self, device: Device, current: OpenRound, life: int) -> None:
        part, now = device.part, self._agenda.now
        if life != self._life or not self._takes(current) or part is None:
            return
        self._rule.accept(device.name)
        current.arrivals[device.name] = Arrival(device.name, now, part.update_bytes)
        self._end_part(device, part, now)
        self._charge(device, current)
        device.in_sync, device.free_at = True, now + device.times.latency_s
        device.spent.used += 1
        self._accounts.acknowledged(device)
        self._agenda.note(now, "update", round=current.number, device=device.name)
        self._check_close(current)

    def _decline(self, device: Device, current: OpenRound, code: str, reason: str) -> None:
        if self._open is not current or not device.linked or not self._rule.expects(device.name):
            return
        self._rule.answer(device.name)
        current.declined[device.name] = None
        fields = {"round": current.number, "device": device.name, "code": code, "reason": reason}
        self._agenda.note(self._agenda.now, "decline", **fields)
        self._check_close(current)

    def _check_close(self, current: OpenRound) -> None:
        if not self._takes(current) or not self._links.server_up:
            return
        now = self._agenda.now
        decision = self._rule.decide(now, ready=len(self._present))
        if decision == "close":
            current.closing = True
            # at once: updates that have come and were not looked at yet are late
            self._busy_until = now + self._costs.close_s
            self._agenda.at(self._busy_until, self._close_round, current, self._life)
        elif decision == "extend":
            self._agenda.at(self._rule.deadline, self._check_close, current)
            self._extend(current)

    def _extend(self, current: OpenRound) -> None:
        """Who still trains gives up at its own deadline and begins anew; who has not begun has more time."""
        now = self._agenda.now
        self._agenda.note(now, "round_extended", round=current.number, accepted=self._rule.accepted)
        plan_bytes = self._accounts.announced(current.size)
        for name in current.cohort:
            device, part = self._by_name[name], self._by_name[name].part
            if part is None or not device.linked or not self._rule.expects(name):
                continue
            times = device.times
            heard_at = now + times.heard_after(plan_bytes)
            if heard_at < part.train_at:
                part.deadline_at = heard_at + self._rule.announced_deadline_s
            elif part.last_at > part.deadline_at:
                stops_at = times.boundary(part.train_at, part.deadline_at)
                self._agenda.at(stops_at + times.latency_s, self._begin_anew, device, device.number, current, stops_at)

    def _begin_anew(self, device: Device, number: int, current: OpenRound, stopped_at: float) -> None:
        part = device.part
        if part is None or device.number != number or self._open is not current or not device.linked:
            return
        self._end_part(device, part, stopped_at)
        device.free_at = stopped_at
        self._decline(device, current, "busy", "the round's deadline passed before training had ended")
        if not current.closing:
            self._begin_part(device, current, stopped_at)

    def _close_round(self, current: OpenRound, life: int) -> None:
        if life != self._life:
            return
        now, used = self._agenda.now, self._rule.accepted >= self._rules.min_updates
        late, given_up, lost = [], [], []
        for name in current.cohort:
            device = self._by_name[name]
            part, spent = device.part, device.spent
            if name in current.arrivals:
                if not used:
                    spent.unused[current.size] += 1
            elif part is not None and self._commits_late(device, part, current):
                late.append(name)
                spent.late += 1
                spent.unused[current.size] += 1
            elif name in current.declined:
                spent.declined += 1
            elif part is None:
                lost.append(name)
                spent.lost += 1
            else:
                given_up.append(name)
                spent.given_up += 1
        self._open, self._closed_rounds, self._idle_since = None, current.number, now
        if used:
            self._version += 1
            self._broadcasts = {}
        notes, extensions = self._agenda.notes_until(now), self._rule.extensions
        self._outcome = current.closed(
            now, late=late, given_up=given_up, lost=lost, extensions=extensions, used=used, notes=notes
        )
        self._open_round()
        if self._open is None:
            self._accounts.announced(0)
            self._agenda.at(now + self._rules.deadline_s + _HAIR_S, self._open_round)

    def _commits_late(self, device: Device, part: Part, current: OpenRound) -> bool:
        """Ends a part whose round is over; True if its update was, or still is, committed."""
        ending = device.ending(part, self._agenda.now)
        device.free_at = ending.free_at
        self._end_part(device, part, ending.computed_until, sent_until=ending.sent_until)
        if ending.committed:
            self._charge(device, current)
        return ending.committed

    def _end_part(self, device: Device, part: Part, until: float, *, sent_until: float | None = None) -> None:
        self._accounts.part_ended(
            device,
            part,
            computed_until=until,
            sent_until=until if sent_until is None else sent_until,
        )
        if until >= part.train_at:
            device.held = self._version
        device.part = None
        device.number += 1

    def _charge(self, device: Device, current: OpenRound) -> None:
        """The device has committed its update of this round."""
        if device.committed_round != current.number:
            device.committed_round = current.number
            device.participations += 1
            device.in_sync = False
            device.spent.charged[current.size] += 1

    # power and network, told by `Links`

    def came(self, device: Device, *, linked_at: float) -> None:
        self._accounts.linked(device, 0 if self._open is None else self._open.size)
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
        part, now, current = device.part, self._agenda.now, self._open
        if part is None or current is None:
            return
        device.number += 1
        if not power:
            part.cut_at = now
        elif now >= part.commit_at:
            self._accounts.sent_in_vain(device, part, now if part.cut_at is None else part.cut_at)
            self._charge(device, current)
        else:
            self._end_part(device, part, now)

    def missed(self, device: Device, state: Literal["lost", "sleeping"]) -> None:
        self._present.discard(device.name)
        self._lose(device)
        self._accounts.note_presence(device, state)

    def server_went(self) -> None:
        self._life += 1
        if self._open is not None:
            self._open.closing = False
        self._went_at = self._agenda.now
        self._present.clear()

    def server_came(self) -> None:
        now, current = self._agenda.now, self._open
        went_at, self._went_at = self._went_at, None
        if went_at is None:
            self._agenda.note(now, "link", state="up")
        else:
            self._agenda.note(now, "run")
            self._busy_until = now
            self._rule = ClosingRule(self._rules, least_ready=self._least)
            if current is not None:
                self._begin_waiting(current)
                for name in current.arrivals:
                    self._rule.accept(name)
                self._rule.answer(*current.declined)
        for device in self.fleet:
            if device.linked:
                self._hear_of(device, now, went_at=went_at)
            elif went_at is not None:
                self._lose(device)
        if current is not None:
            self._check_close(current)
        else:
            self._open_round()

    def _lose(self, device: Device) -> None:
        self._rule.lost(device.name, now=self._agenda.now)
        if self._open is not None and self._rule.expects(device.name):
            self._agenda.at(self._agenda.now + self._rule.grace_s + _HAIR_S, self._check_close, self._open)

    def _hear_of(self, device: Device, linked_at: float, *, went_at: float | None = None) -> None:
        """A linked device and the aggregator find each other, for the first time or again.

        :param went_at: when the aggregator was killed, if that is why; transfers that were open then begin anew.
        """
        if device.name not in self._present:
            self._present.add(device.name)
            self._accounts.note_presence(device, "ready")
        self._rule.back(device.name)
        current, part, times = self._open, device.part, device.times
        if current is None or current.closing or not self._rule.expects(device.name):
            return
        if part is None:
            plan_s = self._sizes.plan_wire_bytes(current.size) * times.down_s_per_byte
            self._begin_part(device, current, linked_at + plan_s)
            return
        if device.committed_round == current.number:  # in an earlier life; the plan says that it is still wanted
            device.send_again(part, device.task_at)
        elif part.cut_at is not None:
            device.resume(part, linked_at)
        elif went_at is not None and part.commit_at <= linked_at:
            self._accounts.sent_in_vain(device, part, linked_at)
            device.send_again(part, linked_at + 2 * times.latency_s)
        elif went_at is not None and part.broadcasts is not None and went_at < device.holds_model_at(part):
            pass_at = device.pass_at(part)
            if pass_at > went_at:
                part.delay(part.broadcasts.want(linked_at + times.latency_s) - pass_at)
        device.number += 1
        self._agenda.at(part.arrive_at, self._arrive, device, device.number, current)
