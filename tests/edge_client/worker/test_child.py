"""A worker in a process of its own: what it gets, what it can reach, and how its guardian outlives it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hushfleet.aggregator.fleet.trust.device_file import device_toml
from hushfleet.aggregator.storage.board import Board
from hushfleet.edge_client.board.config import DeviceConfig, WorkerSection, load_config
from hushfleet.edge_client.worker import process
from hushfleet.edge_client.worker.frames import frame, read_job
from hushfleet.edge_client.worker.job import Job
from hushfleet.edge_client.worker.process import ChildProcess
from hushfleet.wire.format.spec import BlobRef
from hushfleet.wire.format.update import payload_digest
from support.desk import make_folder
from support.edge import DEVICE, Bench, Package

MakeBench = Callable[..., Bench]


def until(bench: Bench, done: Callable[[], bool]) -> None:
    """Like `bench.until`, but real time passes for the worker."""
    for _ in range(120_000):
        if done():
            return
        bench.agent.step(0.0)
        bench.server.pump()
        time.sleep(0.001)
    raise AssertionError("not reached")


def open_and_wait(bench: Bench, round: int = 1) -> None:
    before = len(bench.server.declines)
    bench.opens(round)
    until(bench, lambda: bench.entry_status(round) == "acked" or len(bench.server.declines) > before)


def runs(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers run this before they work, after they have limited themselves: `job` is the job."""
    patched = (
        "import sys; pipe = int(sys.argv[1]); sys.path[:] = sys.argv[2:]\n"
        "from hushfleet.edge_client.worker import limits, main\n"
        "import hushfleet.edge_client.worker.work as work\n"
        "close = limits.close\n"
        "def closed(job):\n"
        "    import ctypes, json, os, signal, socket, subprocess, time\n"
        "    close(job)\n" + "".join(f"    {line}\n" for line in code.splitlines()) + "limits.close = closed\n"
        "main.main(pipe)\n"
    )
    monkeypatch.setattr(process, "_ENTRY", patched)


@pytest.mark.parametrize("is_simulated", [True, False])
def test_a_round_is_trained_in_a_child(in_children: MakeBench, config: DeviceConfig, is_simulated: bool) -> None:
    bench = in_children(config=config if is_simulated else replace(config, simulation=None))
    for round in (1, 2):
        open_and_wait(bench, round)
    assert bench.server.declines == []
    assert [entry.round for entry in bench.store.ledger.entries()] == [1, 2]
    bench.agent.close()
    assert bench.workshop.pid is None, "no process is left"


def test_a_board_of_a_fleet_trains_in_a_child(in_children: MakeBench, config: DeviceConfig, tmp_path: Path) -> None:
    """A job has the whole configuration, with every key that a card of a fleet has in its DEVICE.toml."""
    folder = make_folder(tmp_path / "greenhouse")
    file = tmp_path / "device.toml"
    file.write_text(device_toml(folder, Board(DEVICE, "generic-x86")))
    card = load_config(file)
    assert None not in (card.roster_key, card.broker.server_key, card.fleet)
    device = replace(config.device, roster_key=card.device.roster_key)
    bench = in_children(
        config=replace(card, device=device, data=config.data, limits=config.limits, broker=config.broker)
    )
    plan = bench.server.plan(1)
    assert read_job(frame(Job(card, b"", (), plan, b"", 0))).config == card
    open_and_wait(bench)
    assert bench.server.declines == []


def test_a_child_sends_the_same_bits(
    in_children: MakeBench, make_bench: MakeBench, config: DeviceConfig, tmp_path: Path
) -> None:
    """Rounds of a kept worker, of one process a round, and of the guardian's own process are equal."""
    sent, own = [], []
    for place, make, keep_s in (("kept", in_children, 30.0), ("new", in_children, 0.0), ("own", make_bench, 0.0)):
        device = replace(config.device, state_dir=str(tmp_path / place))
        bench = make(config=replace(config, device=device, worker=WorkerSection(keep_s)))
        pids = set()
        for round in (1, 2, 3):
            open_and_wait(bench, round)
            pids.add(getattr(bench.workshop, "pid", None))
        assert (None in pids) == (keep_s == 0)
        assert len(pids) == 1
        sent.append([payload_digest(data) for data in bench.server.updates])
        own.append(bench.store.load_state("digits-test").own.tobytes())
    assert sent[0] == sent[1] == sent[2]
    assert own[0] == own[1] == own[2]


def kept(bench: Bench) -> int:
    """Trains a round; returns the worker that waits for the next one."""
    open_and_wait(bench)
    assert bench.workshop.pid is not None
    return bench.workshop.pid


@pytest.mark.parametrize("why", ["time", "finished", "task", "closed"])
def test_a_kept_worker_ends(in_children: MakeBench, package: Package, why: str) -> None:
    bench = in_children()
    pid = kept(bench)
    if why == "time":
        bench.clock.now += 29
        bench.steps()
        assert bench.workshop.pid == pid
        bench.clock.now += 2
    elif why == "finished":
        bench.server.open_round(1, phase="finished", cohort={})
    elif why == "task":
        bench.server.package = package.with_spec(task="another")
        bench.server.announce()
    else:
        bench.agent.close()
    bench.steps()
    assert bench.workshop.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("how", ["killed", "talking"])
def test_a_kept_worker_that_is_not_idle_is_replaced(
    in_children: MakeBench, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its end between two rounds is no failure of either."""
    if how == "talking":
        more = "main.frame = lambda message, plain=main.frame: plain(message) + b'?' * isinstance(message, Finished)"
        runs(f"from hushfleet.edge_client.worker.job import Finished\n{more}", monkeypatch)
    bench = in_children()
    pid = kept(bench)
    if how == "killed":
        os.kill(pid, signal.SIGKILL)
    monkeypatch.undo()
    open_and_wait(bench, 2)
    assert bench.server.declines == []
    assert bench.workshop.pid not in (None, pid)


def test_each_job_has_its_processor_time(in_children: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    runs(
        "import resource, logging\n"
        "def seen(self, job, do=work.JobWork.do):\n"
        "    limits_ = resource.getrlimit(resource.RLIMIT_CPU)\n"
        "    logging.getLogger('hushfleet.edge').warning('limit %d used %d', limits_[0], time.process_time())\n"
        "    while job.plan.round == 1 and time.process_time() < 3: pass\n"
        "    return do(self, job)\n"
        "work.JobWork.do = seen",
        monkeypatch,
    )
    logged: list[str] = []
    monkeypatch.setattr("hushfleet.edge_client.worker.handover._log.log", lambda level, form, text: logged.append(text))
    bench = in_children()
    for round in (1, 2):
        open_and_wait(bench, round)
    found = [line.split() for line in logged if line.startswith("limit")]
    left = [int(limit) - int(used) for _, limit, _, used in found]
    assert int(found[1][3]) >= 3
    assert abs(left[0] - left[1]) <= 1


def test_an_personalized_head_is_chosen_in_a_child(
    in_children: MakeBench, config: DeviceConfig, linear: Package
) -> None:
    bench = in_children(package=linear, config=replace(config, simulation=None))
    bench.server.open_round(1, phase="closed", cohort={})
    until(bench, lambda: bench.store.personalized_head("digits-test") is not None)


WORDS = {
    "ctypes.string_at(0)": "was ended by SIGSEGV",
    "os.abort()": "was ended by",
    "os._exit(7)": "ended with status 7",
    "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass": "was killed",
}


@pytest.mark.parametrize("code", WORDS)
def test_a_worker_that_dies_is_a_decline_in_words_and_three_stop_the_task(
    in_children: MakeBench, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    runs(code, monkeypatch)
    bench = in_children()
    for round in (1, 2, 3):
        open_and_wait(bench, round)
        runs("os._exit(7)", monkeypatch)  # sooner than a second of the processor
    reasons = [(decline.code, decline.reason) for decline in bench.server.declines]
    assert [code for code, _ in reasons] == ["memory"] * 3
    assert WORDS[code] in reasons[0][1]
    assert bench.agent.tasks.declined is not None
    assert "3 times in a row" in bench.agent.tasks.declined.reason
    monkeypatch.setattr(ChildProcess, "begin", lambda *_: pytest.fail("a task that was stopped is trained"))
    open_and_wait(bench, 4)
    assert bench.store.ledger.entries() == []


def test_a_worker_that_fails_once_does_not_stop_the_task(
    in_children: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        runs("os._exit(1)", patch)
        bench = in_children()
        for round in (1, 2):
            open_and_wait(bench, round)
    open_and_wait(bench, 3)
    assert bench.entry_status(3) == "acked"
    assert bench.agent.tasks.runtime.deaths == 0


def test_memory_that_a_worker_lacks_is_a_decline(
    in_children: MakeBench, config: DeviceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs("hoard = [bytearray(1 << 20) for _ in range(10_000)]", monkeypatch)
    bench = in_children(config=replace(config, limits=replace(config.limits, memory_mib=200)))
    open_and_wait(bench)
    (decline,) = bench.server.declines
    assert (decline.code, decline.reason) == ("memory", "this device ran out of memory")


def test_a_worker_that_hangs_is_ended_at_the_deadline(in_children: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    runs("time.sleep(3600)", monkeypatch)
    bench = in_children()
    bench.server.open_round(1, deadline_s=100.0)
    until(bench, lambda: bench.workshop.pid is not None)
    pid = bench.workshop.pid
    bench.steps()
    bench.clock.now += 101
    until(bench, lambda: bool(bench.server.declines))
    assert bench.server.declines[0].code == "busy"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_worker_dies_with_its_guardian(tmp_path: Path) -> None:
    code = """
import os, sys, time
from hushfleet.edge_client.worker import process
process._ENTRY = "import sys, time; from hushfleet.edge_client.worker import limits; limits.begin(); time.sleep(600)"
started = process.subprocess.Popen(process._command(0))
print(started.pid, flush=True)
time.sleep(1)
os._exit(0)
"""
    guardian = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pid = int(guardian.stdout)
    for _ in range(10_000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.001)
    raise AssertionError("the worker lives on")


REACH = """
found = {"environment": sorted(os.environ), "descriptors": len(os.listdir("/proc/self/fd"))}
def tried(name, call):
    try:
        call()
        found[name] = "reached"
    except Exception as error:
        found[name] = type(error).__name__
import sqlite3
store = os.path.join(job.config.device.state_dir, "store.sqlite")
tried("network", lambda: socket.create_connection(("127.0.0.1", PORT)))
tried("store", lambda: open(store, "rb").read())
tried("write", lambda: open("/tmp/hushfleet-worker-was-here", "w"))
tried("data", lambda: open(job.config.data.path, "rb").read())
tried("configuration", lambda: open("/etc/passwd", "rb").read())
tried("program", lambda: subprocess.run(["/bin/true"]))
tried("kill", lambda: os.kill(os.getppid(), 0))
tried("memory", lambda: open(f"/proc/{os.getppid()}/mem", "rb").read(1))
import logging
logging.getLogger("hushfleet.edge").warning("found %s", json.dumps(found))
"""


def test_a_worker_reaches_no_network_no_key_and_no_other_process(
    in_children: MakeBench, config: DeviceConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with TemporaryDirectory(dir="/var/tmp") as state, socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("SECRET", "of the guardian")
        runs(REACH.replace("PORT", str(server.getsockname()[1])), monkeypatch)
        device = replace(config.device, state_dir=state)  # not below /dev, where a worker may read
        bench = in_children(config=replace(config, simulation=None, device=device))
        open_and_wait(bench)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("found ")]
    found = json.loads(line.removeprefix("found "))
    assert "SECRET" not in found["environment"]
    assert found["descriptors"] <= 6, "its pipe, three that lead nowhere, and the folder that is being listed"
    assert found["data"] == "reached"
    assert found["network"] == "PermissionError"
    assert found["program"] == found["kill"] == "PermissionError"
    if ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) >= 1:
        denied = {found[name] for name in ("store", "write", "memory", "configuration")}
        assert denied == {"PermissionError"}
    assert bench.entry_status(1) == "acked"


def test_no_key_is_in_a_job(make_bench: MakeBench) -> None:
    bench, jobs = make_bench(), list[Job]()
    begin = bench.workshop.begin
    bench.workshop.begin = lambda job: (jobs.append(job), begin(job))[1]
    bench.train(1)
    (job,) = jobs
    assert bench.store.identity.to_bytes() not in process.frame(job)


@pytest.mark.parametrize("lie", ["charge", "round", "size", "state", "garbage", "endless"])
def test_what_a_worker_says_is_checked(in_children: MakeBench, monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    """It runs programs from the network, and may say anything."""
    lies = {
        "charge": "found = replace(found, charge=replace(found.charge, noise_multiplier=9.0))",
        "round": "found = replace(found, update=found.update.replace(b'digits-test', b'digits-tesT'))",
        "size": "found = replace(found, state=replace(found.state, own=found.state.own[:-4]))",
        "state": "found = replace(found, public_before=bytes(4) + found.public_before[4:][::-1])",
        "garbage": "os.write(int(sys.argv[1]), os.urandom(5000))",
        "endless": "os.write(int(sys.argv[1]), b'\\x02' + b'\\xff' * 5000)",
    }
    code = (
        "import sys\nfrom dataclasses import replace\n"
        "do = work.JobWork.do\n"
        "def lies(self, job):\n"
        f"    found = do(self, job)\n    {lies[lie]}\n    return found\n"
        "work.JobWork.do = lies\n"
    )
    runs(code, monkeypatch)
    bench = in_children()
    open_and_wait(bench)
    assert len(bench.server.declines) == 1
    assert bench.store.ledger.entries() == []
    assert bench.store.load_state("digits-test") is None
    assert bench.workshop.pid is None


def test_a_graph_that_breaks_a_rule_stops_the_task_at_once(in_children: MakeBench, package: Package) -> None:
    graph = b"not a graph at all"
    model = replace(package.spec.model, gradient=BlobRef.of(graph))
    changed = package.with_spec(model=model, task="garbage")
    bench = in_children(package=replace(changed, blobs={**changed.blobs, model.gradient.digest: graph}))
    open_and_wait(bench)
    assert bench.server.declines[0].code == "graph"
    assert bench.agent.tasks.declined is not None


@pytest.mark.parametrize("is_of_the_data", [True, False])
def test_a_death_that_the_data_cause_is_hidden_by_noise(
    in_children: MakeBench, monkeypatch: pytest.MonkeyPatch, is_of_the_data: bool
) -> None:
    """A decline would tell of them; one that also comes without data tells nothing."""
    runs("ctypes.string_at(0)" if not is_of_the_data else "if not job.blank: ctypes.string_at(0)", monkeypatch)
    bench = in_children()
    open_and_wait(bench)
    assert (bench.entry_status(1) == "acked") == is_of_the_data
    assert len(bench.store.ledger.entries()) == is_of_the_data
