"""Sizes told from a graph against those that ONNX Runtime computes and that `onnx.shape_inference` tells."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper, shape_inference

from hushfleet.errors import GraphRefused
from hushfleet.learning.graph_operators import OPERATORS
from hushfleet.learning.graph_safety import check_graph
from hushfleet.learning.graph_shapes import graph_cost, shapes
from hushfleet.learning.graph_sizes import BATCH, Open, at, divide, fixed

FLOAT = TensorProto.FLOAT
UNARY = [
    *("Abs", "Elu", "Erf", "Exp", "HardSigmoid", "LeakyRelu", "Neg", "Relu", "Selu", "Sigmoid", "Sign", "Softplus"),
    *(
        "Ceil",
        "Cos",
        "Floor",
        "Round",
        "Sin",
        "Sqrt",
        "Tanh",
        "Identity",
        "Clip",
        "HardSwish",
        "Softmax",
        "LogSoftmax",
        "Reciprocal",
        "Log",
    ),
]
BINARY = ["Add", "Sub", "Mul", "Div", "Max", "Min", "Mean", "Sum", "Pow", "PRelu"]
COMPARISONS = ["Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"]
REDUCTIONS = [f"Reduce{kind}" for kind in ("L2", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")]


class Sketch:
    """A graph of random nodes; each new value has the shape that `shapes` tells, which later nodes then build on."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.channels, self.side = draw(st.integers(1, 4)), draw(st.integers(3, 9))
        self.shapes: dict[str, tuple] = {"x": (BATCH, self.channels, self.side, self.side)}

    def model(self) -> onnx.ModelProto:
        inputs = [helper.make_tensor_value_info("x", FLOAT, ["batch", *self.shapes["x"][1:]])]
        outputs = [helper.make_empty_tensor_value_info(name) for node in self.nodes for name in node.output]
        graph = helper.make_graph(self.nodes, "sketch", inputs, outputs, self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
        inferred = shape_inference.infer_shapes(model)
        del model.graph.output[:]
        model.graph.output.extend(inferred.graph.output)
        return model

    def constant(self, values: object, kind: type = np.int64) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(values, kind), name))
        return name

    def add(self, operator: str, *inputs: str, outputs: int = 1, **attributes: object) -> bool:
        """Whether the node was taken; one whose sizes are refused is not."""
        names = [f"v{len(self.nodes)}.{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(operator, inputs, names, **attributes))
        try:
            told = shapes(check_graph(self.model().SerializeToString()))
        except GraphRefused:
            self.nodes.pop()
            return False
        self.shapes |= {name: told[name] for name in names if len(told[name]) <= 6 and operator not in COMPARISONS}
        return True

    def any(self, rank: int | None = None) -> str | None:
        fitting = [name for name, shape in self.shapes.items() if rank is None or len(shape) == rank]
        return self.draw(st.sampled_from(fitting)) if fitting else None

    def step(self) -> None:
        draw, name = self.draw, self.any()
        shape = self.shapes[name]
        rank = len(shape)
        axis = draw(st.integers(-rank, rank - 1)) if rank else 0
        kind = draw(st.sampled_from(sorted(BUILDERS)))
        BUILDERS[kind](self, name, shape, rank, axis)


def unary(s: Sketch, name: str, shape: tuple, rank: int, axis: int) -> None:
    if rank:
        s.add(s.draw(st.sampled_from(UNARY)), name)


def binary(s: Sketch, name: str, shape: tuple, rank: int, axis: int) -> None:
    s.add(s.draw(st.sampled_from(BINARY + COMPARISONS)), name, s.any())


def reduce(s: Sketch, name: str, shape: tuple, rank: int, axis: int) -> None:
    keepdims = s.draw(st.integers(0, 1))
    if s.draw(st.booleans()) and rank:
        s.add("ArgMax", name, axis=axis, keepdims=keepdims) and s.shapes.pop(f"v{len(s.nodes) - 1}.0")
        return
    axes = s.draw(st.lists(st.integers(-rank, rank - 1), unique_by=lambda a: a % rank)) if rank else []
    s.add(s.draw(st.sampled_from(REDUCTIONS)), name, s.constant(axes), keepdims=keepdims,
          noop_with_empty_axes=s.draw(st.integers(0, 1)))  # fmt: skip


def reshape(s: Sketch, name: str, shape: tuple, rank: int, axis: int) -> None:
    sizes = [0 if isinstance(n, Open) else n for n in shape]
    place = s.draw(st.integers(0, max(rank - 1, 0)))
    shapes = [[-1], [0, -1], [-1, s.side], [*sizes[:place], -1], [1, *sizes[place:], -1], sizes]
    wanted = s.draw(st.sampled_from(shapes))
    s.add("Reshape", name, s.constant(wanted), allowzero=s.draw(st.integers(0, 1)))


def reshape_by_shape(s: Sketch, name: str, shape: tuple, rank: int, axis: int) -> None:
    """The batch as an integer: taken from a shape, and put in front of what is left."""
    if not s.add("Shape", name, start=0, end=1):
        return
    batch = s.nodes[-1].output[0]
    s.shapes.pop(batch)
    if s.add("Concat", batch, s.constant([-1]), axis=0):
        wanted = s.nodes[-1].output[0]
        s.shapes.pop(wanted)
        s.add("Reshape", name, wanted)


def expand(s: Sketch, name: str, shape: tuple, rank: int, axis: int) -> None:
    s.add("Shape", s.any())
    wanted = s.nodes[-1].output[0]
    s.shapes.pop(wanted)
    s.add(s.draw(st.sampled_from(["Expand"])), name, wanted)
    s.add("ConstantOfShape", wanted)


def squeeze(s: Sketch, name: str, shape: tuple, rank: int, axis: int) -> None:
    s.add(s.draw(st.sampled_from(["Squeeze", "Unsqueeze"])), name, s.constant([axis]))


def cumulate(s: Sketch, name: str, shape: tuple, rank: int, axis: int) -> None:
    if rank:
        s.add("CumSum", name, s.constant(axis), exclusive=s.draw(st.integers(0, 1)), reverse=s.draw(st.integers(0, 1)))


def top(s: Sketch, name: str, shape: tuple, rank: int, axis: int) -> None:
    if rank and s.add("TopK", name, s.constant([s.draw(st.integers(0, 5))]), outputs=2, axis=axis):
        s.shapes.pop(f"v{len(s.nodes) - 1}.1")


def fourier(s: Sketch, name: str, shape: tuple, rank: int, axis: int) -> None:
    """Numbers become complex ones; some transforms have another length."""
    if not rank or not s.add("Unsqueeze", name, s.constant([-1])):
        return
    length = s.constant(s.draw(st.integers(0, 9))) if s.draw(st.booleans()) else ""
    kind = s.draw(st.sampled_from([{}, {"onesided": 1}, {"inverse": 1}, {"inverse": 1, "onesided": 1}]))
    s.add("DFT", f"v{len(s.nodes) - 1}.0", length, axis=axis % rank, **kind)


def short_fourier(s: Sketch, name: str, shape: tuple, rank: int, axis: int) -> None:
    draw = s.draw
    if not s.add("Reshape", name, s.constant([0, -1, 1])):
        return
    step, length = s.constant(draw(st.integers(0, 4))), draw(st.integers(0, 9))
    has_window, has_length = draw(st.booleans()), draw(st.booleans())
    window = s.constant(np.ones(max(1, length - draw(st.integers(0, 1)))), np.float32) if has_window else ""
    last = [s.constant(length)] if has_length else []
    s.add("STFT", f"v{len(s.nodes) - 1}.0", step, window, *last, onesided=draw(st.integers(0, 1)))


def turn(s: Sketch, name: str, shape: tuple, rank: int, axis: int) -> None:
    if rank:
        s.add("Transpose", name, perm=s.draw(st.permutations(range(rank))))


def concat(s: Sketch, name: str, shape: tuple, rank: int, axis: int) -> None:
    s.add("Concat", name, s.any(rank), name, axis=axis)


def cut(s: Sketch, name: str, shape: tuple, rank: int, axis: int) -> None:
    edges = st.integers(-12, 12) | st.sampled_from([(1 << 31) - 1, -(1 << 31), 1 << 62])
    start, stop = s.draw(edges), s.draw(edges)
    s.add("Slice", name, *(s.constant([n]) for n in (start, stop, axis, s.draw(st.sampled_from([1, 2, 3, -1, -2])))))


def split(s: Sketch, name: str, shape: tuple, rank: int, axis: int) -> None:
    s.add("Split", name, outputs=2, axis=axis, num_outputs=2)


def pad(s: Sketch, name: str, shape: tuple, rank: int, axis: int) -> None:
    pads = s.draw(st.lists(st.integers(0, 2), min_size=2 * rank, max_size=2 * rank))
    s.add("Pad", name, s.constant(pads))


def gather(s: Sketch, name: str, shape: tuple, rank: int, axis: int) -> None:
    s.add("Gather", name, s.constant(np.zeros(s.draw(st.sampled_from([(), (1,), (2, 3)])))), axis=axis)


def flatten(s: Sketch, name: str, shape: tuple, rank: int, axis: int) -> None:
    s.add("Flatten", name, axis=axis)


def product(s: Sketch, name: str, shape: tuple, rank: int, axis: int) -> None:
    if rank >= 2 and s.add("Transpose", name, perm=[*range(rank - 2), rank - 1, rank - 2]):
        other = s.nodes[-1].output[0]
        s.add("MatMul", name, other)
        if rank == 2:
            s.add("Gemm", name, name, transA=1)
            s.add("Gemm", name, other, transA=0)


def convolution(s: Sketch, name: str, shape: tuple, rank: int, axis: int) -> None:
    name = s.any(4)
    channels = s.shapes[name][1]
    if isinstance(channels, Open) or channels > 16:
        return
    draw, width = s.draw, s.draw(st.integers(1, 3))
    how = {
        "strides": draw(st.lists(st.integers(1, 3), min_size=2, max_size=2)),
        "dilations": draw(st.lists(st.integers(1, 2), min_size=2, max_size=2)),
        "pads": draw(st.lists(st.integers(0, width - 1), min_size=4, max_size=4)),
    }
    match draw(st.sampled_from(["Conv", "ConvTranspose", "MaxPool", "AveragePool", "GlobalAveragePool"])):
        case "Conv":
            s.add("Conv", name, s.constant(np.ones((2, channels, width, width)), np.float32), **how)
        case "ConvTranspose":
            s.add("ConvTranspose", name, s.constant(np.ones((channels, 2, width, width)), np.float32), **how)
        case "MaxPool":
            ceil = draw(st.integers(0, 1))
            s.add("MaxPool", name, outputs=2, kernel_shape=[width, width], ceil_mode=ceil, **how)
            s.shapes.pop(f"v{len(s.nodes) - 1}.1", None)
        case "AveragePool":
            how.pop("dilations")
            s.add("AveragePool", name, kernel_shape=[width, width], **how)
        case _:
            s.add("GlobalAveragePool", name)


def norm(s: Sketch, name: str, shape: tuple, rank: int, axis: int) -> None:
    if rank and not isinstance(shape[-1], Open):
        s.add("LayerNormalization", name, s.constant(np.ones(shape[-1]), np.float32))


BUILDERS = {
    function.__name__: function
    for function in (
        unary, binary, reduce, reshape, reshape_by_shape, expand, squeeze, turn, concat, cut, split, pad, gather,
        flatten, product, convolution, norm, cumulate, top, fourier, short_fourier,
    )
}  # fmt: skip


@settings(max_examples=60)
@given(st.data())
def test_random_graphs_have_the_sizes_that_were_told(data: st.DataObject) -> None:
    sketch = Sketch(data.draw)
    for _ in range(data.draw(st.integers(1, 8))):
        sketch.step()
    if not sketch.nodes:
        return
    model = sketch.model()
    facts = check_graph(model.SerializeToString())
    told = shapes(facts)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for batch in (1, 2, 5):
        x = np.ones((batch, sketch.channels, sketch.side, sketch.side), np.float32)
        found = dict(zip([o.name for o in session.get_outputs()], session.run(None, {"x": x}), strict=True))
        expected = {name: tuple(at(size, batch) for size in told[name]) for name in found}
        assert {name: value.shape for name, value in found.items()} == expected
        cost = graph_cost(facts, batch)
        assert cost.all_bytes >= sum(value.nbytes for value in found.values())
        assert cost.largest_bytes == max(value.nbytes for value in found.values())
        assert cost.work >= sum(value.size for value in found.values())
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = batch
        inferred = shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
        for value in inferred.graph.value_info:
            sizes = [n.dim_value for n in value.type.tensor_type.shape.dim]
            assert value.name not in expected or tuple(sizes) == expected[value.name]


def test_a_single_number_is_not_padded() -> None:
    nodes = [helper.make_node("ReduceSum", ["x"], ["a"], keepdims=0), helper.make_node("Pad", ["a", "none"], ["b"])]
    none = numpy_helper.from_array(np.zeros(0, np.int64), "none")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])
    made = helper.make_graph(nodes, "g", [x], [helper.make_tensor_value_info("b", TensorProto.FLOAT, [])], [none])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    with pytest.raises(GraphRefused, match="pads a single number"):
        shapes(check_graph(model.SerializeToString()))


@pytest.mark.parametrize(("divisor", "fits"), [([2, 3], True), ([2, 0], False), ([-1, 1], False), (None, False)])
def test_whole_numbers_are_divided_by_known_ones_above_zero(divisor: list[int] | None, fits: bool) -> None:
    """ONNX Runtime ends the process where it divides the least int64 by -1: a -1 that is made of some label would end
    it on the boards that have the label."""
    y = helper.make_tensor_value_info("y", TensorProto.INT64, ["batch", 2])
    by = numpy_helper.from_array(np.array(divisor or [1, 1]), "by")
    nodes = [helper.make_node("Div", ["y", "y" if divisor is None else "by"], ["a"])]
    made = helper.make_graph(nodes, "g", [y], [helper.make_tensor_value_info("a", TensorProto.INT64, None)], [by])
    facts = check_graph(
        helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=8).SerializeToString()
    )
    if fits:
        assert shapes(facts) == {"a": (BATCH, 2)}
        return
    with pytest.raises(GraphRefused, match="known numbers above zero"):
        shapes(facts)


def test_every_allowed_operator_is_one_that_onnx_knows() -> None:
    assert {operator for operator in OPERATORS if not onnx.defs.has(operator)} == set()


def test_sizes_that_depend_on_the_batch() -> None:
    size = 3 * BATCH * BATCH + 2 * BATCH + 1
    assert [at(size, batch) for batch in (1, 2, 10)] == [6, 17, 321]
    assert repr(size) == "1 + 2 batch + 3 batch^2"
    assert divide(12 * BATCH, 4) == 3 * BATCH
    assert divide(12 * BATCH * BATCH, 6 * BATCH) == 2 * BATCH
    assert divide(12 * BATCH, BATCH) == 12
    assert divide(12 * BATCH, 5) is None  # only for some batches
    assert divide(12, BATCH) is None
    assert divide(12 * BATCH, BATCH + 1) is None
    assert 0 * BATCH == 0
    with pytest.raises(GraphRefused, match="does not depend on the batch"):
        fixed(BATCH)
    with pytest.raises(GraphRefused):
        BATCH * -1
    with pytest.raises(GraphRefused):
        BATCH * BATCH * BATCH * BATCH * BATCH


def test_a_convolutions_work_by_hand() -> None:
    inputs = [helper.make_tensor_value_info("x", FLOAT, ["batch", 3, 8, 8]),
              helper.make_tensor_value_info("w", FLOAT, [5, 3, 3, 3])]  # fmt: skip
    outputs = [helper.make_tensor_value_info("y", FLOAT, ["batch", 5, 6, 6])]
    graph = helper.make_graph([helper.make_node("Conv", ["x", "w"], ["y"])], "one", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    facts = check_graph(model.SerializeToString())
    assert shapes(facts) == {"y": (BATCH, 5, 6, 6)}
    products = 2 * (5 * 6 * 6) * (3 * 3 * 3)
    assert graph_cost(facts, 2).work == products + 2 * 5 * 6 * 6
    assert graph_cost(facts, 2).all_bytes == 4 * (2 * 5 * 6 * 6 + 27 * 6 * 6)  # and one image's windows
