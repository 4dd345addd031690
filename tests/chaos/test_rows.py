"""Storms drawn from a seed reach every row of the aggregator's table of states, and each leads where its row says."""

from __future__ import annotations

import random
from collections import Counter
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from hushfleet.aggregator.rounds.cycle import RoundCycle
from hushfleet.aggregator.rounds.protocol import ROUNDS
from hushfleet.state_table import Transition
from hushfleet.wire.format.messages import Decline
from support.field import Field
from support.fleet import Fleet
from support.secure import SecureFleet

BEGINS = datetime(2026, 11, 26, 23, tzinfo=ZoneInfo("Europe/Berlin")).timestamp()
SCHEDULE = {"every": "1h", "between": "01:00-05:00", "timezone": "Europe/Berlin", "until": "2026-11-29"}
RULES = {"rounds": 40, "deadline_s": 1800.0, "schedule": SCHEDULE}
STEPS = 120
WEIGHTS = {"join": 4, "leave": 2, "send": 6, "decline": 1, "pause": 1, "crash": 1, "skip": 4}


class Storm:
    """Everything that can happen to a fleet, in random order; time passes between the steps."""

    def __init__(self, folder: Path, seed: int, *, secure: bool) -> None:
        self.random = random.Random(seed)
        if secure:
            self.fleet: Fleet | SecureFleet = SecureFleet(folder / "run", devices=7, **RULES)
        else:
            self.fleet = Fleet(folder / "run", method="dp-fedavg", accounting="strict", min_updates=2, **RULES)
        self.fleet.wall_from = BEGINS - self.fleet.now
        self.field = Field(self.fleet, folder)

    def play(self) -> None:
        for _ in range(STEPS):
            getattr(self, self.random.choices([*WEIGHTS], [*WEIGHTS.values()])[0])()
            self.field.run(steps=5)
        self.field.pause.unlink(missing_ok=True)
        self.field.skip(20 * 86400.0)
        self.fleet.store.close()

    @property
    def name(self) -> str:
        return self.random.choice(self.fleet.names)

    def join(self) -> None:
        for name in self.fleet.names:
            if self.random.random() < 0.8:
                self.field.join(name)

    def leave(self) -> None:
        if (name := self.name) in self.field.links:
            self.field.send(name, self.field.birth(name, state="lost"), "state")

    def send(self) -> None:
        for name in self.random.sample(self.fleet.names, self.random.randint(1, len(self.fleet.names))):
            plan = self.fleet.engine.plan
            if plan is None or self.field.plan.phase == "closed" or name not in self.field.links:
                return
            if plan.phase == "unmask":
                assert isinstance(self.fleet, SecureFleet)
                if name in self.fleet.round.members:
                    self.field.deliver(name, self.fleet.answer(name))
            else:
                update = self.fleet.update(name)
                self.field.deliver(name, update if isinstance(update, bytes) else update.data)

    def decline(self) -> None:
        if (plan := self.fleet.engine.plan) is not None and (name := self.name) in self.field.links:
            self.field.send(name, Decline(plan.task, plan.round, "paused", "not now"))

    def pause(self) -> None:
        if self.random.random() < 0.4:
            self.field.pause.touch()
        else:
            self.field.pause.unlink(missing_ok=True)

    def crash(self) -> None:
        self.field.crash()
        self.join()

    def skip(self) -> None:
        self.field.skip(self.random.choice((60.0, 60.0, 600.0, 2000.0, 2 * 3600.0)))


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Counter[Transition]:
    """Counts the rows, and checks where each one leads: to its state, or nowhere if the step is tried again later."""
    rows: Counter[Transition] = Counter()
    look_up, advance = ROUNDS.row, RoundCycle.advance
    newest: list[Transition] = []

    def row(state: str, event: str) -> Transition:
        newest.append(look_up(state, event))
        rows.update(newest[-1:])
        return newest[-1]

    def checked(cycle: RoundCycle, *, linked: bool) -> None:
        newest.clear()
        advance(cycle, linked=linked)
        if newest:
            ends = cycle._engine.finished  # after the last round, `close` leads there
            assert cycle.state == newest[-1].then or ends or cycle._retry_at > cycle._clock(), newest

    monkeypatch.setattr(ROUNDS, "row", row)
    monkeypatch.setattr(RoundCycle, "advance", checked)
    return rows


def test_storms_reach_every_row(tmp_path: Path, reached: Counter[Transition]) -> None:
    for seed in range(12):
        Storm(tmp_path / str(seed), seed, secure=seed % 2 == 1).play()
    assert not [row for row in ROUNDS.rows if row not in reached], reached
