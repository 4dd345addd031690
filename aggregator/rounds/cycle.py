"""Runs the cycle of rounds: opens each when enough devices are present, announces it, and closes it when it is over."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from hushfleet.aggregator.results.metrics import lost_rounds
from hushfleet.aggregator.rounds.charge_book import ChargeBook
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.rounds.next_round import NextRound
from hushfleet.aggregator.rounds.outbox import Outbox
from hushfleet.aggregator.rounds.protocol import BETWEEN, COLLECTING, ENDED, RESTING, ROUNDS, UNMASKING
from hushfleet.aggregator.rounds.rhythm import Rhythm
from hushfleet.aggregator.rounds.round_events import change_fields, finished_fields, open_fields
from hushfleet.aggregator.rounds.run_log import RunLog
from hushfleet.aggregator.storage.enrolment import Enrolment
from hushfleet.aggregator.storage.list_file import ListFile
from hushfleet.errors import BadInput, StoreError
from hushfleet.secure.membership_list import MembershipList
from hushfleet.wire.format.messages import RoundPlan

RETRY_S = 5.0

log = logging.getLogger("hushfleet.aggregator")


class RoundCycle:
    """Drives the engine by the table `ROUNDS`, and announces its rounds through the outbox.

    :param next_round: who can take part in the next round.
    :param on_closed: receives the SHA-256 of blobs that devices no longer need, before the closed round is logged.
    :param membership_list: as for the `Coordinator`.
    :param charges: as for the `Coordinator`.
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
        next_round: NextRound,
        on_closed: Callable[[set[bytes]], None],
        membership_list: ListFile[MembershipList] | None,
        charges: ChargeBook | None,
        rhythm: Rhythm,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._outbox, self._log = engine, outbox, run_log
        self._enrolment, self._next, self._on_closed = enrolment, next_round, on_closed
        self._membership_list, self.charges, self.rhythm, self._clock = membership_list, charges, rhythm, clock
        self._linked = self._rests = self._paused = False
        self._retry_at = 0.0  # when a step is tried again that the store or the membership list has refused
        self._open_error = ""  # why no round opens
        self._announce_at, self._told_staleness = math.inf, 0
        self._told: tuple[int, float] | None = None  # the last reported opening
        self.finished_at: float | None = None
        self._limit(clock())

    @property
    def state(self) -> str:
        """One of the states of `ROUNDS`."""
        engine = self._engine
        if engine.finished:
            return ENDED
        if engine.plan is None:
            return BETWEEN
        return RESTING if self._rests else COLLECTING if engine.collects_updates else UNMASKING

    @property
    def announcement(self) -> RoundPlan:
        """The plan that devices should know at present; while a round rests, a plan that says that none is open.

        While no round may be open, no device continues with an older model either.
        """
        plan = self._engine.progress.no_round if self._rests else self._engine.announcement
        of_updates = self._engine.responses.announced_deadline_s if plan.phase == "open" else plan.deadline_s
        return replace(plan, deadline_s=min(of_updates, self._window_s), max_staleness=self._staleness)

    def announce_soon(self) -> None:
        """Makes `advance` announce the plan, after it has checked pause and window."""
        self._announce_at = -math.inf

    def advance(self, *, linked: bool) -> None:
        """Does what is due by the table: a window begins or ends, a round is over, the next one opens."""
        now, self._linked = self._clock(), linked
        self._note_pause()
        self._engine.responses.require(self._next.thresholds.updates)
        for look in (self._window_event, self._closing_event, self._opening_event):
            state = self.state
            if (event := look(state, now)) is not None:
                getattr(self, f"_{ROUNDS.row(state, event).action}")(now)
        if linked and (now >= self._announce_at or self._staleness != self._told_staleness):
            self.announce()

    # events

    def _window_event(self, state: str, now: float) -> str | None:
        """Returns what pause and window say. A round that waits for a committee's answers never rests, because answers
        are no training."""
        over = self.rhythm.left_s() <= 0
        if state == RESTING and not (self._paused or over):
            return "may go on"
        if state == RESTING and over and math.isinf(self.rhythm.goes_on()) and self._engine.closed_rounds:
            return "no round may follow"
        if state == COLLECTING and self._paused:
            return "paused"
        return "window ends" if state == COLLECTING and over else None

    def _closing_event(self, state: str, now: float) -> str | None:
        """Returns whether the open round is over, or has another plan."""
        if state not in (COLLECTING, UNMASKING) or now < self._retry_at:
            return None
        engine, before = self._engine, self._engine.announcement
        try:
            if engine.should_close(now, ready=len(self._next.present)):
                return "over"
        except StoreError as error:
            self._try_later(now, f"the round cannot be closed yet: {error}")
            return None
        if engine.collects_updates and self.rhythm.left_s() <= 0:
            return "too few at the end of the window"
        if engine.announcement is before:
            return None
        return (
            "too few at the deadline" if engine.announcement.phase == before.phase else "devices of the sum are fixed"
        )

    def _opening_event(self, state: str, now: float) -> str | None:
        """Returns whether the next round opens, or none ever.

        A run without a closed round has no result, and waits, also after the schedule's last day.
        """
        if state != BETWEEN or not self._linked or now < self._retry_at:
            return None
        opens, is_due = self.rhythm.opens(), self.rhythm.is_due()
        if opens == math.inf and self._engine.closed_rounds:
            return "no round may follow"
        if not is_due:
            self._next.begin_wait(now)
            self._tell_next(opens)
            if not self._paused:
                self._next.tell_if_impossible(now, opens=opens)
            return None
        return "enough devices" if self._next.has_enough(now, left_s=self.rhythm.left_s()) else None

    # actions

    def _open(self, now: float) -> None:
        try:
            self._engine.open_round(self._next.candidates, membership_list=self._current_membership_list())
        except (StoreError, BadInput) as error:
            told, self._open_error = self._open_error, str(error)
            # it may last for days, such as until the operator signs a membership list
            self._try_later(now, "" if told == str(error) else f"the next round cannot be opened yet: {error}")
            self._next.begin_wait(now)
            return
        self._open_error = ""
        self._next.opened()
        self.rhythm.opened()
        self._limit(now)
        self._leave_out_strangers()
        self._log.note("round_open", **open_fields(self._engine))
        self.announce()

    def _close(self, now: float) -> None:
        engine, served = self._engine, self._engine.model.digests
        try:
            summary = engine.close()
        except StoreError as error:
            self._try_later(now, f"the round cannot be closed yet: {error}")
            return
        self._note_charges(lambda charges: charges.closed(summary.round))  # else the earlier note is an upper bound
        self._on_closed(served - engine.model.digests)
        fields, privacy = summary.to_dict(), engine.spec.privacy
        if not summary.participants:
            lost = lost_rounds(engine.store, delta=privacy.delta, accountant=privacy.accountant)
            if lost is not None:
                log.warning("round %d: %s", summary.round, lost.words(engine.closed_rounds))
                fields["lost"] = lost
        self._log.note("round_close", **fields)
        self._enrolment.round_closed()
        if engine.finished:
            self._log.note("finished", **finished_fields(engine))
        self._next.begin_wait(now)
        self.announce_soon()

    def _stop_waiting(self, now: float) -> None:
        if not self._engine.responses.extensions:  # slow devices have declined, and may use the next window
            self._ask_again()
        self._engine.responses.close_by(now)

    def _rest(self, now: float) -> None:
        """Tells devices that no round is open: none trains, and committed updates are sent when the round continues."""
        self._rests, self._told = True, None
        self._tell_next(self.rhythm.goes_on())
        self.announce()

    def _go_on(self, now: float) -> None:
        self._rests = False
        self._ask_again()
        self._engine.responses.wait_longer(now)
        self._limit(now)
        if self._told is not None:  # its window had ended, and it was not just paused
            self._log.note("round_extended", **change_fields(self._engine))
        self.announce()

    def _extend(self, now: float) -> None:
        self._limit(now)
        self._log.note("round_extended", **change_fields(self._engine))
        self.announce()

    def _ask_members(self, now: float) -> None:
        self._log.note("unmask", **change_fields(self._engine))
        self.announce()

    def _end(self, now: float) -> None:
        """Ends the task after the schedule's last day; no model contains the updates of an open round."""
        until = self._engine.prepared.task.schedule.until
        self._engine.progress.ended = f"no round opens after {until} (schedule.until)"
        self._log.note("finished", **finished_fields(self._engine))
        self.announce()

    # what actions do

    def announce(self) -> None:
        """Announces the round to all devices, after the charges of the present devices are noted."""
        try:
            self.expect(self._next.present)
        except StoreError as error:
            log.error("the round is not announced yet: %s", error)
            self._announce_at = self._clock() + RETRY_S
            return
        self._announce_at, self._told_staleness = math.inf, self._staleness
        self._outbox.round(self.announcement)
        if self._engine.finished and self.finished_at is None:
            self.finished_at = self._clock()

    @property
    def _staleness(self) -> int:
        """How many models old an update may be that a device still trains."""
        plan, rests = self._engine.announcement, self._rests
        may_train = not (self._paused or self.rhythm.left_s() <= 0)
        return plan.max_staleness if may_train or (plan.phase != "closed" and not rests) else 0

    def _limit(self, now: float) -> None:
        """Limits the open round's wait for updates to the end of its window."""
        self._window_s = self.rhythm.left_s()
        if self._engine.collects_updates:
            self._engine.responses.close_by(now + self._window_s)

    def _ask_again(self) -> None:
        self._engine.responses.ask_again()
        self._leave_out_strangers()

    def _leave_out_strangers(self) -> None:
        """Stops waiting for devices of the cohort that are locked out, which a signed membership list may still
        contain."""
        engine = self._engine
        engine.exclude(*(device for device in engine.cohort if self._enrolment.key(device) is None))

    def _note_pause(self) -> None:
        if self.rhythm.paused != self._paused:
            self._paused = not self._paused
            self._log.note("pause", state="on" if self._paused else "off")
            log.info("training is %s by the operator", "paused" if self._paused else "resumed")
            if self._rests and self.rhythm.left_s() <= 0:
                self._tell_next(self.rhythm.goes_on())

    def _tell_next(self, opens: float) -> None:
        """Logs when the next round opens or the resting round continues; once for each such time."""
        told = (self._engine.closed_rounds + 1, opens)
        if told != self._told and math.isfinite(opens) and not self._paused:
            self._told = told
            self._log.note("next_round", round=told[0], opens=opens, timezone=self.rhythm.zone)

    def _try_later(self, now: float, error: str) -> None:
        self._retry_at = now + RETRY_S
        if error:
            log.error("%s", error)

    def _current_membership_list(self) -> MembershipList | None:
        """Returns the membership list of secure aggregation. Raises `BadInput` if the operator should have signed one,
        but has not."""
        if self._membership_list is None:
            return self._enrolment.membership_list()
        listed = self._membership_list.current()
        if listed is None and self._engine.spec.privacy.secure is not None:
            raise BadInput(
                f"no membership list is signed yet in {self._membership_list.path}, and boards take no other"
            )
        return listed

    # charges of devices

    def expect(self, devices: Iterable[str]) -> None:
        """Notes charges before devices are told that they may train. Raises `StoreError`; then they are not told."""
        if self.charges is not None and not self._rests:
            self.charges.expect(devices)

    def arrived(self, devices: Iterable[str]) -> None:
        """Notes charges of devices that have arrived, if they may already train."""
        if not self._rests and not self._note_charges(lambda charges: charges.arrived(devices)):
            self.announce_soon()  # this notes the present devices

    def accepted(self, device: str, round: int) -> None:
        """Notes the charge of an accepted update."""
        self._next.accepted(device)
        self._note_charges(lambda charges: charges.accepted(device, round))  # else when the round closes

    def declined(self, device: str, code: str) -> None:
        """Removes the noted charge of a device that will send no update in the open round."""
        self._next.declined(device, code, at=self.rhythm.wall())
        self._note_charges(lambda charges: charges.declined(device, code))  # else the earlier note is an upper bound

    def _note_charges(self, note: Callable[[ChargeBook], None]) -> bool:
        """Returns whether the store has taken the note."""
        try:
            if self.charges is not None:
                note(self.charges)
        except StoreError as error:
            log.warning("%s", error)
            return False
        return True
