"""A graph of allowed operators and few bytes that would need terabytes, or years, on the board that runs it.

Each trick was accepted by the rules on operators and constants alone, and each is refused by its sizes, before ONNX
Runtime sees a byte.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, defs, helper, numpy_helper

from hushfleet.errors import GraphRefused
from hushfleet.learning import graph_safety as safety
from hushfleet.learning.graph_operators import OPERATORS
from hushfleet.learning.graph_safety import check_graph, check_masks
from hushfleet.learning.graph_shapes import check_cost
from hushfleet.wire.format.spec import DropoutSpec

MEMORY_BYTES = 512 << 20
BATCH = 16
INPUTS = {"x": ["batch", 1, 28, 28], "y": ["batch"], "param.w": [1000], "param.k": [1, 1, 28, 28]}


def graph(nodes: list, **constants: list | np.ndarray) -> bytes:
    """`r` is what it returns: a sum over whatever the last node gives, so that the output itself is small."""
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64 if name == "y" else TensorProto.FLOAT, shape)
        for name, shape in INPUTS.items()
    ]
    arrays = {name: np.asarray(value) for name, value in constants.items()}
    made = helper.make_graph(
        [*nodes, helper.make_node("ReduceSum", [nodes[-1].output[0]], ["r"], keepdims=0)],
        "attack",
        inputs,
        [helper.make_tensor_value_info("r", TensorProto.FLOAT, [])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=8).SerializeToString()


node = helper.make_node


def expand() -> bytes:
    """160 GB of one number."""
    return graph([node("Expand", ["c", "n"], ["a"])], c=np.float32(1), n=[200_000, 200_000])


def expand_by_the_batch() -> bytes:
    return graph(
        [node("Shape", ["x"], ["s"]), node("Mul", ["s", "n"], ["t"]), node("Expand", ["c", "t"], ["a"])],
        c=np.float32(1), n=[1 << 20] * 4,
    )  # fmt: skip


def constant_of_shape() -> bytes:
    return graph([node("ConstantOfShape", ["n"], ["a"])], n=[1 << 40])


def constant_of_computed_shape() -> bytes:
    """Each number is harmless; their product is not."""
    return graph(
        [node("Mul", ["n", "n"], ["m"]), node("Mul", ["m", "m"], ["k"]), node("ConstantOfShape", ["k"], ["a"])],
        n=[1 << 10],
    )


def counting_up() -> bytes:
    numbers = node("Range", ["zero", "many", "one"], ["i"])
    return graph([numbers, node("Cast", ["i"], ["a"], to=1)], zero=np.int64(0), one=np.int64(1), many=np.int64(1 << 40))


def padding() -> bytes:
    return graph([node("Pad", ["x", "n"], ["a"])], n=[0, 0, 65536, 65536, 0, 0, 65536, 65536])


def padding_of_a_window() -> bytes:
    return graph([node("MaxPool", ["x"], ["a"], kernel_shape=[9, 9], pads=[8, 8, 8, 8]),
                  node("Conv", ["x", "param.k"], ["b"], pads=[60000] * 4)])  # fmt: skip


def outer_product() -> bytes:
    """All samples' pixels with each other: it grows with the square of the batch."""
    return graph(
        [node("Reshape", ["x", "n"], ["a"]), node("Transpose", ["a"], ["b"]), node("MatMul", ["a", "b"], ["c"])],
        n=[-1, 1],
    )


def outer_product_by_gemm() -> bytes:
    return graph(
        [node("Expand", ["param.w", "n"], ["a"]), node("Gemm", ["a", "a"], ["b"], transA=0, transB=1)], n=[20_000, 1000]
    )


def broadcast() -> bytes:
    shapes = [[1000 if i == axis else 1 for i in range(4)] for axis in range(4)]
    nodes = [node("Reshape", ["param.w", f"n{axis}"], [f"v{axis}"]) for axis in range(4)]
    nodes += [node("Add", ["v0", "v1"], ["a"]), node("Add", ["a", "v2"], ["b"]), node("Add", ["b", "v3"], ["c"])]
    return graph(nodes, **{f"n{axis}": shape for axis, shape in enumerate(shapes)})


def doubling(operator: str) -> bytes:
    """Forty nodes of two inputs each, and a tebi of pixels."""
    nodes, name = [], "x"
    for turn in range(40):
        nodes.append(node(operator, [name, name], [f"a{turn}"], **({"axis": 0} if operator == "Concat" else {})))
        name = f"a{turn}"
    return graph(nodes)


def doubling_by_concat() -> bytes:
    return doubling("Concat")


def squaring_sizes() -> bytes:
    """Each level squares a size: after thirty, the number itself has more digits than the board has memory."""
    nodes, name = [node("ConstantOfShape", ["n"], ["x0"])], "x0"
    for level in range(16):
        nodes.append(node("Gather", [name, name], [f"g{level}"], axis=0))
        name = f"x{level + 1}"
        nodes.append(node("Flatten", [f"g{level}"], [name], axis=0))
    return graph(nodes, n=[1, 1 << 40])


def counting_beyond_all_numbers() -> bytes:
    numbers = node("Range", ["low", "high", "one"], ["i"])
    low, high = np.int64(-(1 << 63)), np.int64((1 << 63) - 1)
    return graph([numbers, node("Cast", ["i"], ["a"], to=1)], low=low, high=high, one=np.int64(1))


def counting_by_a_step_that_becomes_1() -> bytes:
    """One number by 64 bits, 2^31 by the 32 that a cast keeps of the step."""
    nodes = [node("Cast", ["step"], ["one"], to=6), node("Range", ["zero", "many", "one"], ["i"])]
    step, many = np.int64((1 << 32) + 1), np.int32((1 << 31) - 1)
    return graph([*nodes, node("Cast", ["i"], ["a"], to=1)], zero=np.int32(0), many=many, step=step)


def large_where_windows_with_gaps_are_few() -> bytes:
    """The rule says four windows, ONNX Runtime finds one: a range that begins three before the end is then longer."""
    windows = node(
        "MaxPool", ["x"], ["p"], kernel_shape=[10, 10], strides=[7, 7], dilations=[3, 3], auto_pad="SAME_UPPER"
    )
    return graph([windows, node("Slice", ["p", "from", "to", "axis"], ["a"])], **{"from": [-3]}, to=[2], axis=[2])


def gathering() -> bytes:
    """The same small tensor, taken again and again."""
    nodes = [node("Concat", ["y"] * 1000, ["i"], axis=0), node("Gather", ["x", "i"], ["a"], axis=0)]
    return graph([*nodes, node("Concat", ["a"] * 50, ["b"], axis=0)])


def gathering_of_gathered() -> bytes:
    nodes = [node("ConstantOfShape", ["n"], ["i"], value=numpy_helper.from_array(np.zeros(1, np.int64)))]
    return graph([*nodes, node("Gather", ["x", "i"], ["a"], axis=3)], n=[3000, 3000])


def transposed_convolution() -> bytes:
    return graph([node("ConvTranspose", ["x", "param.k"], ["a"], strides=[20_000, 20_000])])


def hidden_windows() -> bytes:
    """The result is one number, but a kernel lays out what it multiplies."""
    nodes = [node("Expand", ["c", "n"], ["k"]), node("Expand", ["c", "m"], ["i"]),
             node("Conv", ["i", "k"], ["a"], kernel_shape=[3000, 3000])]  # fmt: skip
    return graph(nodes, c=np.float32(1), n=[1, 1, 3000, 3000], m=[1, 1, 6000, 6000])


def many_at_once() -> bytes:
    """Each is 64 MiB; a thousand of them wait for the last node."""
    nodes = [node("Expand", [f"c{i}", "n"], [f"a{i}"]) for i in range(1000)]
    nodes.append(node("Sum", [f"a{i}" for i in range(1000)], ["b"]))
    return graph(nodes, n=[1 << 24], **{f"c{i}": np.float32(i) for i in range(1000)})


def many_in_another_order() -> bytes:
    """Little is held at once in the file's order, but ONNX Runtime need not keep to it."""
    nodes, parts = [], []
    for i in range(1000):
        nodes += [node("Expand", [f"c{i}", "n"], [f"a{i}"]), node("ReduceMax", [f"a{i}"], [f"m{i}"], keepdims=0)]
        nodes += [node("ReduceMin", [f"a{i}"], [f"l{i}"], keepdims=0)]
        parts += [f"m{i}", f"l{i}"]
    nodes.append(node("Sum", parts, ["b"]))
    return graph(nodes, n=[1 << 23], **{f"c{i}": np.float32(i) for i in range(1000)})


def only_slow() -> bytes:
    """A hundred products of matrices that fit, and take hours."""
    nodes = [node("Expand", ["c", "n"], ["a0"])]
    nodes += [node("MatMul", [f"a{i}", "a0"], [f"a{i + 1}"]) for i in range(100)]
    return graph(nodes, c=np.float32(1e-3), n=[4000, 4000])


def from_values() -> bytes:
    """How large it is depends on a label, so nothing can be told before it runs."""
    return graph([node("ConstantOfShape", ["y"], ["a"])])


def from_a_comparison() -> bytes:
    """Small for every batch but one of 13 samples."""
    nodes = [node("Shape", ["y"], ["b"]), node("Equal", ["b", "n"], ["e"]), node("Where", ["e", "m", "o"], ["s"])]
    return graph([*nodes, node("ConstantOfShape", ["s"], ["a"])], n=[13], m=[1 << 40], o=[1])


def cut_by_the_batch() -> bytes:
    """Large only for small batches."""
    nodes = [node("Shape", ["y"], ["b"]), node("Mul", ["b", "m"], ["s"]), node("Expand", ["c", "n"], ["w"])]
    return graph([*nodes, node("Slice", ["w", "s", "n"], ["a"])], c=np.float32(1), n=[1 << 20], m=[1 << 10])


def another_open_size() -> bytes:
    data = graph([node("Relu", ["x"], ["a"])])
    return data.replace(b"\x08\x1c", b"\x12\x00", 1)  # a dimension of 28 becomes one without a size


TRICKS = [
    (expand, "gives it"),
    (expand_by_the_batch, "too large to be followed"),
    (constant_of_shape, "gives it"),
    (constant_of_computed_shape, "cannot be told"),
    (counting_up, "gives it"),
    (padding, "gives it"),
    (padding_of_a_window, "gives it"),
    (outer_product, "gives it"),
    (outer_product_by_gemm, "gives it"),
    (broadcast, "gives it"),
    (doubling_by_concat, "gives it"),
    (squaring_sizes, "too large to be followed"),
    (counting_beyond_all_numbers, "too large to be followed"),
    (counting_by_a_step_that_becomes_1, "cannot be told"),
    (large_where_windows_with_gaps_are_few, "windows with gaps"),
    (gathering, "gives it"),
    (gathering_of_gathered, "gives it"),
    (transposed_convolution, "gives it"),
    (hidden_windows, "gives it"),
    (many_at_once, "gives it"),
    (many_in_another_order, "in all"),
    (only_slow, "multiply-adds"),
    (from_values, "cannot be told"),
    (from_a_comparison, "cannot be told"),
    (cut_by_the_batch, "does not depend on the batch"),
    (another_open_size, "open size"),
]


@pytest.mark.parametrize(("trick", "text"), TRICKS, ids=[trick.__name__ for trick, _ in TRICKS])
def test_a_small_graph_that_needs_much_is_refused(trick: Callable[[], bytes], text: str) -> None:
    data = trick()
    assert len(data) < 200_000
    facts = check_graph(data)  # the rules on operators and constants let it pass
    with pytest.raises(GraphRefused, match=text):
        check_cost(facts, batch=BATCH, memory_bytes=MEMORY_BYTES)


def test_the_same_graphs_pass_where_they_are_small() -> None:
    """It is the sizes that are refused, not the operators."""
    harmless = [
        graph([node("Expand", ["c", "n"], ["a"])], c=np.float32(1), n=[200, 200]),
        graph([node("Pad", ["x", "n"], ["a"])], n=[0, 0, 1, 1, 0, 0, 1, 1]),
        graph([node("Concat", ["x", "x"], ["a"], axis=0)]),
        graph([node("ConstantOfShape", ["n"], ["a"])], n=[1 << 20]),
    ]
    for data in harmless:
        assert check_cost(check_graph(data), batch=BATCH, memory_bytes=MEMORY_BYTES).held_bytes < 1 << 24


def test_a_constant_is_no_larger_than_its_type() -> None:
    """Protobuf keeps 32 bits of a larger number: of the step of a range that would be one long number, 1 is left."""
    model = onnx.load_from_string(graph([node("Cast", ["c"], ["a"], to=1)], c=np.int32(0)))
    model.graph.initializer[0].CopyFrom(helper.make_tensor("c", TensorProto.INT32, [1], [7]))
    data = model.SerializeToString()
    check_graph(data)
    # the field `int32_data`, packed, of one byte; and of five, in a constant and a graph that are longer by as much
    model.graph.initializer[0].int32_data[:] = [-1]
    check_graph(model.SerializeToString())
    long = model.SerializeToString().replace(b"\xff" * 9 + b"\x01", b"\x81\x80\x80\x80\x90\x80\x80\x80\x80\x00")
    assert onnx.load_from_string(long).graph.initializer[0].int32_data[:] == [1]
    with pytest.raises(GraphRefused, match="value of the constant 'c'"):
        check_graph(long)


def test_a_shape_of_nothing_is_no_error_of_numpy() -> None:
    model = onnx.load_from_string(graph([node("Cast", ["c"], ["a"], to=1)], c=np.int64(0)))
    model.graph.initializer[0].CopyFrom(helper.make_tensor("c", TensorProto.INT64, [0, 1 << 40, 1 << 40], []))
    with pytest.raises(GraphRefused, match="empty tensor"):
        check_cost(check_graph(model.SerializeToString()), batch=BATCH)
    shape = node("Reshape", ["c", "n"], ["a"], allowzero=1)
    data = graph([shape], c=np.zeros(0, np.int64), n=[0, 1 << 40, 1 << 40])
    with pytest.raises(GraphRefused, match="empty tensor"):
        check_cost(check_graph(data), batch=BATCH)


@pytest.mark.parametrize("name", ["dropout.0", "teacher"])
def test_an_input_that_the_board_makes_counts(name: str) -> None:
    """Without a mask or a teacher the board makes one of ones or zeros, as large as the graph's input."""
    model = onnx.load_from_string(graph([node("ReduceMax", ["x"], ["a"])]))
    model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 1 << 40]))
    with pytest.raises(GraphRefused, match="gives it"):
        check_cost(check_graph(model.SerializeToString()), batch=BATCH, memory_bytes=MEMORY_BYTES)


def test_masks_are_those_of_the_task() -> None:
    """The board draws the task's masks before a graph is asked; their sizes are then counted as the graph's."""
    model = onnx.load_from_string(graph([node("ReduceMax", ["x"], ["a"])]))
    model.graph.input.append(helper.make_tensor_value_info("dropout.0", TensorProto.FLOAT, ["batch", 7]))
    facts = check_graph(model.SerializeToString())
    check_masks(facts, [DropoutSpec((7,), 0.5)])
    for named in ([], [DropoutSpec((1 << 20,), 0.5)], [DropoutSpec((7,), 0.5)] * 2):
        with pytest.raises(GraphRefused, match="masks"):
            check_masks(facts, named)


def test_constants_in_the_file_are_capped_by_themselves() -> None:
    with pytest.raises(GraphRefused, match="constants need"):
        check_graph(graph([node("Neg", ["c"], ["a"])], c=np.zeros(1 << 19, np.float32)))


@pytest.mark.parametrize(
    "nodes",
    [
        [node("Sum", ["x"] * 50_000, [f"a{i}"]) for i in range(4)],
        [node("Split", ["x"], [f"{i}.{j}" for j in range(50_000)]) for i in range(4)],
        [node("Transpose", ["x"], [f"a{i}"], perm=[0] * 50_000) for i in range(4)],
    ],
    ids=["inputs", "outputs", "attributes"],
)
def test_nodes_that_name_ever_more_values_are_refused_while_they_are_read(nodes: list) -> None:
    """A file of 32 MiB has room for ten million, for which a board would take minutes and its memory."""
    with pytest.raises(GraphRefused, match="more than 131072 values in all"):
        check_graph(graph(nodes))


def test_attributes_without_values_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 13 MiB had a million of them, which took half a minute to read here."""
    monkeypatch.setattr(safety, "MAX_VALUES", 100)
    check_graph(graph([node("Relu", ["x"], [f"a{i}"], u=0) for i in range(20)]))
    with pytest.raises(GraphRefused, match="more than 100 values in all"):
        check_graph(graph([node("Relu", ["x"], [f"a{i}"], u=0, v=0, w=0, x=0) for i in range(20)]))


@pytest.mark.parametrize("operator", ["Loop", "If", "Scan", "SequenceMap", "Tile", "Resize", "NonZero"])
def test_what_repeats_or_sizes_by_values_is_no_operator_of_the_list(operator: str) -> None:
    with pytest.raises(GraphRefused, match=operator):
        check_graph(graph([node(operator, ["x"], ["a"])]))


def test_a_number_of_largest_values_that_samples_determine_is_refused() -> None:
    facts = check_graph(graph([node("Cast", ["x"], ["k"], to=7), node("TopK", ["x", "k"], ["a", "b"])]))
    with pytest.raises(GraphRefused, match=r"TopK.*count"):
        check_cost(facts, batch=BATCH, memory_bytes=MEMORY_BYTES)


def test_nothing_in_the_list_holds_a_graph() -> None:
    for operator in OPERATORS:
        kinds = {attribute.type.value for attribute in defs.get_schema(operator).attributes.values()}
        assert not kinds & {AttributeProto.GRAPH, AttributeProto.GRAPHS}


def test_a_large_batch_counts() -> None:
    data = graph([node("Relu", ["x"], ["a"])])
    assert check_cost(check_graph(data), batch=1024, memory_bytes=MEMORY_BYTES).largest_bytes == 1024 * 28 * 28 * 4
    with pytest.raises(GraphRefused, match="with 1048576 samples"):
        check_cost(check_graph(data), batch=1 << 20, memory_bytes=MEMORY_BYTES)
