"""A slowed device: how long its worker waits, and that nothing else changes. Time is a number here."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.edge_client.board.config import DeviceConfig, SimulationSection, load_config
from hushfleet.edge_client.board.pacing import LEAST_WAIT_S, Pacer, SlowStore, open_store
from hushfleet.edge_client.storage.arrays import RoundCommit
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker import loaded_task
from hushfleet.edge_client.worker.metrics import MetricsFile
from hushfleet.errors import BadInput
from hushfleet.methods.state import DeviceState, PublicState
from hushfleet.privacy.charge import Charge
from hushfleet.wire.format.update import payload_digest
from support.edge import Bench

MakeBench = Callable[..., Bench]


class Time:
    """Wall and CPU seconds, and the event that waits: waiting is what makes wall time pass.

    :param work_s: how much CPU time passes whenever it is asked for.
    """

    def __init__(self, *, work_s: float = 0.0) -> None:
        self.wall, self.cpu, self.work_s = 50.0, 0.0, work_s
        self.waited: list[float] = []

    def read_cpu(self) -> float:
        self.cpu += self.work_s
        return self.cpu

    def wait(self, seconds: float) -> None:
        self.wall += seconds
        self.waited.append(seconds)

    def work(self, cpu_s: float, *, delayed_s: float = 0.0) -> None:
        self.cpu += cpu_s
        self.wall += cpu_s + delayed_s

    def pacer(self, slowdown: float) -> Pacer:
        return Pacer(slowdown, sleep=self.wait, wall=lambda: self.wall, cpu=self.read_cpu)


def test_wall_time_becomes_slowdown_times_cpu_time() -> None:
    time = Time()
    pacer = time.pacer(8.0)
    time.work(0.25)
    pacer.catch_up()
    assert time.wall == pytest.approx(52.0)
    time.work(0.5)
    pacer.catch_up()
    assert time.wall == pytest.approx(56.0)
    pacer.catch_up()
    assert time.wall == pytest.approx(56.0)


def test_no_slowdown_never_waits() -> None:
    time = Time()
    pacer = time.pacer(1.0)
    for _ in range(10):
        time.work(3.0)
        pacer.step()
        pacer.catch_up()
    assert time.waited == []


@given(
    work=st.lists(st.tuples(st.floats(0, 0.4), st.floats(0, 2)), min_size=1, max_size=30),
    slowdown=st.floats(1.01, 30),
)
def test_a_machine_that_is_busy_is_not_slowed_further(work: list[tuple[float, float]], slowdown: float) -> None:
    time = Time()
    pacer = time.pacer(slowdown)
    for cpu_s, delayed_s in work:
        time.work(cpu_s, delayed_s=delayed_s)
        pacer.step()
        assert time.wall - 50.0 >= slowdown * time.cpu - LEAST_WAIT_S - 1e-6
    pacer.catch_up()
    took, here = time.wall - 50.0, sum(cpu_s + delayed_s for cpu_s, delayed_s in work)
    assert took >= slowdown * time.cpu - 1e-6
    if time.waited:
        assert took <= max(slowdown * time.cpu, here) + here + 1e-9
    else:
        assert took == pytest.approx(here)


def test_between_steps_only_long_waits_are_worth_while() -> None:
    time = Time()
    pacer = time.pacer(11.0)
    for _ in range(9):
        time.work(0.01)
        pacer.step()
    assert time.waited == []
    time.work(0.01)
    pacer.step()
    assert time.wall == pytest.approx(50 + 11 * 0.1)


def test_what_was_owed_before_is_forgiven() -> None:
    time = Time()
    pacer = time.pacer(5.0)
    time.work(10.0)
    pacer.begin()
    pacer.catch_up()
    assert time.waited == []
    time.work(1.0)
    pacer.catch_up()
    assert time.wall == pytest.approx(50 + 10 + 5)


def test_the_real_clocks() -> None:
    pacer = Pacer(3.0)
    x = np.random.default_rng(0).random((300, 300))
    for _ in range(3):
        x = x @ x / np.abs(x).max() ** 2
        pacer.step()
    pacer.catch_up()
    assert pacer._wall() - pacer._wall_from >= 3.0 * (pacer._cpu() - pacer._cpu_from) * 0.5
    assert pacer._cpu() > pacer._cpu_from


# the store


class Writes(threading.Event):
    """Notes how long is waited."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout or 0.0)
        return False


def test_writes_take_their_time(tmp_path: Path) -> None:
    writes = Writes()
    with SlowStore(tmp_path / "s", device="d", durable=False, write_mb_s=0.01, stop=writes) as store:
        data = bytes(12_000)
        store.put_blob(hashlib.sha256(data).digest(), data)
        assert writes.waited == [pytest.approx(1.2)], "12 kB at 10 kB a second"
        store.next_session()
        state = DeviceState(PublicState.initial(800), np.zeros(800, np.float32), {"w": np.zeros(25)})
        charge = Charge("device", "zero-out", "gaussian", noise_multiplier=1.0)
        commit = RoundCommit("t", 1, charge, state, update=bytes(5000), public_before=b"")
        store.commit_round(commit)
        least = 5000 + 4 * 800 + 8 * 25
        assert least / 10_000 < writes.waited[1] < 1.1 * least / 10_000


def test_only_a_simulated_store_can_be_slow(tmp_path: Path) -> None:
    stop = threading.Event()
    with open_store(tmp_path / "field" / "s", device="d", simulation=None, stop=stop) as store:
        assert type(store) is DeviceStore
        assert store._connection.execute("PRAGMA synchronous").fetchone() == (2,)
    section = SimulationSection(seed=1, index=0, write_mb_s=3.0)
    with open_store(tmp_path / "sim" / "s", device="d", simulation=section, stop=stop) as store:
        assert isinstance(store, SlowStore)
        assert store._connection.execute("PRAGMA synchronous").fetchone() == (0,)


# the device


def updates_of(bench: Bench) -> list[bytes]:
    bench.server.open_round(1)
    bench.until(lambda: bench.entry_status(1) == "acked")
    return bench.server.updates


def paced(monkeypatch: pytest.MonkeyPatch, time: Time) -> None:
    monkeypatch.setattr(loaded_task, "Pacer", time.pacer)


def with_slowdown(config: DeviceConfig, slowdown: float, **simulation: object) -> DeviceConfig:
    assert config.simulation is not None
    return replace(config, simulation=replace(config.simulation, slowdown=slowdown, **simulation))


def test_a_slow_device_sends_the_same_update(
    make_bench: MakeBench, config: DeviceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Time(work_s=0.1)
    paced(monkeypatch, time)
    update = updates_of(make_bench(config=with_slowdown(config, 20.0)))
    assert time.wall > 50 + 20 * 0.1 * 3, "a round of three batches"
    other = replace(config, device=replace(config.device, state_dir=str(tmp_path / "other")))
    fast = updates_of(make_bench(config=other))
    # Signatures differ, since each store has a key of its own.
    assert [payload_digest(one) for one in fast] == [payload_digest(one) for one in update]
    assert len(fast) == 1


def test_the_simulations_own_tests_of_a_model_are_no_work(
    make_bench: MakeBench, config: DeviceConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    time = Time()
    paced(monkeypatch, time)
    monkeypatch.setattr(MetricsFile, "write", lambda *_, **__: time.work(500.0))
    updates_of(make_bench(config=with_slowdown(config, 20.0, metrics=str(tmp_path / "metrics.jsonl"))))
    assert time.cpu == 500.0
    assert time.waited == []


# the configuration


def test_the_keys_of_the_configuration(tmp_path: Path, config: DeviceConfig) -> None:
    path = tmp_path / "device.toml"
    text = """
[device]
id = "d"
state_dir = "s"
allow_volatile_state = true
[broker]
url = "mqtt://localhost"
[data]
kind = "arrays"
path = "x.npz"
[limits]
epsilon_server = 1
[simulation]
seed = 1
index = 0
"""
    path.write_text(text)
    simulation = load_config(path).simulation
    assert simulation is not None
    assert (simulation.slowdown, simulation.write_mb_s) == (1.0, None)
    path.write_text(text + "slowdown = 24.2\nwrite_mb_s = 20.0\n")
    assert load_config(path).simulation == replace(simulation, slowdown=24.2, write_mb_s=20.0)
    for line, accepted in (
        ("slowdown = 0.5", "1 or more"),
        ("slowdown = inf", "1 or more"),
        ("write_mb_s = 0.0", "write_mb_s = .*: must be positive and finite"),
        ("write_mb_s = inf", "write_mb_s = .*: must be positive and finite"),
    ):
        path.write_text(f"{text}{line}\n")
        with pytest.raises(BadInput, match=accepted):
            load_config(path)
