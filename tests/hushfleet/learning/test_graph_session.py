"""The graphs' runtime on a classifier small enough for pencil and paper: softmax regression on two pixels."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from hushfleet.errors import GraphRefused
from hushfleet.learning.graph_safety import check_graph
from hushfleet.learning.graph_session import GradientGraph, InferenceGraph
from hushfleet.params import ParamLayout

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
LAYOUT = ParamLayout(("fc.weight", "fc.bias"), ((3, 2), (3,)))


def value(name, shape, kind=FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def constant(name, numbers, kind=FLOAT):
    return helper.make_tensor(name, kind, np.shape(numbers), np.ravel(numbers))


def file_of(nodes, inputs, outputs, constants=()):
    graph = helper.make_graph(nodes, "test", inputs, outputs, list(constants))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def inputs(*, masked):
    shapes = {"param.fc.weight": [3, 2], "param.fc.bias": [3], "x": ["batch", 1, 1, 2]}
    found = [value(name, shape) for name, shape in shapes.items()] + [value("y", ["batch"], INT64)]
    return found + ([value("dropout.0", ["batch", 3])] if masked else [])


def gradient_file(*, masked=False, loss_name="loss"):
    """loss = -mean(log softmax((x W' + b) * mask)[y]); by the logits, (softmax - onehot) / B."""
    node = helper.make_node
    logits = "dropped" if masked else "logits"
    nodes = [
        node("Flatten", ["x"], ["flat"], axis=1),
        node("Gemm", ["flat", "param.fc.weight", "param.fc.bias"], ["logits"], transB=1),
        *([node("Mul", ["logits", "dropout.0"], ["dropped"])] if masked else []),
        node("LogSoftmax", [logits], ["logs"], axis=1),
        node("Unsqueeze", ["y", "one"], ["labels"]),
        node("Equal", ["labels", "classes"], ["is_label"]),
        node("Cast", ["is_label"], ["onehot"], to=FLOAT),
        node("Mul", ["logs", "onehot"], ["picked"]),
        node("ReduceSum", ["picked", "one"], ["per_sample"], keepdims=0),
        node("ReduceMean", ["per_sample", "zero"], ["mean"], keepdims=0),
        node("Neg", ["mean"], [loss_name]),
        node("Softmax", [logits], ["probabilities"], axis=1),
        node("Sub", ["probabilities", "onehot"], ["difference"]),
        *([node("Mul", ["difference", "dropout.0"], ["undropped"])] if masked else []),
        node("Shape", ["y"], ["count"]),
        node("Cast", ["count"], ["size"], to=FLOAT),
        node("Div", ["undropped" if masked else "difference", "size"], ["delta"]),
        node("Gemm", ["delta", "flat"], ["grad.fc.weight"], transA=1),
        node("ReduceSum", ["delta", "zero"], ["grad.fc.bias"], keepdims=0),
    ]
    outputs = [value(loss_name, []), value("grad.fc.weight", [3, 2]), value("grad.fc.bias", [3])]
    constants = [
        constant("one", [1], INT64),
        constant("zero", [0], INT64),
        constant("classes", [[0, 1, 2]], INT64),
    ]
    return file_of(nodes, inputs(masked=masked), outputs, constants)


def inference_file():
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"], axis=1),
        helper.make_node("Gemm", ["flat", "param.fc.weight", "param.fc.bias"], ["logits"], transB=1),
    ]
    return file_of(nodes, inputs(masked=False)[:3], [value("logits", ["batch", 3])])


def batch(size, seed=0):
    rng = np.random.default_rng(seed)
    params = rng.standard_normal(9).astype(np.float32)
    return params, rng.standard_normal((size, 1, 1, 2), np.float32), rng.integers(0, 3, size)


def by_hand(params, x, y, mask=1.0):
    """The same in float64 NumPy."""
    weight, bias = params[:6].reshape(3, 2).astype(float), params[6:].astype(float)
    flat = x.reshape(len(x), 2).astype(float)
    exps = np.exp((flat @ weight.T + bias) * mask)
    probabilities = exps / exps.sum(1, keepdims=True)
    loss = -np.log(probabilities[np.arange(len(y)), y]).mean()
    delta = (probabilities - np.eye(3)[y]) * mask / len(y)
    return loss, np.concatenate([(delta.T @ flat).ravel(), delta.sum(0)])


def test_the_test_graphs_are_ones_that_a_device_accepts():
    assert check_graph(gradient_file(masked=True)).inputs["dropout.0"].shape == ("batch", 3)
    assert len(check_graph(inference_file()).nodes) == 2


def test_at_zero_parameters_the_loss_is_log_three():
    """Every class has probability 1/3; for x = (3, 6), y = 0 the gradient of W is ((-2,-4), (1,2), (1,2))."""
    x, y = np.array([[[[3, 6]]]], np.float32), np.array([0])
    loss, grad = GradientGraph(gradient_file(), LAYOUT)(np.zeros(9, np.float32), x, y)
    assert loss == pytest.approx(1.0986123)
    np.testing.assert_allclose(grad, [-2, -4, 1, 2, 1, 2, -2 / 3, 1 / 3, 1 / 3], rtol=1e-6)


@pytest.mark.parametrize("size", [1, 7, 16])
def test_any_batch_size_gives_the_gradient(size):
    graph = GradientGraph(gradient_file(), LAYOUT)
    params, x, y = batch(size)
    loss, grad = graph(params, x, y)
    expected_loss, expected = by_hand(params, x, y)
    assert isinstance(loss, float)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-6)


def test_masks_are_used_and_no_masks_mean_that_nothing_is_dropped():
    graph = GradientGraph(gradient_file(masked=True), LAYOUT)
    params, x, y = batch(4)
    mask = np.array([[0, 2, 2], [2, 0, 2], [2, 2, 2], [0, 0, 2]], np.float32)
    np.testing.assert_allclose(graph(params, x, y, [mask])[1], by_hand(params, x, y, mask)[1], rtol=1e-4, atol=1e-6)
    ones = graph(params, x, y, [np.ones((4, 3), np.float32)])
    none = graph(params, x, y)
    assert ones[0] == none[0]
    assert np.array_equal(ones[1], none[1])
    with pytest.raises(ValueError, match="takes 1 dropout masks or none, not 2"):
        graph(params, x, y, [mask, mask])


def test_the_gradient_is_written_where_the_caller_says():
    graph = GradientGraph(gradient_file(), LAYOUT)
    params, x, y = batch(5)
    room = np.full((3, 9), np.nan, np.float32)
    _, grad = graph(params, x, y, out=room[1])
    assert np.shares_memory(grad, room)
    np.testing.assert_allclose(room[1], by_hand(params, x, y)[1], rtol=1e-4, atol=1e-6)
    assert np.isnan(room[[0, 2]]).all()


def test_results_repeat_to_the_bit_wherever_the_arrays_lie():
    graph = GradientGraph(gradient_file(), LAYOUT)
    params, x, y = batch(16)
    loss, grad = graph(params, x, y)
    for shift in range(5):
        moved = np.empty(16 + 9, np.float32)[shift : shift + 9]
        moved[:] = params
        again_loss, again = graph(moved, x, y, out=np.empty(32, np.float32)[shift : shift + 9])
        assert again_loss == loss
        assert again.tobytes() == grad.tobytes()
    other_session = GradientGraph(gradient_file(), LAYOUT)(params, x, y)
    assert other_session[1].tobytes() == grad.tobytes()


def test_inputs_are_left_as_they_are():
    params, x, y = batch(3)
    copies = params.copy(), x.copy(), y.copy()
    for array in (params, x, y):
        array.flags.writeable = False
    GradientGraph(gradient_file(), LAYOUT)(params, x, y)
    for array, copy in zip((params, x, y), copies, strict=True):
        assert np.array_equal(array, copy)


def test_inference_gives_logits():
    params, x, _ = batch(4)
    logits = InferenceGraph(inference_file(), LAYOUT)(params, x)
    expected = x.reshape(4, 2) @ params[:6].reshape(3, 2).T + params[6:]
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"params": np.zeros(8, np.float32)},
            r"params must be a NumPy array float32 \(9,\), not float32 \(8,\)",
        ),
        ({"params": np.zeros(9)}, "not float64"),
        ({"params": [0.0] * 9}, "not list"),
        ({"params": np.zeros(18, np.float32)[::2]}, "params must be contiguous"),
        ({"x": np.zeros((4, 1, 2, 1), np.float32)}, r"x must be a NumPy array float32 \(4, 1, 1, 2\)"),
        ({"x": np.zeros((4, 1, 1, 4), np.float32)[..., ::2]}, "x must be contiguous"),
        ({"y": np.zeros(4, np.int32)}, "y must be a NumPy array int64"),
        ({"y": np.zeros(3, np.int64)}, r"y must be a NumPy array int64 \(4,\), not int64 \(3,\)"),
        ({"x": np.zeros((0, 1, 1, 2), np.float32), "y": np.zeros(0, np.int64)}, "the batch is empty"),
        ({"out": np.zeros(9)}, "out must be a NumPy array float32"),
        ({"out": np.zeros(8, np.float32)}, "out must be"),
    ],
)
def test_what_is_wrong_with_an_array_is_said(change, text):
    params, x, y = batch(4)
    arguments = {"params": params, "x": x, "y": y} | change
    with pytest.raises(ValueError, match=text):
        GradientGraph(gradient_file(), LAYOUT)(**arguments)


def test_out_must_be_memory_of_its_own():
    graph = GradientGraph(gradient_file(), LAYOUT)
    params, x, y = batch(4)
    with pytest.raises(ValueError, match="not the memory of params"):
        graph(params, x, y, out=params)
    frozen = np.zeros(9, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="writeable"):
        graph(params, x, y, out=frozen)


def test_graphs_that_do_not_fit_are_refused():
    with pytest.raises(GraphRefused, match="cannot load"):
        GradientGraph(b"not a graph", LAYOUT)
    with pytest.raises(GraphRefused, match="outputs"):
        GradientGraph(inference_file(), LAYOUT)
    with pytest.raises(GraphRefused, match="outputs"):
        GradientGraph(gradient_file(loss_name="cost"), LAYOUT)
    transposed = ParamLayout(LAYOUT.names, ((2, 3), (3,)))
    with pytest.raises(GraphRefused, match=r"does not fit the layout: 'param\.fc\.weight'"):
        GradientGraph(gradient_file(), transposed)
    renamed = ParamLayout(("out.weight", "out.bias"), LAYOUT.shapes)
    with pytest.raises(GraphRefused, match=r"no input 'param\.out\.weight'"):
        InferenceGraph(inference_file(), renamed)


def test_onnx_runtimes_own_format_is_never_read():
    """Bytes 4 to 8 mark that format; ONNX Runtime would believe them if it were left to guess."""
    with pytest.raises(GraphRefused, match="cannot load"):
        GradientGraph(b"\x18\0\0\0ORTM" + bytes(64), LAYOUT)


def test_a_device_imports_neither_pytorch_nor_onnx():
    code = """
import sys
import hushfleet.learning.graph_session, hushfleet.learning.graph_safety
print(sorted({"torch", "onnx", "onnxscript", "hushfleet.models", "sklearn"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


REPORTS = """
import contextlib, numpy, sys
from pathlib import Path
{first}
from hushfleet.learning.graph_session import open_session

session = open_session(Path(sys.argv[1]).read_bytes())
with contextlib.suppress(Exception):
    session.run(None, {{"x": numpy.zeros(3, numpy.float32), "label": numpy.int64([7])}})
"""


def files_of_a_process(tmp_path, first):
    """What ONNX Runtime leaves in the user's folder in a process in which a label does not fit the graph.

    Where it reports to its maker, there are an id of the machine and the reports until they are sent. They are not:
    nothing answers at the proxy that they would go through.
    """
    node = helper.make_node("Gather", ["x", "label"], ["picked"])
    read = [value("x", [3]), value("label", ["batch"], INT64)]
    (tmp_path / "graph.onnx").write_bytes(file_of([node], read, [value("picked", ["batch"])]))
    home = tmp_path / "home"
    home.mkdir()
    # nothing else of ours: ONNX Runtime knows the variables of many CI systems, and reports nothing from there
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
    environment["https_proxy"] = "http://127.0.0.1:9"
    command = [sys.executable, "-c", REPORTS.format(first=first), str(tmp_path / "graph.onnx")]
    subprocess.run(command, env=environment, check=True)
    return [path for path in home.rglob("*") if path.is_file()]


def test_onnx_runtime_reports_nothing_to_its_maker(tmp_path):
    assert files_of_a_process(tmp_path, first="") == []


def test_onnx_runtime_that_was_there_first_reports_what_it_runs_on_and_no_more(tmp_path):
    (path,) = (path for path in files_of_a_process(tmp_path, first="import onnxruntime") if path.suffix == ".db")
    with closing(sqlite3.connect(path)) as kept:
        reports = [report for (report,) in kept.execute("SELECT payload FROM events")]
    assert reports
    assert all(b"ProcessInfo" in report for report in reports), reports


def test_memory_that_is_given_back_changes_no_bit() -> None:
    graph, (params, x, y) = GradientGraph(gradient_file(masked=True), LAYOUT), batch(7)
    before = graph(params, x, y)[1].copy()
    graph.give_back()
    np.testing.assert_array_equal(graph(params, x, y)[1], before)
