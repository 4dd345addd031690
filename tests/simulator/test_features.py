"""Tasks on features of images: engines agree, and models that leave take images."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from safetensors.numpy import load_file

from hushfleet.aggregator.config.task import Task, load_task
from hushfleet.aggregator.payloads.prepare import prepare
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.predict import predict
from hushfleet.errors import BadInput
from hushfleet.learning.personalized_head import inputs_of_own, own_logits
from hushfleet.simulator.engines.fast.device import store_of
from hushfleet.simulator.engines.fast.personalized_heads import choose_personalized_heads
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.model_files import write_models
from hushfleet.simulator.results import read_metrics
from hushfleet.simulator.run_folder import Simulation, begin
from hushfleet.simulator.world.live import LiveFleet


@pytest.fixture(scope="module")
def task(short_task: Any) -> Task:
    return short_task(
        model={"name": "linear", "features": "filters", "directions": 40},
        method={"name": "dp-fedavg", "learning_rate": 1.0},
        data={"devices": 4, "limit": 200},
        round={"rounds": 2, "min_updates": 4},
    )


def last_model(simulation: Simulation) -> np.ndarray:
    tensors = load_file(simulation.folder.aggregator / "global-2.safetensors")
    return np.concatenate([tensors[name].ravel() for name in simulation.prepared.spec.model.layout.names])


def test_features_are_made_once_in_a_run(fast: Simulation) -> None:
    """Of each device's images, of its test images, and of the common test set."""
    assert len(list(fast.folder.features.iterdir())) <= 2 * len(fast.fleet.devices) + 1
    spec = fast.prepared.spec.model
    assert spec.image_shape == (1, 8, 8)
    assert spec.input_shape == (41, 1, 1)
    assert spec.features.count == 41 + 129
    assert (spec.mean, spec.std) == ((0.0,), (1.0,))


def test_arrays_train_on_the_same_features(task: Task, fast: Simulation, runs: Any, tmp_path: Path) -> None:
    arrays = runs.fast(begin(task, tmp_path / "run", data_dir=None), runtime="vmap")
    np.testing.assert_allclose(last_model(arrays), last_model(fast), atol=0.1 * np.abs(last_model(fast)).max())


def test_a_model_file_takes_images(fast: Simulation) -> None:
    spec, features = fast.prepared.spec.model, fast.prepared.features
    assert features is not None
    [path, *_] = write_models(fast)
    images = fast.fleet.common_test.take(slice(0, 20))
    found = onnxruntime.InferenceSession(path).run(["logits"], {"x": images.x})[0]
    expected = fast.prepared.inference(last_model(fast), features.of(images).x)
    assert found.shape == (20, len(spec.class_names))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_an_personalized_head_takes_all_directions(fast: Simulation) -> None:
    with Workers(1) as workers:
        choose_personalized_heads(fast, workers)
    device, features = fast.fleet.devices[0].name, fast.prepared.features
    images = fast.fleet.common_test.take(slice(0, 20))
    with store_of(fast.folder, device) as store:
        params = store.own_params(fast.prepared.spec.task)
    assert features is not None
    assert params is not None
    expected = own_logits(params, inputs_of_own(features.of(images)).x)
    files = {path.stem: path for path in write_models(fast)}
    (found,) = onnxruntime.InferenceSession(files[device]).run(["logits"], {"x": images.x})
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    last = read_metrics(fast, device)[2]
    assert last["accuracy_own_common"] > 0.5
    assert last["own_head"]["images"] == len(fast.fleet.devices[0].train)


@pytest.mark.slow
def test_boards_end_in_the_same_model_and_predict(
    task: Task, fast: Simulation, tmp_path: Path, finish: Any, audit: Any
) -> None:
    from PIL import Image

    live = begin(task, tmp_path / "run", data_dir=None)
    fleet = LiveFleet(live)
    with fleet.running():
        finish(fleet)
    assert audit.models(live) == audit.models(fast), "to the last bit"
    with Workers(1) as workers:
        choose_personalized_heads(live, workers)
    pixels = live.fleet.common_test.images[0, 0]
    Image.fromarray(pixels).save(tmp_path / "digit.png")
    device = live.fleet.devices[0].name
    with DeviceStore(live.folder.device(device).store, device=device, inspect=True) as store:
        seen = predict(store, tmp_path / "digit.png")
        params = store.own_params(live.prepared.spec.task)
        assert not store.awaited
    assert "the fleet's model" in seen.model
    x = inputs_of_own(live.prepared.features.of(live.fleet.common_test.take(slice(0, 1)))).x
    likeliest = own_logits(params, x)[0].argmax()
    assert seen.classes[0][0] == live.prepared.spec.model.class_names[likeliest]
    assert len(seen.classes) == 10
    assert sum(odds for _, odds in seen.classes) == pytest.approx(1)


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"data": {"augment": "flip-crop"}}, "computed once"),
        ({"model": {"name": "digits-cnn"}}, "features go with name = 'linear'"),
    ],
)
def test_what_does_not_go_with_features_is_refused(short_task: Any, sections: dict[str, Any], text: str) -> None:
    model = {"name": "linear", "features": "filters", **sections.pop("model", {})}
    with pytest.raises(BadInput, match=text):
        short_task(model=model, method={"name": "dp-fedavg"}, **sections)


LOADED = """
import sys
from hushfleet.aggregator.commands.main import main
try:
    main()
finally:
    print("loaded", *(name for name in ("matplotlib", "pandas", "plotly.io", "torch") if name in sys.modules))
"""


def test_a_run_whose_graphs_are_kept_loads_no_pytorch_from_its_start_to_its_report(tmp_path: Path) -> None:
    file = Path(__file__).parents[2] / "tasks" / "digits-hush.toml"
    changes = ["data.devices=20", "data.limit=240", "round.rounds=1"]
    prepare(load_task(file, changes), run_id="test")  # keeps the graphs
    words = ["simulate", file, "--out", tmp_path / "run", "--workers", "1", *(f"--set={each}" for each in changes)]
    done = subprocess.run([sys.executable, "-c", LOADED, *map(str, words)], capture_output=True, text=True, check=True)
    assert (tmp_path / "run" / "report.html").exists()
    assert (tmp_path / "run" / "models" / "device-00.onnx").exists()
    assert done.stdout.splitlines()[-1] == "loaded"
