"""What closed rounds leave is read again from the store as it was, and a close that fails leaves nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hushfleet as hf
from hushfleet.aggregator.payloads.prepare import prepare
from hushfleet.aggregator.rounds.policy import rises_no_more
from hushfleet.aggregator.rounds.progress import TaskProgress
from hushfleet.aggregator.rounds.round_events import finished_fields
from hushfleet.errors import BadInput, StoreFull
from hushfleet.learning.evaluation import Evaluation


def left_by(progress: TaskProgress) -> tuple[Any, ...]:
    server = {name: array.tobytes() for name, array in progress.server_half.state.items()}
    offered = [each.digest for each in progress.model.differences.refs]
    return progress.closed_rounds, progress.model.digest, offered, progress.trained_on, server


@pytest.mark.parametrize("method", ["fedglp-adp", "acdp-pfsd"])
def test_a_new_process_has_what_the_last_one_had(make_fleet: Callable[..., Any], method: str) -> None:
    fleet = make_fleet(method=method)
    for _ in range(2):
        fleet.run_round()
        again = TaskProgress(fleet.store, fleet.prepared)
        assert left_by(again) == left_by(fleet.engine.progress)
        np.testing.assert_array_equal(again.model.params, fleet.engine.global_params)
    assert again.closed_rounds == 2
    assert set(again.trained_on) == set(fleet.names)


def test_a_task_with_patience_ends_when_the_model_becomes_no_better(make_fleet: Callable[..., Any]) -> None:
    """By what the aggregator measures on its own test set, kept in its store; restarts forget nothing of it."""
    found = iter([0.2, 0.5, 0.4, 0.6, 0.6, 0.5, 0.9])
    fleet = make_fleet(rounds=10, patience=2, evaluate=lambda params: Evaluation(next(found), 1.0))
    for _ in range(5):
        fleet.run_round()
        assert not fleet.restart().finished
    fleet.run_round()
    assert fleet.engine.finished
    engine = fleet.restart()
    assert (engine.finished, engine.closed_rounds, engine.announcement.phase) == (True, 6, "finished")
    assert "for 2 rounds" in finished_fields(engine)["reason"]
    with pytest.raises(BadInput, match="no round can be opened"):
        fleet.open()


@pytest.mark.parametrize(
    ("accuracies", "patience", "ends"),
    [
        ([0.1, 0.2], 2, False),
        ([0.2, 0.1, 0.2], 2, True),
        ([0.2, 0.1, 0.3], 2, False),
        ([0.2, None, None], 2, True),
        ([None, None, None], 2, True),
        ([None, 0.1], 1, False),
        ([0.2, 0.1, 0.1, 0.1], 0, False),
    ],
)
def test_what_counts_as_no_better(accuracies: list[float | None], patience: int, ends: bool) -> None:
    assert rises_no_more(accuracies, patience) is ends


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"round.patience": 10}, "must be below rounds = 10"),
        (
            {"round.patience": 2, "method.name": "hush", "model.name": "linear", "model.features": "filters"},
            "'hush' ends",
        ),
    ],
)
def test_patience_that_ends_nothing_is_refused(changes: dict[str, Any], said: str) -> None:
    task = {"name": "t", "model": {"name": "digits-cnn"}, "method": {"name": "dp-fedavg"}, "data": {"name": "digits"}}
    with pytest.raises(BadInput, match=said):
        hf.task(task, {"round.rounds": 10, **changes})


def test_patience_without_public_test_data_is_refused() -> None:
    task = {
        "name": "t",
        "model": {"name": "digits-cnn"},
        "method": {"name": "dp-fedavg"},
        "data": {"name": "folder", "class_names": ["a", "b"], "input_shape": [1, 8, 8], "devices": 3},
        "round": {"patience": 2},
    }
    with pytest.raises(BadInput, match="needs public test data on the aggregator"):
        prepare(hf.task(task))


def test_a_round_that_cannot_be_stored_changes_nothing_and_closes_later(
    make_fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, calm = make_fleet(), make_fleet()
    for each in (fleet, calm):
        each.engine.open_round(each.names)
        for name in each.names:
            assert each.engine.accept(name, each.update(name).data).acknowledged
    before = left_by(fleet.engine.progress)

    def full(*_: object, **__: object) -> None:
        raise StoreFull("no space")

    with monkeypatch.context() as patch:
        patch.setattr(fleet.store, "close_round", full)
        with pytest.raises(StoreFull):
            fleet.engine.close()
    assert left_by(fleet.engine.progress) == left_by(TaskProgress(fleet.store, fleet.prepared)) == before
    fleet.engine.close()
    calm.engine.close()
    assert left_by(fleet.engine.progress) == left_by(calm.engine.progress)
