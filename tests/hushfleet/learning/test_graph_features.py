"""Features on a board: each image's by itself, kept once made, and graphs that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from hushfleet.data.samples import FeatureSamples, Samples
from hushfleet.errors import GraphRefused
from hushfleet.learning import graph_features as features
from hushfleet.learning.graph_features import FeatureGraph, check_features
from hushfleet.models.onnx_nodes import Graph
from hushfleet.wire.format.spec import BlobRef, FeatureSpec

SHAPE = (1, 4, 4)
COUNT = 3
MATRIX = np.random.default_rng(0).standard_normal((16, COUNT)).astype(np.float32)


def linear(last: str = "Relu") -> bytes:
    """relu(x M), as a graph."""
    graph = Graph()
    flat = graph.node("Flatten", "x", axis=1)
    return graph.to_bytes(graph.node(last, graph.node("MatMul", flat, graph.constant(MATRIX))), SHAPE, COUNT)


def spec_of(graph: bytes) -> FeatureSpec:
    return FeatureSpec(SHAPE, COUNT, BlobRef.of(graph))


def images(count: int) -> Samples:
    rng = np.random.default_rng(count)
    return Samples(rng.integers(0, 256, (count, *SHAPE), np.uint8), np.arange(count), (0.0,), (1.0,))


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_every_image_has_its_features(count: int) -> None:
    samples = images(count)
    made = FeatureGraph(linear, spec_of(linear())).of(samples)
    expected = np.maximum(samples.x.reshape(count, 16) @ MATRIX, 0)
    assert made.x.shape == (count, COUNT, 1, 1)
    np.testing.assert_allclose(made.x[:, :, 0, 0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(made.y, samples.y)


def test_a_network_may_be_given_the_first_ones() -> None:
    graph = FeatureGraph(linear, spec_of(linear()), input_shape=(2, 1, 1))
    every, some = FeatureGraph(linear, spec_of(linear())).of(images(5)), graph.of(images(5))
    assert some.x.shape == (5, 2, 1, 1)
    assert some.x.flags.c_contiguous
    np.testing.assert_array_equal(some.x, every.x[:, :2])
    np.testing.assert_array_equal(some.own, every.x[:, 2:, 0, 0])
    np.testing.assert_array_equal(every.own, every.x[:, :, 0, 0])
    part = some.take(np.array([3, 1, 2]))
    np.testing.assert_array_equal(part.x, some.x[[3, 1, 2]])
    np.testing.assert_array_equal(part.own, some.own[[3, 1, 2]])
    assert part.nbytes == 3 * COUNT * 4


def test_a_graph_that_stays_is_loaded_once() -> None:
    loaded = list[int]()
    graphs = [
        FeatureGraph(linear, spec_of(linear()), stays=stays, loaded=lambda stays=stays: loaded.append(stays))
        for stays in (False, True)
    ]
    for count in (3, 1, 4):
        once, stays = (graph.of(images(count)) for graph in graphs)
        np.testing.assert_array_equal(once.x, stays.x)
    assert loaded == [0, 1, 0, 0]


def test_features_are_kept_by_what_they_were_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = FeatureGraph(linear, spec_of(linear()), cache=tmp_path)
    first = graph.of(images(9)).x
    with monkeypatch.context() as patch:
        patch.setattr(features, "open_session", lambda *_, **__: pytest.fail("made again"))
        np.testing.assert_array_equal(graph.of(images(9)).x, first)
    assert not np.array_equal(graph.of(replace(images(9), mean=(0.5,))).x, first)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-7])  # as after a power cut
    np.testing.assert_array_equal(graph.of(images(9)).x, first)


def test_features_that_are_no_numbers_are_refused() -> None:
    graph = linear("Log")  # of negative numbers
    with pytest.raises(GraphRefused, match="not finite"):
        FeatureGraph(lambda: graph, spec_of(graph)).of(images(4))


@pytest.mark.parametrize("fails", ["Log", "Gather"])
def test_images_without_features_can_be_left_out_by_themselves(fails: str) -> None:
    """One that a graph makes no finite numbers of, or fails on."""
    dark, bright = np.full((1, *SHAPE), 2, np.uint8), np.full((1, *SHAPE), 200, np.uint8)
    wrong = np.zeros((1, *SHAPE), np.uint8) if fails == "Log" else bright
    kept = Samples(np.concatenate([dark] * 4), np.arange(4), (0.0,), (1 / 255,))
    some = Samples(np.concatenate([dark, dark, dark, wrong, dark]), np.array([0, 1, 2, 9, 3]), (0.0,), (1 / 255,))
    graph = Graph()
    first = (graph.constant(np.array([n])) for n in (0, COUNT, 1))
    flat = graph.node("Slice", graph.node("Flatten", "x", axis=1), *first)
    if fails == "Log":
        last = graph.node("Log", flat)
    else:
        last = graph.node("Gather", graph.constant(np.ones(9, np.float32)), graph.node("Cast", flat, to=7))
    made = graph.to_bytes(last, SHAPE, COUNT)
    skipped: list[str] = []
    features = FeatureGraph(lambda: made, spec_of(made))
    found = features.of(some, skipped=skipped)
    np.testing.assert_array_equal(found.x, features.of(kept).x)
    assert found.labels.tolist() == [0, 1, 2, 3]
    assert skipped == ["sample 3: it has no finite features"]
    with pytest.raises(GraphRefused):
        features.of(some)


def test_an_acceptable_graph_is_accepted() -> None:
    check_features(linear(), spec_of(linear()))


@pytest.mark.parametrize(
    ("change", "text"),
    [({"count": 4}, "outputs of the graph"), ({"image_shape": (1, 4, 5)}, "inputs of the graph")],
)
def test_a_graph_of_another_shape_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(GraphRefused, match=text):
        check_features(linear(), replace(spec_of(linear()), **change))


def test_a_graph_with_a_second_input_is_refused() -> None:
    model = onnx.load_from_string(linear())
    model.graph.input.append(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch"]))
    data = model.SerializeToString()
    with pytest.raises(GraphRefused, match="inputs of the graph"):
        check_features(data, spec_of(data))


@pytest.mark.parametrize("graph", [b"", b"\x00" * 64, b"ONNX"])
def test_something_else_than_a_graph_is_refused(graph: bytes) -> None:
    with pytest.raises(GraphRefused):
        check_features(graph, spec_of(b"x"))


def test_an_operator_that_is_not_allowed_is_refused() -> None:
    graph = Graph()
    data = graph.to_bytes(graph.node("NonZero", "x"), SHAPE, COUNT)
    with pytest.raises(GraphRefused, match="NonZero"):
        check_features(data, spec_of(data))


def test_a_graph_that_needs_more_memory_than_there_is_is_refused() -> None:
    graph = Graph()
    large = graph.node("Expand", graph.node("Flatten", "x", axis=1), graph.constant(np.array([1 << 14, 1, 16])))
    cut = graph.node("ReduceMax", large, graph.constant(np.array([0])), keepdims=0)
    data = graph.to_bytes(graph.node("MatMul", cut, graph.constant(MATRIX)), SHAPE, COUNT)
    check_features(data, spec_of(data))
    with pytest.raises(GraphRefused, match="MiB"):
        check_features(data, spec_of(data), memory_bytes=2 << 20)


def test_samples_are_taken_in_any_order() -> None:
    made = FeatureSamples(np.arange(6, dtype=np.float32).reshape(3, 2, 1, 1), np.array([0, 1, 2]))
    both = made.take(np.array([2, 0, 1]))
    assert both.x[:, 0, 0, 0].tolist() == [4, 0, 2]
    assert both.y.tolist() == [2, 0, 1]
