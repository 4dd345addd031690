"""The trained models as ONNX files that stand alone."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from safetensors.numpy import load_file

from hushfleet.errors import BadInput, HushfleetError
from hushfleet.learning.graph_session import InferenceGraph
from hushfleet.privacy.charge import DEVICE_ADJACENCY, Charge
from hushfleet.simulator.cohort_store import ChargeKind, CohortStore, StateRow
from hushfleet.simulator.engines.fast.device import store_of
from hushfleet.simulator.model_files import trained_tensors, write_models
from hushfleet.simulator.run_folder import RunFolder, Simulation


@pytest.fixture(scope="module")
def files(calm: Simulation) -> list[Path]:
    return write_models(calm)


def logits(path: Path, x: np.ndarray) -> np.ndarray:
    return onnxruntime.InferenceSession(path).run(None, {"x": x})[0]


def test_the_global_model_comes_first_then_each_devices_own(files: list[Path], calm: Simulation) -> None:
    names = ["global", *(device.name for device in calm.fleet.devices)]
    assert files == [calm.folder.models / f"{name}.onnx" for name in names]


def test_a_file_is_the_model_and_needs_nothing_else(files: list[Path], calm: Simulation) -> None:
    spec, x = calm.prepared.spec, calm.fleet.common_test.x
    graph = InferenceGraph(calm.prepared.blobs[spec.model.inference.digest], spec.model.layout)
    tensors = load_file(calm.folder.aggregator / "global-3.safetensors")
    vectors = {"global": np.concatenate([tensors[name].ravel() for name in spec.model.layout.names])}
    for device in calm.fleet.devices:
        with store_of(calm.folder, device.name) as store:
            vectors[device.name] = store.load_state(spec.task).own
    assert len({vector.tobytes() for vector in vectors.values()}) == 1 + len(calm.fleet.devices)
    for file in files:
        found = logits(file, x)
        np.testing.assert_allclose(found, graph(vectors[file.stem], x), rtol=0, atol=1e-4 * np.abs(found).max())


def test_models_by_name_as_tensors(files: list[Path], calm: Simulation) -> None:
    name, spec = calm.fleet.devices[1].name, calm.prepared.spec
    expected = load_file(calm.folder.aggregator / "global-3.safetensors")
    found = trained_tensors(calm.folder, "global")
    assert list(found) == list(spec.model.layout.names)
    for key, value in found.items():
        np.testing.assert_array_equal(value, expected[key])
    with store_of(calm.folder, name) as store:
        own = store.load_state(spec.task).own
    flat = np.concatenate([value.ravel() for value in trained_tensors(calm.folder, name).values()])
    np.testing.assert_array_equal(flat, own)
    with pytest.raises(BadInput, match=r"'nobody' has no model .* such as device-0"):
        trained_tensors(calm.folder, "nobody")
    with pytest.raises(BadInput, match="the run folder of a simulation"):
        trained_tensors(RunFolder(calm.folder.aggregator), "global")


def test_a_model_that_was_not_kept_is_not_one_of_a_device_that_took_no_part(calm: Simulation, tmp_path: Path) -> None:
    shutil.copytree(calm.folder.path, tmp_path / "run")
    copy, name = RunFolder(tmp_path / "run"), calm.fleet.devices[0].name
    store = CohortStore.open(copy.cohort, closed=3)
    charge = ChargeKind(Charge("device", DEVICE_ADJACENCY, "gaussian", 1.0), None)
    store.append(3, {0: StateRow(charge, bytes(32), 3, 0, (), b"", left_out=True)})
    with pytest.raises(BadInput, match=f"the model of '{name}' is not kept in"):
        trained_tensors(copy, name)


def test_the_batch_is_open(files: list[Path], calm: Simulation) -> None:
    x = calm.fleet.common_test.x
    one, many = logits(files[0], x[:1]), logits(files[0], x[:50])
    np.testing.assert_allclose(one[0], many[0], rtol=1e-4, atol=1e-5)


def test_a_file_that_computes_something_else_is_refused(calm: Simulation) -> None:
    prepared = calm.prepared
    other = replace(prepared, inference=lambda params, x: 1.01 * prepared.inference(params, x))
    with pytest.raises(HushfleetError, match=r"global.onnx computes something else than the trained model: 9.9e-03"):
        write_models(replace(calm, prepared=other))


def test_a_device_that_was_in_no_cohort_has_no_store_and_no_model(calm: Simulation, tmp_path: Path) -> None:
    shutil.copytree(calm.folder.path, tmp_path / "run")
    copy = replace(calm, folder=RunFolder(tmp_path / "run"))
    del CohortStore.read(copy.folder.cohort)._carried[3]
    assert len(write_models(copy)) == len(calm.fleet.devices)
