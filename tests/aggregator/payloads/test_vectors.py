"""What a server half tells devices beside the model travels, is rounded, kept and checked as the model is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hushfleet import methods
from hushfleet.aggregator.payloads import prepare, published_model
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.methods.method import CLIP_AND_NOISE, Method, Published, TrainingConfig
from hushfleet.methods.server import ClosedRound, ServerArrays, ServerHalf
from hushfleet.wire.format.difference import apply_difference, params_digest
from support.fleet import LAYOUT

MakeFleet = Callable[..., Any]
D = LAYOUT.size
COUNTS = [layer.size for layer in LAYOUT.layers] * 2


@dataclass(frozen=True)
class Telling(ServerHalf):
    """Tells devices how the model has moved, summed up over the rounds and halved in each."""

    @property
    def vectors(self) -> tuple[str, ...]:
        return ("moved",)

    def advance(self, state: ServerArrays, closed: ClosedRound) -> ServerArrays:
        assert (closed.updates, closed.devices) == (3, 3)
        moved = state.get("moved", np.zeros_like(closed.before)) / 2 + closed.after - closed.before
        return {"moved": moved, "rounds": np.array(closed.round)}


METHOD = Method(stages=CLIP_AND_NOISE, server=Telling())


@pytest.fixture(autouse=True)
def telling(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Published("telling", "these tests", "a vector", TrainingConfig, lambda *_: METHOD)
    monkeypatch.setattr(methods, "METHODS", {**methods.METHODS, "telling": made})


def test_devices_reach_model_and_vector_by_one_difference(make_fleet: MakeFleet) -> None:
    fleet, plain = make_fleet(method="telling", rounds=4), make_fleet(method="dp-fedavg", rounds=4)
    held = np.append(fleet.engine.global_params, np.zeros(D, np.float32))
    expected = np.zeros(D)
    for _ in range(3):
        before = fleet.engine.global_params
        fleet.run_round()
        plain.run_round()
        plan, ref = fleet.engine.announcement, fleet.engine.model.differences.refs[-1]
        held = apply_difference(fleet.engine.find_blob(ref.digest), held, task=plan.task, counts=COUNTS)
        expected = expected / 2 + fleet.engine.global_params - before
        assert params_digest(held) == plan.global_digest
        assert plan.global_bytes == held.nbytes == len(fleet.engine.find_blob(plan.global_digest)) == 8 * D
        np.testing.assert_array_equal(held[:D], plain.engine.global_params, "a vector does not change the model")
        np.testing.assert_array_equal(held[D:], fleet.engine.progress.server_half.state["moved"])
        np.testing.assert_allclose(held[D:], expected, atol=0.05 * np.abs(expected).max())


@pytest.mark.parametrize("wire", [{}, {"downlink": "full"}])
def test_a_restart_at_every_step_ends_in_the_same_bits(make_fleet: MakeFleet, wire: dict[str, Any]) -> None:
    calm, restless = make_fleet(method="telling", wire=wire), make_fleet(method="telling", wire=wire)
    while not calm.engine.finished:
        calm.run_round()
    while not restless.engine.finished:
        restless.restart().open_round(restless.names)
        for name in restless.names:
            restless.restart()
            assert restless.engine.accept(name, restless.update(name).data).code == "accepted"
        restless.restart()
        restless.engine.close()
    model = restless.restart().model
    assert model.digest == calm.engine.global_digest
    assert model.vectors["moved"].any()
    np.testing.assert_array_equal(model.published, calm.engine.model.published)


def test_what_cannot_be_coded_is_offered_whole(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that was tested and told to the server half is the one that is published, whatever the vector is."""
    fleet, plain = make_fleet(method="telling"), make_fleet(method="dp-fedavg")
    make = published_model.make_difference

    def fails(before: np.ndarray, target: np.ndarray, **how: Any) -> Any:
        return None if target[D:].any() else make(before, target, **how)

    monkeypatch.setattr(published_model, "make_difference", fails)
    fleet.run_round()
    plain.run_round()
    assert fleet.open().differences == ()
    np.testing.assert_array_equal(fleet.engine.global_params, plain.engine.global_params)
    assert fleet.engine.model.vectors["moved"].any()


@pytest.mark.parametrize("wrong", [np.full(D, np.nan), np.zeros(D + 1)])
def test_a_vector_that_is_none_is_named(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, wrong: np.ndarray
) -> None:
    monkeypatch.setattr(Telling, "advance", lambda *_: {"moved": wrong})
    with pytest.raises(HushfleetError, match="the server's vector 'moved'"):
        make_fleet(method="telling").run_round()


def test_more_than_devices_fetch_is_refused(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = make_fleet(method="telling").prepared
    task, method = prepared.task, prepared.method
    prepare._check_published(task, method)
    monkeypatch.setattr(prepare, "MAX_BLOB_BYTES", 8 * D - 1)
    with pytest.raises(BadInput, match=f"1 vectors .*: {8 * D} bytes"):
        prepare._check_published(task, method)
    monkeypatch.setattr(prepare, "MAX_CHUNKS", 2)
    with pytest.raises(
        BadInput, match=f"wire.chunk_bytes = 61440: the model's {8 * D} bytes are 3 chunks, .* at least"
    ):
        prepare._check_published(task, method)
