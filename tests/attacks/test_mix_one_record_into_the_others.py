"""The aggregator's graphs make each record's features, or its teacher, of the records beside it, or before it.

With the unit `record` noise hides what one record changes: its own clipped gradient. Features were once made of two
images together, so that a record that was left out gave all that follow it another neighbour; here it moved a sum by 62
clip norms.
"""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from hushfleet.data.samples import Samples
from hushfleet.errors import GraphRefused
from hushfleet.learning.graph_features import FeatureGraph, check_features
from hushfleet.learning.graph_safety import check_graph
from hushfleet.learning.graph_session import InferenceGraph
from hushfleet.learning.graph_shapes import check_cost
from hushfleet.learning.linear import LinearClipping
from hushfleet.learning.own_samples import LoadedSamples
from hushfleet.models.onnx_nodes import Graph
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import BlobRef, FeatureSpec

SHAPE, COUNT, RECORDS, CLIP_NORM = (1, 2, 2), 4, 64, 0.1
LAYOUT = ParamLayout(("head.weight", "prior"), ((3, COUNT), (3,)))
# Neighbours are alike in pairs: bright, bright, dark, dark, ...
IMAGES = np.where(np.arange(RECORDS) % 4 < 2, 255, 0).astype(np.uint8)[:, None, None, None] + np.zeros(SHAPE, np.uint8)


def samples(images: np.ndarray) -> Samples:
    return Samples(images, np.zeros(len(images), np.int64), (0.0,), (1.0,))


def mixed(graph: Graph) -> str:
    """0 for each image of a batch, and how far apart its images are."""
    flat = graph.node("Flatten", "x", axis=1)
    first = graph.constant(np.array([0]))
    gap = graph.node("Sub", *(graph.node(f"Reduce{which}", flat, first, keepdims=1) for which in ("Max", "Min")))
    return graph.node("Add", graph.node("Sub", flat, flat), gap)


def test_features_are_made_of_one_image() -> None:
    graph = Graph()
    data = graph.to_bytes(mixed(graph), SHAPE, COUNT)
    spec = FeatureSpec(SHAPE, COUNT, BlobRef.of(data))
    check_features(data, spec)  # it breaks no rule: a gradient needs such operators

    def sum_of(images: np.ndarray) -> np.ndarray:
        found, out = FeatureGraph(lambda: data, spec).of(samples(images)), np.empty(LAYOUT.size, np.float32)
        start = np.zeros(LAYOUT.size, np.float32)
        LinearClipping(LAYOUT)(start, found.x, found.y, clip_norm=CLIP_NORM, out=out, part=LAYOUT.slices["head.weight"])
        return out.astype(np.float64)

    for left_out in (0, 31, 63):
        moved = sum_of(IMAGES) - sum_of(np.delete(IMAGES, left_out, 0))
        assert np.linalg.norm(moved) <= CLIP_NORM * (1 + 1e-6)


def test_a_teacher_sees_one_record() -> None:
    """pFedSD and ACDP-pFSD ask the graph of inference for logits of all records, before any gradient."""
    graph = Graph()
    mix = mixed(graph)
    weight = graph.node("Transpose", "param.head.weight", perm=[1, 0])
    logits = graph.node("Add", graph.node("MatMul", mix, weight), "param.prior")
    nodes = [*graph.nodes, helper.make_node("Identity", [logits], ["logits"])]
    shapes = {"x": ["batch", *SHAPE], "param.head.weight": [3, COUNT], "param.prior": [3]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])]
    made = helper.make_graph(nodes, "logits", inputs, outputs, graph.constants)
    data = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=8).SerializeToString()
    check_graph(data)
    inference, params = InferenceGraph(data, LAYOUT), np.ones(LAYOUT.size, np.float32)

    def taught_by(images: np.ndarray) -> np.ndarray:
        return LoadedSamples(samples(images), lambda *_: None, inference, by_record=True).logits(params)

    images = IMAGES.copy()
    images[images == 255] = 200
    images[5] = 255  # the brightest decides how far apart they are
    np.testing.assert_array_equal(np.delete(taught_by(images), 5, 0), taught_by(np.delete(images, 5, 0)))


@pytest.mark.parametrize(("opset", "attributes", "outputs"), [(13, {}, 5), (18, {"training_mode": 1}, 3)])
def test_a_graph_remembers_no_record(opset: int, attributes: dict[str, int], outputs: int) -> None:
    """ONNX Runtime wrote a batch normalization's new averages over the constants that it had begun with: all gradients
    after that of one record told of it, each within its own bound."""
    names = ["normed", "mean", "variance", "saved_mean", "saved_variance"][:outputs]
    nodes = [
        helper.make_node("Reshape", ["x", "rows"], ["rows_of_x"]),
        helper.make_node("BatchNormalization", ["rows_of_x", *["ones"] * 4], names, **attributes),
        helper.make_node("ReduceSum", ["mean"], ["loss"], keepdims=0),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1, 2, 2])
    loss = helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])
    constants = {"rows": np.array([-1, 2, 2]), "ones": np.ones(2, np.float32)}
    made = helper.make_graph(
        nodes, "g", [x], [loss], [numpy_helper.from_array(value, name) for name, value in constants.items()]
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    with pytest.raises(GraphRefused, match="keeps averages"):
        check_cost(check_graph(model.SerializeToString()), batch=1)
