"""Reads the state of a fleet from its folder: the registry, the aggregator's register and the log of its run.

It writes nothing and sends no requests, so any process that may read the folder sees the same.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import fields, replace

from hushfleet.aggregator.config.question import noise_by_round
from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.fleet import descriptions
from hushfleet.aggregator.fleet.sightings import AGGREGATOR, HEARTBEAT_S, SERVICE
from hushfleet.aggregator.fleet.software.rollout import rollout_view
from hushfleet.aggregator.fleet.tasks.pay import pay_of_fleet
from hushfleet.aggregator.fleet.tasks.seasons import season_view
from hushfleet.aggregator.fleet.tasks.spending import Spending
from hushfleet.aggregator.fleet.tasks.sums import SumsWatch
from hushfleet.aggregator.fleet.tasks.task_check import KIND_ADVICE, kind_note, waits
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.trust.own_certificates import AUTHORITY, ends
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.fleet.view import FleetView, Process, RoundPoint, RunView, SeasonView, SumsView
from hushfleet.aggregator.fleet.watching.advice import certificate_problems, old_copy_problems
from hushfleet.aggregator.fleet.watching.columns import Circumstances, with_problems
from hushfleet.aggregator.fleet.watching.ended import why_ended
from hushfleet.aggregator.planning.advice import DAY_S
from hushfleet.aggregator.results.events import EventTail
from hushfleet.aggregator.results.fleet_state import Event, RunState, SeenDevice
from hushfleet.aggregator.storage.activity import ActivityStore
from hushfleet.aggregator.storage.board import Activity, Board, with_blocked
from hushfleet.durations import duration_s
from hushfleet.errors import BadInput, PrivacyError
from hushfleet.losses import ACCURACY
from hushfleet.schema import read_file
from hushfleet.wire.format.health import Problem

LOST_HEARTBEATS = 3
KEPT_ROUNDS = 500
LOG_PIECE_BYTES = 1 << 18
EVENTS = "events.jsonl"
_START = "Start it: hushfleet fleet up DIR, or systemctl start hushfleet-{}."


class Course(RunState):
    """The state of a run after each event, with figures of its rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[RoundPoint] = []
        self.opened: float | None = None
        self.asked = 0
        self.codes: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def view(self) -> RunView | None:
        """Returns the run; None before it has begun."""
        if not self.task:
            return None
        parts = Counter(device.part for device in self.devices.values())
        is_open, same = self.open_round is not None, {each.name for each in fields(RunView)} & vars(self).keys()
        return replace(
            RunView(**{name: getattr(self, name) for name in same}),
            opened=self.opened if is_open else None,
            asked=self.asked if is_open else 0,
            answered=sum(parts[part] for part in ("accepted", "declined", "refused")),
            accepted=parts["accepted"],
            finished=self.finished or 0 < self.rounds <= self.rounds_closed,
            accuracy=self.accuracy_global if self.measure == ACCURACY else None,
            epsilon=self.epsilon_server,
            epsilon_release=self.epsilon_release,
            uplink_bytes=self.uplink_bytes + (self.round_bytes if is_open else 0),
            declines=tuple(self.codes["decline"].most_common()),
            refusals=tuple(self.codes["refusal"].most_common()),
            course=tuple(self.points[-KEPT_ROUNDS:]),
        )

    def _on_round_open(self, event: Event) -> None:
        super()._on_round_open(event)
        cohort, size = event.get("cohort"), event.get("cohort_size")
        self.asked = len(cohort) if isinstance(cohort, list) else size if isinstance(size, int) else 0
        self.opened = event.get("at")

    def _on_update(self, event: Event) -> None:
        super()._on_update(event)
        if (code := event.get("code")) not in ("accepted", "duplicate"):
            self.codes["refusal"][str(code)] += 1

    def _on_decline(self, event: Event) -> None:
        super()._on_decline(event)
        self.codes["decline"][str(event.get("code"))] += 1

    def _on_refused(self, event: Event) -> None:
        super()._on_refused(event)
        self.codes["refusal"][str(event.get("code"))] += 1

    def _on_round_close(self, event: Event) -> None:
        super()._on_round_close(event)
        sent, accuracy = (
            event.get("uplink_bytes") or 0,
            event.get("accuracy_global") if self.measure == ACCURACY else None,
        )
        self.points.append(RoundPoint(self.rounds_closed, event.get("participants") or 0, sent, accuracy))


class FleetWatch(contextlib.AbstractContextManager["FleetWatch"]):
    """Makes a `FleetView` of a fleet's folder, as often as it is asked, until it is closed; used by one thread.

    Raises `StoreError` if a file is damaged.
    """

    def __init__(self, folder: FleetFolder) -> None:
        self._folder = folder
        self._registry = FleetRegistry(folder.path)
        self._activity: ActivityStore | None = None
        self._tail: EventTail | None = None
        self._course = Course()
        self._sums = SumsWatch(folder)
        self._pay: tuple[object, str] = (None, "")
        self._spending = Spending(folder.config.device.get("limits", {}))
        self._season: SeasonView | None = None
        self._season_of: object = None

    def _window_s(self) -> int:
        """Returns the length of the task's windows of data, seconds; 0: it has none, or its file cannot be read."""
        try:
            window = read_file(self._folder.task).get("data", {}).get("window")
            return 0 if window is None else int(duration_s(str(window)))
        except (BadInput, ValueError, AttributeError):  # the last: `data` is no section
            return 0

    def _noise_to_come(self, run: RunView | None) -> tuple[float, ...]:
        """Returns the noise of each round to come (`Spending.most`); empty if the task's file is another one by now."""
        with contextlib.suppress(BadInput, ValueError):  # a task file that is being written by hand
            noise = noise_by_round(load_task(self._folder.task))
            if run is not None and len(noise) == run.rounds:
                return tuple(noise[run.rounds_closed :])
        return ()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._registry.close()
        if self._activity is not None:
            self._activity.close()

    def view(self, now: float | None = None) -> FleetView:
        """Returns the fleet now.

        :param now: unix seconds; by default the clock.
        """
        now = time.time() if now is None else now
        self._read_log()
        if self._activity is None and ActivityStore.exists(self._folder.aggregator):
            self._activity = ActivityStore(self._folder.aggregator)
        run, activity = self._course.view(), self._activity
        service, aggregator = self._processes(now)
        own, authority = self._certificates()
        season = self._seasons(now)
        paused = None
        with contextlib.suppress(FileNotFoundError):
            paused = self._folder.paused.stat().st_mtime
        boards = with_blocked(self._registry.boards(), {} if activity is None else activity.blocked())
        sums, of_sums = self._secure_aggregation(boards)
        window_s, task, spent = self._window_s(), self._course.task, dict[str, float]()
        able = [board.device for board in boards if not board.is_blocked]  # a blocked board needs no budget
        most = left = None
        if activity is not None:
            spent, following = self._spending.update(activity), self._noise_to_come(run)
            most = self._spending.most(task, activity, window_s=window_s)
            left = self._spending.most(task, activity, among=able, window_s=window_s, following=following)
        parts, known = self._course.states(), {board.device for board in boards}
        moment = Circumstances(now, self._course.round, service == "running")
        boards = [
            with_problems(self._with_part(b, parts.get(b.device, "absent"), spent.get(b.device)), moment)
            for b in boards
        ]
        refused = [] if activity is None else activity.refused_births()
        return FleetView(
            federation=self._folder.config.federation,
            at=now,
            boards=tuple(boards),
            run=run,
            lifetime=most and most[0],
            privacy_left=left and left[1],
            aggregator=aggregator,
            service=service,
            refused_devices=tuple(row for row in refused if row.device not in known),
            asking=tuple(self._registry.refused_requests()),
            rollout=rollout_view(self._registry, now=now),
            sums=sums,
            season=season,
            certificates_end=min(own.values(), default=None),
            authority_end=authority,
            paused=paused,
            pay=self._pays(boards, run, None if season is None else season.lasts_s(now)),
            problems=(
                *_problems(service, aggregator, run, why_ended(self._folder)),
                *(() if paused else self._waits(run, boards, aggregator != "stopped", now)),
                *old_copy_problems(boards, newest_round=self._course.round),
                *self._unfit(),
                *of_sums,
                *descriptions.season_problems(season),
                *certificate_problems(own, authority, now=now),
            ),
        )

    def _pays(self, boards: Sequence[Board], run: RunView | None, lasts_s: float | None) -> str:
        """Says whether the fleet pays; computed again when its task, its boards or its evaluation have changed."""
        enrolled = sum(board.standing == "enrolled" for board in boards)
        evaluation = None if run is None else run.evaluation
        with contextlib.suppress(BadInput, PrivacyError, OSError):  # a task file that is being written by hand
            state = (self._folder.task.stat().st_mtime_ns, enrolled, evaluation, lasts_s and lasts_s // DAY_S)
            if state != self._pay[0]:
                task = load_task(self._folder.task)
                found = pay_of_fleet(task, self._folder, boards=enrolled, evaluation=evaluation, lasts_s=lasts_s)
                self._pay = state, "" if found is None else found.in_words
        return self._pay[1]

    def _waits(self, run: RunView | None, boards: Sequence[Board], runs: bool, now: float) -> list[Problem]:
        """:param runs: whether the aggregator may be running, so that what it waits for still holds."""
        if run is not None and run.finished:
            return []
        is_open = run is not None and run.open_round is not None
        waiting = None if run is None or not runs else run.waiting
        opening = None if run is None or is_open else run.next_opening
        if opening is not None and opening.at > now and not (waiting is not None and waiting.is_certain):
            return []  # boards may come until then
        with contextlib.suppress(BadInput):  # a task file that is being written by hand
            closed = 0 if run is None else run.rounds_closed
            return waits(self._folder, boards, round=closed + 1, waiting=waiting, is_open=is_open, now=now)
        return []

    def _unfit(self) -> list[Problem]:
        with contextlib.suppress(BadInput):  # a task file that is being written by hand
            if (why := kind_note(load_task(self._folder.task), self._folder.config)) is not None:
                return [Problem(why, KIND_ADVICE, urgent=True)]
        return []

    def _seasons(self, now: float) -> SeasonView | None:
        """Returns the seasons, which are read again once a minute and when the task has changed."""
        with contextlib.suppress(FileNotFoundError):
            of = int(now // 60), self._folder.task.stat().st_mtime_ns
            if of != self._season_of:
                self._season, self._season_of = season_view(self._folder, now), of
        return self._season

    def _secure_aggregation(self, boards: Sequence[Board]) -> tuple[SumsView | None, list[Problem]]:
        try:
            return self._sums.view(boards)
        except BadInput:  # a task file that is being written by hand
            return None, []

    def _certificates(self) -> tuple[dict[str, float], float | None]:
        """Returns when the fleet's own certificates end, and its authority; nothing if they cannot be read."""
        try:
            found = ends(self._folder)
        except BadInput:  # the process that uses them reports it
            return {}, None
        return found, found.pop(AUTHORITY)

    def _read_log(self) -> None:
        with contextlib.suppress(BadInput):  # a task file that is being written by hand: the run stays what it was
            file = self._folder.run / EVENTS
            if self._tail is None or self._tail.path != file:
                self._tail, self._course = EventTail(file), Course()
        if self._tail is None:
            return
        events = None
        while events is None or events:
            before = self._tail.offset
            events = self._tail.read(LOG_PIECE_BYTES)
            if self._tail.offset < before:  # a run that was started again
                self._course = Course()
            for event in events:
                self._course.apply(event)

    def _processes(self, now: float) -> tuple[Process, Process]:
        """Returns the states of fleet service and aggregator; the latter is unknown while the service does not run."""
        known = self._registry.processes()
        state, at = known.get(SERVICE, ("unknown", 0.0))
        service: Process = "running" if state == "running" and now - at < LOST_HEARTBEATS * HEARTBEAT_S else "stopped"
        if SERVICE not in known:
            service = "unknown"
        state, _ = known.get(AGGREGATOR, ("unknown", 0.0))
        told: Process = "running" if state == "running" else "stopped" if state == "stopped" else "unknown"
        return service, told if service == "running" else "unknown"

    def _with_part(self, board: Board, part: Activity, spent: float | None) -> Board:
        """Adds what the run and the charges know of a board.

        :param part: its state in the run.
        """
        seen = self._course.devices.get(board.device, SeenDevice())
        told_end = None if board.health is None or not board.health.certificate_end else board.health.certificate_end
        found = replace(
            board,
            state=_state(part, board.state),
            seen=max((at for at in (board.seen, seen.last_seen) if at), default=None),
            certificate_end=board.certificate_end or (told_end and float(told_end)),
            rounds=seen.rounds,
            epsilon=seen.epsilon,
            sent_bytes=seen.sent_bytes,
            decline=seen.decline,
            refusal=seen.refusal,
        )
        if spent is None:
            return found
        undecided = self._course.open_round is not None and seen.is_open
        return replace(found, spent=spent, limit=self._spending.limit, undecided=undecided)


def view_now(folder: FleetFolder, now: float | None = None) -> FleetView:
    """Returns the fleet now, once. Raises `StoreError`."""
    with FleetWatch(folder) as watch:
        return watch.view(now)


def _state(part: Activity, heard: Activity) -> Activity:
    """Combines a board's part in the run with its presence at the broker."""
    if heard in ("absent", "lost", "sleeping"):
        return part if heard == "absent" else heard
    if part in ("absent", "lost", "sleeping"):
        return "training" if heard == "training" else "ready"
    return part


def _problems(service: Process, aggregator: Process, run: RunView | None, why_ended: str) -> list[Problem]:
    """:param why_ended: the error with which the aggregator has ended; empty if there was none."""
    found = []
    if service != "running":
        words = "the fleet service does not run, or cannot reach the broker: nobody hears how boards are"
        found.append(Problem(words, _START.format("fleet"), urgent=True))
    if aggregator != "running" and why_ended:
        found.append(
            Problem(f"the aggregator has ended: {why_ended}", "Correct the task, and give it again.", urgent=True)
        )
    elif aggregator == "stopped" and run is not None and not run.finished:
        words = "the aggregator does not run: boards wait, and nothing is lost"
        found.append(Problem(words, _START.format("aggregator"), urgent=True))
    if run is not None and (run.raw_values or (run.epsilon is not None and math.isinf(run.epsilon))):
        words = "values without noise leave the boards" + (f": {', '.join(run.raw_values)}" if run.raw_values else "")
        found.append(Problem(words, 'privacy.accounting = "strict" in the task.'))
    return found
