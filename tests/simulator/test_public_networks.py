"""Public networks train here: by simulation and on boards alike, with PyTorch's gradients. docs/own.md has the table.

`make test-networks` runs it beside timm and transformers; `tests/support/public_networks.py` prints the table.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hushfleet as hf
from hushfleet.aggregator.results.events import EventLog
from hushfleet.learning.graph_safety import check_graph
from hushfleet.learning.graph_session import GradientGraph
from hushfleet.learning.graph_shapes import check_cost
from hushfleet.models import get_model
from hushfleet.models.checks import relative_error, stable_batch
from hushfleet.models.export import export_graphs
from hushfleet.models.module import offer
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import begin
from hushfleet.simulator.world.on_boards import run_on_boards
from support.public_networks import CLASSES, NETWORKS, SHAPES, VOCABULARY

PAGE = Path(__file__).parents[2] / "docs" / "own.md"
ROW = re.compile(r"^\| (\S.*?) \| (torchvision|timm|transformers) \| (\w+) \| ([\d,]+) \|$", re.M)
HERE = [name for name, each in NETWORKS.items() if importlib.util.find_spec(each.package)]
"""`make test` has torchvision's alone."""
BOARD_MIB = 200
TASK: dict[str, Any] = {
    "name": "public",
    "method": {"name": "dp-fedavg", "batch_size": 16},
    "privacy": {"accounting": "as-published", "clip_norm": 1.0, "noise_multiplier": 0.5},
    "data": {"devices": 3},
    "round": {"rounds": 2, "min_devices": 3, "min_updates": 3},
}


def samples(kind: str) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Returns samples that tell their class, and what a task says of them."""
    rng, y = np.random.default_rng(0), np.arange(96) % CLASSES
    shape = {"vectors": (12,), "series": (3, 16)}.get(kind, SHAPES[kind])
    if kind == "tokens":
        x = rng.integers(1, VOCABULARY, (96, 12))
        x[:, 0] = 1 + y
        return x, y, {"data.values": "tokens", "data.vocabulary": VOCABULARY}
    x = rng.standard_normal((96, *shape), np.float32) + y.reshape(-1, *[1] * len(shape))
    return x.astype(np.float32), y, {}


def sizes() -> dict[str, int]:
    """Returns the number of parameters that the table gives each network."""
    return {row[0]: int(row[3].replace(",", "")) for row in ROW.findall(PAGE.read_text("utf-8"))}


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_trains_and_boards_compute_the_same(name: str, tmp_path: Path) -> None:
    public = NETWORKS[name]
    x, y, more = samples(public.data)
    fast = hf.simulate(
        TASK, more, model=public.make, data=(x, y), out=tmp_path / "fast", quiet=True, local_only=False, runtime="onnx"
    )
    assert list(fast.rounds.index) == [1, 2]
    assert np.isfinite(fast.rounds.loss).all()

    vocabulary = VOCABULARY if public.data == "tokens" else 0
    what = {"classes": CLASSES, "input_shape": SHAPES[public.data], "vocabulary": vocabulary}
    model = get_model(offer(public.make), **what, loss="cross-entropy")
    graph = export_graphs(model).gradient
    check_cost(check_graph(graph), batch=16, memory_bytes=BOARD_MIB << 20)
    torch, board = TorchGradient(model), GradientGraph(graph, model.layout)
    assert model.layout.size == sizes()[name]
    params = model.init(99)
    batch = stable_batch(torch, params, 11, np.random.default_rng(99))
    (expected_loss, expected), (loss, found) = torch(params, *batch), board(params, *batch)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert relative_error(found, expected) < 1e-4

    mix = FleetMix.in_turn(["raspberry-pi-zero-2-w"], 3)
    boards = begin(hf.task(tmp_path / "fast" / "task.json"), tmp_path / "boards", data_dir=None, mix=mix)
    with Workers(1) as workers, EventLog(boards.folder.events):
        run_on_boards(boards, workers, mix=mix)
    for number in (0, 1, 2):
        ours, theirs = (
            tmp_path / which / "aggregator" / f"global-{number}.safetensors" for which in ("fast", "boards")
        )
        assert ours.read_bytes() == theirs.read_bytes()


def test_the_table_names_each_network_of_the_gate_and_no_other() -> None:
    rows = ROW.findall(PAGE.read_text("utf-8"))
    assert [row[:3] for row in rows] == [(name, each.package, each.data) for name, each in NETWORKS.items()]
    assert len(rows) >= 30
    for name, each in NETWORKS.items():
        if each.package == "torchvision":
            model = get_model(offer(each.make), classes=CLASSES, input_shape=SHAPES[each.data])
            assert model.layout.size == sizes()[name], name
