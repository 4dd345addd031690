"""Privacy budgets and preferences of simulated devices: who has spent its own stops, and the fleet goes on."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.aggregator.results.events import EventLog
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.data.sets import load
from hushfleet.edge_client.board.config import load_config
from hushfleet.errors import BadInput, HushfleetError, PrivacyError
from hushfleet.methods.cost import RoundTerms
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.simulator.engines.fast.engine import ALL_SPENT, deliver, run_rounds
from hushfleet.simulator.engines.fast.partial_sum import LIKE
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.fleet import make_fleet
from hushfleet.simulator.model_files import write_models
from hushfleet.simulator.results import assemble, read_metrics
from hushfleet.simulator.run_folder import begin
from hushfleet.simulator.world.live import LiveFleet

ROUNDS = 8
DEVICES = 4
RATE, STEPS = 0.25, 4


def task_of(short_task: Any, *, rounds: int = ROUNDS, **privacy: Any) -> Any:
    return short_task(
        method={"name": "apdp-fl", "optimizer": "sgd", "learning_rate": 0.05, "batch_size": 20, "local_steps": STEPS},
        privacy={
            "unit": "record",
            "accounting": "strict",
            "clip_norm": 1.0,
            "noise_multiplier": 1.5,
            "sample_rate": RATE,
            "delta": 1e-5,
            **privacy,
        },
        data={"partition": "iid", "devices": DEVICES, "limit": 200},
        round={"rounds": rounds, "min_updates": 1},
    )


def spent_after(rounds: int, multiplier: float) -> float:
    return epsilon([Step(multiplier, RATE, STEPS * rounds)], delta=1e-5)


@pytest.mark.parametrize("runtime", ["onnx", "vmap"])
def test_devices_stop_at_their_own_budgets_and_the_run_ends_when_all_have(
    runs: Any, audit: Any, short_task: Any, tmp_path: Path, runtime: str
) -> None:
    task = task_of(short_task, budget=spent_after(2, 1.5) * 1.01, preference_std=0.25)
    simulation = runs.fast(begin(task, tmp_path / "run", data_dir=None), runtime=runtime)
    method = simulation.prepared.method
    took = Counter(update["device"] for update in audit.events(simulation, "update"))
    for device in simulation.fleet.devices:
        sigma = method.noise_multiplier(RoundTerms(preference=device.preference))  # as none scored, it did not fall
        may = sum(spent_after(rounds, sigma) <= task.privacy.budget for rounds in range(1, ROUNDS + 1))
        assert took[device.name] == may
        assert len(audit.ledger(simulation, device.name)) == may
    assert len(set(took.values())) > 1, "preferences made a difference"
    declines = audit.events(simulation, "decline")
    assert {event["code"] for event in declines} == {"budget"}
    assert {event["round"] for event in declines} >= {min(took.values()) + 1}
    assert audit.events(simulation, "finished")[-1]["reason"] == ALL_SPENT
    write_models(simulation)
    result = assemble(simulation, engine="fast")
    assert [row.participants for row in result.rounds] == [
        sum(count >= round for count in took.values()) for round in range(1, max(took.values()) + 2)
    ]
    assert {row.unit for row in result.privacy} == {"record"}
    for row in result.privacy:
        # What a device says of its own noise above the standard counts for its own ledger, and for no release.
        assert row.epsilon_server <= min(row.epsilon_release, task.privacy.budget)
    # It stays at its end, and the model is that of the last round with updates.
    before = audit.models(simulation)
    assert audit.models(runs.fast(runs.again(simulation), runtime=runtime)) == before


def test_a_resumed_run_knows_who_declined(
    runs: Any, audit: Any, short_task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(short_task, rounds=4, budget=spent_after(2, 1.5) * 1.01, preference_std=0.25)
    calm = runs.fast(begin(task, tmp_path / "calm", data_dir=None))
    simulation = begin(task, tmp_path / "run", data_dir=None)
    heard = 0

    def dies(*arguments: Any, **more: Any) -> None:
        nonlocal heard
        heard += 1
        if heard == 3 * math.ceil(DEVICES / LIKE):
            raise KeyboardInterrupt
        deliver(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr("hushfleet.simulator.engines.fast.engine.deliver", dies)
        with pytest.raises(KeyboardInterrupt):
            runs.fast(simulation)
    runs.fast(runs.again(simulation))
    assert audit.models(simulation) == audit.models(calm)
    with AggregatorStore(simulation.folder.aggregator) as one, AggregatorStore(calm.folder.aggregator) as other:
        assert one.declines() == other.declines()


def test_a_cohort_that_declines_for_another_reason_ends_the_run(
    runs: Any, short_task: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Training has diverged everywhere: that is no end to be silent about."""
    simulation = begin(task_of(short_task, rounds=1), tmp_path / "run", data_dir=None)
    monkeypatch.setattr("hushfleet.privacy.record.RecordMechanism.check_charged", _diverged)
    with pytest.raises(HushfleetError, match="round 1: no device takes part \\(no-privacy\\), since not finite"):
        runs.fast(simulation)


def _diverged(*_: object) -> None:
    raise PrivacyError("not finite")


def test_preferences_are_normal_around_one_within_limits_and_by_the_seed(short_task: Any) -> None:
    def preferences(**sections: Any) -> np.ndarray:
        task = task_of(short_task, preference_std=0.5, **sections)
        data = replace(task.data, devices=150, min_samples=2, limit=None)
        fleet = make_fleet(replace(task, data=data), load("digits"))
        return np.array([device.preference for device in fleet.devices])

    drawn = preferences()
    assert abs(drawn.mean() - 1) < 0.15
    assert 0.35 < drawn.std() < 0.6
    assert drawn.min() >= 0.2
    assert preferences().tolist() == drawn.tolist()


def test_budget_and_preference_reach_a_live_device(
    short_task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LiveFleet, "url_for", lambda fleet, device: "mqtt://localhost")
    simulation = begin(task_of(short_task, budget=3.5, preference_std=0.3), tmp_path / "run", data_dir=None)
    for device in simulation.fleet.devices:
        path = tmp_path / "device.toml"
        path.write_text(LiveFleet(simulation).device_config(device.name))
        limits = load_config(path).limits
        assert (limits.epsilon_server, limits.noise_preference, limits.delta) == (3.5, device.preference, 1e-5)
        assert limits.accounting == simulation.task.privacy.accounting, "simulated data have no owner"


def test_by_default_nothing_is_limited(calm: Any) -> None:
    assert {(d.epsilon_limit, d.preference) for d in calm.fleet.devices} == {(math.inf, 1.0)}


def test_preferences_need_a_method_that_allows_them(short_task: Any) -> None:
    with pytest.raises(BadInput, match=r"preference_std = 0\.3: .*all devices add the same noise"):
        short_task(privacy={"preference_std": 0.3})


def test_personalized_models_are_tested_in_the_last_rounds(runs: Any, short_task: Any, tmp_path: Path) -> None:
    simulation = begin(task_of(short_task, rounds=6), tmp_path / "run", data_dir=None)
    with Workers(1) as workers, EventLog(simulation.folder.events) as events:
        run_rounds(simulation, workers, events, evaluate_every=4, evaluate_last=2)
    metrics = read_metrics(simulation, simulation.fleet.devices[0].name)
    assert [round for round in sorted(metrics) if "accuracy_own_common" in metrics[round]] == [4, 5, 6]


def test_a_run_whose_first_round_nobody_can_pay_for_is_an_error(runs: Any, short_task: Any, tmp_path: Path) -> None:
    task = task_of(short_task, budget=spent_after(1, 1.5) / 2)
    with pytest.raises(HushfleetError, match=r"round 1: no device takes part \(budget\), since .* above its limit"):
        runs.fast(begin(task, tmp_path / "run", data_dir=None))


def test_rounds_that_too_few_can_pay_for_end_the_run(runs: Any, audit: Any, short_task: Any, tmp_path: Path) -> None:
    task = task_of(short_task, budget=4.0, preference_std=0.25)
    task = replace(task, round=replace(task.round, min_updates=DEVICES))
    simulation = runs.fast(begin(task, tmp_path / "run", data_dir=None))
    took = Counter(update["device"] for update in audit.events(simulation, "update"))
    assert audit.events(simulation, "finished")[-1]["reason"] == ALL_SPENT
    assert max(took.values()) <= min(took.values()) + 1, "nobody goes on to pay for rounds that cannot close"
