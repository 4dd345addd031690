"""One small fleet, real processes, on brokers of several makes (docs/field-reference.md, "Other brokers")."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.payloads.prepare import PreparedTask, prepare
from hushfleet.wire.link.interface import Link, Will
from hushfleet.wire.link.mqtt import MqttLink
from support.brokers import MATRIX, ROOT, nats
from support.whole import Whole, prepared_digits

DEVICE = """
[device]
id = "{name}"
state_dir = "state"
allow_volatile_state = true
[broker]
url = "{url}"
[data]
kind = "arrays"
path = "{samples}"
[limits]
epsilon_server = 1000.0
min_devices = 2
"""
NAMES = ("board-a", "board-b")
WAIT_S = 0.02
STEPS = 20_000  # of 0.02 s at most: a busy machine starts boards slowly


@pytest.fixture(scope="module")
def prepared() -> PreparedTask:
    return prepared_digits("matrix")


@pytest.fixture
def boards() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(board: str, url: str, whole: Whole) -> subprocess.Popen[bytes]:
    folder = whole.folder / board
    folder.mkdir()
    (folder / "device.toml").write_text(DEVICE.format(name=board, url=url, samples=whole.samples))
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "hushfleet.edge_client", str(folder / "device.toml")],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.needs("mosquitto")] if "mosquitto" in kind else []) for kind in MATRIX],
)
def test_a_fleet_runs_on_it(kind: str, tmp_path: Path, prepared: PreparedTask, boards: ExitStack) -> None:
    """The boards are there before the aggregator, and before its second start in the middle of the run."""
    folder = tmp_path / "broker"
    folder.mkdir()
    with MATRIX[kind](folder) as urls:

        def connect(client_id: str, will: Will | None) -> Link:
            return MqttLink(urls[0], client_id=client_id, will=will)

        whole = Whole(tmp_path / "fleet", connect)
        for index, name in enumerate(NAMES):
            process = boards.enter_context(start(name, urls[index % len(urls)], whole))
            boards.callback(process.kill)
        states = {whole.topics.state(name) for name in NAMES}
        for _ in range(STEPS):
            if states <= {delivery.topic for delivery in whole.heard}:
                break
            whole.drive_boards()
            threading.Event().wait(WAIT_S)
        whole.begin(prepared)
        engine = whole.coordinator.engine
        assert whole.drive(lambda: engine.closed_rounds >= 1, steps=STEPS, wait_s=WAIT_S), told(whole)
        whole.end()
        whole.begin(prepared)
        engine = whole.coordinator.engine
        assert whole.drive(lambda: engine.finished, steps=STEPS, wait_s=WAIT_S), told(whole)
        store = whole.coordinator.store
        assert [row.metrics["participants"] for row in store.rounds()] == [2, 2, 2]
        assert store.refusals() == {}
        whole.close()


def told(whole: Whole) -> str:
    logs = [(whole.folder / name / "log").read_text("utf-8", "replace")[-1500:] for name in NAMES]
    return "\n".join([f"present: {whole.coordinator.present}, refused: {whole.coordinator.store.refusals()}", *logs])


@pytest.mark.slow
def test_a_secure_aggregation_is_made_where_topics_overtake_each_other(tmp_path: Path) -> None:
    task = {
        "name": "summed",
        "model": {"name": "digits-cnn"},
        "method": {"name": "dp-fedavg", "batch_size": 16},
        "privacy": {"clip_norm": 1.0, "noise_multiplier": 2.0, "accounting": "secure", "delta": 1e-5},
        "data": {"name": "digits", "devices": 8},
        "round": {"rounds": 1, "min_devices": 8, "min_updates": 5},
        "wire": {"chunk_bytes": 1024},
    }
    with nats(tmp_path) as urls:
        whole = Whole(
            tmp_path / "fleet", lambda name, will: MqttLink(urls[0], client_id=name, will=will), accounting="secure"
        )
        whole.begin(prepare(parse_task(task), run_id="matrix"))
        for number in range(8):
            whole.board(f"board-{number}")
        assert whole.drive(lambda: whole.coordinator.engine.finished, steps=STEPS, wait_s=WAIT_S)
        assert [row.metrics["participants"] for row in whole.coordinator.store.rounds()] == [8]
        assert whole.coordinator.store.refusals() == {}
        whole.close()


def test_the_documents_name_every_broker_and_the_file_of_the_bridge() -> None:
    """And `bridged` runs with the lines of that file."""
    page = (ROOT / "docs/field-reference.md").read_text("utf-8")
    text = page.partition("### Other brokers")[2].partition("\n### ")[0]
    assert text.count("(../examples/mosquitto-bridge.conf)") == 2
    listed = [line.split("|")[1].strip().lower() for line in text.splitlines() if line.startswith("| ")]
    assert len(listed) == 1 + len(MATRIX)
    assert all(any(kind.split("-")[-1] in line for line in listed) for kind in MATRIX)
