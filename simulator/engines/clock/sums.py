"""Simulates secure sums under the virtual clock: draws devices and costs committee answers by the field's own rules."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np

from hushfleet.aggregator.config.round_section import RoundSection
from hushfleet.aggregator.publish.prepare import PreparedTask
from hushfleet.aggregator.rounds.policy import least_devices
from hushfleet.config.spec import BlobRef, SecureSpec
from hushfleet.errors import BadInput
from hushfleet.secure.prime_field import to_bytes
from hushfleet.secure.roster import Roster
from hushfleet.secure.secure_round import SecureRound
from hushfleet.simulator.engines.clock.buffered import BufferedClock
from hushfleet.simulator.engines.clock.calendar import Calendar
from hushfleet.simulator.engines.clock.device import ClockDevice
from hushfleet.simulator.engines.clock.engine import FleetClock
from hushfleet.simulator.engines.clock.events import OpenRound
from hushfleet.simulator.world.outcomes import STARTS
from hushfleet.simulator.world.sizes import Sizes
from hushfleet.simulator.world.times import Costs
from hushfleet.wire.format.identity import SIGNATURE_BYTES
from hushfleet.wire.format.messages import Ack, Offer, RoundPlan, SecurePlan

_ANSWER_HEADER_BYTES = 160


class Drawn(NamedTuple):
    """The devices that take part in a round.

    :param members: committee members; `least` of their answers open the sum.
    """

    cohort: list[str]
    members: list[str]
    least: int
    answer_bytes: int


class Draws:
    """The draws of one fleet.

    :param roster: roster of the fleet; None creates an artificial one, for a forecast.
    """

    def __init__(
        self, prepared: PreparedTask, names: Sequence[str], rules: RoundSection, roster: Roster | None = None
    ) -> None:
        secure = prepared.spec.privacy.secure
        if secure is None:
            raise BadInput(f"the task {prepared.spec.task} has no secure sums")
        self._spec: SecureSpec = secure
        self._task, self._rounds = prepared.spec.task, prepared.spec.rounds
        self._roster = roster or Roster.of({name: hashlib.sha256(name.encode()).digest() for name in names})
        wanted = rules.cohort_size
        ref = BlobRef.of(self._roster.to_bytes())
        self._plan = SecurePlan(ref, min(1.0, wanted / len(names)) if wanted else 1.0)
        self._size = prepared.spec.model.layout.size - int(prepared.method.init_state().public.mask.sum())

    @property
    def rate(self) -> float:
        return self._plan.rate

    def of(self, round: int) -> Drawn | None:
        """Returns the draw of a round; None if too few devices are drawn for a sum."""
        plan = RoundPlan(
            task=self._task, round=round, rounds=max(round, self._rounds), phase="open", global_digest=bytes(32),
            global_bytes=1, cohort={}, noise_split=1, deadline_s=0.0, secure=self._plan,
        )  # fmt: skip
        try:
            drawn = SecureRound(self._spec, plan, self._roster, size=self._size)
        except BadInput:
            return None
        values = len(to_bytes(np.zeros(drawn.width, np.uint32), self._spec.bits))
        return Drawn(
            cohort=drawn.devices,
            members=drawn.members,
            least=drawn.rule.threshold,
            answer_bytes=_ANSWER_HEADER_BYTES + values + SIGNATURE_BYTES,
        )


class SummedClock(FleetClock):
    """A fleet whose rounds have secure sums: a committee answers after the round has stopped waiting for updates.

    Simplified: a device that still trains when the set of devices is fixed continues until the round closes.

    :param draws: the draws of the fleet.

    The other arguments are the same as for `FleetClock`.
    """

    def __init__(
        self,
        rules: RoundSection,
        fleet: Sequence[ClockDevice],
        *,
        draws: Draws,
        costs: Costs,
        sizes: Sizes,
        **options: Any,
    ) -> None:
        super().__init__(rules, fleet, costs=costs, sizes=sizes, **options)
        self._draws, self._rate = draws, draws.rate
        self._least = least_devices(rules, devices=len(fleet), drawn=True)
        self._drawn: Drawn | None = None
        self._answered: dict[str, None] = {}
        self._tried = 0  # number of answers that did not open the sum
        self._settled = False

    def _choose(self, round: int) -> list[str]:
        self._drawn, self._answered, self._tried, self._settled = self._draws.of(round), {}, 0, False
        return [] if self._drawn is None else self._drawn.cohort

    def _told_of(self, cohort: list[str]) -> dict[str, Any]:
        return {"cohort_size": len(cohort)}

    def _named(self, current: OpenRound | None) -> int:
        """Returns 0 until the set of devices is fixed; after that, the plan has one bit per device."""
        return -(-current.size // 8) if current is not None and self._settled else 0

    def _begin_waiting(self, current: OpenRound) -> None:
        super()._begin_waiting(current)
        if self._drawn is None:  # too few were drawn
            self._rule.close_by(self._queue.now)
            self._queue.at(self._queue.now, self._check_close, current)

    def _wait_again(self, current: OpenRound) -> None:
        if self._settled:
            self._begin_answers(current)
        else:
            super()._wait_again(current)

    def _collects(self, current: OpenRound) -> bool:
        return super()._collects(current) and not self._settled

    def _limit(self, current: OpenRound) -> None:
        """Does not limit a committee's answers to the window, because they are no training."""
        if self._settled:
            self._queue.at(self._rule.deadline, self._check_close, current)
        else:
            super()._limit(current)

    def _is_over(self, current: OpenRound) -> bool:
        if self._settled:
            return self._is_used(current) or not self._may_open_later(current)
        if not super()._is_used(current):
            return True
        self._settled = True
        self._queue.log("unmask", round=current.number, accepted=len(current.arrivals))
        plan_bytes = self._accounts.announce(self._named(current))
        self._begin_answers(current)
        for member in self._members:
            if member.linked:
                self._answer(member, current, self._queue.now + member.times.heard_after(plan_bytes))
        return False

    def _is_used(self, current: OpenRound) -> bool:
        enough = self._drawn is not None and len(self._answered) >= self._drawn.least
        return super()._is_used(current) and enough

    def _may_open_later(self, current: OpenRound) -> bool:
        """Returns whether another member may still answer, such as a lost one that returns (`SecureSum.closing`)."""
        if not self._answered:
            return False
        if len(self._answered) != self._tried:
            self._tried = len(self._answered)
        elif self._queue.now < self._rule.deadline:
            return True
        if not self._rule.wait_longer(self._queue.now):
            return False
        self._limit(current)
        self._extend(current)
        return True

    def _hear_of(self, device: ClockDevice, linked_at: float, *, went_at: float | None = None) -> None:
        super()._hear_of(device, linked_at, went_at=went_at)
        current = self._open
        if current is not None and self._settled and self._rule.expects(device.name):
            self._answer(device, current, linked_at)

    @property
    def _members(self) -> list[ClockDevice]:
        return [] if self._drawn is None else [self._by_name[name] for name in self._drawn.members]

    def _begin_answers(self, current: OpenRound) -> None:
        least = 0 if self._drawn is None else self._drawn.least
        members = [] if self._drawn is None else self._drawn.members
        self._rule.begin_answers(members, least=least, now=self._queue.now)
        for member in self._answered:
            self._rule.accept(member)
        self._queue.at(self._rule.deadline, self._check_close, current)

    def _answer(self, member: ClockDevice, current: OpenRound, heard_at: float) -> None:
        """Lets a member add up the masks that it shares with each device of the sum, and send the result."""
        times, size = member.times, self._drawn.answer_bytes if self._drawn else 0
        sent_s = self._sizes.blob_wire_bytes(size, down=False) * times.up_s_per_byte
        ready_at = max(heard_at, member.free_at) + len(current.arrivals) * times.pair_s
        self._queue.at(ready_at + sent_s + times.latency_s, self._take_answer, member, current, size)

    def _take_answer(self, member: ClockDevice, current: OpenRound, size: int) -> None:
        if not (self._takes(current) and self._links.server_linked and member.linked):
            return
        if not self._rule.expects(member.name):
            return
        self._rule.accept(member.name)
        self._answered[member.name] = None
        member.spent.up_bytes += self._sizes.packet[Offer] + self._sizes.blob_wire_bytes(size, down=False)
        member.spent.down_bytes += self._sizes.packet[Ack]
        self._queue.log("answer", round=current.number, device=member.name, bytes=size, code="accepted")
        if self._drawn is not None and len(self._answered) >= self._drawn.least:
            self._rule.close_by(self._queue.now + self._rule.answers_grace_s)
            self._queue.at(self._rule.deadline, self._check_close, current)
        self._check_close(current)


def clock_of(
    prepared: PreparedTask,
    rules: RoundSection,
    fleet: Sequence[ClockDevice],
    *,
    roster: Roster | None = None,
    starts: datetime = STARTS,
    **options: Any,
) -> FleetClock:
    """Returns the clock of a task's rounds under these rules and the task's schedule.

    :param starts: date and time at which the run starts.
    :param roster: roster of secure sums; None creates an artificial one.

    Raises `BadInput` if the schedule has no window.
    """
    options["calendar"] = calendar = Calendar(prepared.task.schedule, starts=starts)
    if calendar.is_over(0.0):
        raise BadInput(
            "no round ever opens: the schedule's first window begins after its last day (schedule.until, or the end of "
            "--days)"
        )
    if prepared.spec.privacy.secure is None:
        return (BufferedClock if rules.buffered else FleetClock)(rules, fleet, **options)
    return SummedClock(rules, fleet, draws=Draws(prepared, [each.name for each in fleet], rules, roster), **options)
