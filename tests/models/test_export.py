from __future__ import annotations

import dataclasses
import os
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch.nn import functional as F

from hushfleet.errors import GraphRefused
from hushfleet.learning.graph_safety import check_graph
from hushfleet.learning.graph_session import GradientGraph, InferenceGraph
from hushfleet.models import checks, export, get_model, model_names
from hushfleet.models.compact import digits_cnn
from hushfleet.models.export import bake, export_graphs
from hushfleet.models.model import Model
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.models.tracing import export_gradient, export_inference
from hushfleet.params import ParamLayout
from hushfleet.user_files import read_cached, write_cached

pytestmark = pytest.mark.slow


# resnet8-gn is of the same layers as resnet18-gn, whose export takes minutes.
NAMES = [name for name in model_names() if name not in ("autoencoder", "resnet18-gn")]  # the first: test_anomaly.py


@pytest.fixture(scope="module")
def graphs_of():
    """From the cache that all tests share: its keys cover the code and the packages that export."""
    return cache(lambda name: export_graphs(get_model(name)))


@pytest.mark.parametrize("name", NAMES)
def test_graphs_compute_what_pytorch_computes(name, graphs_of):
    """The exporter has checked them already; this draws other samples and other parameters."""
    model, graphs = get_model(name), graphs_of(name)
    reference, run = TorchGradient(model), GradientGraph(graphs.gradient, model.layout)
    rng, params = np.random.default_rng(99), model.init(7)
    for size in (1, 7, 16):
        x, y, masks = checks.stable_batch(reference, params, size, rng)
        for dropout in ((), masks) if masks else ((),):
            expected_loss, expected = reference(params, x, y, dropout)
            loss, grad = run(params, x, y, dropout)
            assert loss == pytest.approx(expected_loss, rel=1e-5)
            for tensor, place in model.layout.slices.items():
                assert checks.relative_error(grad[place], expected[place]) < 1e-4, tensor
        logits = InferenceGraph(graphs.inference, model.layout)(params, x)
        assert checks.relative_error(logits, reference.logits(params, x)) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_devices_accept_the_graphs(name, graphs_of):
    model, graphs = get_model(name), graphs_of(name)
    facts = check_graph(graphs.gradient)
    assert set(facts.outputs) == {"loss", *(f"grad.{tensor}" for tensor in model.layout.names)}
    assert facts.inputs["x"].shape == ("batch", *model.input_shape)
    assert facts.inputs["y"].dtype == "int64"
    assert facts.initializer_bytes < 4096
    assert list(check_graph(graphs.inference).outputs) == ["logits"]
    assert len(graphs.gradient) < 120_000


def test_training_by_graph_and_by_pytorch_ends_at_the_same_place(graphs_of):
    model = get_model("digits-cnn")
    runs = TorchGradient(model), GradientGraph(graphs_of(model.name).gradient, model.layout)
    rng = np.random.default_rng(0)
    batches = [checks.random_batch(model, 8, rng)[:2] for _ in range(40)]
    ends = []
    for run in runs:
        params = model.init(0)
        for x, y in batches:
            params -= np.float32(0.05) * run(params, x, y)[1]
        ends.append(params)
    assert checks.relative_error(ends[1], ends[0]) < 1e-4
    assert checks.relative_error(model.init(0), ends[0]) > 0.05


def test_bake_gives_a_file_that_needs_nothing_else(graphs_of):
    model = get_model("digits-cnn")
    params = model.init(3)
    baked = bake(graphs_of(model.name).inference, model.layout, params)
    session = ort.InferenceSession(baked, providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == ["x"]
    x = np.random.default_rng(0).standard_normal((6, 1, 8, 8), np.float32)
    (logits,) = session.run(None, {"x": x})
    np.testing.assert_allclose(logits, TorchGradient(model).logits(params, x), rtol=1e-4, atol=1e-5)
    assert check_graph(baked).initializer_bytes >= 4 * model.layout.size


def test_bake_refuses_another_layout(graphs_of):
    with pytest.raises(ValueError, match="are not the layout's"):
        bake(graphs_of("digits-cnn").inference, ParamLayout(("fc.bias",), ((3,),)), np.zeros(3, np.float32))


def test_a_graph_with_a_wrong_gradient_is_refused(graphs_of):
    model, graphs = get_model("digits-cnn"), graphs_of("digits-cnn")
    proto = onnx.load_from_string(graphs.gradient)
    relu = next(node for node in proto.graph.node if node.op_type == "Relu")
    relu.op_type = "Elu"
    with pytest.raises(GraphRefused, match=r"disagrees with PyTorch in 'loss' on a batch of 1: relative error"):
        checks.check_against_torch(model, gradient=proto.SerializeToString(), inference=graphs.inference)


def test_a_graph_that_ignores_its_dropout_is_refused(graphs_of):
    """Masks of ones cannot show it, and no masks cannot; the drawn ones must."""
    model, graphs = get_model("fashion-mnist-cnn"), graphs_of("fashion-mnist-cnn")
    proto = onnx.load_from_string(graphs.gradient)
    readers = [node for node in proto.graph.node if "dropout.1" in node.input]
    assert {node.op_type for node in readers} == {"Mul"}
    for node in readers:
        (other,) = set(node.input) - {"dropout.1"}
        node.op_type = "Identity"
        del node.input[:]
        node.input.append(other)
    with pytest.raises(GraphRefused, match="disagrees with PyTorch"):
        checks.check_against_torch(model, gradient=proto.SerializeToString(), inference=graphs.inference)


def test_a_network_that_float32_cannot_tell_is_refused():
    """One activation is always a billionth of the other, so no sample is clear of the kink."""
    base = digits_cnn()

    def edge(tensors, x, dropout):
        return base.function(tensors, x, dropout) + F.relu(torch.tensor([1.0, 1e-9])).sum()

    model = dataclasses.replace(base, name="edge", function=edge)
    with pytest.raises(GraphRefused, match="edge: only 0 of 40 random samples"):
        checks.stable_batch(TorchGradient(model), model.init(0), 2, np.random.default_rng(0))


def test_a_tie_in_a_pooling_window_is_a_kink_unless_it_is_of_zeros():
    def pooled(t, x, dropout):
        pair = torch.tensor([[[[3.0, 3.0], [1.0, 2.0]]]]) * t["scale.weight"]
        return F.max_pool2d(pair, 2).flatten(1)

    layout = ParamLayout(("scale.weight",), ((1,),))
    reference = TorchGradient(Model("tie", "this test", (1, 2, 2), 2, layout, (), pooled))
    rng = np.random.default_rng(0)
    with pytest.raises(GraphRefused, match="only 0 of 20"):
        checks.stable_batch(reference, np.ones(1, np.float32), 1, rng)
    assert len(checks.stable_batch(reference, np.zeros(1, np.float32), 1, rng)[0]) == 1


def overlapping_pool() -> Model:
    """Overlapping and padded windows, stride and dilation: what the backward operators must get right."""

    def forward(t, x, dropout):
        x = F.conv2d(x, t["conv1.weight"], t["conv1.bias"], stride=2, padding=1)
        x = F.max_pool2d(torch.tanh(x), 3, stride=1, padding=1)
        x = F.group_norm(x, 2, t["norm.weight"], t["norm.bias"])
        x = F.conv2d(x, t["conv2.weight"], None, dilation=2, padding=2)
        return F.linear(F.softplus(x).mean((2, 3)), t["fc.weight"], t["fc.bias"])

    shapes = {
        "conv1.weight": (4, 2, 3, 3),
        "conv1.bias": (4,),
        "norm.weight": (4,),
        "norm.bias": (4,),
        "conv2.weight": (6, 4, 3, 3),
        "fc.weight": (3, 6),
        "fc.bias": (3,),
    }
    layout = ParamLayout(tuple(shapes), tuple(shapes.values()))
    return Model("overlapping", "this test", (2, 12, 11), 3, layout, (), forward)


def test_strides_dilations_padding_and_overlapping_pools_export():
    model = overlapping_pool()
    gradient, inference = export_gradient(model), export_inference(model)
    assert checks.check_against_torch(model, gradient=gradient, inference=inference) < 1e-4


def test_exporting_is_silent(capfd):
    export_inference(get_model("digits-cnn"))
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


# The cache.


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """The folder of an export, of another number of classes."""
    folder = tmp_path_factory.mktemp("exported")
    export_graphs(get_model("digits-cnn", classes=4), cache_dir=folder)
    return folder


@pytest.fixture
def traced(exported, monkeypatch) -> list[str]:
    """What was traced, without doing it: each graph is the one of the folder."""
    traced = []

    def pretend(name: str, graph: bytes):
        monkeypatch.setattr(f"hushfleet.models.tracing.export_{name}", lambda *_: traced.append(name) or graph)

    for path in exported.iterdir():
        pretend(path.name.split(".")[-2], read_cached(path))
    return traced


def test_the_second_export_is_read_from_the_cache(exported, traced):
    assert len(list(exported.iterdir())) == 2
    found = export_graphs(get_model("digits-cnn", classes=4), cache_dir=exported)
    assert {found.gradient, found.inference} == set(map(read_cached, exported.iterdir()))
    assert traced == []


def test_damaged_files_are_made_again(exported, traced, tmp_path):
    model, folder = get_model("digits-cnn", classes=4), shutil.copytree(exported, tmp_path / "graphs")
    first = export_graphs(model, cache_dir=folder)
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert export_graphs(model, cache_dir=folder) == first
    assert traced == ["gradient", "inference"]
    assert export_graphs(model, cache_dir=folder) == first
    assert len(traced) == 2


def test_graphs_of_other_versions_serve_where_these_versions_cannot_export(exported, tmp_path, monkeypatch):
    model, folder = get_model("digits-cnn", classes=4), shutil.copytree(exported, tmp_path / "graphs")

    def refuses(*_: object) -> bytes:
        raise RuntimeError("this version cannot")

    monkeypatch.setattr(export, "_PACKAGES", ("torch",))
    monkeypatch.setattr("hushfleet.models.tracing.export_gradient", refuses)
    first, carried = (export_graphs(model, cache_dir=folder) for _ in range(2))
    assert first == carried
    assert {carried.gradient, carried.inference} == set(map(read_cached, exported.iterdir()))
    with pytest.raises(GraphRefused, match="this version cannot"):
        export_graphs(get_model("digits-cnn", classes=3), cache_dir=folder)
    wrong = next(path for path in exported.iterdir() if ".inference." in path.name)
    for path in folder.glob("*.inference.onnx"):
        path.unlink()
    write_cached(folder / wrong.name, export_inference(get_model("digits-cnn", classes=3)))
    with pytest.raises(GraphRefused, match="digits-cnn"):
        export_graphs(model, cache_dir=folder)


def test_the_key_follows_the_network():
    keys = {export.content_key(get_model(name)) for name in model_names()}
    keys |= {export.content_key(get_model("digits-cnn", classes=n)) for n in (2, 3)}
    assert len(keys) == len(model_names()) + 2
    assert export.content_key(get_model("digits-cnn")) in keys


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path, traced):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert export_graphs(get_model("digits-cnn", classes=4), cache_dir=blocked / "graphs").gradient
    assert os.listdir(tmp_path) == ["file"]
