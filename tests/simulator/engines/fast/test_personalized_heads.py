"""After the last round of a linear model: personalized heads in store, metrics, result and ONNX files; and who is
alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.results.events import EventLog
from hushfleet.aggregator.results.gains import common_test
from hushfleet.aggregator.storage.checkpoints import Checkpoints
from hushfleet.data.samples import FeatureSamples
from hushfleet.errors import BadInput
from hushfleet.learning.evaluation import evaluate
from hushfleet.learning.personalized_head import own_logits, personalized_head_of
from hushfleet.simulator import run_folder
from hushfleet.simulator.cohort_store import CohortStore
from hushfleet.simulator.engines.fast import after_round, local_only, personalized_heads
from hushfleet.simulator.engines.fast.device import store_of
from hushfleet.simulator.engines.fast.engine import run_logged, run_rounds
from hushfleet.simulator.engines.fast.loaded_run import loaded_run
from hushfleet.simulator.engines.fast.local_only import train_local_only
from hushfleet.simulator.engines.fast.local_only_on_features import (
    AccuracyByWay,
    accuracies,
    best_way,
    predict_local_only,
)
from hushfleet.simulator.engines.fast.personalized_heads import choose_personalized_heads
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.model_files import write_models
from hushfleet.simulator.results import assemble, read_metrics
from hushfleet.simulator.run_folder import RunFolder, Simulation, begin, repeated
from hushfleet.simulator.sweep import noise_point, sweep_noise
from support.report_samples import told

DEVICES, ROUNDS = 4, 2
ROUND = {"rounds": 1, "min_updates": 3}


@pytest.fixture(scope="module")
def run(short_task: Any, tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    task = short_task(
        model={"name": "linear"},
        method={"name": "dp-fedavg", "optimizer": "sgd", "learning_rate": 0.1, "batch_size": 64, "local_epochs": 5},
        data={"devices": DEVICES, "limit": 200, "test_fraction": 0.0, "partition": "iid"},
        round={"rounds": ROUNDS, "min_updates": DEVICES},
    )
    simulation = begin(task, tmp_path_factory.mktemp("linear") / "run", data_dir=None)
    with Workers(1) as workers, EventLog(simulation.folder.events) as events:
        run_rounds(simulation, workers, events)
        choose_personalized_heads(simulation, workers)
    return simulation


def test_a_device_keeps_the_head_that_its_images_choose_with_the_final_model(run: Simulation) -> None:
    spec = run.prepared.spec
    final = Checkpoints(run.folder.aggregator, spec.model.layout, durable=False).read(ROUNDS)
    for device in run.fleet.devices:
        expected = personalized_head_of(final, spec.model.layout, device.train.samples, spec.signal)
        with store_of(run.folder, device.name) as store:
            kept = store.own_params(spec.task)
        assert kept is not None
        np.testing.assert_array_equal(kept, expected.params)
        line = read_metrics(run, device.name)[ROUNDS]
        common, local = (
            evaluate(own_logits, kept, each) for each in (run.fleet.common_test, device.local_test.samples)
        )
        assert (line["accuracy_own_common"], line["loss_own_common"]) == common[:2]
        assert line["accuracy_own_local"] == local.accuracy
        assert line["loss_own_local"] == pytest.approx(local.loss, rel=1e-6), (
            "a product of other rows may round otherwise"
        )


def test_the_result_has_what_the_heads_reach(run: Simulation) -> None:
    with Workers(1) as workers:
        alone = list(train_local_only(run, workers))
    result = assemble(run, engine="fast", local_only_models=alone)
    first, last = result.rounds
    assert first.accuracy_own_common is None
    assert last.accuracy_own_common is not None
    assert last.accuracy_own_local is not None
    assert [head.images for head in result.details.own_heads] == [len(d.train) for d in run.fleet.devices]
    assert result.details.local_test_images == [len(d.local_test) for d in run.fleet.devices]
    assert result.local_only.way != ""
    assert result.local_only.accuracy_own_common > 0.5
    gain = common_test(result).gain
    assert gain.mean == pytest.approx(last.accuracy_global - result.local_only.accuracy_own_common)
    point = noise_point(result)
    assert (point.noise_multiplier, point.gain_over_local_only) == (0.3, gain.mean)
    assert point.gain_standard_error == gain.standard_error > 0


def test_the_onnx_file_of_a_device_is_its_chosen_head(run: Simulation) -> None:
    device, x = run.fleet.devices[0], run.fleet.common_test.take(slice(0, 40)).x
    files = {file.stem: file for file in write_models(run)}
    with store_of(run.folder, device.name) as store:
        params = store.own_params(run.prepared.spec.task)
    (found,) = onnxruntime.InferenceSession(files[device.name]).run(["logits"], {"x": x})
    np.testing.assert_allclose(found, run.prepared.inference(params, x), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_points_of_a_sweep_have_heads_too(run: Simulation) -> None:
    with Workers(1) as workers:
        alone, rounds = list(train_local_only(run, workers)), partial(run_logged, workers=workers)
        (point,) = sweep_noise(run, workers, [1.0], alone, rounds=rounds)
    assert point.accuracy_own_common is not None
    assert point.gain_standard_error > 0


def test_in_a_large_fleet_a_random_part_is_tested_with_the_same_results(
    run: Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads are also kept for the first devices, tested or not; one group or several make no difference."""
    way = "nearest neighbour"  # the best way depends on who is tested
    monkeypatch.setattr(local_only, "best_way", lambda found: way)
    with Workers(1) as workers:
        whole = assemble(run, engine="fast", local_only_models=list(train_local_only(run, workers)))
    monkeypatch.setattr(run_folder, "MOST_TESTED", 2)
    monkeypatch.setattr(personalized_heads, "MOST_SHOWN", 3)  # at least one of them is not tested
    monkeypatch.setattr(after_round, "AT_ONCE", 1)
    again = repeated(run, run.task, RunFolder(tmp_path / "run"))
    tested = [device.index for device in again.tested]
    assert len(tested) == 2
    with Workers(1) as workers, EventLog(again.folder.events) as events:
        run_rounds(again, workers, events)
        choose_personalized_heads(again, workers)
        alone = list(train_local_only(again, workers))
    assert [one.device for one in alone] == [device.name for device in again.tested]
    kept = CohortStore.read(again.folder.cohort)
    assert [bool(kept.carried(device.index).head) for device in again.fleet.devices] == [True, True, True, False]
    result = assemble(again, engine="fast", local_only_models=alone)
    for name in ("own_heads", "local_only_common", "local_only_local"):
        every, some = getattr(whole.details, name), getattr(result.details, name)
        assert some == [every[index] if index in tested else None for index in range(DEVICES)], name
    for name in ("accuracy_own_common", "accuracy_own_local"):
        every, some = getattr(whole.details, name)[-1], getattr(result.details, name)[-1]
        assert some == [every[index] if index in tested else None for index in range(DEVICES)], name
    assert common_test(result).gain.count == 2
    loaded = loaded_run(again.folder.path.absolute(), "onnx")
    for one in alone:  # its own test is a part of the common one
        train, own_test = loaded.train(one.device), loaded.local_test(one.device)
        assert (
            accuracies(*predict_local_only([train], own_test, classes=10), own_test.labels)[way] == one.accuracy_local
        )


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4), shown=st.integers(0, 300), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_devices_alone_are_predicted_together_as_each_by_itself(sizes: list[int], shown: int, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def of(count: int) -> FeatureSamples:
        features = rng.normal(size=(count, 5, 1, 1)).astype(np.float32)
        return FeatureSamples(features, rng.integers(0, 3, count))

    trains, test = [of(size) for size in sizes], of(shown)
    for train, found in zip(trains, predict_local_only(trains, test, classes=3), strict=True):
        (single,) = predict_local_only([train], test, classes=3)
        assert {way: said.tolist() for way, said in found.items()} == {way: s.tolist() for way, s in single.items()}


def test_neighbours_and_class_means_by_hand() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 5)).astype(np.float32), rng.integers(0, 3, 12)
    shown, labels = rng.normal(size=(300, 5)).astype(np.float32), rng.integers(0, 3, 300)

    def of(features: np.ndarray, named: np.ndarray) -> FeatureSamples:
        return FeatureSamples(features[:, :, None, None], named)

    found, empty = reached_alone(of(x, y), [of(shown, labels), of(shown[:0], labels[:0])], classes=4)
    nearest = [y[np.argmin(np.linalg.norm(x - each, axis=1))] for each in shown]
    means = {label: x[y == label].mean(0) for label in set(y)}
    by_mean = [min(means, key=lambda label, each=each: np.linalg.norm(means[label] - each)) for each in shown]
    assert found["nearest neighbour"] == np.mean(nearest == labels)
    assert found["nearest class mean"] == np.mean(by_mean == labels)
    assert len(found) == 5
    assert all(np.isnan(value) for value in empty.values())


def test_the_best_way_is_the_fleets() -> None:
    ways = [{f"softmax regression (penalty {p:g})": 0.1 for p in (0.01, 0.001, 0.0001)} for _ in range(2)]
    for each, neighbour, mean in zip(ways, (0.9, 0.1), (0.4, 0.7), strict=True):
        each |= {"nearest neighbour": neighbour, "nearest class mean": mean}
    assert best_way(ways) == "nearest class mean"


def reached_alone(train: FeatureSamples, tests: list[FeatureSamples], *, classes: int) -> list[AccuracyByWay]:
    return [accuracies(*predict_local_only([train], test, classes=classes), test.labels) for test in tests]


def test_who_has_no_images_reaches_nothing_alone() -> None:
    none = FeatureSamples(np.zeros((0, 5, 1, 1), np.float32), np.zeros(0, np.int64))
    (found,) = reached_alone(none, [none], classes=3)
    assert all(np.isnan(value) for value in found.values())


def test_plain_vectors_in_any_unit_are_learned_and_personalized_heads_are_no_worse(
    short_task: Any, tmp_path: Path
) -> None:
    """Values of some hundreds with a mean far from zero, and a task that gives neither mean nor deviation."""
    rng = np.random.default_rng(0)
    centres, mean = rng.normal(0, 1, (4, 30)), rng.normal(0, 3, 30)
    y, test_y = np.arange(240) % 4, np.arange(400) % 4
    x, test_x = (50 * (centres[each] + rng.normal(0, 1.6, (len(each), 30)) + mean) for each in (y, test_y))
    arrays = {"train_x": x, "train_y": y, "test_x": test_x, "test_y": test_y}
    np.savez(
        tmp_path / "own.npz",
        **{name: each.astype(np.float32) if "x" in name else each for name, each in arrays.items()},
    )
    task = parse_task(
        {
            "name": "vectors",
            "model": {"name": "linear"},
            "method": {"name": "hush"},
            "privacy": {"accounting": "secure", "epsilon": 8, "honest_fraction": 1},
            "data": {
                "name": "arrays",
                "path": str(tmp_path / "own.npz"),
                "devices": 12,
                "mean": [0] * 30,
                "std": [1] * 30,
            }
            | {"partition": "iid", "test_fraction": 0},
            "round": {"rounds": 4},
        }
    )
    simulation = begin(task, tmp_path / "run", data_dir=None)
    with Workers(1) as workers, EventLog(simulation.folder.events) as events:
        run_rounds(simulation, workers, events, evaluate_every=4)
        choose_personalized_heads(simulation, workers)
        result = assemble(simulation, engine="fast", local_only_models=list(train_local_only(simulation, workers)))
    last, alone = result.rounds[-1], result.local_only.accuracy_own_common
    assert last.accuracy_global > 0.75, "without norm 1 two thirds, with other noise a third"
    assert last.accuracy_own_common > max(last.accuracy_global, alone) - 0.01
    assert alone > 0.85
    [path, *_] = write_models(simulation)  # a model file takes the vectors
    shown = simulation.fleet.common_test.x
    logits = onnxruntime.InferenceSession(path).run(["logits"], {"x": shown})[0]
    assert np.mean(logits.argmax(1) == test_y) == pytest.approx(last.accuracy_global, abs=0.01)


def test_another_network_leaves_no_choice(calm: Simulation, tmp_path: Path) -> None:
    with Workers(1) as workers:
        choose_personalized_heads(calm, workers)
    assert assemble(calm, engine="fast").details.own_heads == []


def test_images_without_labels_are_others_than_any_device_has(
    short_task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"devices": 3, "limit": 90, "test_fraction": 0.0, "partition": "iid", "unlabelled": 12}
    task = short_task(model={"name": "linear"}, method={"name": "dp-fedavg"}, data=data, round=ROUND)
    simulation = begin(task, tmp_path / "run", data_dir=None)
    held = {image.tobytes() for device in simulation.fleet.devices for image in device.train.samples.images}
    run = loaded_run(simulation.folder.path, "onnx")
    for device in simulation.fleet.devices:
        shown = run.unlabelled(device.name)
        assert (len(shown), shown.labels.any()) == (12, False)
        assert held.isdisjoint(image.tobytes() for image in shown.images)
    with Workers(1) as workers, EventLog(simulation.folder.events) as events:
        run_rounds(simulation, workers, events)
        monkeypatch.setattr(personalized_heads, "takes_unlabelled", lambda signal, classes: True)
        choose_personalized_heads(simulation, workers)
    result = assemble(simulation, engine="fast")
    assert [head.unlabelled for head in result.details.own_heads] == [12, 12, 12]
    assert "12 samples without labels have half of a head" in told(result, "own_heads")


def test_too_few_images_for_those_without_labels_are_said(short_task: Any, tmp_path: Path) -> None:
    task = short_task(model={"name": "linear"}, data={"devices": 3, "unlabelled": 5000}, round=ROUND)
    with pytest.raises(BadInput, match=r"data\.unlabelled = 5000.*data\.limit"):
        begin(task, tmp_path / "run", data_dir=None)
