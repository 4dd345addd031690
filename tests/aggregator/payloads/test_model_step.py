"""New global models as differences: their precision, what is offered, after restarts too, and what a download costs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.aggregator.config.sections import WireSection
from hushfleet.aggregator.payloads.model_step import Noise, aggregate_noise_stds, download_bytes, make_difference
from hushfleet.wire.format.difference import apply_difference, params_digest, read_difference_header
from hushfleet.wire.format.messages import BASE_BYTES, RoundPlan
from hushfleet.wire.format.symbols import MAX_LEVEL

MakeFleet = Callable[..., Any]
COUNTS = [204, 52]


def chain_applied(fleet: Any, base: np.ndarray, plan: RoundPlan) -> np.ndarray:
    """What a device makes of a model that it holds, by the plan's differences."""
    chain = plan.differences_from([params_digest(base)])
    assert chain is not None
    for ref in chain:
        blob = fleet.engine.model.differences.find(ref.digest)
        assert (len(blob), hashlib.sha256(blob).digest()) == (ref.size, ref.digest)
        base = apply_difference(blob, base, task=plan.task, counts=COUNTS)
    return base


def test_the_new_model_is_the_old_one_and_the_difference(make_fleet: MakeFleet) -> None:
    fleet, exact = make_fleet(method="dp-fedavg"), make_fleet(method="dp-fedavg", wire={"downlink": "full"})
    models = [fleet.engine.global_params]
    while not fleet.engine.finished:
        fleet.run_round()
        models.append(fleet.engine.global_params)
        for old in models:
            plan = replace(fleet.engine.announcement, differences=fleet.engine.model.differences.refs)
            assert np.array_equal(chain_applied(fleet, old, plan), fleet.engine.global_params)
    exact.run_round()
    assert exact.open().differences == ()
    # half of the noise in the mean of three, on a whole vector: 0.5 x 2 / sqrt(3) / sqrt(3), and half a step of that
    allowed = 0.5 * (0.5 * 2 / 3) / 2
    away = np.abs(models[1] - exact.engine.global_params)
    assert allowed / 2 < away.max() <= allowed * (1 + 1e-5)


def play(fleet: Any, *names: str) -> RoundPlan:
    """A round in which only `names` are accepted; its plan."""
    plan = fleet.open()
    for name in names:
        assert fleet.engine.accept(name, fleet.update(name).data).code == "accepted"
    fleet.engine.close()
    return plan


def test_a_plan_offers_what_its_cohort_needs_oldest_first(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(rounds=9)
    bases = [fleet.engine.global_digest[:BASE_BYTES]]
    offered = []
    for names in (fleet.names, fleet.names[:2], fleet.names[:2], fleet.names, fleet.names[:1]):
        plan = play(fleet, *names)
        bases.append(fleet.engine.global_digest[:BASE_BYTES])
        offered.append([bases.index(ref.base) for ref in plan.differences])
    # after the first round everybody has its model; dev-2 has it still when the fourth opens, and then a newer one
    assert offered == [[], [0], [0, 1], [0, 1, 2], [3]]
    assert [bases.index(ref.base) for ref in fleet.open(["dev-0"]).differences] == [4]
    assert fleet.restart().plan.differences == fleet.engine.model.differences.refs[-1:]


def test_strangers_are_offered_the_last_difference_only(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(rounds=4)
    for _ in range(3):
        play(fleet, "dev-0")
    assert len(fleet.open(["dev-1", "dev-2"]).differences) == 1


def test_no_more_are_kept_than_are_cheaper_than_the_model(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(rounds=6)
    while not fleet.engine.finished:
        plan = play(fleet, *fleet.names[fleet.engine.closed_rounds > 0 :])
        kept = fleet.engine.model.differences.refs
        assert sum(ref.size for ref in plan.differences) <= sum(ref.size for ref in kept) < plan.global_bytes
    assert len(kept) < 6, "1,024 bytes of a model are soon outweighed"
    assert fleet.engine.announcement.differences == ()
    assert [digest for digest, _ in fleet.store.differences()] == [ref.digest for ref in reversed(kept)]


@pytest.mark.parametrize("wire", [{"downlink": "full"}, {"codec": "float32"}])
def test_full_models_where_they_are_asked_for(make_fleet: MakeFleet, wire: dict[str, Any]) -> None:
    fleet = make_fleet(wire=wire)
    fleet.run_round()
    assert fleet.open().differences == ()
    assert fleet.store.differences() == []


def test_too_few_updates_make_no_difference_and_break_no_chain(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(rounds=4, min_updates=2)
    first = fleet.engine.global_params
    fleet.run_round()
    play(fleet, "dev-0")
    play(fleet, "dev-0", "dev-1")
    plan = fleet.open()
    assert len(plan.differences) == 2, "dev-2 is where it was"
    assert np.array_equal(chain_applied(fleet, first, plan), fleet.engine.global_params)


def test_differences_are_offered_after_a_restart_but_not_those_that_are_damaged(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(rounds=5)
    fleet.run_round()
    for _ in range(2):
        play(fleet, "dev-0")
    plan = fleet.open()
    assert len(plan.differences) == 3
    assert fleet.restart().plan == plan
    assert [fleet.engine.model.differences.find(ref.digest) is not None for ref in plan.differences] == [True] * 3
    digest, data = fleet.store.differences()[1]
    fleet.store.put_difference(2, digest, data[:-1] + bytes([data[-1] ^ 1]))
    assert fleet.restart().plan.differences == plan.differences[2:], "the oldest leads nowhere any more"
    fleet.store.put_difference(3, digest, b"")
    assert fleet.restart().plan.differences == ()
    for name in fleet.names:
        fleet.engine.accept(name, fleet.update(name).data)
    fleet.engine.close()
    assert len(fleet.open().differences) == 1


def test_a_difference_of_a_close_that_was_interrupted_is_not_offered(make_fleet: MakeFleet) -> None:
    fleet, calm = make_fleet(), make_fleet()
    for each in (fleet, calm):
        each.run_round()
        each.open()
        for name in each.names:
            each.engine.accept(name, each.update(name).data)
    calm.engine.close()
    fleet.store.put_difference(2, *calm.store.differences()[0])
    plan = fleet.engine.plan
    assert fleet.restart().plan == plan
    fleet.engine.close()
    assert fleet.engine.global_digest == calm.engine.global_digest
    assert fleet.engine.model.differences.refs == calm.engine.model.differences.refs


def test_what_cannot_be_coded_is_offered_whole(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = make_fleet()
    fleet.run_round()
    monkeypatch.setattr("hushfleet.aggregator.payloads.model_step.MAX_STEP", 2.0**-99)
    fleet.run_round()
    assert fleet.open().differences == ()
    assert fleet.store.differences() == []
    assert fleet.restart().plan.differences == ()


def test_downloads_are_counted_as_devices_make_them(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(rounds=3)
    assert fleet.run_round().downlink_bytes == 3 * 1024, "newcomers"
    plan = fleet.open()
    for name in ("dev-0", "dev-1"):
        fleet.engine.accept(name, fleet.update(name).data)
    (first,) = plan.differences
    assert fleet.engine.close().downlink_bytes == 2 * first.size
    fleet.restart()
    fleet.devices.names.append("dev-new")
    fleet.devices.names.remove("dev-1")
    fleet.devices.identities["dev-new"] = fleet.devices.identities["dev-1"]
    fleet.devices.states["dev-new"] = fleet.prepared.method.init_state()
    fleet.devices.charged["dev-new"] = 0
    fleet.devices.enrol(fleet.store)
    plan = fleet.open()
    for name in fleet.names:
        assert fleet.engine.accept(name, fleet.update(name).data).code == "accepted"
    second = plan.differences[-1]
    # dev-0 took part in both rounds, dev-2 in the first only, dev-new in none
    assert fleet.engine.close().downlink_bytes == second.size + (first.size + second.size) + 1024


def test_a_model_that_did_not_change_is_held_already(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    plan = fleet.open()
    assert download_bytes(plan, plan.global_digest) == 0
    assert download_bytes(plan, bytes(32)) == download_bytes(plan, None) == 1024


@given(
    data=st.lists(st.tuples(st.floats(0.01, 4), st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=20),
    random=st.randoms(use_true_random=False),
)
def test_noise_in_the_mean_by_the_textbook_in_any_order(data: list[tuple[float, ...]], random: Any) -> None:
    updates = [Noise(weight, stds) for weight, *stds in data]
    found = aggregate_noise_stds(updates, layers=2)
    total = sum(weight for weight, _, _ in data)
    for layer in (0, 1):
        variance = sum((update.weight / total * update.stds[layer]) ** 2 for update in updates)
        assert found[layer] == pytest.approx(math.sqrt(variance), rel=1e-9)
    random.shuffle(updates)
    assert aggregate_noise_stds(updates, layers=2) == found


def test_steps_follow_the_noise_or_else_the_change_and_never_overflow() -> None:
    rng = np.random.default_rng(1)
    before = rng.normal(size=4000).astype(np.float32)
    change = np.zeros(4000, np.float32)
    change[:1000] = rng.normal(0, 0.1, 1000)
    change[1000:1500] = rng.normal(0, 0.2, 500)  # half of this layer stays
    change[3000] = 1e6
    wire = WireSection(downlink_step=0.25, relative_step=0.1)
    made = make_difference(
        before, before + change, task="t", round=1, counts=[1000] * 4, noise_stds=[0.1, 0, 0, 1e-9], wire=wire
    )
    steps = read_difference_header(made.data).steps
    assert steps[0] == pytest.approx(0.25 * 0.1)
    moved = ((before + change).astype(np.float64) - before)[1000:1500]
    assert steps[1] == pytest.approx(0.1 * np.sqrt(np.mean(moved**2)))
    assert steps[2] == 0
    assert steps[3] == pytest.approx(2e6 / MAX_LEVEL, rel=1e-3)
    assert np.array_equal(made.result[1500:3000], before[1500:3000])
    assert np.abs(made.result - before - change)[:1000].max() <= steps[0] / 2 * 1.001


@pytest.mark.parametrize("rate", [0.3, 0.01])
def test_a_model_that_moves_by_less_than_the_mean_is_not_rounded_off(rate: float) -> None:
    """As by `method.server_learning_rate`: the step of the mean's noise would leave the model as it is."""
    rng = np.random.default_rng(2)
    before = rng.normal(size=4000).astype(np.float32)
    target = (before + rate * rng.normal(0.3, 1.0, 4000)).astype(np.float32)
    made = make_difference(before, target, task="t", round=1, counts=[4000], noise_stds=[1.0], wire=WireSection())
    assert np.mean(made.result - before) == pytest.approx(np.mean(target - before), rel=0.1)
    assert np.sqrt(np.mean(np.square(made.result - target))) < 0.35 * rate
