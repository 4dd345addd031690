"""The figures of a run's event log, as TensorBoard, MLflow and Weights & Biases read them back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hushfleet.aggregator.results.events import EventLog
from hushfleet.aggregator.results.tracking import TrackedFigures, figures_of, tracker
from hushfleet.errors import BadInput

FIGURES = [TrackedFigures(1, 100.0, {"loss": 2.0, "bytes/up": 10.0}), TrackedFigures(2, 101.0, {"loss": 1.5})]


def a_run(folder: Path, *, rounds: int = 2) -> Path:
    with EventLog(folder / "aggregator" / "events.jsonl", clock=lambda: 100.0) as log:
        log.write("run", task="t", rounds=rounds, devices=2, delta=1e-5)
        for number in (1, 2):
            log.write("round_open", round=number, cohort=["a", "b"])
            for n, device in enumerate("ab"):
                path = folder / "devices" / device / "metrics.jsonl"
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a") as file:
                    file.write(json.dumps({"round": number, "accuracy_own_common": 0.1 * number + 0.2 * n}) + "\n")
                log.write("update", round=number, device=device, bytes=5, code="accepted", epsilon_server=float("inf"))
            log.write(
                "round_close", round=number, participants=2, uplink_bytes=10, downlink_bytes=20, loss=2.0 / number
            )
    return folder


def test_rounds_become_figures_and_what_is_infinite_is_left_out(tmp_path: Path) -> None:
    for follow in (False, True):  # its last round has closed, so nothing is waited for
        first, second = figures_of(a_run(tmp_path / str(follow)), follow=follow)
        assert (first.round, first.at) == (1, 100.0)
        assert first.values == pytest.approx(
            {"loss": 2.0, "round/devices": 2, "bytes/up": 10, "bytes/down": 20, "accuracy/own_common_test": 0.2}
        )
        assert second.values["accuracy/own_common_test"] == pytest.approx(0.3)


def test_a_line_that_is_no_event_is_passed_over(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    with (run / "aggregator" / "events.jsonl").open("a") as file:
        file.write('{"at": 1.0}\n')
    assert len(list(figures_of(run))) == 2


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a run folder"):
        next(figures_of(tmp_path))


def test_tensorboard_reads_them_back(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with tracker("tensorboard", "a-run", tmp_path) as (write, _):
        for each in FIGURES:
            write(each)
    found = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(each.step, each.wall_time, each.value) for each in found.Scalars("loss")] == [(1, 100, 2), (2, 101, 1.5)]
    assert sorted(found.Tags()["scalars"]) == ["bytes/up", "loss"]


def test_mlflow_reads_them_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "tracked").as_uri())
    with tracker("mlflow", "a-run", tmp_path) as (write, _):
        for each in FIGURES:
            write(each)
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("hushfleet").experiment_id])
    assert run.info.run_name == "a-run"
    assert [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "loss")] == [
        (1, 2),
        (2, 1.5),
    ]


MLFLOW = """
from pathlib import Path

from hushfleet.aggregator.results.tracking import tracker

with tracker("mlflow", "a-run", Path()):
    pass
"""


def test_mlflow_reports_nothing_to_its_maker(tmp_path: Path) -> None:
    """Where it reports, it keeps an id in the user's folder. It never does where a variable speaks of a test or CI."""
    pytest.importorskip("mlflow")
    own = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_TRACKING_URI": (tmp_path / "tracked").as_uri()}
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), **own}
    subprocess.run([sys.executable, "-c", MLFLOW], env=environment, cwd=tmp_path, check=True)
    assert (tmp_path / "tracked").is_dir()
    assert not (tmp_path / "home").exists()


def test_mlflow_without_a_server_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tmp_path.as_uri())
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(BadInput, match="MLFLOW_TRACKING_URI"), tracker("mlflow", "a-run", tmp_path):
        pass


WANDB = """
from pathlib import Path

from hushfleet.aggregator.results.tracking import TrackedFigures, tracker

with tracker("wandb", "a-run", Path("out")) as (write, _):
    write(TrackedFigures(1, 100.0, {"loss": 2.0, "bytes/up": 10.0}))
    write(TrackedFigures(2, 101.0, {"loss": 1.5}))
"""


@pytest.mark.slow
def test_wandb_offline_has_the_figures_and_nothing_of_the_machine(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), "USER": "a-private-name"}
    subprocess.run([sys.executable, "-c", WANDB], env=environment, cwd=tmp_path, check=True)
    (path,) = (tmp_path / "out" / "wandb").glob("offline-run-*/run-*.wandb")
    data, rows, at = path.read_bytes(), [], 7
    while at + 7 < min(len(data), 1 << 15):  # a log of LevelDB, whose first block has all of it
        size = int.from_bytes(data[at + 4 : at + 6], "little")
        record = Record.FromString(data[at + 7 : at + 7 + size])
        if record.WhichOneof("record_type") == "history":
            rows.append({(each.key or each.nested_key[0]): json.loads(each.value_json) for each in record.history.item})
        at += 7 + size
    assert [(row["_step"], row["_timestamp"], row["loss"]) for row in rows] == [(1, 100, 2), (2, 101, 1.5)]
    assert rows[0]["bytes/up"] == 10
    written = b"".join(each.read_bytes() for each in (tmp_path / "out").rglob("*.wandb"))
    for private in (b"a-private-name", str(tmp_path).encode(), b"requirements.txt"):
        assert private not in written


def test_wandb_that_is_no_mode_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    with pytest.raises(BadInput, match="WANDB_MODE"), tracker("wandb", "a-run", tmp_path):
        pass
