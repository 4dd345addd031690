"""The live engine: real processes behind a real broker end in the fast engine's model, and leave nothing running."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hushfleet.aggregator.results.result import Result
from hushfleet.errors import HushfleetError
from hushfleet.simulator.options import RunOptions
from hushfleet.simulator.run import run
from hushfleet.simulator.run_folder import Simulation, begin
from hushfleet.simulator.world.live import LiveFleet
from support.tools import BROKERS

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-c", "from hushfleet.aggregator.commands.main import main; main()"]


@pytest.fixture(scope="module")
def two_rounds(runs: Any, short_task: Any, tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    """The calm run by the fast engine."""
    task = short_task(data={"devices": 4, "limit": 320}, round={"rounds": 2, "min_updates": 4})
    return runs.fast(begin(task, tmp_path_factory.mktemp("fast") / "run", data_dir=None))


@pytest.fixture
def live(two_rounds: Simulation, tmp_path: Path) -> Simulation:
    return begin(two_rounds.task, tmp_path / "run", data_dir=None)


def processes_about(folder: Path) -> list[str]:
    """Command lines of all processes that work on a run folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in command and path.parent.name != str(os.getpid()):
            found.append(command)
    return found


@pytest.mark.parametrize("broker", BROKERS)
def test_live_ends_in_the_model_of_fast(
    broker: str, live: Simulation, two_rounds: Simulation, audit: Any, tap: Any, finish: Any, wait: Any
) -> None:
    fleet = LiveFleet(live, broker_kind=broker)
    with fleet.running():
        assert fleet.broker is not None
        assert fleet.broker.program.name == broker
        tap.attach(fleet.broker.url)
        pids = [fleet.pid(name) for name in ("aggregator", *(device.name for device in fleet.devices))]
        assert len(set(pids)) == 5
        finish(fleet)
    assert processes_about(live.folder.path) == []
    assert audit.models(live) == audit.models(two_rounds), "to the last bit"
    audit.check(live)
    audit.check_tap(live, tap)
    assert {(transfer.device, transfer.round) for transfer in tap.transfers} == {
        (device.name, number) for device in live.fleet.devices for number in (1, 2)
    }


def test_devices_that_share_a_process_end_in_the_same_model(
    live: Simulation, two_rounds: Simulation, audit: Any, finish: Any
) -> None:
    names = [device.name for device in live.fleet.devices]
    fleet = LiveFleet(live, hosts={"host-0": names[1:3], "host-1": names[3:]})
    with fleet.running():
        assert fleet.clients == [names[0], "host-0", "host-1"]
        finish(fleet)
    assert audit.models(live) == audit.models(two_rounds), "to the last bit"
    audit.check(live)


def test_the_whole_command_leaves_logs_models_result_and_report(
    live: Simulation, two_rounds: Simulation, audit: Any, quiet: Console
) -> None:
    result = run(live, RunOptions(engine="live", workers=1, local_only=False), console=quiet)
    assert processes_about(live.folder.path) == []
    assert audit.models(live) == audit.models(two_rounds), "to the last bit"
    folder = live.folder
    for log in (folder.path / "aggregator.log", *(folder.device(d.name).log for d in live.fleet.devices)):
        assert log.stat().st_size > 0
    for device in live.fleet.devices:
        log = folder.device(device.name).log.read_text()
        assert "round 2: trained and committed" in log
        assert "round 2: the global model came as" in log, "as a difference"
        assert "round 1: the global model came as" not in log
    assert result.rounds[1].downlink_bytes < result.rounds[0].downlink_bytes / 5
    assert Result.load(folder.result) == result
    assert result.engine == "live"
    assert [row.participants for row in result.rounds] == [4, 4]
    assert [row.rounds_charged for row in result.privacy] == [2] * 4
    assert all(value is not None for row in result.details.accuracy_own_common for value in row)
    assert folder.report.read_text().lstrip().lower().startswith("<!doctype html>")
    names = {f"{device.name}.onnx" for device in live.fleet.devices}
    assert {path.name for path in folder.models.iterdir()} == names | {"global.onnx"}


def test_a_process_that_cannot_live_ends_the_run_with_its_log(
    live: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = LiveFleet(live, client=(sys.executable, "-c", "raise SystemExit('the card is gone')"))
    with pytest.raises(HushfleetError, match=r"device-\d ended with status 1; its log is .*log\.txt"), fleet.running():
        fleet.wait()
    assert re.search(r"device-\d: the card is gone", caplog.text)
    assert processes_about(live.folder.path) == []


def test_what_dies_is_started_again(
    live: Simulation, two_rounds: Simulation, audit: Any, finish: Any, wait: Any
) -> None:
    fleet = LiveFleet(live, restarts=1)
    with fleet.running():
        wait(lambda: audit.events(live, "update"), "an update came", logs=lambda: audit.logs(live))
        for name in ("device-3", "aggregator", "broker"):
            fleet.kill(name)
        finish(fleet)
        assert fleet.is_running("broker")
    assert audit.models(live) == audit.models(two_rounds), "to the last bit"
    audit.check(live)


def start_command(simulation: Simulation, log: Path) -> subprocess.Popen[bytes]:
    """`hushfleet simulate` in a process group of its own, as a terminal starts it."""
    folder = simulation.folder
    options = ["--engine", "live", "--workers", "1", "--no-local-only", "--out", str(folder.path), "--resume"]
    with log.open("ab") as output:
        return subprocess.Popen(
            [*COMMAND, "simulate", str(folder.task), *options],
            stdout=output,
            stderr=output,
            start_new_session=True,
            # Where the tests themselves run in the background, SIGINT is ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )


@pytest.mark.parametrize("how", ["ctrl-c", "kill -9"])
def test_an_interrupted_run_leaves_nothing_running_and_can_go_on(
    how: str, live: Simulation, two_rounds: Simulation, audit: Any, wait: Any, tmp_path: Path
) -> None:
    log = tmp_path / "output"

    def logs() -> str:
        return log.read_text() + audit.logs(live)

    command = start_command(live, log)
    wait(lambda: audit.events(live, "update") or command.poll() is not None, "an update came", logs=logs)
    assert command.poll() is None, logs()
    assert len(processes_about(live.folder.path)) >= 5
    if how == "ctrl-c":
        os.killpg(command.pid, signal.SIGINT)  # a terminal sends it to all of the group
        assert command.wait() == 130, logs()
        assert "interrupted" in log.read_text()
        assert "--engine live --workers 1 --no-local-only" in log.read_text(), "how to go on"
        assert "--resume" in log.read_text()
        assert processes_about(live.folder.path) == []
    else:
        command.kill()
        command.wait()
        wait(lambda: processes_about(live.folder.path) == [], "all processes ended", logs=logs)
    assert not live.folder.result.exists()

    again = start_command(live, log)
    assert again.wait() == 0, logs()
    assert audit.models(live) == audit.models(two_rounds), "to the last bit"
    audit.check(live)
    result = json.loads(live.folder.result.read_text())
    assert [row["participants"] for row in result["rounds"]] == [4, 4]
