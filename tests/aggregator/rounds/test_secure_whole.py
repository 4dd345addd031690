"""Secure aggregation with real boards and real noise: the aggregator is killed in each phase, boards are lost between
them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.payloads.prepare import PreparedTask, prepare
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.simulator.world.hub import LocalHub
from support.whole import Whole

BOARDS = 8
ROUNDS = 2


@pytest.fixture(scope="module")
def prepared() -> PreparedTask:
    task = {
        "name": "summed",
        "model": {"name": "digits-cnn"},
        "method": {"name": "dp-fedavg", "batch_size": 16},
        "privacy": {"clip_norm": 1.0, "noise_multiplier": 2.0, "accounting": "secure", "delta": 1e-5},
        "data": {"name": "digits", "devices": BOARDS},
        "round": {"rounds": ROUNDS, "min_devices": BOARDS, "min_updates": 5, "deadline_s": 60},
        "wire": {"chunk_bytes": 1024},
    }
    return prepare(parse_task(task), run_id="whole")


@pytest.fixture
def whole(tmp_path: Path, prepared: PreparedTask) -> Iterator[Whole]:
    bench = Whole(tmp_path, LocalHub().link, accounting="secure")
    bench.begin(prepared)
    for index in range(BOARDS):
        bench.board(f"board-{index}")
    yield bench
    bench.close()


def kill(whole: Whole, prepared: PreparedTask) -> None:
    """The aggregator dies, and starts again."""
    whole.end()
    whole.begin(prepared)


def finished(whole: Whole) -> Callable[[], bool]:
    return lambda: whole.coordinator.engine.finished


def check_whole(whole: Whole, *, participants: int = BOARDS) -> None:
    """Nothing that was acknowledged is lost, and nobody was charged twice."""
    store = whole.coordinator.store
    rounds = store.rounds()
    assert [row.phase for row in rounds] == ["closed"] * ROUNDS
    assert [row.metrics["participants"] for row in rounds if row.metrics] == [participants] * ROUNDS
    charged = {(row.device, row.round) for row in store.charges()}
    assert len(charged) == len(store.charges()) == participants * ROUNDS
    for board in whole.boards:
        for number in range(1, ROUNDS + 1):
            if (board.name, number) in charged:
                assert board.entry_status("summed-whole", number) == "acked"
        assert len(board.store.ledger.entries()) == ROUNDS
        assert board.stopped is None
    assert np.isfinite(whole.coordinator.engine.global_params).all()


def test_a_run_goes_to_its_end(whole: Whole) -> None:
    assert whole.drive(finished(whole))
    check_whole(whole)


MOMENTS: dict[str, Callable[[RoundEngine], bool]] = {
    "open": lambda engine: engine.plan is not None,
    "first update": lambda engine: engine.accepted > 0,
    "settled": lambda engine: engine.announcement.phase == "unmask",
    "first answer": lambda engine: bool(engine.store.answers(engine.closed_rounds + 1)),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_aggregator_is_killed(
    whole: Whole, prepared: PreparedTask, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hushfleet.aggregator.rounds.coordinator.EVENTS_A_STEP", 1)  # a step must not skip the moment
    for number in range(1, ROUNDS + 1):
        assert whole.drive(lambda: MOMENTS[moment](whole.coordinator.engine)), moment
        kill(whole, prepared)
        assert whole.drive(partial(has_closed, whole, number))
    check_whole(whole)


def has_closed(whole: Whole, number: int) -> bool:
    return whole.coordinator.engine.closed_rounds >= number


def test_boards_are_lost_after_their_upload(whole: Whole) -> None:
    engine = whole.coordinator.engine
    assert whole.drive(lambda: engine.announcement.phase == "unmask")
    whole.lose(whole.boards[3])
    assert whole.drive(lambda: engine.closed_rounds == 1)
    metrics = whole.coordinator.store.rounds()[0].metrics
    assert metrics is not None
    assert metrics["participants"] == BOARDS, "its update counts, although it never answered"
