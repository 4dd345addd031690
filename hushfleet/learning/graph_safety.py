"""Checks the bytes of an ONNX file, before ONNX Runtime reads them, to decide whether a device may load it.

A graph from the network is a program. It may compute, and nothing else: only a short list of operators of the
standard domain, no control flow, no functions, no data outside the file, nothing larger than its caps.
Our own strict reader reads the file, so the check needs no package, and the bytes cannot be read in two ways.

`hushfleet.learning.graph_shapes` bounds the memory and the work of the graph, from the facts that are found here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hushfleet.errors import GraphRefused, Malformed
from hushfleet.learning.graph_node import MAX_KNOWN, Node, Tensor
from hushfleet.learning.graph_operators import OPERATORS
from hushfleet.learning.protobuf import Schema, fields, read_message
from hushfleet.wire.format.spec import MAX_GRAPH_BYTES, DropoutSpec

MAX_NODES = 16_384
MAX_VALUES = 1 << 17  # cap on the fields of one message, and on the inputs, outputs and attribute values of all nodes
MAX_NAME_CHARS = 512
MAX_RANK = 8
MAX_INITIALIZER_BYTES = 1 << 20  # weights are inputs; constants are small
MAX_ATTRIBUTE = 1 << 16  # magnitudes of axes, kernel sizes, strides and pads
OPSETS = range(13, 26)
IR_VERSIONS = range(7, 14)

# onnx.proto, DataType: the element types that gradients of image networks use, and their bytes.
ELEMENT_BYTES = {1: 4, 2: 1, 3: 1, 6: 4, 7: 8, 9: 1, 11: 8}
_ELEMENT_NAMES = {1: "float32", 2: "uint8", 3: "int8", 6: "int32", 7: "int64", 9: "bool", 11: "float64"}
ELEMENT_KINDS = {name: kind for kind, name in _ELEMENT_NAMES.items()}
_INTEGERS = {6: "<i4", 7: "<i8"}
_TYPED_DATA = dict.fromkeys((2, 3, 6, 9), "int32_data") | {
    1: "float_data",
    7: "int64_data",
    11: "double_data",
}

# onnx.proto, AttributeProto: the kinds that hold no graph, type or sparse tensor.
_ATTRIBUTE_FIELDS = {1: "f", 2: "i", 3: "s", 4: "t", 6: "floats", 7: "ints", 8: "strings", 9: "tensors"}

_MODEL = fields(
    "1 ir_version int, 2 producer_name string, 3 producer_version string, 4 domain string, 5 model_version int, "
    "6 doc_string string, 7 graph message, 8 opset_import message*"
)
_OPSET = fields("1 domain string, 2 version int")
_GRAPH = fields(
    "1 node message*, 2 name string, 5 initializer message*, 10 doc_string string, 11 input message*, "
    "12 output message*, 13 value_info message*"
)
_NODE = fields(
    "1 input string*, 2 output string*, 3 name string, 4 op_type string, 5 attribute message*, 6 doc_string string, "
    "7 domain string"
)
_ATTRIBUTE = fields(
    "1 name string, 2 f float, 3 i int, 4 s bytes, 5 t message, 7 floats float*, 8 ints int*, 9 strings bytes*, "
    "10 tensors message*, 13 doc_string string, 20 type int"
)
_TENSOR = fields(
    "1 dims int*, 2 data_type int, 4 float_data float*, 5 int32_data int*, 7 int64_data int*, 8 name string, "
    "9 raw_data bytes, 10 double_data double*, 12 doc_string string, 13 external_data message*, 14 data_location int"
)
_VALUE_INFO = fields("1 name string, 2 type message, 3 doc_string string")
_TYPE = fields("1 tensor_type message, 6 denotation string")
_TENSOR_TYPE = fields("1 elem_type int, 2 shape message")
_SHAPE = fields("1 dim message*")
_DIMENSION = fields("1 dim_value int, 2 dim_param string, 3 denotation string")

Message = dict[str, list[Any]]


@dataclass(frozen=True)
class ValueFacts:
    """An input or output: its element type and shape; an open dimension is given by its name or ''."""

    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class GraphFacts:
    """The contents of an accepted graph; `nodes` are in an order in which they can run."""

    initializer_bytes: int
    inputs: Mapping[str, ValueFacts]
    outputs: Mapping[str, ValueFacts]
    constants: Mapping[str, Tensor]
    nodes: tuple[Node, ...]


def check_graph(
    graph: bytes, *, max_bytes: int = MAX_GRAPH_BYTES, max_initializer_bytes: int = MAX_INITIALIZER_BYTES
) -> GraphFacts:
    """Returns the facts of an ONNX file if it is acceptable.

    :param max_bytes: cap on the file size, checked first.
    :param max_initializer_bytes: cap on all constants together.
    :raises GraphRefused: for every problem; no other exception leaves this function.
    """
    if len(graph) > max_bytes:
        raise GraphRefused(f"the graph has {len(graph)} bytes, above the cap of {max_bytes}")
    if graph[4:8] == b"ORTM":
        raise GraphRefused("the graph carries the mark of ONNX Runtime's own format, not of an ONNX file")
    try:
        return _model(memoryview(graph), max_initializer_bytes)
    except Malformed as error:
        raise GraphRefused(f"the graph is not an ONNX file that may be used: {error}") from error


def check_masks(facts: GraphFacts, dropout: Sequence[DropoutSpec]) -> None:
    """Raises `GraphRefused` unless the graph takes exactly the task's masks, which the device draws."""
    named = {f"dropout.{place}": each.shape for place, each in enumerate(dropout)}
    taken = {name: value.shape[1:] for name, value in facts.inputs.items() if name.startswith("dropout.")}
    _require(taken == named, f"masks, where the task has {named},", taken)


def _model(data: memoryview, max_initializer_bytes: int) -> GraphFacts:
    model = _read(data, _MODEL, "ModelProto")
    _require(_one(model, "ir_version", 0) in IR_VERSIONS, "IR version", _one(model, "ir_version", 0))
    opsets = [_read(entry, _OPSET, "OperatorSetIdProto") for entry in model.get("opset_import", [])]
    _require(len(opsets) == 1, "number of operator sets", len(opsets))
    domain, opset = _one(opsets[0], "domain", ""), _one(opsets[0], "version", 0)
    _require(_is_standard(domain), "operator set", domain)
    _require(opset in OPSETS, "operator set version", opset)
    _require("graph" in model, "model", "one without a graph")
    return _graph(_read(model["graph"][0], _GRAPH, "GraphProto"), max_initializer_bytes)


def _graph(graph: Message, max_initializer_bytes: int) -> GraphFacts:
    nodes = graph.get("node", [])
    if len(nodes) > MAX_NODES:
        raise GraphRefused(f"the graph has {len(nodes)} nodes, above the cap of {MAX_NODES}")
    inputs = _values(graph, "input")
    constants = _Constants(max_initializer_bytes)
    known = {""} | set(inputs)  # an omitted optional input has the name ''
    named: dict[str, Tensor] = {}
    for entry in graph.get("initializer", []):
        name, named[name] = constants.add(entry)
        if not name or name in known:
            raise GraphRefused(f"the constant {name!r} has no name, or the name of another value")
        known.add(name)
    program = tuple(_node(entry, known, constants) for entry in nodes)
    for entry in graph.get("value_info", []):
        _value(entry)
    outputs = _values(graph, "output")
    for name in outputs:
        _require(name in known, "graph output that nothing computes", name)
    return GraphFacts(constants.total_bytes, inputs, outputs, named, program)


def _node(data: memoryview, known: set[str], constants: _Constants) -> Node:
    """Checks one node and adds its outputs to what is known."""
    node = _read(data, _NODE, "NodeProto")
    constants.count(*(node.get(many, []) for many in ("input", "output", "attribute")))
    operator, domain = _one(node, "op_type", ""), _one(node, "domain", "")
    _require(_is_standard(domain), f"domain of the operator {operator!r}", domain)
    _require(operator in OPERATORS, "operator", operator)
    for name in node.get("input", []):
        _require(name in known, f"input of {operator!r} that nothing before it computes", name)
    for name in node.get("output", []):
        if name and name in known:
            raise GraphRefused(f"the value {name!r} is computed twice")
        known.add(name)
    attributes = [_attribute(entry, operator, constants) for entry in node.get("attribute", [])]
    names = [name for name, _ in attributes]
    _require(len(set(names)) == len(names), f"repeated attribute of {operator!r}", names)
    return Node(operator, tuple(node.get("input", [])), tuple(node.get("output", [])), dict(attributes))


def _attribute(data: memoryview, operator: str, constants: _Constants) -> tuple[str, object]:
    attribute = _read(data, _ATTRIBUTE, "AttributeProto")
    name, kind = _one(attribute, "name", ""), _one(attribute, "type", 0)
    where = f"attribute {name!r} of {operator!r}"
    _require(bool(name) and kind in _ATTRIBUTE_FIELDS, f"type of the {where}", kind)
    constants.count(*(attribute.get(many, []) for many in ("floats", "ints", "strings", "tensors")))
    filled = set(attribute) - {"name", "type", "doc_string"}
    _require(filled <= {_ATTRIBUTE_FIELDS.get(kind)}, f"content of the {where}", sorted(filled))
    for number in attribute.get("i", []) + attribute.get("ints", []):
        # Constant holds values; in all other operators a number may be a size.
        _require(abs(number) <= MAX_ATTRIBUTE or operator == "Constant", f"value of the {where}", number)
    for text in attribute.get("s", []) + attribute.get("strings", []):
        _require(len(text) <= MAX_NAME_CHARS, f"length of the {where}", len(text))
    tensors = [constants.add(tensor)[1] for tensor in attribute.get("t", []) + attribute.get("tensors", [])]
    return name, _attribute_value(kind, attribute, tensors)


def _attribute_value(kind: int, attribute: Message, tensors: list[Tensor]) -> object:
    """Returns the attribute's value in the form of `Node`; protobuf omits values that are 0 or empty."""
    match _ATTRIBUTE_FIELDS[kind]:
        case "i":
            return _one(attribute, "i", 0)
        case "s":
            return bytes(_one(attribute, "s", b""))
        case "t":
            _require(len(tensors) == 1, "attribute without its tensor", kind)
            return tensors[0]
        case "f":
            return math.nan
        case many:
            return attribute.get(many, [])


class _Constants:
    """Counts the bytes of all constants and the values of all nodes; refuses too many of them, and incomplete data."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.total_bytes = self.total_values = 0

    def count(self, *lists: list[Any]) -> None:
        """Counts values that nodes name, against a cap: millions would take a board minutes and its memory."""
        self.total_values += sum(map(len, lists))
        if self.total_values > MAX_VALUES:
            raise GraphRefused(f"the graph's nodes have more than {MAX_VALUES} values in all")

    def add(self, data: memoryview) -> tuple[str, Tensor]:
        """Checks one tensor; returns its name, and the known facts about it."""
        tensor = _read(data, _TENSOR, "TensorProto")
        name, kind = _one(tensor, "name", ""), _one(tensor, "data_type", 0)
        if "external_data" in tensor or _one(tensor, "data_location", 0) != 0:
            raise GraphRefused(f"the constant {name!r} lies in another file, which is not allowed")
        _require(kind in ELEMENT_BYTES, f"element type of the constant {name!r}", kind)
        shape = tensor.get("dims", [])
        _require(len(shape) <= MAX_RANK and all(n >= 0 for n in shape), f"shape of the constant {name!r}", shape)
        count = math.prod(shape)
        self.total_bytes += count * ELEMENT_BYTES[kind]
        if self.total_bytes > self.max_bytes:
            raise GraphRefused(f"the constants need {self.total_bytes} bytes, above the cap of {self.max_bytes}")
        stored = {key for key in ("raw_data", *_TYPED_DATA.values()) if tensor.get(key)}
        _require(stored <= {"raw_data"} or stored == {_TYPED_DATA[kind]}, f"data of the constant {name!r}", stored)
        raw = _one(tensor, "raw_data", b"")
        found = len(raw) // ELEMENT_BYTES[kind] if raw else len(tensor.get(_TYPED_DATA[kind], []))
        if found != count or len(raw) % ELEMENT_BYTES[kind]:
            raise GraphRefused(f"the constant {name!r} of shape {shape} has {found} elements, not {count}")
        for value in tensor.get("int32_data", []):  # other parsers would keep only 32 bits
            _require(-(1 << 31) <= value < 1 << 31, f"value of the constant {name!r}", value)
        return name, Tensor(kind, tuple(shape), _integers(kind, raw, tensor, shape))


def _integers(kind: int, raw: bytes | memoryview, tensor: Message, shape: list[int]) -> np.ndarray | None:
    """Returns the values of a small integer tensor, which may be a shape, axes or pads; None for other tensors."""
    count = math.prod(shape)
    if kind not in _INTEGERS or count > MAX_KNOWN or (not count and len(shape) > 1):  # NumPy may refuse it
        return None
    values = np.frombuffer(raw, _INTEGERS[kind]).tolist() if raw else tensor.get(_TYPED_DATA[kind], [])
    return np.array(values, object).reshape(shape)


def _values(graph: Message, kind: str) -> dict[str, ValueFacts]:
    entries = [_value(entry) for entry in graph.get(kind, [])]
    values = dict(entries)
    _require(len(values) == len(entries) and "" not in values, f"names of the graph's {kind}s", list(values))
    return values


def _value(data: memoryview) -> tuple[str, ValueFacts]:
    value = _read(data, _VALUE_INFO, "ValueInfoProto")
    name = _one(value, "name", "")
    kind = _read(_one(value, "type", memoryview(b"")), _TYPE, "TypeProto")
    tensor = _read(_one(kind, "tensor_type", memoryview(b"")), _TENSOR_TYPE, "TypeProto.Tensor")
    element = _one(tensor, "elem_type", 0)
    _require(element in _ELEMENT_NAMES, f"element type of {name!r}", element)
    shape: list[int | str] = []
    for entry in _read(_one(tensor, "shape", memoryview(b"")), _SHAPE, "TensorShapeProto").get("dim", []):
        dimension = _read(entry, _DIMENSION, "Dimension")
        _require(not {"dim_value", "dim_param"} <= set(dimension), f"dimension of {name!r}", "two values")
        shape.append(_one(dimension, "dim_value", _one(dimension, "dim_param", "")))
    _require(len(shape) <= MAX_RANK, f"rank of {name!r}", len(shape))
    _require(all(n >= 0 for n in shape if isinstance(n, int)), f"shape of {name!r}", shape)
    return name, ValueFacts(_ELEMENT_NAMES[element], tuple(shape))


def _read(data: memoryview, schema: Schema, message: str) -> Message:
    values = read_message(data, schema, message=message, max_values=MAX_VALUES)
    for field in schema.values():
        if field.kind == "string" and any(len(text) > MAX_NAME_CHARS for text in values.get(field.name, [])):
            raise GraphRefused(f"{message}.{field.name} is longer than {MAX_NAME_CHARS} characters")
    return values


def _one(values: Message, name: str, default: Any) -> Any:
    return values[name][0] if name in values else default


def _is_standard(domain: object) -> bool:
    return domain in ("", "ai.onnx")


def _require(condition: bool, what: str, value: object) -> None:
    if not condition:
        raise GraphRefused(f"the graph's {what} is not allowed: {value!r}")
