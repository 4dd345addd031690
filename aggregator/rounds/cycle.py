"""Runs the cycle of rounds: opens each when enough devices are present, announces it, and closes it when it is over."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, replace

from hushfleet.aggregator.devices.enrolment import Enrolment
from hushfleet.aggregator.devices.list_file import ListFile
from hushfleet.aggregator.results.metrics import lost_rounds
from hushfleet.aggregator.rounds.charge_book import ChargeBook
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.rounds.next_round import Declines, Eligible, participants, shortfall_text
from hushfleet.aggregator.rounds.outbox import Outbox
from hushfleet.aggregator.rounds.policy import may_open
from hushfleet.aggregator.rounds.rhythm import Rhythm
from hushfleet.aggregator.rounds.round_events import changed_plan, finished_fields, open_fields
from hushfleet.aggregator.rounds.run_log import RunLog
from hushfleet.aggregator.rounds.thresholds import RunningThresholds, Thresholds
from hushfleet.errors import BadInput, StoreError
from hushfleet.secure.roster import Roster
from hushfleet.wire.format.messages import RoundPlan

RETRY_S = 5.0
TELLS_AFTER_S = 5.0
"""A round that waits for so long is told; devices that are just connecting are no news."""
TELLS_EVERY_S = 60.0

log = logging.getLogger("hushfleet.aggregator")


class RoundCycle:
    """Drives the engine and announces its rounds through the outbox.

    :param present: names of the present devices; the caller keeps it up to date.
    :param on_closed: receives the SHA-256 of blobs that devices no longer need, before the closed round is logged.
    :param roster: as for the `Coordinator`.
    :param charges: as for the `Coordinator`.
    :param thresholds: as for the `Coordinator`.
    :param rhythm: as for the `Coordinator`.
    :param clock: monotonic seconds.

    `finished_at` is when devices were told that the task has finished.
    """

    def __init__(
        self,
        engine: RoundEngine,
        outbox: Outbox,
        run_log: RunLog,
        *,
        enrolment: Enrolment,
        present: Collection[str],
        on_closed: Callable[[set[bytes]], None],
        roster: ListFile[Roster] | None,
        charges: ChargeBook | None,
        thresholds: RunningThresholds,
        rhythm: Rhythm,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._outbox, self._log = engine, outbox, run_log
        self._enrolment, self._present, self._on_closed = enrolment, present, on_closed
        self._roster, self._charges, self._rhythm = roster, charges, rhythm
        self._retry_close_at = self._retry_open_at = 0.0
        self._announce_at, self._told_may_train = math.inf, True
        self._open_error = ""  # why no round opens
        self._clock, self._idle_since = clock, clock()  # since when the next round waits only for devices
        self._wall, self._running = rhythm.wall, thresholds
        self._declines = Declines(engine.prepared.task.round.deadline_s)
        self._told_waiting: dict[str, object] = {}
        self._warned_of: tuple[object, ...] = ()
        self._tell_waiting_at, self._told_needed = 0.0, self._thresholds()
        self._listed: tuple[Roster | None, dict[str, bytes]] = None, {}
        self._remember_declines()
        engine.responses.require(self._told_needed.updates, at_once=True)
        self._rests = self._paused = False
        self._told: tuple[int, float] | None = None  # the last reported opening
        self.finished_at: float | None = None
        self._limit(clock())

    @property
    def announcement(self) -> RoundPlan:
        """The plan that devices should know at present; while a round rests, a plan that says that none is open.

        While no round may be open, a buffered round also lets no device continue with an older model.
        """
        plan = self._engine.progress.no_round if self._rests else self._engine.announcement
        if plan.phase == "closed" and not self._may_train:
            plan = replace(plan, max_staleness=0)
        of_updates = self._engine.responses.announced_deadline_s if plan.phase == "open" else plan.deadline_s
        return replace(plan, deadline_s=min(of_updates, self._window_s))

    def announce_soon(self) -> None:
        """Makes `advance` announce the plan, after it has checked pause and window."""
        self._announce_at = -math.inf

    def advance(self, *, linked: bool) -> None:
        """Closes and opens what is due."""
        now = self._clock()
        self._note_pause()
        self._engine.responses.require(self._thresholds().updates)
        if self._engine.plan is not None:
            self._look_at_window(now)
        if self._engine.plan is not None and not self._rests and now >= self._retry_close_at and self._close(now):
            self._idle_since = now
            if not self._open(now, linked=linked):
                self.announce()
        self._open(now, linked=linked)
        if linked and (now >= self._announce_at or self._may_train != self._told_may_train):
            self.announce()

    def announce(self) -> None:
        """Announces the round to all devices, after the charges of the present devices are noted."""
        try:
            self.expect(self._present)
        except StoreError as error:
            log.error("the round is not announced yet: %s", error)
            self._announce_at = self._clock() + RETRY_S
            return
        self._announce_at, self._told_may_train = math.inf, self._may_train
        self._outbox.round(self.announcement)
        if self._engine.finished and self.finished_at is None:
            self.finished_at = self._clock()

    def expect(self, devices: Iterable[str]) -> None:
        """Notes charges before devices are told that they may train. Raises `StoreError`; then they are not told."""
        if self._charges is not None and not self._rests:
            self._charges.expect(devices)

    def arrived(self, devices: Iterable[str]) -> None:
        """Notes charges of devices that have arrived, if they may already train."""
        if self._charges is not None and not self._rests:
            try:
                self._charges.arrived(devices)
            except StoreError as error:
                log.warning("%s", error)
                self.announce_soon()  # this notes the present devices

    def accepted(self, device: str, round: int) -> None:
        """Notes the charge of an accepted update."""
        self._declines.drop(device)
        if self._charges is not None:
            try:
                self._charges.accepted(device, round)
            except StoreError as error:  # it is noted when the round closes
                log.warning("%s", error)

    def declined(self, device: str, code: str) -> None:
        """Removes the noted charge of a device that will send no update in the open round."""
        self._note_decline(device, code, at=self._wall())
        if self._charges is not None:
            try:
                self._charges.declined(device, code)
            except StoreError as error:  # the earlier note is an upper bound
                log.warning("%s", error)

    @property
    def _may_train(self) -> bool:
        """True if devices may continue with a buffered round's model; always True if rounds are not buffered."""
        return not (self._engine.prepared.task.round.buffered and (self._paused or self._rhythm.left_s() <= 0))

    def _limit(self, now: float) -> None:
        """Limits the open round's wait for updates to the end of its window."""
        self._window_s = self._rhythm.left_s()
        if self._engine.collects_updates:
            self._engine.responses.close_by(now + self._window_s)

    def _look_at_window(self, now: float) -> None:
        """Lets the open round rest during a pause, and continue when it may; when a window ends, `_close` decides.

        A round that waits for a committee's answers never rests, because answers are no training.
        """
        engine, over = self._engine, self._rhythm.left_s() <= 0
        if self._rests and not (self._paused or over):
            self._rests = False
            self._ask_again()
            engine.responses.wait_longer(now)
            self._limit(now)
            if self._told is not None:  # its window had ended, and it was not just paused
                self._log.note("round_extended", round=engine.announcement.round, accepted=engine.accepted)
            self.announce()
        elif self._rests and over and math.isinf(self._rhythm.goes_on()):
            self._end()
        elif engine.collects_updates and not self._rests and self._paused:
            self._begin_rest()
        elif engine.collects_updates and over and not self._rests:
            if not engine.responses.extensions:  # slow devices have declined, and may use the next window
                self._ask_again()
            engine.responses.close_by(now)

    def _ask_again(self) -> None:
        self._engine.responses.ask_again()
        self._leave_out_strangers()

    def _leave_out_strangers(self) -> None:
        """Stops waiting for devices of the cohort that are locked out, which a signed roster may still contain."""
        engine = self._engine
        engine.exclude(*(device for device in engine.cohort if self._enrolment.key(device) is None))

    def _begin_rest(self) -> None:
        """Tells devices that no round is open: none trains, and committed updates are sent when the round continues."""
        self._rests, self._told = True, None
        self._tell_next(self._rhythm.goes_on())
        self.announce()

    def _note_pause(self) -> None:
        if self._rhythm.paused != self._paused:
            self._paused = not self._paused
            self._log.note("pause", state="on" if self._paused else "off")
            log.info("training is %s by the operator", "paused" if self._paused else "resumed")
            if self._rests and self._rhythm.left_s() <= 0:
                self._tell_next(self._rhythm.goes_on())

    def _tell_next(self, opens: float) -> None:
        """Logs when the next round opens or the resting round continues; once for each such time."""
        told = (self._engine.closed_rounds + 1, opens)
        if told != self._told and math.isfinite(opens) and not self._paused:
            self._told = told
            self._log.note("next_round", round=told[0], opens=opens, timezone=self._rhythm.zone)

    def _may_open(self, now: float) -> bool:
        """Returns whether it is time for the next round. Ends the task if no round opens any more."""
        opens = self._rhythm.opens()
        if opens == math.inf:
            self._end()
        if self._rhythm.is_due():
            return True
        self._idle_since = now
        self._tell_next(opens)
        return False

    def _end(self) -> None:
        """Ends the task, once, after the schedule's last day; no model contains the updates of an open round. A run
        without a closed round has no result, and waits."""
        progress = self._engine.progress
        if self._engine.closed_rounds and not progress.ended:
            progress.ended = True
            self._log.note("finished", **finished_fields(self._engine))
            self.announce()

    def _close(self, now: float) -> bool:
        """Closes the open round, or announces its changed plan; returns True if it is closed."""
        engine, before = self._engine, self._engine.plan
        try:
            if not engine.should_close(now, ready=len(self._present)):
                if engine.collects_updates and self._rhythm.left_s() <= 0:
                    self._begin_rest()
                elif engine.plan is not before:
                    self._limit(now)
                    event, fields = changed_plan(before, engine)
                    self._log.note(event, **fields)
                    self.announce()
                return False
            served = engine.model.digests
            summary = engine.close()
        except StoreError as error:
            log.error("the round cannot be closed yet: %s", error)
            self._retry_close_at = now + RETRY_S
            return False
        if self._charges is not None:
            try:
                self._charges.closed(summary.round)
            except StoreError as error:  # the earlier note is an upper bound
                log.warning("%s", error)
        self._on_closed(served - engine.model.digests)
        fields, privacy = summary.to_dict(), engine.spec.privacy
        if not summary.participants:
            lost = lost_rounds(engine.store, delta=privacy.delta, accountant=privacy.accountant)
            if lost is not None:
                log.warning("round %d: %s", summary.round, lost.words(engine.closed_rounds))
                fields["lost"] = lost.model_dump()
        self._log.note("round_close", **fields)
        self._enrolment.round_closed()
        if engine.finished:
            self._log.note("finished", **finished_fields(engine))
        return True

    def _open(self, now: float, *, linked: bool) -> bool:
        """Opens the next round if enough devices can take part; returns True if it did."""
        engine = self._engine
        if engine.finished or engine.plan is not None or not linked or now < self._retry_open_at:
            return False
        may_open = self._may_open(now)
        if not may_open and (now < self._tell_waiting_at or self._paused or engine.finished):
            return False
        needed, found = self._thresholds(), self._participants()
        if not may_open or not self._enough(now, needed, len(found.able)):
            waited = now >= self._idle_since + TELLS_AFTER_S
            if waited if may_open else found.possible(self._rhythm.opens()) < needed.needed:
                self._tell_waiting(now, needed, found)
            return False
        # of a whole fleet, a board whose owner has allowed more than the card says also takes part
        among = found.able if engine.prepared.task.round.cohort_size else self._present
        try:
            engine.open_round(among, roster=self._current_roster())
        except (StoreError, BadInput) as error:
            if str(error) != self._open_error:  # it may last for days, such as until the operator signs a roster
                log.error("the next round cannot be opened yet: %s", error)
            self._open_error = str(error)
            self._idle_since, self._retry_open_at = now, now + RETRY_S
            return False
        self._open_error, self._told_waiting = "", {}
        self._rhythm.opened()
        self._limit(now)
        self._leave_out_strangers()
        self._log.note("round_open", **open_fields(engine))
        self.announce()
        return True

    def _current_roster(self) -> Roster | None:
        """Returns the roster of a secure sum. Raises `BadInput` if the operator should have signed one, but has not."""
        if self._roster is None:
            return self._enrolment.roster()
        listed = self._roster.current()
        if listed is None and self._engine.spec.privacy.secure is not None:
            raise BadInput(f"no roster is signed yet in {self._roster.path}, and boards take no other")
        return listed

    # who can take part

    def _thresholds(self) -> Thresholds:
        boards, blocked = self._enrolment.count, self._enrolment.blocked
        return self._running.now(boards=boards, blocked=blocked, begun=self._engine.closed_rounds > 0)

    def _enough(self, now: float, needed: Thresholds, able: int) -> bool:
        engine, waited_s = self._engine, now - self._idle_since
        if waited_s >= self._rhythm.left_s() / 3:  # a quarter of the window: absent devices join the next round
            waited_s = math.inf
        return may_open(
            needed.applied(engine.prepared.task.round),
            able,
            least=needed.devices,
            closed_rounds=engine.closed_rounds,
            waited_s=waited_s,
            rate=engine.drawn_at or 1.0,
        )

    def _participants(self) -> Eligible:
        enrolment, budgets = self._enrolment, None if self._charges is None else self._charges.budgets
        return participants(
            enrolment.accepted,
            present=self._present,
            listed=self._listed_devices(),
            spent={} if budgets is None else budgets.spent(self._engine.next_charge),
            declined=self._declines.hold(self._wall(), enrolment.session),
        )

    def _listed_devices(self) -> Collection[str] | None:
        """Returns the devices of the signed roster whose keys in it are their present ones; None if none is needed."""
        if self._roster is None or self._engine.spec.privacy.secure is None:
            return None
        roster = self._roster.current()
        if roster is None:  # the error of the opening says so
            return None
        if roster is not self._listed[0]:
            self._listed = roster, {name: roster.key(index) for index, name in enumerate(roster.devices)}
        return {name for name, key in self._listed[1].items() if self._enrolment.key(name) == key}

    def _tell_waiting(self, now: float, needed: Thresholds, found: Eligible) -> None:
        """Tells what the next round waits for: the log once for each kind of reasons, the run's events each minute."""
        if now < self._tell_waiting_at and needed == self._told_needed:
            return
        self._told_needed = needed
        self._tell_waiting_at = now + TELLS_EVERY_S
        waiting = found.waiting(self._engine.closed_rounds + 1, needed, zone=self._rhythm.zone)
        event = asdict(waiting)
        if event == self._told_waiting:
            return
        self._told_waiting = event
        kinds = (waiting.round, *(bool(event[name]) for name in ("spent", "spent_for_good", "declined", "unlisted")))
        if kinds != self._warned_of:
            self._warned_of = kinds
            log.warning("%s", shortfall_text(waiting, now=self._wall()))
        self._log.note("waits", **event)

    def _note_decline(self, device: str, code: str, *, at: float) -> None:
        if device in self._engine.store.new_cards(self._engine.announcement.round):
            return  # it declines what an earlier card may have done
        period = None if self._charges is None or self._charges.budgets is None else self._charges.budgets.period(at)
        session, of_fleet = self._enrolment.session(device), self._charges is not None
        self._declines.note(device, code, at=at, period=period, of_fleet=of_fleet, session=session)

    def _remember_declines(self) -> None:
        """Takes the declines of the newest round from the store, after a restart."""
        store = self._engine.store
        if (row := store.last_round()) is not None:
            for _, device, code, _ in store.declines(row.round):
                self._note_decline(device, code, at=row.closed_at or row.opened_at)
