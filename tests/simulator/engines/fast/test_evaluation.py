"""Rounds that ask: against the truth, which a simulation knows, and against the epsilon that the task promises."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from hushfleet.aggregator.commands.second_opinion import second_opinion
from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.payloads.prepare import prepare
from hushfleet.aggregator.planning.evaluation_error import evaluation_error
from hushfleet.aggregator.results.answers import DEVIATIONS
from hushfleet.aggregator.results.result import Result
from hushfleet.aggregator.storage.checkpoints import Checkpoints
from hushfleet.data.held_out import is_held_out
from hushfleet.edge_client.board.config import DeviceConfig, OwnDataSection
from hushfleet.edge_client.board.drift import HeldOutTest, note_test
from hushfleet.edge_client.worker.trainer import DeviceRound
from hushfleet.errors import BadInput, Malformed
from hushfleet.methods import method_of
from hushfleet.methods.answer import right_answers
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.privacy.clipping import clip
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.engines.fast import engine
from hushfleet.simulator.engines.fast.chunks import Client, ClientChunk, trainer_for
from hushfleet.simulator.engines.fast.loaded_run import LoadedRun
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.fleet import Subset
from hushfleet.simulator.results import assemble
from hushfleet.simulator.run_folder import Simulation, begin
from hushfleet.simulator.world.on_boards import run_on_boards
from hushfleet.wire.format.question import QuestionSpec
from hushfleet.wire.format.spec import TaskSpec
from hushfleet.wire.format.update import read_header
from hushfleet.wire.format.update_values import decode_update
from support.device import config, make_bench, package  # noqa: F401
from support.edge import DEVICE, Bench, Package

DEVICES = 12


@pytest.fixture
def asking(runs: Any, tmp_path: Path) -> Callable[..., Simulation]:
    """Runs a task that asks, without training anybody alone."""

    def run(name: str = "run", **sections: Any) -> Simulation:
        return runs.fast(begin(parse_task(task_of(**sections)), tmp_path / name, data_dir=None))

    return run


def task_of(**sections: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "model": {"name": "linear", "features": "filters"},
        "method": {"name": "hush"},
        "privacy": {"accounting": "secure", "epsilon": 4.0, "delta": 1e-5},
        "data": {"name": "digits", "devices": DEVICES, "limit": 240, "partition": "iid", "test_fraction": 0},
        "round": {"rounds": 3},
    }
    seed = sections.pop("seed", 0)
    merged = {name: {**usual.get(name, {}), **sections.get(name, {})} for name in usual | sections}
    kept = {name: {key: v for key, v in table.items() if v is not None} for name, table in merged.items()}
    return {"name": "asking", "seed": seed, **kept}


def result_of(simulation: Simulation) -> Result:
    return assemble(simulation, engine="fast", local_only_models=[], runtime="onnx")


def truth(simulation: Simulation, round: int) -> np.ndarray:
    """Each device's accuracy with its personalized head, alone, and with the shared model; float64 `[devices, 3]`."""
    run = LoadedRun(simulation.folder.path, "onnx")
    params = Checkpoints(run.folder.aggregator, run.spec.model.layout, durable=False).read(round)
    rows = []
    for device in simulation.fleet.devices:
        right = right_answers(run.spec, params, run.train(device.name), run.held_out(device.name))
        assert right is not None
        rows.append(right.mean(axis=1))
    return np.array(rows)


@pytest.mark.parametrize("accounting", ["secure", "strict"])
def test_without_noise_the_answer_is_the_truth(asking: Callable[..., Simulation], accounting: str) -> None:
    simulation = asking(
        method={"name": "dp-fedavg"},
        privacy={"accounting": accounting, "epsilon": None, "noise_multiplier": 0.0, "clip_norm": 1.0},
        evaluation={"every": 2},
    )
    found = result_of(simulation).evaluations
    assert [row.round for row in found] == [3, 5]
    for row in found:
        own, alone, shared = truth(simulation, row.round).T
        gain = own - alone
        assert row.devices == DEVICES
        assert row.own.value == pytest.approx(own.mean(), abs=3e-3)
        assert row.gain.value == pytest.approx(gain.mean(), abs=3e-3)
        assert row.alone.value == pytest.approx(alone.mean(), abs=3e-3)
        assert row.shared.value == pytest.approx(shared.mean(), abs=1e-2)
        assert row.gaining.value == pytest.approx((np.sign(gain).mean() + 1) / 2, abs=3e-3)
        assert row.gain.error == pytest.approx(1.96 * gain.std() / np.sqrt(DEVICES), abs=2e-2), "no noise: the spread"


@pytest.mark.parametrize("accounting", ["secure", "strict"])
def test_training_and_evaluation_together_cost_what_the_task_says(
    asking: Callable[..., Simulation], audit: Any, accounting: str
) -> None:
    simulation = asking(
        method={"name": "hush" if accounting == "secure" else "dp-fedavg"},
        privacy={"accounting": accounting},
        evaluation={"share": 0.2, "every": 2},
    )
    (name, *_), result = [device.name for device in simulation.fleet.devices], result_of(simulation)
    steps = [
        Step(charge.noise_multiplier, 1.0, 1) for charge in (entry.charge for entry in audit.ledger(simulation, name))
    ]
    assert len(steps) == 5, "three rounds of training, two that ask"
    spent = epsilon(steps, delta=1e-5)
    assert 3.99 < spent <= 4.0 + 1e-6
    assert not second_opinion(steps, delta=1e-5, charged=spent).differs
    asked = [Step(steps[2].noise_multiplier, 1.0, 2)]
    assert sum(1 / each.noise_multiplier**2 for each in steps[:2] + steps[3:4]) == pytest.approx(
        4 * sum(each.steps / each.noise_multiplier**2 for each in asked), rel=1e-6
    ), "a fifth of the budget"
    for row in result.privacy:
        assert row.epsilon_server == pytest.approx(spent)
        assert row.rounds_charged == 5


def test_the_error_covers_the_truth(asking: Callable[..., Simulation]) -> None:
    """With the noise of three seeds; 2.5 of the 1.96 deviations would be beyond chance."""
    for seed in range(3):
        simulation = asking(f"run-{seed}", seed=seed, evaluation={"share": 0.3})
        (row,) = result_of(simulation).evaluations
        own, alone, shared = truth(simulation, row.round).mean(axis=0)
        for estimate, value in ((row.own, own), (row.alone, alone), (row.shared, shared), (row.gain, own - alone)):
            assert 0 < estimate.error < 1.5
            assert abs(estimate.value - value) < 2.5 * estimate.error


@pytest.mark.parametrize(("given", "share"), [(4.0, 0.3), (60.0, 0.5)], ids=["noise", "few samples"])
def test_the_error_that_is_predicted_before_is_the_spread_of_what_is_told(
    asking: Callable[..., Simulation], given: float, share: float
) -> None:
    """Over fleets with other samples and other noise. The deviation of 24 of them is within a third, 2.3 of its own;
    the error that each of them states has the noise of its spread in it, so it is larger."""
    asked = {"privacy": {"epsilon": given}, "round": {"rounds": 1}, "evaluation": {"share": share}}
    predicted = evaluation_error(parse_task(task_of(**asked)), devices=DEVICES, images=240 // DEVICES)
    assert predicted is not None
    told, errors = [], []
    for seed in range(24):
        (row,) = result_of(asking(f"run-{seed}", seed=seed, **asked)).evaluations
        told.append(row.gain.value)
        errors.append(row.gain.error / DEVIATIONS)
    assert np.mean(errors) == pytest.approx(predicted.standard_error, rel=0.15)
    assert np.std(told, ddof=1) == pytest.approx(predicted.standard_error, rel=0.34)


def test_what_is_held_out_changes_no_bit_of_any_model(
    asking: Callable[..., Simulation], runs: Any, tmp_path: Path
) -> None:
    """Labels of held-out samples are exchanged; training, personalized heads and heads alone stay, and the evaluation
    falls."""
    task = parse_task(
        task_of(
            method={"name": "dp-fedavg"},
            privacy={"noise_multiplier": 0.0, "epsilon": None, "clip_norm": 1.0},
            evaluation={},
        )
    )
    calm, other = (begin(task, tmp_path / name, data_dir=None) for name in ("calm", "other"))
    devices = []
    for device in other.fleet.devices:
        samples = device.train.samples
        held = is_held_out(samples, 0.2)
        assert 0 < held.sum() < len(held)
        changed = replace(samples, labels=np.where(held, (samples.labels + 1) % 10, samples.labels))
        devices.append(replace(device, train=Subset(changed, partial(np.arange, len(changed)))))
    other = replace(other, fleet=replace(other.fleet, devices=tuple(devices)))
    for simulation in (calm, other):
        runs.fast(simulation)
    rounds = task.round.rounds + 1
    models = [
        [model_of(simulation, round) for round in (rounds - 2, rounds - 1, rounds)] for simulation in (calm, other)
    ]
    assert np.array_equal(models[0], models[1])
    assert np.array_equal(models[0][1], models[0][2]), "a round that asks leaves the model as it is"
    (before,), (after,) = (result_of(simulation).evaluations for simulation in (calm, other))
    assert after.own.value < before.own.value - 0.3


@pytest.mark.parametrize("accounting", ["secure", "strict"])
def test_interrupted_in_a_round_that_asks_it_goes_on_to_the_same_answer(
    runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accounting: str
) -> None:
    task = parse_task(task_of(method={"name": "dp-fedavg"}, privacy={"accounting": accounting}, evaluation={}))
    calm = runs.fast(begin(task, tmp_path / "calm", data_dir=None))
    simulation, heard, deliver, chunks = begin(task, tmp_path / "run", data_dir=None), 0, engine.deliver, 3

    def dies(*arguments: Any, **more: Any) -> None:
        nonlocal heard
        heard += 1
        if heard == 3 * chunks + 2:
            raise KeyboardInterrupt
        deliver(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "deliver", dies)
        with pytest.raises(KeyboardInterrupt):
            runs.fast(simulation)
    runs.fast(runs.again(simulation))
    assert result_of(simulation).evaluations == result_of(calm).evaluations


def test_under_the_virtual_clock_it_answers_as_without(runs: Any, tmp_path: Path) -> None:
    task = parse_task(task_of(evaluation={}))
    calm, clocked = (begin(task, tmp_path / name, data_dir=None) for name in ("calm", "clocked"))
    runs.fast(calm)
    with Workers(1) as workers:
        run_on_boards(clocked, workers, mix=FleetMix.in_turn(["jetson-orin-nano"], DEVICES))
    assert result_of(clocked).evaluations == result_of(calm).evaluations


STATISTICS: dict[str, dict[str, Any]] = {
    "counts": {"kind": "counts", "most": 30},
    "mean": {"kind": "mean", "column": "20", "low": 0.0, "high": 255.0},
    "drift": {"kind": "drift"},
    "histogram": {"kind": "histogram", "column": "20", "low": 0.0, "high": 255.0, "bins": 4},
}


@pytest.mark.parametrize("kind", STATISTICS)
def test_a_statistic_without_noise_is_the_truth(asking: Callable[..., Simulation], kind: str) -> None:
    simulation = asking(
        model={"name": "linear", "features": None},
        method={"name": "dp-fedavg"},
        privacy={"epsilon": None, "noise_multiplier": 0.0, "clip_norm": 1.0},
        round={"rounds": 1},
        statistic=STATISTICS[kind],
    )
    found = result_of(simulation).statistic
    assert found is not None
    values = np.array([each.value for each in found.values])
    samples = [device.train.samples for device in simulation.fleet.devices]
    if kind == "drift":
        assert values == pytest.approx([0, 0], abs=0.01), "no owner lets a simulated device tell"
        return
    if kind == "counts":
        assert simulation.fleet.label_counts is not None
        assert values == pytest.approx([*simulation.fleet.label_counts.sum(0), 0], abs=0.1)
        assert found.names[-1] == "left out"
        return
    columns = [each.images.reshape(len(each), -1)[:, 20].astype(float) for each in samples]
    if kind == "mean":
        assert values == pytest.approx([np.mean([each.mean() for each in columns])], rel=1e-3)
    else:
        shares = [np.histogram(each, bins=4, range=(0, 255))[0] / len(each) for each in columns]
        assert values == pytest.approx(np.mean(shares, axis=0), abs=1e-3)
        assert found.names[0] == "0 to 63.75"


def test_a_statistic_has_its_epsilon_and_its_error(asking: Callable[..., Simulation]) -> None:
    simulation = asking(
        model={"name": "linear", "features": None},
        method={"name": "dp-fedavg"},
        privacy={"epsilon": 1.0},
        round={"rounds": 1},
        statistic=STATISTICS["counts"],
    )
    result, (row, *_) = result_of(simulation), result_of(simulation).privacy
    assert result.statistic is not None
    assert 0.99 < row.epsilon_server <= 1.0 + 1e-6
    assert simulation.fleet.label_counts is not None
    truth = [*simulation.fleet.label_counts.sum(0), 0]
    for found, value in zip(result.statistic.values, truth, strict=True):
        assert abs(found.value - value) < 2.5 * found.error


def test_an_evaluation_is_in_no_window_of_data(asking: Callable[..., Simulation], audit: Any) -> None:
    """It looks at all samples, so its charge counts for whoever appears in any window."""
    simulation = asking(privacy={"accounting": "strict"}, data={"window": "30d"}, evaluation={"every": 2})
    entries = audit.ledger(simulation, simulation.fleet.devices[0].name)
    assert [entry.window is None for entry in entries] == [
        simulation.prepared.spec.asks(entry.round) for entry in entries
    ]
    assert [entry.round for entry in entries if entry.window is None] == [3, 5]


QUESTIONS = {**STATISTICS, "evaluation": None}


@pytest.mark.parametrize("kind", QUESTIONS)
def test_a_board_answers_as_a_simulated_device_does(
    kind: str,
    make_bench: Callable[..., Bench],  # noqa: F811
    config: DeviceConfig,  # noqa: F811
    tmp_path: Path,
) -> None:
    """A board of an owner who lets it tell nothing, with the data of one device, and with a personalized head that
    fell."""
    statistic = QUESTIONS[kind]
    sections: dict[str, Any] = (
        {"evaluation": {"held_out": 0.5}} if statistic is None else {"statistic": statistic, "round": {"rounds": 1}}
    )
    features = {"name": "linear", "features": "filters" if statistic is None else None}
    noise = {"accounting": "strict", "epsilon": None, "noise_multiplier": 0.0, "clip_norm": 1.0}
    task = parse_task(task_of(model=features, privacy=noise, **sections))
    simulation = begin(task, tmp_path / "run", data_dir=None)
    prepared, name = simulation.prepared, simulation.fleet.devices[0].name
    simulation.write_samples()
    asked = Package(prepared.spec, prepared.spec.to_bytes(), prepared.blobs, prepared.initial)
    data = OwnDataSection("arrays", str(simulation.folder.device(name).train))
    bench = make_bench(
        package=asked, config=replace(config, data=data, limits=replace(config.limits, epsilon_server=math.inf))
    )
    for month, right in (("2026-01", 38), ("2026-02", 5)):
        note_test(bench.store.path.parent, HeldOutTest(month, right, 40))
    method = method_of(prepared.spec)
    bench.server.open_round(prepared.spec.rounds, cohort={DEVICE: method.init_state().public.digest()})
    bench.until(lambda: bool(bench.server.updates or bench.server.declines))
    (update,) = bench.server.updates
    count = read_header(update).value_count
    values = decode_update(update, public_key=bench.store.identity.public_key, counts=[count]).values
    plan = bench.agent.rounds.plan
    client = Client(name, index=0)
    chunk = ClientChunk(simulation.folder.path, "onnx", plan, seed=0, clients=[client], evaluate=False)
    told = DeviceRound(trainer_for(chunk, client, None), plan).answer_question(prepared.initial)
    assert values == pytest.approx(clip(told.update, 1.0), abs=1e-6)
    assert np.any(values) == (kind != "drift")


def test_a_question_that_fails_on_a_board_is_answered_by_noise_alone(
    make_bench: Callable[..., Bench],  # noqa: F811
    config: DeviceConfig,  # noqa: F811
) -> None:
    """The package asks for counts of samples, in a task of features: no task file can, but an aggregator."""
    prepared = prepare(parse_task(task_of(evaluation={}, privacy={"accounting": "strict"})), run_id="asked")
    question = QuestionSpec("counts", every=1, noise_multiplier=1e-3, most=50)
    plain = Package(prepared.spec, b"", prepared.blobs, prepared.initial)
    limits = replace(config.limits, epsilon_server=math.inf)
    bench = make_bench(package=plain.with_spec(rounds=1, question=question), config=replace(config, limits=limits))
    bench.server.open_round(1, cohort={DEVICE: method_of(prepared.spec).init_state().public.digest()})
    bench.until(lambda: bool(bench.server.updates or bench.server.declines))
    (update,) = bench.server.updates
    values = decode_update(update, public_key=bench.store.identity.public_key, counts=[11]).values
    assert np.abs(values).max() < 0.01
    assert [entry.charge.noise_multiplier for entry in bench.store.ledger.entries()] == [1e-3]


def test_a_package_that_asks_about_records_is_refused() -> None:
    """Whoever makes it: nothing but the unit `device` adds noise to an answer."""
    spec = prepare(parse_task(task_of(evaluation={})), run_id="asked").spec
    plain = msgpack.unpackb(spec.to_bytes())
    plain["privacy"] |= {"unit": "record"}
    with pytest.raises(
        Malformed, match="question = 'evaluation': must be of a task whose unit of privacy is the device"
    ):
        TaskSpec.from_bytes(msgpack.packb(plain))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"evaluation": {}, "privacy": {"unit": "record", "accounting": "strict", "epsilon": 2.0}}, "whole device"),
        (
            {"evaluation": {}, "model": {"name": "digits-cnn", "features": None}, "method": {"name": "dp-fedavg"}},
            "fixed features",
        ),
        ({"evaluation": {"held_out": 0.0}}, "without samples that never train"),
        ({"evaluation": {"share": 0.9}}, "evaluation.share"),
        (
            {"evaluation": {}, "privacy": {"accounting": "strict"}, "round": {"mode": "buffered", "buffer_size": 5}},
            "asks all devices",
        ),
        ({"statistic": {"kind": "mean"}}, "needs a column"),
        ({"statistic": {"kind": "counts"}}, "rounds = 1"),
    ],
)
def test_what_cannot_be_asked_is_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        parse_task(task_of(**sections))


def model_of(simulation: Simulation, round: int) -> np.ndarray:
    layout = simulation.prepared.spec.model.layout
    return Checkpoints(simulation.folder.aggregator, layout, durable=False).read(round)
