"""A simulated device's metrics: JSON lines that outlive a full disk and a kill."""

from __future__ import annotations

import math
from pathlib import Path

from hushfleet.aggregator.results.events import EventTail
from hushfleet.edge_client.worker.metrics import append_line


def test_a_line_that_was_cut_costs_no_other_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"round": 1, "loss": math.inf})
    with path.open("ab") as file:
        file.write(b'{"round": 2, "lo')  # and the disk was full
    append_line(path, {"round": 2, "loss": 0.5})
    append_line(path, {"round": 3, "loss": math.nan})
    assert EventTail(path).read() == [
        {"round": 1, "loss": math.inf},
        {"round": 2, "loss": 0.5},
        {"round": 3, "loss": None},
    ]
