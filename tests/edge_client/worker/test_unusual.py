"""A board learns from a CSV file without labels, and says how unusual other windows are, by a threshold of its own."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.data.form import SampleForm
from hushfleet.data.held_out import chosen_by_content
from hushfleet.data.sound import write_clip
from hushfleet.data.targets import Targets
from hushfleet.edge_client.__main__ import main
from hushfleet.edge_client.board.config import DeviceConfig, OwnDataSection
from hushfleet.edge_client.board.local_data import LocalData
from hushfleet.edge_client.board.sample_files import load_file
from hushfleet.edge_client.worker.personalized_model import PersonalizedModel, personalized_model
from hushfleet.edge_client.worker.predict import graphs_of
from hushfleet.edge_client.worker.unusual import Judge, Unusual
from hushfleet.errors import BadInput
from hushfleet.learning.anomaly import Threshold
from hushfleet.methods.second_moments import GAIN
from hushfleet.models import get_model
from hushfleet.models.export import export_graphs
from hushfleet.objectives import Objective
from hushfleet.wire.format.spec import BlobRef
from support.edge import DEVICE, Bench, Package
from support.moments import errors_by, errors_left_out

CHANNELS, STEPS, WINDOWS = 2, 3, 20
SHAPE = (CHANNELS, 1, STEPS)


@pytest.fixture(scope="session")
def series(package: Package) -> Package:
    """The model gives back the mean of its two channels in each step, so that it is right where they are equal."""
    alike = np.hstack([np.eye(STEPS)] * CHANNELS)
    return of_network(package, "autoencoder", alike / CHANNELS, np.zeros(STEPS), alike.T, np.zeros(CHANNELS * STEPS))


@pytest.fixture(scope="session")
def moments(package: Package) -> Package:
    """The same by second moments, whose leading direction at each frequency is the sum of the channels."""
    return of_network(package, "second-moments", np.full((STEPS, CHANNELS, CHANNELS), GAIN / CHANNELS))


def of_network(package: Package, name: str, *parts: np.ndarray) -> Package:
    model = get_model(name, input_shape=SHAPE)
    graphs = export_graphs(model, objective=Objective("reconstruction"))
    spec = replace(
        package.spec.model,
        name=name,
        layout=model.layout,
        input_shape=SHAPE,
        class_names=("fault",),
        mean=(0.0, 0.0),
        std=(1.0, 1.0),
        gradient=BlobRef.of(graphs.gradient),
        inference=BlobRef.of(graphs.inference),
        dropout=(),
        targets=Targets("reconstruction", false_alarms=0.2),
    )
    initial = np.concatenate([part.ravel() for part in parts]).astype(np.float32)
    blobs = {hashlib.sha256(graph).digest(): graph for graph in (graphs.gradient, graphs.inference)}
    return replace(package, blobs=blobs, initial=initial).with_spec(model=spec)


def write(path: Path, apart: list[float], *, faults: list[int] | None = None) -> None:
    """Windows of two channels that differ by so much, one line a step."""
    rng, lines = np.random.default_rng(1), ["left,right" + ",fault" * (faults is not None)]
    for window, distance in enumerate(apart):
        for value in rng.standard_normal(STEPS):
            mark = "" if faults is None else f",{int(window in faults)}"
            lines.append(f"{value + distance},{value - distance}{mark}")
    path.write_text("\n".join(lines) + "\n")


def device_toml(folder: Path, more: str = "") -> Path:
    path = folder / "device.toml"
    path.write_text(
        f'[device]\nid = "{DEVICE}"\nfederation = "test"\nstate_dir = "state"\nallow_volatile_state = true\n'
        '[broker]\nurl = "mqtt://127.0.0.1:9"\n'
        f'[data]\nkind = "csv"\npath = "pump.csv"\n{more}[limits]\nepsilon_server = 1000.0\n'
    )
    return path


def test_a_board_says_how_unusual_a_window_is(
    make_bench: Callable[..., Bench],
    series: Package,
    config: DeviceConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path / "pump.csv", [0.01 * (1 + window) for window in range(WINDOWS)])
    write(tmp_path / "later.csv", [0.01, 2.0, 0.1])
    write(tmp_path / "known.csv", [0.01, 2.0, 3.0, 0.3], faults=[1, 3])
    data = OwnDataSection("csv", str(tmp_path / "pump.csv"))
    bench = make_bench(package=series, config=replace(config, data=data, simulation=None))
    bench.train(1)
    bench.server.global_params = bench.server.global_params + np.float32(1e-6)
    final = bench.server.open_round(5, phase="finished").global_digest
    bench.until(
        lambda: bench.store.global_digest == final
    )  # it predicts with the shared model, and fetches the last one
    path = device_toml(tmp_path, 'held_out = "known.csv"\n')
    assert main(["predict", str(path), str(tmp_path / "later.csv"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    # Every fifth window is held out: 0.05, 0.1, 0.15 and 0.2 apart. Of four the largest error keeps to one in five.
    assert told["threshold"] == {
        "error": pytest.approx(0.2**2, rel=1e-3),
        "held_out": 4,
        "false_alarms": pytest.approx(0.2),
    }
    assert [each["score"] for each in told["samples"]] == pytest.approx([0.01**2 / 0.04, 100, 0.25], rel=1e-3)
    assert [each["unusual"] for each in told["samples"]] == [False, True, False]
    assert main(["predict", str(path), str(tmp_path / "later.csv")]) == 0
    said = capsys.readouterr().out
    assert "1 of 3 samples is unusual\n  sample 1: 100 times the threshold" in said
    assert "0.04, by 4 samples of this board; of normal ones at most 20 % lie above it while they vary" in said
    assert main(["status", str(path)]) == 0
    assert "right on 3 of 4 held-out samples" in capsys.readouterr().out  # window 2 is called unusual without a label
    own, data = personalized_model(bench.store), replace(data, held_out=str(tmp_path / "known.csv"))
    assert Unusual("t", "global", Threshold(1.0, 4, 0.2), (2.0, 0.5, 3.0)).places == [2, 0], "the most unusual first"
    other = own._replace(params=0 * own.params, shared=own.params)
    judge = Judge(other, data, graphs_of(bench.store, own.spec))
    assert judge.alarms_right()[::3] == (2, 3), "each model has a threshold of its own"
    held_out = chosen_by_content(load_file(tmp_path / "pump.csv", own.spec.model).images, np.arange(WINDOWS), 0.2)
    with (tmp_path / "pump.csv").open("a") as file:
        file.write("1.0,much\n" * STEPS)  # a window that is left out, as in training
    records = own._replace(spec=replace(own.spec, privacy=replace(own.spec.privacy, unit="record")))
    chosen = Judge(records, data, graphs_of(bench.store, own.spec)).threshold
    errors = np.square(0.01 * np.arange(1, WINDOWS + 1)[held_out])
    assert (chosen.held_out, chosen.error) == (7, pytest.approx(errors.max(), rel=1e-3))


def test_by_second_moments_a_window_is_unusual_by_its_distance_from_the_own_mean(
    make_bench: Callable[..., Bench],
    moments: Package,
    config: DeviceConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    apart = 3 + np.random.default_rng(0).normal(0, 0.1, WINDOWS)
    write(tmp_path / "pump.csv", apart.tolist())
    write(tmp_path / "later.csv", [3.0, 0.0])
    data = OwnDataSection("csv", str(tmp_path / "pump.csv"))
    bench = make_bench(package=moments, config=replace(config, data=data, simulation=None))
    bench.train(1)
    bench.server.global_params = bench.server.global_params + np.float32(1e-6)
    final = bench.server.open_round(5, phase="finished").global_digest
    bench.until(lambda: bench.store.global_digest == final)
    assert main(["predict", str(device_toml(tmp_path)), str(tmp_path / "later.csv"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)

    def rests(apart: np.ndarray) -> np.ndarray:  # windows of one distance: all of it is in the first frequency
        found = np.zeros((len(apart), STEPS, CHANNELS))
        found[:, 0] = np.sqrt(STEPS) * np.outer(apart, [1, -1])
        return found

    chosen = Threshold.fitted(errors_left_out(rests(apart)), 0.2)
    assert told["threshold"] == pytest.approx(chosen._asdict(), rel=1e-3)
    assert [each["score"] * chosen.error for each in told["samples"]] == pytest.approx(
        errors_by(rests(apart), rests(np.array([3.0, 0.0]))), rel=1e-3
    )
    assert [each["unusual"] for each in told["samples"]] == [False, True]


@pytest.mark.parametrize(("unit", "held_out"), [("device", 4), ("record", 3)])
def test_where_records_are_protected_one_segment_of_a_clip_is_judged(
    series: Package, tmp_path: Path, unit: Any, held_out: int
) -> None:
    """As in training; else every fifth of ten clips is held out, with both of its segments."""
    for number in range(10):
        sound = np.random.default_rng(40 + number).integers(-9000, 9000, 200).astype(np.int16)
        (tmp_path / "normal").mkdir(exist_ok=True)
        write_clip(tmp_path / "normal" / f"{number}.wav", sound, 8000)
        os.utime(tmp_path / "normal" / f"{number}.wav", (1, 1))  # nobody writes it any more
    model = replace(
        series.spec.model,
        input_shape=(1, 1, 100),
        mean=(0.0,),
        std=(1.0,),
        form=SampleForm(sample_rate=8000, segment_s=1 / 80),
    )
    spec = replace(series.spec, model=model, privacy=replace(series.spec.privacy, unit=unit))
    own = PersonalizedModel(spec, "global", series.initial)
    judge = Judge(own, OwnDataSection("sound", str(tmp_path)), (lambda params, x: 0 * x.reshape(len(x), -1), None))
    assert judge.threshold.held_out == held_out


def test_what_is_held_out_or_a_fault_is_not_trained_on(series: Package, tmp_path: Path) -> None:
    write(tmp_path / "pump.csv", [0.1 * window for window in range(12)], faults=[3, 7])
    data = LocalData(OwnDataSection("csv", str(tmp_path / "pump.csv")), series.spec.model).samples()
    apart = np.abs(data.x[:, 0, 0, 0] - data.x[:, 1, 0, 0]) / 2
    np.testing.assert_allclose(apart, [0, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0], atol=1e-6)
    np.testing.assert_array_equal(data.y, data.x.reshape(8, -1))


def test_without_enough_windows_it_says_what_is_missing(
    make_bench: Callable[..., Bench],
    series: Package,
    config: DeviceConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path / "pump.csv", [0.0] * 4)
    data = OwnDataSection("csv", str(tmp_path / "pump.csv"))
    bench = make_bench(package=series, config=replace(config, data=data, simulation=None))
    bench.train(1)
    assert main(["predict", str(device_toml(tmp_path)), str(tmp_path / "pump.csv")]) == 2
    assert "no sample is held out to choose a threshold by" in capsys.readouterr().err
    (tmp_path / "pump.csv").write_text("left\n1\n")
    with pytest.raises(BadInput, match=r"has 1 columns of values, the task wants 6: 2 x 1 x 3; or 2, where each line"):
        LocalData(data, replace(series.spec.model)).samples()
