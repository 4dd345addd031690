"""`benchmarks/fleet.py`: a real, tiny fleet on a real broker with mutual TLS; and every kind of loss must be found."""

from __future__ import annotations

import json
import resource
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import fleet
from benchmarks.fleet import allow_descriptors, audit, compare_with_fast
from hushfleet.aggregator.storage.store import FILE_NAME
from hushfleet.errors import BadInput
from hushfleet.simulator.run_folder import RunFolder, Simulation, go_on

pytestmark = [pytest.mark.slow, pytest.mark.needs("mosquitto")]

DEVICES, ROUNDS = 6, 2
SOMEONE = "device-3"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole benchmark run that lost nothing."""
    folder = tmp_path_factory.mktemp("fleet")
    words = f"--devices {DEVICES} --rounds {ROUNDS} --generators 1 --tls --out {folder}"
    assert fleet.main(f"{words} --json {folder}/f.json".split()) == 0
    return folder


@pytest.fixture
def copy(ran: Path, tmp_path: Path) -> Simulation:
    shutil.copytree(ran / "live", tmp_path / "live")
    return go_on(tmp_path / "live", data_dir=None)


def test_nothing_is_lost_and_the_figures_say_what_it_took(ran: Path) -> None:
    shown = json.loads((ran / "f.json").read_text())
    assert [finding["promise"] for finding in shown["findings"] if not finding["kept"]] == []
    assert shown["findings"][-1]["found"] == f"{ROUNDS} of {ROUNDS}", "the fast engine's models"
    assert (shown["devices"], shown["tls"]) == (DEVICES, True)
    assert len(shown["rounds"]) == ROUNDS
    for each in shown["rounds"]:
        assert 0 < each["trained_s"] <= each["accepted_s"] <= each["closed_s"]
        assert each["updates"] == DEVICES
    assert set(shown["usage"]) == {"broker", "aggregator", "generator-0"}
    assert all(usage["peak_mib"] > 1 for usage in shown["usage"].values())
    assert 0 < shown["latency_s"]["p50"] <= shown["latency_s"]["p99"] <= shown["latency_s"]["longest"]


def _device_sql(statement: str) -> Callable[[RunFolder], None]:
    return lambda folder: _change(folder.device(SOMEONE).store, statement)


def _aggregator_sql(statement: str) -> Callable[[RunFolder], None]:
    return lambda folder: _change(folder.aggregator / FILE_NAME, statement)


def _change(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as database:
        assert database.execute(statement).rowcount == 1
    database.close()


LOSSES = {
    "every update was acknowledged on its device": _device_sql("UPDATE outbox SET status = 'pending' WHERE round = 1"),
    "the bytes are those that the devices committed": _device_sql("UPDATE outbox SET digest = x'00' WHERE round = 1"),
    "every round has an update of every device": _aggregator_sql(
        f"DELETE FROM updates WHERE round = 2 AND device = '{SOMEONE}'"
    ),
    "every ledger holds what was charged": _aggregator_sql(
        f"DELETE FROM privacy WHERE round = 2 AND device = '{SOMEONE}'"
    ),
    "every round was closed": _aggregator_sql("UPDATE rounds SET phase = 'open' WHERE round = 2"),
    "nobody declined": _aggregator_sql(f"INSERT INTO declines VALUES (2, '{SOMEONE}', 'busy', '')"),
    "no message was refused": _aggregator_sql(f"INSERT INTO refusals VALUES ('{SOMEONE}', 'malformed', 1)"),
}


@pytest.mark.parametrize("promise", LOSSES)
def test_a_loss_is_found(copy: Simulation, promise: str) -> None:
    assert all(finding["kept"] for finding in audit(copy))
    LOSSES[promise](copy.folder)
    broken = [finding["promise"] for finding in audit(copy) if not finding["kept"]]
    assert promise in broken


def test_a_refused_update_and_another_model_are_found(copy: Simulation, tmp_path: Path) -> None:
    with copy.folder.events.open("a") as log:
        log.write(json.dumps({"at": 0, "event": "update", "code": "late", "device": SOMEONE, "round": 2}) + "\n")
    _aggregator_sql("UPDATE rounds SET result_digest = x'00' WHERE round = 2")(copy.folder)
    broken = [finding["promise"] for finding in audit(copy) if not finding["kept"]]
    assert broken == ["no update was refused"]
    finding = compare_with_fast(copy, tmp_path / "fast", processes=1)
    assert not finding["kept"]
    assert finding["found"] == f"{ROUNDS - 1} of {ROUNDS}"


def test_too_few_open_files_are_said_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (64, 128)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: limits.update(now=given))
    allow_descriptors(100)
    assert limits["now"] == (100, 128)
    allow_descriptors(90)
    assert limits["now"] == (100, 128), "never lowered"
    with pytest.raises(BadInput, match="hard limit is 128"):
        allow_descriptors(129)
