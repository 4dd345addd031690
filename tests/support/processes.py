"""Processes of a fleet as they are in the field."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.results.events import iterate_events
from support.desk import Board

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NOTIFY_SOCKET": ""}


@contextmanager
def running(*command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen([sys.executable, *command], stdout=output, stderr=output, env=ENVIRONMENT)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        finally:
            process.kill()
            process.wait()


def start_board(folder: FleetFolder, home: Path, device: str) -> Board:
    """Its card, and some images; it is started by `running`."""
    board = Board(folder, home, device)
    board.store.close()
    rng = np.random.default_rng(len(device))
    images = rng.integers(0, 256, (30, 1, 8, 8), dtype=np.uint8)
    np.savez(home / "images.npz", images=images, labels=rng.integers(0, 10, 30, dtype=np.int64))
    text = board.file.read_text().replace('"folder"', '"arrays"').replace("/var/lib/hushfleet-images", "images.npz")
    board.file.write_text(text.replace("epsilon_server = 8.0", "epsilon_server = inf"))
    return board


def rounds_closed(folder: FleetFolder) -> int:
    file = folder.run / "events.jsonl"
    return sum(event["event"] == "round_close" for event in iterate_events(file)) if file.exists() else 0
