"""Anomaly detection from unlabelled windows to the report, and what a task of it may not ask for."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.fft

import hushfleet as hf
from hushfleet.aggregator.config.task import load_task, parse_task
from hushfleet.aggregator.payloads.prepare import prepare
from hushfleet.aggregator.results.result import Result
from hushfleet.aggregator.storage.checkpoints import Checkpoints
from hushfleet.data.arrays import Data, load_arrays
from hushfleet.data.csv_file import CsvLayout, load_csv_set, read_csv
from hushfleet.edge_client.board.config import OwnDataSection
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.personalized_model import personalized_model
from hushfleet.edge_client.worker.predict import graphs_of
from hushfleet.edge_client.worker.unusual import Judge
from hushfleet.errors import BadInput
from hushfleet.learning.anomaly import Threshold
from hushfleet.methods.second_moments import GAIN
from hushfleet.models import get_model
from hushfleet.simulator.fleet import make_fleet
from hushfleet.simulator.run_folder import RunFolder
from support.moments import errors_by, errors_left_out

DEVICES, EACH, TESTED = 4, 25, 10
LAYOUT = get_model("second-moments", input_shape=(2, 1, 3)).layout
MACHINES = Path(__file__).parents[2] / "examples" / "machines"


def data() -> Data:
    """Windows of a rank of one; a fault breaks it."""
    rng = np.random.default_rng(0)

    def windows(count: int) -> np.ndarray:
        return rng.standard_normal((count, 1, 1)) * np.array([[1.0, 0.5, -1], [2, 1, 0]])

    test = windows(TESTED * DEVICES)
    is_fault = np.arange(len(test)) % TESTED < 3
    test[is_fault] += rng.standard_normal((is_fault.sum(), 2, 3))
    names = np.array([f"pump-{number}" for number in range(DEVICES)])
    return Data(
        windows(EACH * DEVICES).astype(np.float32),
        test_x=test.astype(np.float32),
        test_y=is_fault.astype(int),
        train_device=np.repeat(names, EACH),
        test_device=np.repeat(names, TESTED),
    )


def plain(**sections: Any) -> dict[str, Any]:
    tables = {
        "model": {"name": "autoencoder", "loss": "reconstruction"},
        "method": {"name": "dp-fedavg", "learning_rate": 0.2, "local_epochs": 10},
        "privacy": {"accounting": "secure", "epsilon": 1000.0, "clip_norm": 2.0},
        "data": {"name": "arrays", "path": "data.npz", "devices": DEVICES, "partition": "given"},
        "round": {"rounds": 3},
    }
    return {"name": "pumps", **{name: {**table, **sections.get(name, {})} for name, table in tables.items()}}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": {"name": "linear"}}, "needs a network with a narrow layer"),
        ({"model": {"loss": "cross-entropy"}}, "'autoencoder' gives its input back; set loss = 'reconstruction'"),
        ({"model": {"name": "linear", "loss": "binary", "false_alarms": 0.1}}, "belongs to loss = 'reconstruction'"),
        ({"model": {"false_alarms": 1.0}}, "between 0 and 1"),
        ({"data": {"augment": "flip-crop"}}, "changes the input and not the target"),
        ({"data": {"partition": "pathological", "classes_per_device": 1}}, "take 'iid', or 'given'"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_take(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        parse_task(plain(**changed))


def test_each_device_is_tested_on_its_own_part_and_trains_on_all_of_its_windows() -> None:
    task = parse_task(plain())
    found = data().dataset("arrays", targets=task.targets, class_names=task.class_names)
    fleet = make_fleet(task, found)
    assert [len(device.train) for device in fleet.devices] == [EACH] * DEVICES
    for number, device in enumerate(fleet.devices):
        part = slice(number * TESTED, (number + 1) * TESTED)
        np.testing.assert_array_equal(device.local_test.samples.images, found.test.images[part])
    assert fleet.chance == (0.5, 0.5)


def test_a_task_goes_on_from_the_model_of_an_earlier_one(tmp_path: Path) -> None:
    """Its outputs are the values of a sample, and no classes: all of them stay."""
    data().save(tmp_path / "data.npz")
    task = parse_task(plain(data={"path": str(tmp_path / "data.npz")}))
    earlier = prepare(task, run_id="first")
    about = {"task": earlier.spec.task, "classes": earlier.spec.model.class_names, "features": None}
    final = np.arange(earlier.spec.model.layout.size, dtype=np.float32)
    Checkpoints(tmp_path, earlier.spec.model.layout, about=about).write(3, final)
    following = prepare(replace(task, model=replace(task.model, start=str(tmp_path))), run_id="second")
    np.testing.assert_array_equal(following.initial, final)


@pytest.mark.slow
def test_pumps_learn_in_secret_and_no_figure_is_called_accuracy(tmp_path: Path) -> None:
    """Also each device alone, whose training bounds nothing while the task's sums are of whole numbers."""
    run = hf.simulate(plain(), data=data(), out=tmp_path / "run", workers=1, quiet=True)
    written = (tmp_path / "run" / "result.json").read_text()
    rounds = json.loads(written)["rounds"]
    assert "accuracy_" not in written
    assert Result.load(tmp_path / "run" / "result.json").rounds[-1].accuracy_global == rounds[-1]["auroc_global"]
    assert rounds[-1]["auroc_global"] > 0.8
    assert rounds[-1]["loss"] < 0.5  # of normal windows, whose variance is 1
    assert {"auroc_own_local", "auroc_alone_local"} <= set(run.devices)
    report = (tmp_path / "run" / "report.html").read_text()
    assert "AUROC is the probability that a sample with a fault has a larger reconstruction error" in report
    assert ">Accuracy<" not in report
    assert "<th>AUROC</th>" in run._repr_html_()


MOMENTS: dict[str, Any] = {
    **plain(model={"name": "second-moments"}, privacy={"epsilon": 50.0}, round={"rounds": 1}),
    "method": {"name": "second-moments", "directions": 3},
}


@pytest.mark.slow
def test_second_moments_are_the_same_in_processes_and_judge_there(tmp_path: Path) -> None:
    """Against formulas: the mean and the threshold are each board's own, and the directions are those of all."""
    fast, live = (
        hf.simulate(MOMENTS, data=data(), out=tmp_path / engine, engine=engine, runtime="onnx", workers=1, quiet=True)
        for engine in ("fast", "live")
    )
    params = [Checkpoints(tmp_path / each / "aggregator", LAYOUT, durable=False).read(1) for each in ("fast", "live")]
    np.testing.assert_array_equal(*params)
    same = [name for name in fast.devices if "own" in name or name.startswith("epsilon")]
    assert {"auroc_own_local", "detected_own_local", "false_alarms_own_local", "f1_own_local"} <= set(same)
    assert fast.devices[same].equals(live.devices[same])
    assert fast.devices.auroc_own_local.min() > 0.95
    for run in (fast, live):  # what a round trains is another model than the one that counts: it has no score
        files = (run.folder / "devices").rglob("metrics.jsonl")
        lines = [line for file in files for line in file.read_text().splitlines() if line]
        assert ["own_local" in line for line in lines] == [False, True] * (len(lines) // 2)
    with DeviceStore(RunFolder(tmp_path / "live").device("device-0").store, device="device-0", inspect=True) as store:
        own = personalized_model(store)._replace(params=params[0])  # simulated boards do not fetch the last model
        train = RunFolder(tmp_path / "live").device("device-0").train
        found = Judge(own, OwnDataSection("arrays", str(train)), graphs_of(store, own.spec)).file(train)
    z = scipy.fft.dct(data().train_x[:EACH].reshape(EACH, 2, 3).astype(float), axis=-1, norm="ortho")
    rest = z.transpose(0, 2, 1)
    rest -= np.einsum("ntc,tdc->ntd", rest, params[0].reshape(3, 2, 2) / GAIN)
    np.testing.assert_allclose(np.array(found.scores) * found.threshold.error, errors_by(rest, rest), rtol=1e-3)
    assert found.threshold == pytest.approx(Threshold.fitted(errors_left_out(rest), 0.01), rel=1e-3)


def test_lines_that_are_steps_become_windows_of_one_device(tmp_path: Path) -> None:
    lines = ["device,a,b,fault", *(f"x,{n},{n / 10},{int(n == 4)}" for n in range(7)), "y,10,1,0", "y,11,1.1,0"]
    (tmp_path / "train.csv").write_text("\n".join(lines))
    (tmp_path / "test.csv").write_text("\n".join(lines))
    layout = CsvLayout(input_shape=(2, 1, 2), outputs=("fault",), series=True)
    values, faults, devices, names = read_csv(tmp_path / "train.csv", replace(layout, owners=True))
    np.testing.assert_allclose(values[:, :, 0, :], [[[n, n + 1], [n / 10, (n + 1) / 10]] for n in (0, 2, 4, 10)])
    assert faults.ravel().tolist() == [0, 0, 1, 0]
    assert devices is not None
    assert devices.tolist() == ["x", "x", "x", "y"]
    assert names == ("a", "a", "b", "b")
    both = load_csv_set(tmp_path, layout)
    assert both.test_device.tolist() == devices.tolist()


def test_a_file_without_labels_is_all_normal_and_a_line_may_be_a_whole_window(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a;b\n1,5;2\n3;4\n")
    layout = CsvLayout(input_shape=(1, 1, 2), outputs=("fault",))
    values, faults, _, _ = read_csv(tmp_path / "a.csv", replace(layout, series=True))
    np.testing.assert_allclose(values[:, 0, 0], [[1.5, 2], [3, 4]])
    assert faults.tolist() == [[0], [0]]
    with pytest.raises(BadInput, match="one of them 'fault'"):
        read_csv(tmp_path / "a.csv", layout)


def test_each_fault_of_the_example_shows_where_its_physics_says(tmp_path: Path) -> None:
    made = runpy.run_path(str(MACHINES / "make_data.py"))
    machine, channels = made["Machine"].drawn(np.random.default_rng(0)), list(made["CHANNELS"])

    def levels(fault: str) -> dict[str, float]:
        found = made["windows"](machine, 20, np.random.default_rng(1), any_load=False, fault=fault)
        return dict(zip(channels, found.mean((0, 2)).tolist(), strict=True))

    well, bearing, blade, dry = (levels(fault) for fault in ("", *made["FAULTS"]))
    assert bearing["db_512_1024"] > well["db_512_1024"] + 3  # where the housing rings
    assert bearing["db_4_32"] == pytest.approx(well["db_4_32"], abs=0.5)  # the shaft turns as ever
    assert blade["db_4_32"] > well["db_4_32"] + 7  # a force of 2.6 times: 8 dB
    assert blade["celsius"] == pytest.approx(well["celsius"], abs=0.1)
    assert dry["celsius"] > well["celsius"] + 5
    made["make"](tmp_path / "machines.npz", machines=2, train=5)
    task = load_task(MACHINES / "task.toml", (f'data.path="{tmp_path / "machines.npz"}"',))
    found = load_arrays(tmp_path / "machines.npz").dataset("arrays", targets=task.targets, class_names=task.class_names)
    assert (len(found.train), len(found.test), found.test.labels.mean()) == (10, 48, 0.5)
