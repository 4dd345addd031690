"""Makes a plan's troubles happen to a fleet while it works, until its task is finished."""

from __future__ import annotations

import heapq
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count

from chaos.audit import check_at_death
from chaos.fleet import ChaosFleet
from chaos.plan import BROKER, Plan, Trouble
from chaos.progress import Progress
from chaos.tap import Tap
from hushfleet.edge_client.rounds import MAX_ATTEMPTS
from hushfleet.errors import HushfleetError

_TICK_S = 0.01
_RESTART_S = 0.5  # of what ended by itself because its disk was full, as a service manager would


class Storm:
    """One run's trouble.

    :param tap: is attached anew where the broker was restarted.
    :param timeout_s: a run that takes longer fails.
    :param clock: monotonic seconds.
    """

    def __init__(
        self,
        fleet: ChaosFleet,
        plan: Plan,
        tap: Tap,
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._plan, self._tap = fleet, plan, tap
        self._timeout_s, self._clock = timeout_s, clock
        self._progress = Progress(fleet.simulation, tap.sent)
        self._rng = random.Random(f"storm {plan.seed}")
        self._waiting = list(plan.troubles)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._down: Counter[str] = Counter()
        self._killed: Counter[str] = Counter()
        self._was_full: set[str] = set()
        self.played: list[tuple[str, str]] = []
        """(what was done, to whom), in order."""

    def pass_over(self) -> None:
        """Returns when the task is finished. Raises `HushfleetError` where a part dies or declines without a reason."""
        ends_at = self._clock() + self._timeout_s
        while not self._tick():
            if self._clock() > ends_at:
                raise HushfleetError(f"the run was not finished after {self._timeout_s:g} s")
            time.sleep(_TICK_S)

    def may_decline(self, device: str, code: str) -> bool:
        """Whether there was a reason for it."""
        return (
            device == self._plan.hostile
            or (device in self._was_full and code == "disk")
            or (self._killed[device] >= MAX_ATTEMPTS and code == "memory")
        )

    def _tick(self) -> bool:
        self._progress.look()
        if self._progress.finished or self._fleet.finished:
            return True
        for name in self._was_full:
            if self._fleet.has_failed(name) and name not in self._fleet.expected_down:
                self._fleet.expected_down.add(name)
                self._down[name] += 1
                self._at(_RESTART_S, partial(self._start, name))
        self._fleet.check()
        for round, device, code, reason in self._progress.declines:
            if not self.may_decline(device, code):
                raise HushfleetError(f"{device} declined round {round} ({code}): {reason}")
        for trouble in [trouble for trouble in self._waiting if self._progress.reached(trouble.moment)]:
            self._waiting.remove(trouble)
            self._at(trouble.delay_s, partial(self._begin, trouble))
        while self._due and self._due[0][0] <= self._clock():
            heapq.heappop(self._due)[2]()
        return False

    def _at(self, in_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self._clock() + in_s, next(self._order), action))

    def _begin(self, trouble: Trouble) -> None:
        fleet = self._fleet
        if trouble.kind == "twin":
            (device,) = trouble.targets
            if not self._progress.has_come(device):  # of two new devices the first is the right one
                self._at(_TICK_S, partial(self._begin, trouble))
                return
            twin = fleet.start_twin(device)
            self._at(trouble.lasts_s, partial(fleet.kill, twin))
            self.played.append((trouble.kind, device))
            return
        for name in trouble.targets:
            if trouble.kind in ("kill", "power-cut"):
                self._take_down(trouble, name, again_s=trouble.again_s, away_s=trouble.lasts_s)
                continue
            self.played.append((trouble.kind, name))
            if trouble.kind == "full-disk":
                self._was_full.add(name)
                fleet.machines[name].fill_disk(True)
                self._at(trouble.lasts_s, partial(fleet.machines[name].fill_disk, False))
            elif trouble.kind == "clock-jump":
                fleet.machines[name].move_clock(trouble.amount)
            elif trouble.kind == "cut-link":
                fleet.proxy.cut(name)
                self._at(trouble.lasts_s, partial(fleet.proxy.mend, name))
            else:
                for number in range(int(trouble.amount)):
                    self._at(number * trouble.lasts_s / trouble.amount, partial(fleet.proxy.reset, name))

    def _take_down(self, trouble: Trouble, name: str, *, again_s: tuple[float, ...], away_s: float) -> None:
        if not self._fleet.is_running(name) and not self._down[name]:
            return  # what has ended well stays as it is
        self.played.append((trouble.kind, name))
        self._killed[name] += 1
        self._fleet.expected_down.add(name)
        self._down[name] += 1
        if trouble.kind == "power-cut":
            self._fleet.cut_power(name, self._rng, kept=trouble.amount)
        else:
            self._fleet.kill(name)
        if name in self._fleet.honest and (wrong := check_at_death(self._fleet.simulation, name, self._tap)):
            raise HushfleetError(wrong[0])
        self._at(0.0, partial(self._start_when_over, trouble, name, self._clock() + away_s))
        if again_s:
            again = partial(self._take_down, trouble, name, again_s=again_s[1:], away_s=0.0)
            self._at(away_s + again_s[0], again)

    def _start_when_over(self, trouble: Trouble, name: str, at: float) -> None:
        if self._clock() >= at or (trouble.until is not None and self._progress.reached(trouble.until)):
            self._start(name)
        else:
            self._at(_TICK_S, partial(self._start_when_over, trouble, name, at))

    def _start(self, name: str) -> None:
        """Starts it when nothing keeps it down any more."""
        self._down[name] -= 1
        if self._down[name]:
            return
        self._fleet.start_again(name)
        if name == BROKER:
            self._tap.attach(self._fleet.broker_url)
