"""A graph of 160 GB, or of a day's work, that the rules on graphs did not see: its worker ends, and nobody is harmed.

The rules refuse such graphs before ONNX Runtime sees a byte (`test_exhaust_a_boards_memory_with_a_graph.py`). Here they
are switched off in the worker, so that only the limits of its process are left.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.worker import process
from hushfleet.edge_client.worker.process import ChildProcess
from hushfleet.wire.format.spec import BlobRef
from support.edge import Bench, Package

WITHOUT_RULES = """
import sys; pipe = int(sys.argv[1]); sys.path[:] = sys.argv[2:]
import hushfleet.edge_client.worker.loaded_task as loaded_task
loaded_task.check_cost = lambda *_, **__: None
from hushfleet.edge_client.worker.main import main
main(pipe)
"""


def spoilt(package: Package, nodes: list[onnx.NodeProto], **constants: object) -> Package:
    """The task's own gradient, to whose loss the result `r` of some nodes is added."""
    model = onnx.load_from_string(package.blobs[package.spec.model.gradient.digest])
    for node in model.graph.node:
        for place, name in enumerate(node.output):
            if name == "loss":
                node.output[place] = "plain_loss"
    for name, value in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    model.graph.node.extend([*nodes, helper.make_node("Add", ["plain_loss", "r"], ["loss"])])
    graph = model.SerializeToString()
    spec = replace(package.spec.model, gradient=BlobRef.of(graph))
    changed = package.with_spec(model=spec, task="spoilt")
    return replace(changed, blobs={**changed.blobs, spec.gradient.digest: graph})


def huge(package: Package) -> Package:
    """160 GB of numbers that depend on the batch, so that nothing is computed before it runs."""
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["top"], keepdims=0),
        helper.make_node("Expand", ["top", "shape"], ["much"]),
        helper.make_node("ReduceMin", ["much"], ["r"], keepdims=0),
    ]
    return spoilt(package, nodes, shape=np.array([200_000, 200_000], np.int64))


def slow(package: Package) -> Package:
    """Many products of large matrices: little memory, and a day's work."""
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["top"], keepdims=0),
        helper.make_node("Expand", ["top", "shape"], ["a0"]),
        *(helper.make_node("MatMul", [f"a{i}", "a0"], [f"a{i + 1}"]) for i in range(2000)),
        helper.make_node("ReduceMin", ["a2000"], ["r"], keepdims=0),
    ]
    return spoilt(package, nodes, shape=np.array([2000, 2000], np.int64))


@pytest.mark.parametrize("trick", [huge, slow])
def test_a_graph_that_wants_everything_harms_nobody(
    make_bench: Callable[..., Bench],
    package: Package,
    config: DeviceConfig,
    monkeypatch: pytest.MonkeyPatch,
    trick: Callable[[Package], Package],
) -> None:
    monkeypatch.setattr(process, "_ENTRY", WITHOUT_RULES)
    bench = make_bench(package=trick(package), config=replace(config, simulation=None))
    workshop = bench.agent.rounds._handover._workshop = ChildProcess()
    bench.server.open_round(1, deadline_s=100.0)
    pids, seen = set[int](), time.monotonic()
    while not bench.server.declines:
        bench.agent.step(0.0)
        bench.server.pump()
        if workshop.pid is not None:
            pids.add(workshop.pid)
            if trick is slow and time.monotonic() - seen > 3:
                bench.clock.now += 101  # the deadline passes while it works
        time.sleep(0.005)
    assert bench.server.declines[0].code in ("memory", "graph", "busy")
    assert bench.store.ledger.entries() == []
    assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    bench.steps()
    assert bench.agent._up, "the guardian goes on"
