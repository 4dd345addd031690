"""Tasks whose targets are no classes: what is refused at start; and from arrays to the report, by each engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import hushfleet as hf
from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.aggregator.payloads.prepare import prepare
from hushfleet.aggregator.results.gains import common_test
from hushfleet.aggregator.results.result import Result
from hushfleet.data.conversion import as_data
from hushfleet.data.samples import Samples
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.personalized_model import personalized_model
from hushfleet.edge_client.worker.predict import predict
from hushfleet.errors import BadInput
from hushfleet.simulator.fleet import make_fleet
from hushfleet.simulator.run_folder import begin
from hushfleet.simulator.world.live import LiveFleet

DEVICES, EACH, FEATURES = 3, 40, 4
SQUARED, BINARY = {"loss": "squared", "tolerance": 1.0}, {"loss": "binary"}
HUBER = {"loss": "huber", "tolerance": 1.0}


def arrays(loss: str) -> hf.Data:
    """Numbers and answers that follow from the values linearly."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((DEVICES * EACH, FEATURES)).astype(np.float32)
    numbers = 20 + x @ np.array([[3.0, 0], [0, -2], [1, 0], [0, 1]])
    y = (numbers > 20).astype(np.uint8) if loss == "binary" else numbers
    return hf.Data(x, y, train_device=np.repeat(np.arange(DEVICES), EACH), class_names=("load", "heat"))


def plain(model: dict[str, Any], **sections: Any) -> dict[str, Any]:
    tables = {
        "model": {"name": "linear", **model},
        "method": {"name": "fedavg", "learning_rate": 0.05, "local_epochs": 4},
        "data": {"name": "arrays", "path": "data.npz", "devices": DEVICES, "partition": "given"},
        "round": {"rounds": 2, "min_updates": DEVICES},
    }
    if model.get("loss") in ("squared", "huber"):
        tables["data"] |= {"target_mean": [20.0, 20.0], "target_std": [3.0, 3.0]}
    return {"name": "targets", **{name: {**table, **sections.get(name, {})} for name, table in tables.items()}}


@pytest.mark.parametrize(
    ("model", "changed", "said"),
    [
        ({"loss": "squared"}, {}, "tolerance and a loss of numbers .* need each other"),
        ({"loss": "hinge"}, {}, "loss = 'hinge': must be one of cross-entropy, binary, squared, huber"),
        ({**BINARY, "tolerance": 1.0}, {}, "tolerance and a loss of numbers"),
        (BINARY, {"data": {"target_mean": [0.0], "target_std": [1.0]}}, "need a model.loss of numbers"),
        (SQUARED, {"data": {"target_mean": [0.0], "target_std": []}}, "target_mean and target_std come together"),
        (SQUARED, {"data": {"class_names": ["a", "b", "c"]}}, "target_mean has 2 values, and there are 3 outputs"),
        (BINARY, {"data": {"name": "digits", "path": None, "partition": "iid"}}, "'digits' has classes; take 'arrays'"),
        (BINARY, {"data": {"partition": "dirichlet-class", "alpha": 1.0}}, "take 'iid', or 'given'"),
        (BINARY, {"data": {"partition": "pathological", "classes_per_device": 1}}, "take 'iid', or 'given'"),
        (SQUARED, {"method": {"name": "hush"}, "privacy": {"clip_norm": 1.0}}, "'hush' is defined for classes alone"),
        (SQUARED, {"method": {"name": "pfedsd"}}, "'pfedsd' is defined for classes alone"),
    ],
)
def test_a_task_that_needs_classes_is_refused_with_what_to_take(
    model: dict[str, Any], changed: dict[str, Any], said: str
) -> None:
    task = plain(model, **changed) | ({"privacy": changed["privacy"]} if "privacy" in changed else {})
    task["data"] = {key: value for key, value in task["data"].items() if value is not None}
    if changed.get("method"):
        task["method"] = changed["method"]
    with pytest.raises(BadInput, match=said):
        parse_task(task)


def task_of(loss: dict[str, Any], folder: Path, **sections: Any) -> Task:
    arrays(loss["loss"]).save(folder / "data.npz")
    return parse_task(plain(loss, data={"path": str(folder / "data.npz")}, **sections))


def test_classes_of_one_name_and_numbers_for_classes_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", train_x=np.zeros((9, 2)), train_y=np.zeros(9, int))
    with pytest.raises(BadInput, match="one class, '0'; a classifier needs at least 2"):
        prepare(parse_task(plain({}, data={"path": str(tmp_path / "data.npz"), "partition": "iid"})))
    np.savez(tmp_path / "data.npz", train_x=np.zeros((9, 2)), train_y=np.arange(9) / 2)
    with pytest.raises(BadInput, match="numbers to predict go with model"):
        prepare(parse_task(plain({}, data={"path": str(tmp_path / "data.npz"), "partition": "iid"})))


@pytest.mark.parametrize("loss", [SQUARED, BINARY], ids=["squared", "binary"])
def test_chance_is_the_best_constant_of_all_samples_and_of_each_device(loss: dict[str, Any], tmp_path: Path) -> None:
    task = task_of(loss, tmp_path)
    data = arrays(loss["loss"]).dataset("arrays", targets=task.targets)
    fleet = make_fleet(task, data)
    assert fleet.label_counts is None
    held = [np.concatenate([d.train.samples.labels, d.local_test.samples.labels]) for d in fleet.devices]
    everything, own = task.targets.constant_right(np.concatenate(held)), [*map(task.targets.constant_right, held)]
    assert fleet.chance == (pytest.approx(everything), pytest.approx(np.mean(own)))


def test_a_torch_data_set_of_numbers_stays_numbers() -> None:
    pairs = [(np.zeros(3, np.float32), np.float32([1.5, -2])), (np.ones(3, np.float32), np.float32([0, 7]))]
    assert as_data(pairs).train_y.tolist() == [[1.5, -2], [0, 7]]
    with pytest.raises(BadInput, match="the task names a file"):
        as_data("mine.csv")
    assert as_data([(np.zeros(3), 1.5), (np.zeros(3), 2)]).train_y.tolist() == [1.5, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize("loss", [HUBER, BINARY], ids=["huber", "binary"])
def test_runtimes_agree_and_the_report_says_what_is_counted(loss: dict[str, Any], tmp_path: Path) -> None:
    data, task = arrays(loss["loss"]), plain(loss, round={"rounds": 8})
    first, *others = (
        hf.simulate(
            task,
            data=data,
            out=tmp_path / runtime,
            runtime=runtime,
            workers=1,
            local_only=runtime == "onnx",
            quiet=True,
        )
        for runtime in ("onnx", "torch", "vmap")
    )
    for other in others:
        np.testing.assert_allclose(other.rounds.loss, first.rounds.loss, rtol=1e-3)
    result = Result.load(tmp_path / "onnx" / "result.json")
    assert result.rounds[-1].loss < 0.7 * result.rounds[0].loss
    assert (result.details.confusion_global, result.details.label_counts, result.details.own_heads) == ([], [], [])
    found = common_test(result)
    assert found.federated > found.chance > 0
    assert result.details.score in (tmp_path / "onnx" / "report.html").read_text()
    assert result.details.score == ("with all labels right" if loss == BINARY else "within 1.0 of the target")


@pytest.mark.slow
def test_boards_learn_numbers_under_privacy_and_predict_them(
    tmp_path: Path, runs: Any, finish: Any, audit: Any
) -> None:
    """DP-SGD by the devices' graphs, in real processes and in the fast engine: the same bits. From small images."""
    images = np.random.default_rng(0).integers(0, 256, (DEVICES * EACH, 1, 4, 4), np.uint8)
    hf.Data(images, images[:, 0, 0, :2] / 10.0, class_names=("left", "right")).save(tmp_path / "data.npz")
    task = parse_task(
        plain(SQUARED, data={"path": str(tmp_path / "data.npz"), "partition": "iid"}, method={"batch_size": 8})
        | {"privacy": {"unit": "record", "accounting": "strict", "clip_norm": 1.0, "noise_multiplier": 0.5}}
    )
    fast, live = runs.fast(begin(task, tmp_path / "fast", data_dir=None)), begin(task, tmp_path / "live", data_dir=None)
    fleet = LiveFleet(live)
    with fleet.running():
        finish(fleet)
    assert audit.models(live) == audit.models(fast)
    Image.fromarray(images[0, 0]).save(tmp_path / "image.png")
    with DeviceStore(live.folder.device("device-0").store, device="device-0", inspect=True) as store:
        found, (spec, _, params, *_) = predict(store, tmp_path / "image.png"), personalized_model(store)
    x = Samples(images[:1], np.zeros(1, int), spec.model.mean, spec.model.std).x
    [outputs] = live.prepared.inference(params, x)
    assert found.are_numbers
    assert [name for name, _ in found.classes] == ["left", "right"]
    assert [value for _, value in found.classes] == pytest.approx((20 + 3 * outputs).tolist(), rel=1e-5)
