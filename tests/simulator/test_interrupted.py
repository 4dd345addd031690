"""Ctrl-C in the commands that take long, as a terminal sends it: to all processes of the group."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

# The demo's own fleet is of eight boards: three of them say the same.
MAIN = """
from dataclasses import replace
from hushfleet.aggregator.commands.main import main
from hushfleet.simulator.demo import HALVES

HALVES["paper"] = replace(HALVES["paper"], short=("round.rounds=2", "data.devices=3", "data.limit=200"))
main()
"""
# Enough rounds that a busy machine interrupts it in time.
TASK = """
name = "long"
[model]
name = "digits-cnn"
[method]
name = "dp-fedavg"
local_epochs = 1
[privacy]
noise_multiplier = 0.5
[data]
name = "digits"
devices = 4
limit = 200
[round]
rounds = 20
"""
SIMULATE = "simulate task.toml --workers 2 --out run"


def updates(events: str) -> Callable[[int], bool]:
    return lambda pid: any('"update"' in path.read_text() for path in Path().glob(events))


def imports(pid: int) -> bool:
    """Whether it has begun to."""
    return "onnxruntime" in Path(f"/proc/{pid}/maps").read_text()


def measures_a_start(pid: int) -> bool:
    """Whether it has started a process whose start it measures, and that has begun to import."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):  # it has ended
            client = b"hushfleet.edge_client" in Path(f"/proc/{child}/cmdline").read_bytes()
            if client and "msgspec" in Path(f"/proc/{child}/maps").read_text():
                return True
    return False


@dataclass(frozen=True)
class Case:
    """:param when: it is interrupted, given the process id.
    :param result: what it leaves behind when it goes on; None where there is nothing to go on with.
    """

    words: str
    when: Callable[[int], bool]
    result: str | None


CASES = {
    "in rounds": Case(SIMULATE, updates("run/aggregator/events.jsonl"), "run/report.html"),
    "in a sweep": Case(f"{SIMULATE} --sweep 0,1,2,3", updates("run/sweep/*/*/events.jsonl"), "run/report.html"),
    "in a demo": Case("demo paper --short --out run", updates("run/*/*/events.jsonl"), "run/paper/report.html"),
    "before a run": Case(SIMULATE, imports, None),
    "in an audit": Case("audit task.toml --trials 1000000", imports, None),
    "in a forecast": Case("forecast task.toml", imports, None),
    "in a forecast's measurement": Case("forecast task.toml", measures_a_start, None),
}  # fmt: skip


def start(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-c", MAIN, *words],
            stdout=output,
            stderr=output,
            start_new_session=True,
            # Where the tests themselves run in the background, SIGINT is ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )


def wait_for_the_end_of_all(session: int) -> None:
    """Workers have groups of their own, in the session of the command."""

    def belongs(pid: int) -> bool:
        with contextlib.suppress(ProcessLookupError):
            return os.getsid(pid) == session
        return False

    while any(belongs(pid) for pid in psutil.pids()):
        time.sleep(0.01)


def test_sigterm_ends_a_run_as_ctrl_c_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent to the whole group, as `timeout` and Slurm do; `docker stop` and systemd send it."""
    monkeypatch.chdir(tmp_path)
    Path("task.toml").write_text(TASK)
    asked, log = CASES["in rounds"], Path("log.txt")
    process = start(shlex.split(asked.words), log)
    while not asked.when(process.pid):
        assert process.poll() is None, log.read_text()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait() == 143, log.read_text()
    assert "nothing is lost. Go on with:" in log.read_text()
    assert not {"Traceback", "leaked"} & set(log.read_text().split())
    wait_for_the_end_of_all(process.pid)


@pytest.mark.parametrize("case", CASES)
def test_ctrl_c_ends_all_in_words_and_the_command_goes_on(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("task.toml").write_text(TASK)
    asked, log = CASES[case], Path("log.txt")
    process = start(shlex.split(asked.words), log)
    while not asked.when(process.pid):
        assert process.poll() is None, log.read_text()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait() == 130, log.read_text()
    assert "Traceback" not in log.read_text()
    wait_for_the_end_of_all(process.pid)
    if asked.result is not None:
        assert not Path(asked.result).exists()
        (line,) = [line for line in log.read_text().splitlines() if line.lstrip().startswith("hushfleet ")]
        assert line.split()[-1] == "--resume"
        assert start([*shlex.split(asked.words), "--resume"], log).wait() == 0, log.read_text()
        assert Path(asked.result).exists()
