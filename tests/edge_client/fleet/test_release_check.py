"""The self-test of a release: its graph is the one that it says, and it notices what does not work."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from hushfleet.edge_client.fleet import trial as module
from hushfleet.edge_client.fleet.trial import check_release, drop_copy
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import HushfleetError, StoreError


def graph_of_squared_error() -> bytes:
    """loss = mean((x @ w - y)^2), and its gradient."""
    nodes = [
        helper.make_node("MatMul", ["x", "param.w"], ["p"]),
        helper.make_node("Cast", ["y"], ["t"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["p", "t"], ["r"]),
        helper.make_node("Mul", ["r", "r"], ["s"]),
        helper.make_node("ReduceMean", ["s"], ["loss"], keepdims=0),
        helper.make_node("Unsqueeze", ["r", "one"], ["c"]),
        helper.make_node("Mul", ["x", "c"], ["m"]),
        helper.make_node("ReduceMean", ["m", "zero"], ["g"], keepdims=0),
        helper.make_node("Add", ["g", "g"], ["grad.w"]),
    ]
    floats, integers = TensorProto.FLOAT, TensorProto.INT64
    inputs = [("param.w", floats, [2]), ("x", floats, ["B", 2]), ("y", integers, ["B"])]
    outputs = [("loss", floats, []), ("grad.w", floats, [2])]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(*each) for each in inputs],
        [helper.make_tensor_value_info(*each) for each in outputs],
        [helper.make_tensor("one", integers, [1], [1]), helper.make_tensor("zero", integers, [1], [0])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return model.SerializeToString()


def test_the_graph_is_what_it_says() -> None:
    kept = onnx.load_model_from_string(zlib.decompress(base64.b64decode(module._GRAPH)))
    made = onnx.load_model_from_string(graph_of_squared_error())
    assert kept.graph == made.graph
    assert kept.opset_import == made.opset_import


def test_a_board_without_a_store_has_nothing_to_copy(tmp_path: Path) -> None:
    assert check_release(tmp_path, tmp_path / "store.sqlite", device="a") is None
    assert not list(tmp_path.iterdir())


def test_a_part_that_is_imported_at_need_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"hushfleet.secure.secure_round", "hushfleet.edge_client.storage.migrations"} < module.NAMED
    monkeypatch.setattr(module, "NAMED", {"hushfleet.that_is_missing"})
    with pytest.raises(ModuleNotFoundError, match="that_is_missing"):
        module.check_software()


def test_a_wrong_result_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = onnx.load_model_from_string(graph_of_squared_error())
    made.graph.node[8].input[1] = "one_more"
    made.graph.initializer.append(helper.make_tensor("one_more", TensorProto.FLOAT, [2], [0.0, 0.0]))
    monkeypatch.setattr(module, "_GRAPH", base64.b64encode(zlib.compress(made.SerializeToString())))
    with pytest.raises(HushfleetError, match="computes"):
        check_release(tmp_path, tmp_path / "store.sqlite", device="a")


def test_a_store_that_cannot_be_read_is_noticed_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    path.write_bytes(b"no database" * 100)
    with pytest.raises(StoreError):
        check_release(tmp_path, path, device="a")
    drop_copy(tmp_path)
    assert path.read_bytes() == b"no database" * 100


def test_the_copy_is_the_device_and_stays_apart(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with DeviceStore(path, device="a") as store:
        store.next_session()
        copy = check_release(tmp_path, path, device="a")  # beside a client that runs
        assert copy is not None
        with copy:
            assert copy.identity.public_key == store.identity.public_key
            copy.next_session()
        assert store.last_session == 1
    drop_copy(tmp_path)
    assert not list(tmp_path.glob("trial*"))
