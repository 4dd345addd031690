"""A network without its last layer as features: against PyTorch, from weights in a file, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from torch.nn import functional as F

from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.aggregator.payloads.prepare import prepare
from hushfleet.errors import BadInput
from hushfleet.learning.graph_session import open_session
from hushfleet.models import get_model, model_names
from hushfleet.models.features import backbone, hidden_features
from hushfleet.models.features.hidden import read_weights, without_last
from hushfleet.models.features.whitening import BIAS


@pytest.mark.parametrize("name", sorted(set(model_names()) - {"autoencoder", "linear", "second-moments"}))
def test_the_last_layer_on_what_it_is_given_is_the_network(name: str) -> None:
    model, rng = get_model(name), np.random.default_rng(0)
    tensors = model.layout.unflatten(torch.from_numpy(model.init(1)))
    x = torch.from_numpy(rng.standard_normal((2, *model.input_shape), np.float32))
    last = model.layout.layers[-1].name
    given = without_last(model).forward(tensors, x)
    found = F.linear(given, tensors[f"{last}.weight"], tensors[f"{last}.bias"])
    torch.testing.assert_close(found, model.forward(tensors, x))
    assert set(model.layout.names) - set(without_last(model).layout.names) == {f"{last}.weight", f"{last}.bias"}


def test_features_are_the_hidden_values_at_norm_one(tmp_path: Path) -> None:
    model, x = get_model("digits-cnn"), np.random.default_rng(0).standard_normal((3, 1, 8, 8), np.float32)
    params = model.init(5)
    extractor = hidden_features(model, params, cache_dir=tmp_path)
    given = without_last(model).forward(model.layout.unflatten(torch.from_numpy(params)), torch.from_numpy(x)).numpy()
    expected = np.c_[given / np.linalg.norm(given, axis=1, keepdims=True), np.full(3, BIAS)]
    found = open_session(extractor.graph).run(["features"], {"x": x})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert extractor.count == 33
    assert hidden_features(model, params, cache_dir=tmp_path) == extractor
    assert len(list(tmp_path.iterdir())) == 1
    other = hidden_features(model, model.init(6), cache_dir=tmp_path)
    assert other.graph != extractor.graph


def test_a_large_network_travels_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = get_model("digits-cnn"), np.random.default_rng(0).standard_normal((3, 1, 8, 8), np.float32)
    whole = hidden_features(model, model.init(5), cache_dir=tmp_path)
    monkeypatch.setattr(backbone, "MAX_GRAPH_BYTES", 10_000)
    small = hidden_features(model, model.init(5), cache_dir=tmp_path)
    assert len(small.graph) < len(whole.graph) / 2
    both = [open_session(each.graph).run(["features"], {"x": x})[0] for each in (whole, small)]
    np.testing.assert_allclose(*both, atol=0.02)
    monkeypatch.setattr(backbone, "MAX_GRAPH_BYTES", 1000)
    with pytest.raises(BadInput, match="even with weights in bytes"):
        hidden_features(model, model.init(5), cache_dir=tmp_path)


def write(path: Path, **changes: np.ndarray | None) -> np.ndarray:
    """A file as runs keep them; the vector in it."""
    model = get_model("digits-cnn")
    params = model.init(9)
    tensors = {name: value.copy() for name, value in model.layout.unflatten(params).items()} | changes
    safetensors.numpy.save_file({name: value for name, value in tensors.items() if value is not None}, path)
    return params


def test_weights_come_from_a_file_without_the_last_layer(tmp_path: Path) -> None:
    path, layout = tmp_path / "net.safetensors", get_model("digits-cnn").layout
    params = write(path, **{"fc2.weight": np.zeros((3, 32), np.float32), "fc2.bias": None})
    found, own = read_weights(path, layout), layout.layers[-1].start
    np.testing.assert_array_equal(found[:own], params[:own])
    assert not found[own:].any()


@pytest.mark.parametrize(
    "change",
    [
        {"conv1.weight": None},
        {"conv1.weight": np.zeros((16, 1, 5, 5), np.float32)},
        {"conv1.weight": np.zeros((16, 1, 3, 3), np.float64)},
        {"conv1.bias": np.full(16, np.nan, np.float32)},
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, np.ndarray | None]) -> None:
    path = tmp_path / "net.safetensors"
    write(path, **change)
    with pytest.raises(BadInput, match="does not fit: 'conv1"):
        read_weights(path, get_model("digits-cnn").layout)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    with pytest.raises(BadInput, match="cannot be read"):
        read_weights(path, get_model("digits-cnn").layout)
    path.write_bytes(b"weights")
    with pytest.raises(BadInput, match="cannot be read"):
        read_weights(path, get_model("digits-cnn").layout)


def task(**model: str) -> Task:
    return parse_task(
        {
            "name": "shares",
            "model": {"name": "digits-cnn", **model},
            "method": {"name": "hush"},
            "data": {"name": "digits", "devices": 4},
            "privacy": {"clip_norm": 2.0},
        }
    )


def test_a_task_shares_the_head_alone(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    write(path)
    drawn, given = prepare(task(share="head"), run_id="1"), prepare(task(share="head", weights=str(path)), run_id="1")
    for prepared in (drawn, given):
        spec = prepared.spec.model
        assert spec.layout.size == 33 * 10 + 10
        assert (spec.input_shape, spec.image_shape) == ((33, 1, 1), (1, 8, 8))
        assert (spec.mean, spec.std) == (prepared.dataset.mean, prepared.dataset.std)
    assert drawn.spec.model.features != given.spec.model.features


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"name": "linear", "share": "head"}, "'linear' has one"),
        ({"weights": "net.safetensors"}, "need share = 'head'"),
        ({"share": "tail"}, "share"),
    ],
)
def test_what_makes_no_sense_is_refused(model: dict[str, str], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        task(**model)


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(BadInput, match=r"takes images of 1 x 28 x 28, but data.name = 'digits' has 1 x 8 x 8"):
        prepare(task(name="mnist-cnn", share="head"))
