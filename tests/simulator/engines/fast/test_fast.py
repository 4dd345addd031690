"""The fast engine: the same result whatever computes it, and whenever it is killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from hushfleet.edge_client.worker.metrics import own_metrics
from hushfleet.edge_client.worker.trainer import DeviceRound
from hushfleet.errors import HushfleetError
from hushfleet.methods import task_method
from hushfleet.simulator.engines.fast import chunks
from hushfleet.simulator.engines.fast.engine import deliver
from hushfleet.simulator.engines.fast.runtimes import RUNTIMES, unavailable
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.results import read_metrics
from hushfleet.simulator.run_folder import begin
from hushfleet.wire.format import spec

pytestmark = pytest.mark.slow

POINTS = 20
TASKS_READ = 4  # by the aggregator and by the worker

# Everything is imported once; a child is forked for each point, and killed there.
SCRIPT = r"""
import json, os, random, signal, sys
from pathlib import Path

import torch
from hushfleet.aggregator.results.events import EventLog
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.run_folder import go_on
from hushfleet.simulator.engines.fast.workers import Workers

torch.set_num_threads(1)
folders = [Path(name) for name in sys.argv[1:]]
simulations = [go_on(folder, data_dir=None) for folder in folders]
WATCHED = ("simulator/engines/fast/engine.py", "simulator/engines/fast/chunks.py", "edge_client/storage/store.py",
           "edge_client/worker/trainer.py", "edge_client/worker/metrics.py", "aggregator/rounds/engine.py",
           "aggregator/storage/store.py", "aggregator/storage/checkpoints.py", "aggregator/results/events.py")


def play(simulation, kill_at=-1):
    seen = []

    def hook(frame, event, argument):
        if frame.f_code.co_filename.endswith(WATCHED):
            seen.append(f"{event} {getattr(argument, '__name__', '') or frame.f_code.co_name}")
            if len(seen) - 1 == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    with Workers(1) as workers, EventLog(simulation.folder.events) as events:
        sys.setprofile(hook)
        run_rounds(simulation, workers, events)
        sys.setprofile(None)
    return seen


def forked(work):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            os.write(writer, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    data = b"".join(iter(lambda: os.read(reader, 1 << 16), b""))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), json.loads(data or "null")


def number_of_calls():
    return forked(lambda: len(play(simulations[0])))[1]


rng, total, report = random.Random(20261), number_of_calls(), []
for number, simulation in enumerate(simulations[1:]):
    # one point in each part of the run, and in some runs a second crash of the resumed run
    point = int(total * (number + rng.random()) / len(simulations[1:]))
    statuses = [forked(lambda: play(simulation, point))[0]]
    if number % 3 == 0:
        statuses.append(forked(lambda: play(simulation, int((total - point) * rng.random())))[0])
    report.append([point, statuses])
print(json.dumps({"total": total, "report": report}))
"""


def test_the_number_of_workers_changes_no_bit(runs: Any, calm: Any, audit: Any, tmp_path: Path) -> None:
    simulation = runs.fast(runs.copy(tmp_path / "run"), workers=2)
    assert list(audit.models(simulation)) == [f"global-{r}.safetensors" for r in range(4)]
    assert audit.models(simulation) == audit.models(calm)
    assert len(set(audit.models(calm).values())) == 4
    audit.check(simulation)


def test_every_device_is_charged_every_round_once(calm: Any, audit: Any) -> None:
    audit.check(calm)
    for device in calm.fleet.devices:
        assert len(audit.ledger(calm, device.name)) == calm.task.round.rounds


def test_what_devices_share_is_computed_once(runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five devices, three rounds, and the task's terms are the same in each: the cost, and the package's digest."""
    counts: Counter[str] = Counter()
    for module, name in ((task_method, "costs"), (spec, "pack")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, name=name, real=real: counts.update([name]) or real(*given))
    runs.fast(runs.copy(tmp_path / "run"))
    assert 0 < counts["costs"] <= TASKS_READ
    assert 0 < counts["pack"] <= TASKS_READ


def test_a_seed_makes_the_run_and_another_seed_another(
    runs: Any, calm: Any, audit: Any, short_task: Any, tmp_path: Path
) -> None:
    other = runs.fast(begin(short_task(seed=8, round={"rounds": 1}), tmp_path / "other", data_dir=None))
    mine, calms = audit.models(other), audit.models(calm)
    assert mine["global-0.safetensors"] != calms["global-0.safetensors"]
    assert mine["global-1.safetensors"] != calms["global-1.safetensors"]


@pytest.mark.parametrize("method", ["dp-fedavg", "fedglp-adp"])
def test_other_runtimes_compute_what_devices_compute(
    runs: Any, audit: Any, short_task: Any, tmp_path: Path, method: str
) -> None:
    """In a gentle setting: where steps or rounding amplify the last bits, runtimes go apart within rounds."""
    task = short_task(
        method={"name": method, "optimizer": "sgd", "learning_rate": 0.01},
        round={"rounds": 2},
        wire={"codec": "float32"},
    )
    models = {}
    for runtime in RUNTIMES:
        if unavailable(runtime, "digits-cnn") is None:
            simulation = runs.fast(begin(task, tmp_path / runtime, data_dir=None), runtime=runtime)
            models[runtime] = load_file(simulation.folder.aggregator / "global-2.safetensors")
            audit.check(simulation)
    assert set(models) >= {"onnx", "torch", "vmap"}
    first = load_file(simulation.folder.aggregator / "global-0.safetensors")
    for name, onnx in models["onnx"].items():
        assert np.abs(onnx - first[name]).max() > 1e-3, "it was trained"
        for other in models.values():
            assert np.abs(onnx - other[name]).max() <= 1e-4 * np.abs(onnx).max()


def test_a_cohort_trained_at_once_goes_on_with_what_was_committed(
    runs: Any, audit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed within a round.

    On the processor: CUDA's kernels sum in an order that depends on how many devices are left to be trained.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    calm = runs.fast(runs.copy(tmp_path / "calm"), runtime="vmap")
    simulation, heard = runs.copy(tmp_path / "run"), 0

    def dies(*arguments: Any, **more: Any) -> None:
        nonlocal heard
        heard += 1
        if heard == 4:
            raise KeyboardInterrupt
        deliver(*arguments, **more)

    monkeypatch.setattr("hushfleet.simulator.engines.fast.engine.deliver", dies)
    with pytest.raises(KeyboardInterrupt):
        runs.fast(simulation, runtime="vmap")
    runs.fast(simulation, runtime="vmap", workers=2)
    assert audit.models(simulation) == audit.models(calm)
    audit.check(simulation)


def test_killed_anywhere_it_goes_on_to_the_same_model(runs: Any, calm: Any, audit: Any, tmp_path: Path) -> None:
    simulations = [runs.copy(tmp_path / f"run-{number}") for number in range(1 + POINTS)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *(str(simulation.folder.path) for simulation in simulations)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outcome = json.loads(done.stdout)
    assert outcome["total"] > 1000, "the hook saw the run"
    assert audit.models(simulations[0]) == audit.models(calm), "the hook changes nothing"
    assert [statuses[0] for _, statuses in outcome["report"]] == [-signal.SIGKILL] * POINTS
    assert sum(statuses[1:] == [-signal.SIGKILL] for _, statuses in outcome["report"]) >= 3
    for simulation, (point, _) in zip(simulations[1:], outcome["report"], strict=True):
        runs.fast(simulation)
        assert audit.models(simulation) == audit.models(calm), f"killed at call {point} of {outcome['total']}"
        audit.check(simulation)


def test_killed_while_an_personalized_model_is_tested_it_loses_no_metrics(
    runs: Any, calm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes long in the last round, and what a table says is the mean over the devices that were tested."""
    simulation = runs.copy(tmp_path / "run")

    def dies(round: DeviceRound, *arguments: Any, **more: Any) -> dict[str, object]:
        if round.plan.round == calm.task.round.rounds:
            raise KeyboardInterrupt
        return own_metrics(round, *arguments, **more)

    monkeypatch.setattr(chunks, "own_metrics", dies)
    with pytest.raises(KeyboardInterrupt):
        runs.fast(simulation)
    monkeypatch.undo()
    runs.fast(simulation)
    for device in calm.fleet.devices:
        found, expected = (read_metrics(run, device.name) for run in (simulation, calm))
        for line in (*found.values(), *expected.values()):
            del line["train_s"]
        assert found == expected


def test_a_worker_that_is_killed_is_told_in_words() -> None:
    with Workers(2) as workers, pytest.raises(HushfleetError, match="memory ran out; take fewer --workers"):
        list(workers.map(os._exit, [1]))


def test_processor_time_of_workers_is_counted() -> None:
    with Workers(2) as workers:
        began = workers.processor_s()
        burnt = list(workers.map(burn, [0.3, 0.3]))
        assert workers.processor_s() - began >= sum(burnt)


def burn(seconds: float) -> float:
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass
    return seconds


def test_the_workers_of_a_killed_simulation_end_too(
    runs: Any, calm: Any, audit: Any, wait: Any, tmp_path: Path
) -> None:
    simulation = runs.copy(tmp_path / "run")
    main = "from hushfleet.aggregator.commands.main import main; main()"
    command = [sys.executable, "-c", main, "simulate", simulation.folder.task]
    options = ["--engine", "fast", "--workers", "2", "--no-local-only", "--out", simulation.folder.path, "--resume"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log)
    log_text = (tmp_path / "log").read_text
    wait(lambda: audit.events(simulation, "update") or process.poll() is not None, "it trained", logs=log_text)
    assert process.poll() is None, log_text()
    children = children_of(process.pid)
    assert len(children) >= 2
    process.kill()
    process.wait()
    wait(lambda: not any(map(is_running, children)), "its workers ended")
    runs.fast(simulation)
    assert audit.models(simulation) == audit.models(calm)
    audit.check(simulation)


def children_of(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def is_running(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_daemonic_process_has_no_workers() -> None:
    """As Celery's, which may have no children: all is then computed in it."""
    process = multiprocessing.get_context("fork").Process(target=lambda: os._exit(Workers(4).count), daemon=True)
    process.start()
    process.join()
    assert process.exitcode == 1
