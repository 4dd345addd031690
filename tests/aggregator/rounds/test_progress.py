"""What closed rounds leave is read again from the store as it was, and a close that fails leaves nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hushfleet.aggregator.rounds.progress import Progress
from hushfleet.errors import StoreFull


def left_by(progress: Progress) -> tuple[Any, ...]:
    server = {name: array.tobytes() for name, array in progress.server_half.state.items()}
    offered = [each.digest for each in progress.model.differences.refs]
    return progress.closed_rounds, progress.model.digest, offered, progress.trained_on, server


@pytest.mark.parametrize("method", ["fedglp-adp", "acdp-pfsd"])
def test_a_new_process_has_what_the_last_one_had(make_fleet: Callable[..., Any], method: str) -> None:
    fleet = make_fleet(method=method)
    for _ in range(2):
        fleet.run_round()
        again = Progress(fleet.store, fleet.prepared)
        assert left_by(again) == left_by(fleet.engine._progress)
        np.testing.assert_array_equal(again.model.params, fleet.engine.global_params)
    assert again.closed_rounds == 2
    assert set(again.trained_on) == set(fleet.names)


def test_a_round_that_cannot_be_stored_changes_nothing_and_closes_later(
    make_fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, calm = make_fleet(), make_fleet()
    for each in (fleet, calm):
        each.engine.open_round(each.names)
        for name in each.names:
            assert each.engine.accept(name, each.update(name).data).acknowledged
    before = left_by(fleet.engine._progress)

    def full(*_: object, **__: object) -> None:
        raise StoreFull("no space")

    with monkeypatch.context() as patch:
        patch.setattr(fleet.store, "close_round", full)
        with pytest.raises(StoreFull):
            fleet.engine.close()
    assert left_by(fleet.engine._progress) == left_by(Progress(fleet.store, fleet.prepared)) == before
    fleet.engine.close()
    calm.engine.close()
    assert left_by(fleet.engine._progress) == left_by(calm.engine._progress)
