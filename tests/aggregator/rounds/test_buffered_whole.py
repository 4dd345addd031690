"""Buffered rounds with a real aggregator and real boards that are hardly ever there together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.simulator.world.hub import LocalHub
from support.whole import Board, Whole, prepared_digits


@pytest.fixture(scope="module")
def prepared() -> PreparedTask:
    found = prepared_digits("buffered")
    rules = replace(found.task.round, mode="buffered", buffer_size=2, max_staleness=2, min_devices=None)
    return replace(found, task=replace(found.task, round=rules))


@pytest.fixture
def whole(tmp_path: Path, prepared: PreparedTask) -> Iterator[Whole]:
    bench = Whole(tmp_path, LocalHub().link)
    bench.begin(prepared)
    yield bench
    bench.close()


def awake(whole: Whole, name: str, round: int) -> None:
    """The board wakes up, trains the version that is open, and is switched off again."""
    board = whole.board(name)

    def handed_in() -> bool:
        return whole.coordinator.store.update(round, name) is not None

    assert whole.drive(handed_in), (name, round, board.stopped)
    whole.lose(board)


def test_boards_that_never_meet_train_a_model(whole: Whole, prepared: PreparedTask) -> None:
    for round in (1, 2, 3):
        awake(whole, "dawn", round)
        whole.end()
        whole.begin(prepared)  # the aggregator is killed with half a buffer
        assert whole.coordinator.engine.accepted == 1
        awake(whole, "dusk", round)
        assert whole.drive(lambda round=round: whole.coordinator.engine.closed_rounds == round)
    store = whole.coordinator.store
    assert whole.coordinator.engine.finished
    assert [row.metrics["participants"] for row in store.rounds() if row.metrics] == [2, 2, 2]
    assert len(store.charges()) == 6


def test_a_board_whose_link_is_cut_hands_in_a_stale_update(whole: Whole) -> None:
    slow: Board = whole.board("slow")
    assert whole.drive(lambda: slow.store.outbox("digits-buffered", 1) is not None)
    whole.lose(slow)  # it has committed, and nothing has come
    assert whole.coordinator.store.update(1, "slow") is None
    for name in ("dawn", "dusk"):
        awake(whole, name, 1)
    assert whole.drive(lambda: whole.coordinator.engine.closed_rounds == 1)
    awake(whole, "slow", 1)
    (row,) = whole.coordinator.store.updates(2)
    assert (row.device, row.round) == ("slow", 1)
