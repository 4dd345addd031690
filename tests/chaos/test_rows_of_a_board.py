"""Storms drawn from a seed reach every row of a board's table of states, and each leads where its row says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hushfleet.edge_client.protocol import ROUND
from hushfleet.edge_client.rounds import RoundHandler
from hushfleet.edge_client.worker.job import Died, Failed, Outcome
from hushfleet.state_table import Transition
from hushfleet.wire.format.messages import Ack, Missing, Refused
from support.device import config, linear, make_bench, package
from support.edge import DEVICE, Bench, Package, Waiting

__all__ = ["config", "linear", "make_bench", "package"]

pytestmark = pytest.mark.slow
STEPS, MOST_STORMS = 150, 100
FIRST = (93, 7, 5, 11, 2, 12, 4)
"""Few that reached every row when they were last counted; if they do no longer, the others follow."""
WEIGHTS = {
    "next_round": 6, "same_plan": 3, "extend": 3, "close": 3, "finish": 1, "new_task": 2, "link": 1, "refuse": 2,
    "silence": 1, "worker": 3, "jump": 2, "old_answer": 4, "steps": 8, "stop": 6, "too_large": 1,
}  # fmt: skip


class UnsureWorkshop(Waiting):
    """A workshop whose jobs end as the storm says: by themselves, by death, or with a failure."""

    ends: tuple[str, ...] = ()

    def poll(self) -> Outcome | None:
        outcome = super().poll()
        if outcome is None or not self.ends:
            return outcome
        end, *self.ends = self.ends
        return Died("was killed by the storm") if end == "dies" else Failed("error", "as the storm says", False)


class Storm:
    """Everything that can happen to a board, in random order."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self.bench, self.random, self.round, self.task = bench, random.Random(seed), 0, 0
        inner = bench.agent.rounds._handover._workshop
        self.workshop = bench.agent.rounds._handover._workshop = UnsureWorkshop(
            inner, lambda: None, looks=self.random.choice((1, 8))
        )

    def play(self) -> None:
        for _ in range(STEPS):
            getattr(self, self.random.choices([*WEIGHTS], [*WEIGHTS.values()])[0])()
            self.bench.steps(self.random.choice((0, 1, 2, 3, 5, 30)))

    def _open(self, **changes: Any) -> None:
        state = self.bench.store.load_state(self.bench.server.package.spec.task)
        digest = (self.bench.server.initial_public() if state is None else state.public).digest()
        self.bench.server.open_round(max(1, self.round), **{"cohort": {DEVICE: digest}, **changes})

    def next_round(self) -> None:
        self.round = min(self.round + 1, self.bench.server.package.spec.rounds)
        self._open(deadline_s=self.random.choice((20.0, 600.0)))

    def extend(self) -> None:
        self._open(deadline_s=self.random.choice((20.0, 300.0, 900.0)))

    def same_plan(self) -> None:
        self.bench.hub.publish(
            self.bench.server.topics.round,
            self.bench.hub.retained.get(self.bench.server.topics.round, b""),
            retain=True,
        )

    def close(self) -> None:
        self._open(phase="closed", cohort={})

    def finish(self) -> None:
        self._open(phase="finished", cohort={})

    def new_task(self) -> None:
        self.task, self.round = self.task + 1, 0
        server = self.bench.server
        server.package = server.package.with_spec(task=f"digits-{self.task}")
        server.latest, server.place = (0, b""), (0, "closed")
        self.bench.server.announce()

    def link(self) -> None:
        self.bench.hub.cut(DEVICE)
        self.bench.steps(3)
        self.bench.hub.restore(DEVICE)

    def refuse(self) -> None:
        self.bench.server.refuse_next = self.random.choice(("late", "duplicate", "store-full", "state-unknown"))

    def silence(self) -> None:
        self.bench.server.answers = not self.bench.server.answers

    def worker(self) -> None:
        self.workshop.ends = self.random.choice((("dies",), ("dies", "dies"), ("fails",)))

    def old_answer(self) -> None:
        """The aggregator answers the newest update once more, or has lost it."""
        server = self.bench.server
        if not server.updates or not server.offers:
            return
        entry = self.bench.store.outbox(server.offers[-1].task, server.offers[-1].round)
        if entry is not None:
            about = (entry.task, entry.round, entry.digest)
            answers = (
                Ack(*about),
                Missing(*about, ((0, 1),)),
                Refused(*about, "store-full", "full"),
                Refused(*about, "late", ""),
            )
            server.send(server.topics.down(DEVICE), self.random.choice(answers))

    def jump(self) -> None:
        self.bench.clock.now += self.random.choice((6.0, 60.0, 4000.0))

    def steps(self) -> None:
        self.bench.steps(60)

    def too_large(self) -> None:
        """The broker takes no chunk of the update's size."""
        if self.bench.agent.rounds.upload is not None:
            self.bench.agent.rounds.drop_upload()

    def stop(self) -> None:
        self.bench.agent.rounds.take("stop")


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Counter[Transition]:
    rows: Counter[Transition] = Counter()
    find = ROUND.find

    def counted(state: str, event: str) -> Transition | None:
        row = find(state, event)
        rows.update([] if row is None else [row])
        return row

    monkeypatch.setattr(ROUND, "find", counted)
    return rows


def test_storms_reach_every_row(
    make_bench: Callable[..., Bench],
    package: Package,
    linear: Package,
    config: Any,
    reached: Counter[Transition],
    tmp_path: Any,
) -> None:
    for seed in dict.fromkeys((*FIRST, *range(MOST_STORMS))):
        own = replace(config, device=replace(config.device, state_dir=str(tmp_path / f"board-{seed}")))
        own = replace(own, limits=replace(own.limits, constant_time=seed % 3 != 2))
        if seed % 2:
            own = replace(own, simulation=None)
        Storm(make_bench(linear if seed % 2 else package, own), seed).play()
        if all(reached[row] for row in ROUND.rows):
            break
    assert not [row for row in ROUND.rows if row not in reached]


def test_each_action_is_a_method() -> None:
    for row in ROUND.rows:
        assert not row.action or callable(getattr(RoundHandler, f"_{row.action}"))
