from __future__ import annotations

import contextlib

import numpy as np
import onnx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from hushfleet.errors import GraphRefused
from hushfleet.learning.graph_operators import OPERATORS
from hushfleet.learning.graph_safety import MAX_INITIALIZER_BYTES, MAX_NODES, ValueFacts, check_graph

FLOAT = TensorProto.FLOAT


def value(name, shape, kind=FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def good() -> onnx.ModelProto:
    """y = relu(conv(x, w) + c) with a constant c, an attribute of each harmless kind among the nodes."""
    nodes = [
        helper.make_node("Conv", ["x", "param.w"], ["a"], pads=[1, 1, 1, 1], auto_pad="NOTSET"),
        helper.make_node("Add", ["a", "c"], ["b"]),
        helper.make_node("LeakyRelu", ["b"], ["d"], alpha=0.1),
        helper.make_node("Constant", [], ["e"], value=numpy_helper.from_array(np.array([2.5], np.float32))),
        helper.make_node("Mul", ["d", "e"], ["y"], doc_string="twice and a half"),
    ]
    inputs = [value("x", ["batch", 1, 4, 4]), value("param.w", [2, 1, 3, 3])]
    constants = [numpy_helper.from_array(np.ones((2, 1, 1), np.float32), "c")]
    graph = helper.make_graph(nodes, "good", inputs, [value("y", ["batch", 2, 4, 4])], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def changed(change) -> bytes:
    model = good()
    change(model)
    return model.SerializeToString()


GOOD = good().SerializeToString()


def test_facts_of_a_good_graph():
    facts = check_graph(GOOD)
    assert sorted(node.operator for node in facts.nodes) == ["Add", "Constant", "Conv", "LeakyRelu", "Mul"]
    assert facts.initializer_bytes == 4 * 2 + 4
    assert facts.inputs == {
        "x": ValueFacts("float32", ("batch", 1, 4, 4)),
        "param.w": ValueFacts("float32", (2, 1, 3, 3)),
    }
    assert facts.outputs == {"y": ValueFacts("float32", ("batch", 2, 4, 4))}


def external_data(model):
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../etc/passwd")


def external_entry_only(model):
    model.graph.initializer[0].external_data.add(key="location", value="weights.bin")


def external_attribute(model):
    model.graph.node[3].attribute[0].t.external_data.add(key="location", value="weights.bin")


def custom_domain(model):
    model.graph.node[0].domain = "com.example"


def contrib_domain(model):
    model.graph.node[1].domain = "com.microsoft"


def custom_opset(model):
    model.opset_import.append(helper.make_opsetid("com.example", 1))


def unknown_operator(model):
    model.graph.node[2].op_type = "LaunchMissiles"


def random_operator(model):
    model.graph.node[2].op_type = "RandomNormalLike"


def local_function(model):
    body = [helper.make_node("Neg", ["v"], ["w"])]
    model.functions.append(helper.make_function("", "Relu", ["v"], ["w"], body, [helper.make_opsetid("", 18)]))


def loop(model):
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"])],
        "body",
        [value("i", [], TensorProto.INT64), value("go", [], TensorProto.BOOL)],
        [value("go_on", [], TensorProto.BOOL)],
    )
    model.graph.node.append(helper.make_node("Loop", ["", ""], [], body=body))


def hidden_subgraph(model):
    body = helper.make_graph([helper.make_node("Identity", ["b"], ["q"])], "body", [], [value("q", [1])])
    model.graph.node[2].attribute.append(helper.make_attribute("body", body))


def sparse_attribute(model):
    sparse = onnx.SparseTensorProto()
    sparse.values.data_type = FLOAT
    model.graph.node[3].attribute[0].CopyFrom(helper.make_attribute("sparse_value", sparse))


def referring_attribute(model):
    model.graph.node[2].attribute[0].ref_attr_name = "alpha"


def two_kinds_in_one_attribute(model):
    model.graph.node[2].attribute[0].i = 3


def oversized_constant(model):
    values = np.zeros(MAX_INITIALIZER_BYTES // 4 + 1, np.float32)
    model.graph.initializer.append(numpy_helper.from_array(values, "large"))


def many_constants(model):
    for i in range(5):
        values = np.zeros(MAX_INITIALIZER_BYTES // 16, np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, f"large{i}"))


def promised_constant(model):
    """Four bytes that claim to be a tensor of a tebibyte."""
    del model.graph.initializer[0].dims[:]
    model.graph.initializer[0].dims.extend([1 << 20, 1 << 18])


def short_constant(model):
    model.graph.initializer[0].raw_data = b"\0" * 4


def negative_shape(model):
    model.graph.initializer[0].dims[0] = -2


def constant_of_strings(model):
    model.graph.initializer[0].CopyFrom(helper.make_tensor("c", TensorProto.STRING, [1], [b"text"]))


def deep_shape(model):
    model.graph.initializer[0].dims.extend([1] * 8)


def sparse_initializer(model):
    model.graph.sparse_initializer.add()


def too_many_nodes(model):
    node = helper.make_node("Neg", ["x"], [])
    model.graph.node.extend([node] * MAX_NODES)


def unknown_input(model):
    model.graph.node[1].input[1] = "nowhere"


def reversed_nodes(model):
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def value_computed_twice(model):
    model.graph.node[2].output[0] = "a"


def shadowed_input(model):
    model.graph.initializer[0].name = "x"


def missing_output(model):
    model.graph.output[0].name = "nowhere"


def sequence_input(model):
    model.graph.input[0].CopyFrom(helper.make_tensor_sequence_value_info("x", FLOAT, [1]))


def huge_padding(model):
    (pads,) = [attribute for attribute in model.graph.node[0].attribute if attribute.name == "pads"]
    pads.ints[0] = 1 << 40


def long_name(model):
    model.graph.node[0].name = "n" * 1000


def old_opset(model):
    model.opset_import[0].version = 7


def future_ir(model):
    model.ir_version = 1000


def training_info(model):
    model.training_info.add()


def metadata(model):
    model.metadata_props.add(key="session.load_model_format", value="ORT")


def no_graph(model):
    model.ClearField("graph")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (external_data, "lies in another file"),
        (external_entry_only, "lies in another file"),
        (external_attribute, "lies in another file"),
        (custom_domain, "domain of the operator 'Conv' is not allowed: 'com.example'"),
        (contrib_domain, "domain of the operator 'Add'"),
        (custom_opset, "number of operator sets"),
        (unknown_operator, "operator is not allowed: 'LaunchMissiles'"),
        (random_operator, "RandomNormalLike"),
        (local_function, "ModelProto has the field 25"),
        (loop, "'Loop'"),
        (hidden_subgraph, "AttributeProto has the field 6"),
        (sparse_attribute, "AttributeProto has the field 22"),
        (referring_attribute, "AttributeProto has the field 21"),
        (two_kinds_in_one_attribute, "content of the attribute 'alpha'"),
        (oversized_constant, "above the cap"),
        (many_constants, "above the cap"),
        (promised_constant, "above the cap"),
        (short_constant, "has 1 elements, not 2"),
        (negative_shape, "shape of the constant"),
        (constant_of_strings, "TensorProto has the field 6"),
        (deep_shape, "shape of the constant"),
        (sparse_initializer, "GraphProto has the field 15"),
        (too_many_nodes, "nodes, above the cap"),
        (unknown_input, "nothing before it computes is not allowed: 'nowhere'"),
        (reversed_nodes, "nothing before it computes"),
        (value_computed_twice, "'a' is computed twice"),
        (shadowed_input, "the constant 'x'"),
        (missing_output, "output that nothing computes"),
        (sequence_input, "TypeProto has the field 4"),
        (huge_padding, "value of the attribute 'pads'"),
        (long_name, "longer than 512"),
        (old_opset, "operator set version"),
        (future_ir, "IR version"),
        (training_info, "ModelProto has the field 20"),
        (metadata, "ModelProto has the field 14"),
        (no_graph, "without a graph"),
    ],
    ids=lambda case: case.__name__ if callable(case) else "",
)
def test_what_a_device_will_not_run(change, text):
    with pytest.raises(GraphRefused, match=text):
        check_graph(changed(change))


def test_size_is_looked_at_first():
    with pytest.raises(GraphRefused, match=f"has {len(GOOD)} bytes, above the cap of 100"):
        check_graph(GOOD, max_bytes=100)
    with pytest.raises(GraphRefused, match="above the cap of 4"):
        check_graph(GOOD, max_initializer_bytes=4)


def test_a_second_graph_in_the_file_is_not_merged_in():
    """Protobuf appends one to the other; a reader that takes the last one would check half of it."""
    evil = onnx.ModelProto()
    evil.graph.node.append(helper.make_node("LaunchMissiles", ["x"], ["z"]))
    with pytest.raises(GraphRefused, match="'graph' twice"):
        check_graph(evil.SerializeToString() + GOOD)


def test_a_file_that_is_two_formats_at_once_is_refused():
    polyglot = b"\x08\x08\x12\x04ORTM" + GOOD[2:]
    assert onnx.load_from_string(polyglot).producer_name == "ORTM"
    with pytest.raises(GraphRefused, match="own format"):
        check_graph(polyglot)


def test_no_operator_of_the_list_runs_other_graphs_or_is_random():
    for operator in OPERATORS:
        schema = onnx.defs.get_schema(operator)
        kinds = {attribute.type for attribute in schema.attributes.values()}
        assert not kinds & {onnx.defs.OpSchema.AttrType.GRAPH, onnx.defs.OpSchema.AttrType.GRAPHS}
        assert "Random" not in operator


def test_numbers_may_be_packed_or_not():
    """Both are valid protobuf; `dims` is written unpacked by onnx, packed by others."""
    tensor = numpy_helper.from_array(np.ones((2, 1, 1), np.float32), "c").SerializeToString()
    unpacked, packed = b"\x08\x02\x08\x01\x08\x01", b"\x0a\x03\x02\x01\x01"
    assert tensor.count(unpacked) == 1
    other = tensor.replace(unpacked, packed)
    longer = len(GOOD) + len(other) - len(tensor)
    model = good()
    model.graph.initializer[0].ParseFromString(other)
    assert check_graph(model.SerializeToString()).initializer_bytes == 12
    assert longer == len(GOOD) - 1
    graph = good().graph.SerializeToString()
    repacked = graph.replace(bytes([len(tensor)]) + tensor, bytes([len(other)]) + other)
    assert len(repacked) == len(graph) - 1
    model = good()
    model.ClearField("graph")
    head = model.SerializeToString()
    size = len(repacked)
    data = head + b"\x3a" + bytes([size & 0x7F | 0x80, size >> 7]) + repacked
    assert check_graph(data).initializer_bytes == 12


def refuses_or_accepts(data: bytes) -> None:
    with contextlib.suppress(GraphRefused):
        check_graph(data)


@settings(max_examples=300)
@given(st.binary(max_size=400))
@example(b"")
@example(b"\xff" * 40)
@example(b"\x3a\xff\xff\xff\xff\x0f")
def test_random_bytes_are_refused_and_nothing_else_is_raised(data):
    with pytest.raises(GraphRefused):
        check_graph(data)


@settings(max_examples=600)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["set", "cut", "insert", "remove"]),
            st.integers(0, len(GOOD) - 1),
            st.integers(0, 255),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_mutations_of_a_good_file_raise_nothing_else(mutations):
    data = bytearray(GOOD)
    for kind, position, byte in mutations:
        place = min(position, len(data))
        if kind == "set" and place < len(data):
            data[place] = byte
        elif kind == "cut":
            del data[place:]
        elif kind == "insert":
            data.insert(place, byte)
        elif place < len(data):
            del data[place]
    refuses_or_accepts(bytes(data))


@settings(max_examples=100)
@given(st.integers(1, 15), st.integers(0, 7), st.binary(max_size=40))
def test_any_field_with_any_content_raises_nothing_else(number, wire_type, content):
    field = bytes([number << 3 | wire_type, len(content)]) + content
    refuses_or_accepts(GOOD + field)
    graph = good().graph.SerializeToString() + field
    size = len(graph)
    model = good()
    model.ClearField("graph")
    refuses_or_accepts(model.SerializeToString() + b"\x3a" + bytes([size & 0x7F | 0x80, size >> 7]) + graph)


def test_every_single_byte_changed_to_a_few_values_raises_nothing_else():
    for position in range(len(GOOD)):
        for byte in (0x00, 0x01, 0x7F, 0x80, 0xFF):
            refuses_or_accepts(GOOD[:position] + bytes([byte]) + GOOD[position + 1 :])
