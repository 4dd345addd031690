"""Decides who can take part in the next round, and says why too few can."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

from hushfleet.aggregator.results.fleet_state import Shortfall
from hushfleet.aggregator.rounds.budgets import Budgets
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.rounds.policy import FOR_GOOD, may_open
from hushfleet.aggregator.rounds.rhythm import Rhythm
from hushfleet.aggregator.rounds.run_log import RunLog
from hushfleet.aggregator.rounds.shortfall import shortfall_text
from hushfleet.aggregator.rounds.thresholds import RunningThresholds, Thresholds
from hushfleet.aggregator.storage.enrolment import Enrolment
from hushfleet.aggregator.storage.list_file import ListFile
from hushfleet.durations import Period
from hushfleet.secure.membership_list import MembershipList

TELLS_AFTER_S = 5.0
"""A round that waits for so long is told; devices that are just connecting are no news."""
TELLS_EVERY_S = 60.0

UNKNOWN_S = 86400.0
"""A board without budget counts again after this time, if nothing is known of its period."""

log = logging.getLogger("hushfleet.aggregator")


class _Decline(NamedTuple):
    until: float
    of_period: bool  # it holds until the present period ends
    session: int


class Declines:
    """The declines that also hold in the next round. Each speaks for its device alone.

    In a fleet a decline about the budget holds until the present period ends, or for `UNKNOWN_S`; every other one for a
    deadline. It ends earlier if the device starts anew, because its owner may have changed something, and if an update
    of it is accepted. At the beginning of a period a board's clock may be late, so the decline holds for less.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._known: dict[str, _Decline] = {}

    def note(self, device: str, code: str, *, at: float, period: Period | None, of_fleet: bool, session: int) -> None:
        """:param at: unix seconds.
        :param period: of the limits of the fleet's cards; None if they have none, or are not known.
        :param session: the device's session at the decline."""
        if code not in FOR_GOOD:
            return
        until, of_period = at + self._deadline_s, False
        if code == "budget" and of_fleet and period is None:
            until = at + UNKNOWN_S
        elif code == "budget" and period is not None:
            in_time = period.start + min(UNKNOWN_S, (period.stop - period.start) / 10)
            of_period = at >= in_time
            until = period.stop if of_period else in_time
        self._known[device] = _Decline(until, of_period, session)

    def drop(self, device: str) -> None:
        self._known.pop(device, None)

    def hold(self, now: float, session: Callable[[str], int]) -> dict[str, float]:
        """Returns the devices whose declines hold at `now`, and when their periods end; 0 for other reasons.

        :param session: returns the present session of a device.
        """
        return {
            device: known.until if known.of_period else 0.0
            for device, known in self._known.items()
            if now < known.until and session(device) == known.session
        }


@dataclass(frozen=True)
class Eligible:
    """Who can take part in the next round. Every device that may take part at all is in exactly one of these sets.

    :param spent: cannot pay until this time, unix seconds; infinity: never again within the limits of its card.
    :param declined: has declined for a reason that still holds.
    :param unlisted: not in the valid membership list of secure aggregation.
    :param absent: can take part when it comes.
    """

    able: frozenset[str]
    spent: Mapping[str, float]
    declined: frozenset[str]
    unlisted: frozenset[str]
    absent: frozenset[str]

    def possible(self, at: float) -> int:
        """Returns how many could take part at this time, unix seconds, if all that are absent came."""
        return len(self.able) + len(self.absent) + sum(frees <= at for frees in self.spent.values())

    def waiting(self, round: int, needed: Thresholds, *, zone: str) -> Shortfall:
        """Returns what the round waits for, as counts."""
        ends = [at for at in self.spent.values() if math.isfinite(at)]
        return Shortfall(
            round,
            able=len(self.able),
            min_devices=needed.devices,
            min_updates=needed.updates,
            least_updates=needed.least,
            absent=len(self.absent),
            unlisted=len(self.unlisted),
            declined=len(self.declined),
            spent=len(ends),
            frees=min(ends, default=None),
            spent_for_good=len(self.spent) - len(ends),
            timezone=zone,
        )


def participants(
    accepted: Iterable[str],
    *,
    present: Collection[str],
    listed: Collection[str] | None,
    spent: Mapping[str, float],
    declined: Mapping[str, float],
) -> Eligible:
    """Sorts the devices that may take part; what keeps a device out for longest is named first.

    :param listed: devices of the valid membership list with their present keys; None: no membership list is needed.
    :param spent: as `Budgets.spent`.
    :param declined: as `Declines.hold`.
    """
    devices = set(accepted)
    until = {device: max(spent.get(device, 0.0), declined.get(device, 0.0)) for device in devices}
    poor = {device: at for device, at in until.items() if at}
    left = devices - poor.keys()
    refusing = left & declined.keys()
    left -= refusing
    unlisted = set[str]() if listed is None else left.difference(listed)
    left -= unlisted
    able = left.intersection(present)
    return Eligible(frozenset(able), poor, frozenset(refusing), frozenset(unlisted), frozenset(left - able))


class NextRound:
    """Who can take part in the next round of an engine, whether they are enough, and what the round waits for.

    :param present: names of the present devices; the caller keeps it up to date.
    :param membership_list: as for the `Coordinator`.
    :param budgets: which boards of a fleet can pay; None if their cards have no limits.
    :param of_fleet: whether charges of boards are noted.
    :param thresholds: with how many devices rounds open and close.
    """

    def __init__(
        self,
        engine: RoundEngine,
        run_log: RunLog,
        *,
        enrolment: Enrolment,
        present: Collection[str],
        membership_list: ListFile[MembershipList] | None,
        budgets: Budgets | None,
        of_fleet: bool,
        thresholds: RunningThresholds,
        rhythm: Rhythm,
        now: float,
    ) -> None:
        self._engine, self._log, self._enrolment, self.present = engine, run_log, enrolment, present
        self._membership_list, self._budgets, self._of_fleet = membership_list, budgets, of_fleet
        self._running, self._rhythm = thresholds, rhythm
        self._declines = Declines(engine.prepared.task.round.deadline_s)
        self._listed: tuple[MembershipList | None, dict[str, bytes]] = None, {}
        self._waits_since = now  # since when it waits only for devices
        self._told: dict[str, object] = {}
        self._warned_of: tuple[object, ...] = ()
        self._tell_at, self._told_needed = 0.0, self.thresholds
        engine.responses.require(self._told_needed.updates, at_once=True)
        if (row := engine.store.last_round()) is not None:  # after a restart
            for _, device, code, _ in engine.store.declines(row.round):
                self.declined(device, code, at=row.closed_at or row.opened_at)

    @property
    def thresholds(self) -> Thresholds:
        """The present numbers of devices with which rounds open and close."""
        boards, blocked = self._enrolment.count, self._enrolment.blocked
        return self._running.now(boards=boards, blocked=blocked, begun=self._engine.closed_rounds > 0)

    @property
    def candidates(self) -> Collection[str]:
        """The devices among which a cohort is chosen: of a whole fleet, a board whose owner has allowed more than the
        card says also takes part."""
        return self._participants().able if self._engine.prepared.task.round.cohort_size else self.present

    def begin_wait(self, now: float) -> None:
        """Notes that from now on the round waits only for devices."""
        self._waits_since = now

    def opened(self) -> None:
        """Notes that the round has opened."""
        self._told = {}

    def has_enough(self, now: float, *, left_s: float) -> bool:
        """Returns whether enough devices can take part; tells what is missing.

        :param left_s: seconds until the window ends.
        """
        needed, found = self.thresholds, self._participants()
        waited_s = now - self._waits_since
        if self._enough(needed, len(found.able), waited_s=math.inf if waited_s >= left_s / 3 else waited_s):
            return True  # a quarter of the window is over: absent devices join the next round
        if waited_s >= TELLS_AFTER_S:
            self._tell(now, needed, found)
        return False

    def tell_if_impossible(self, now: float, *, opens: float) -> None:
        """Tells what the next round will wait for, if too few can take part even if all come.

        :param opens: when it may open, unix seconds.
        """
        if now >= self._tell_at:
            needed, found = self.thresholds, self._participants()
            if found.possible(opens) < needed.needed:
                self._tell(now, needed, found)

    def accepted(self, device: str) -> None:
        """Forgets a decline, because the device has sent an update."""
        self._declines.drop(device)

    def declined(self, device: str, code: str, *, at: float) -> None:
        """Remembers a decline that may also hold in the next round.

        :param at: unix seconds.
        """
        if device in self._engine.store.new_cards(self._engine.announcement.round):
            return  # it declines what an earlier card may have done
        period = None if self._budgets is None else self._budgets.period(at)
        session = self._enrolment.session(device)
        self._declines.note(device, code, at=at, period=period, of_fleet=self._of_fleet, session=session)

    def _enough(self, needed: Thresholds, able: int, *, waited_s: float) -> bool:
        engine = self._engine
        return may_open(
            needed.applied(engine.prepared.task.round),
            able,
            least=needed.devices,
            closed_rounds=engine.closed_rounds,
            waited_s=waited_s,
            rate=engine.drawn_at or 1.0,
        )

    def _participants(self) -> Eligible:
        enrolment = self._enrolment
        return participants(
            enrolment.accepted,
            present=self.present,
            listed=self._listed_devices(),
            spent={} if self._budgets is None else self._budgets.spent(self._engine.next_charge),
            declined=self._declines.hold(self._rhythm.wall(), enrolment.session),
        )

    def _listed_devices(self) -> Collection[str] | None:
        """Returns the devices of the signed membership list whose keys in it are their present ones; None if none is
        needed."""
        if self._membership_list is None or self._engine.spec.privacy.secure is None:
            return None
        membership_list = self._membership_list.current()
        if membership_list is None:  # the error of the opening says so
            return None
        if membership_list is not self._listed[0]:
            self._listed = (
                membership_list,
                {name: membership_list.key(index) for index, name in enumerate(membership_list.devices)},
            )
        return {name for name, key in self._listed[1].items() if self._enrolment.key(name) == key}

    def _tell(self, now: float, needed: Thresholds, found: Eligible) -> None:
        """Tells what the next round waits for: the log once for each kind of reasons, the run's events each minute."""
        if now < self._tell_at and needed == self._told_needed:
            return
        self._told_needed = needed
        self._tell_at = now + TELLS_EVERY_S
        waiting = found.waiting(self._engine.closed_rounds + 1, needed, zone=self._rhythm.zone)
        event = asdict(waiting)
        if event == self._told:
            return
        self._told = event
        kinds = (waiting.round, *(bool(event[name]) for name in ("spent", "spent_for_good", "declined", "unlisted")))
        if kinds != self._warned_of:
            self._warned_of = kinds
            log.warning("%s", shortfall_text(waiting, now=self._rhythm.wall()))
        self._log.note("waits", **event)
