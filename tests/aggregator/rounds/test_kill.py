"""kill -9 at any point, then resume: bit by bit the model of the calm run, and the same ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.fleet import Fleet
from support.kill import KillPoints, forked

pytestmark = pytest.mark.slow

POINTS = 24
FIXED: dict[str, Any] = {"devices": 2, "rounds": 2, "durable": True}

NAMED = {
    "the round is opened": ("execute", ("write", "open_round")),
    "the update is stored": ("execute", ("write", "put_update", "commit")),
    "the public state is stored": ("execute", ("write", "put_public_state", "commit")),
    "the charge is stored": ("execute", ("write", "put_charge", "commit")),
    "the batch is committed": ("execute", ("transaction", "__exit__", "_add")),
    "the checkpoint is synced": ("fsync", ("write_whole", "Checkpoints.write")),
    "the checkpoint is named": ("replace", ("write_whole", "Checkpoints.write")),
    "the checkpoint's folder is synced": ("fsync", ("sync_folder", "write_whole", "Checkpoints.write")),
    "old differences are dropped": ("execute", ("write", "drop_differences", "Differences.write")),
    "the difference is stored": ("execute", ("write", "put", "put_difference")),
    "the round is closed": ("execute", ("write", "close_round", "close")),
    "the server half is stored": ("execute", ("write", "put", "close")),
    "the close is committed": ("execute", ("transaction", "__exit__", "close")),
}


def play(folder: Path, script: list[dict[str, bytes]]) -> Fleet:
    """What the devices send is fixed beforehand: a crash of the aggregator changes nothing on a device."""
    fleet = Fleet(folder, **FIXED)
    engine = fleet.engine
    while not engine.finished:
        plan = engine.plan or fleet.open()
        verdicts = engine.accept_many(list(script[plan.round - 1].items()))
        if not all(verdict.acknowledged for verdict in verdicts):
            raise SystemExit(f"{folder}: {verdicts}")
        engine.close()
    return fleet


def recorded(folder: Path) -> tuple[Fleet, list[dict[str, bytes]]]:
    """A calm run, and what its devices sent."""
    fleet, script = Fleet(folder, **FIXED), []
    while not fleet.engine.finished:
        fleet.open()
        sent = {name: fleet.update(name).data for name in fleet.names}
        script.append(sent)
        for name, data in sent.items():
            fleet.engine.accept(name, data)
        fleet.engine.close()
    return fleet, script


def outcome(fleet: Fleet) -> list[Any]:
    return [
        fleet.engine.global_digest.hex(),
        fleet.engine.model.checkpoints.path(2).read_bytes().hex(),
        [repr(row) for row in fleet.store.charges()],
        [repr(row) for row in fleet.store.devices()],
        [repr(row) for row in fleet.store.updates(1) + fleet.store.updates(2)],
        [row.phase for row in fleet.store.rounds()],
        [each.digest.hex() for each in fleet.engine.model.differences.refs],
        fleet.store.differences()[0][1].hex(),
        sorted(path.name for path in fleet.folder.iterdir() if path.suffix == ".safetensors"),
    ]


def test_every_kill_ends_in_the_calm_runs_model(tmp_path: Path) -> None:
    result = tmp_path / "result"
    calm, script = recorded(tmp_path / "calm")
    expected = outcome(calm)
    points = KillPoints(("aggregator", "hushfleet"), NAMED)
    labels = points.labels(lambda: play(tmp_path / "all", script), result)
    opened = next(i for i, (event, _, chain) in enumerate(labels) if "RoundEngine.open_round" in chain)
    for point, where in points.chosen(labels, spread=POINTS, start=opened).items():
        folder = tmp_path / f"kill-{point}"
        points.kill(lambda: play(folder, script), point, result)  # noqa: B023
        assert forked(lambda: outcome(play(folder, script)), result) == 0, where  # noqa: B023
        assert json.loads(result.read_text()) == expected, where or labels[point]
