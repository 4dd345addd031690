"""A slowed device: how long it waits, what ends a wait, and that nothing else changes. Time is a number here."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.edge_client.agent import Agent
from hushfleet.edge_client.board.config import DeviceConfig, SimulationSection, load_config
from hushfleet.edge_client.board.pacing import LEAST_WAIT_S, SLICE_S, PacedStore, Pacer, open_store
from hushfleet.edge_client.metrics import MetricsFile
from hushfleet.edge_client.rounds import Stopped
from hushfleet.edge_client.storage.arrays import RoundCommit
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import BadInput
from hushfleet.methods.state import DeviceState, PublicState
from hushfleet.privacy.charge import Charge
from hushfleet.wire.format.update import payload_digest
from support.edge import DEVICE, Bench, Clock, Package, ScriptedAggregator
from support.local_link import LocalHub

MakePaced = Callable[..., tuple[Bench, "Time"]]


class Time:
    """Wall and CPU seconds, and the event that waits: waiting is what makes wall time pass.

    :param work_s: how much CPU time passes whenever it is asked for.
    """

    def __init__(self, *, work_s: float = 0.0) -> None:
        self.wall = 50.0
        self.cpu = 0.0
        self.work_s = work_s
        self.waited: list[float] = []
        self.stopped = False
        self.on_wait: Callable[[], None] = lambda: None

    def read_cpu(self) -> float:
        self.cpu += self.work_s
        return self.cpu

    def wait(self, seconds: float) -> bool:
        if not self.stopped:
            self.wall += seconds
            self.waited.append(seconds)
            self.on_wait()
        return self.stopped

    def work(self, cpu_s: float, *, delayed_s: float = 0.0) -> None:
        self.cpu += cpu_s
        self.wall += cpu_s + delayed_s

    def pacer(self, slowdown: float) -> Pacer:
        return Pacer(slowdown, stop=self, wall=lambda: self.wall, cpu=self.read_cpu)


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


def test_other_waits_pay_for_no_work() -> None:
    time = Time()
    pacer = time.pacer(4.0)
    time.work(1.0)
    pacer.wait(7.0)
    pacer.catch_up()
    assert time.wall == pytest.approx(50 + 4 + 7)


def test_a_check_runs_at_each_step_and_soon_in_a_wait() -> None:
    time = Time()
    pacer = time.pacer(100.0)
    checks: list[float] = []

    def check() -> None:
        checks.append(time.wall)
        if time.wall > 53:
            raise ZeroDivisionError

    with pacer.checked_by(check):
        pacer.step()
        assert checks == [50.0]
        time.work(1.0)
        with pytest.raises(ZeroDivisionError):
            pacer.step()
    assert 53 < time.wall <= 53 + SLICE_S + 1e-9
    assert max(time.waited) <= SLICE_S
    checks.clear()
    pacer.catch_up()
    assert checks == [], "outside of the block it is not asked"
    assert time.wall == pytest.approx(150.0)


def test_a_check_that_ends_a_write_does_not_make_the_rest_due() -> None:
    time = Time()
    pacer = time.pacer(2.0)

    def check() -> None:
        if time.wall > 60:
            raise ZeroDivisionError

    with pacer.checked_by(check), pytest.raises(ZeroDivisionError):
        pacer.wait(1000.0)
    time.work(1.0)
    pacer.catch_up()
    assert time.wall == pytest.approx(60 + 2, abs=2 * SLICE_S)


def test_a_stop_ends_all_waits() -> None:
    time = Time()
    pacer = time.pacer(10.0)
    time.work(100.0)

    def stop() -> None:
        time.stopped = time.wall > 160

    time.on_wait = stop
    pacer.catch_up()
    assert 160 < time.wall < 161
    pacer.wait(1000.0)
    assert 160 < time.wall < 161


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


@contextmanager
def a_store(tmp_path: Path, pacer: Pacer, write_mb_s: float | None) -> Iterator[DeviceStore]:
    with PacedStore(tmp_path / "store.sqlite", device="d", durable=False, pacer=pacer, write_mb_s=write_mb_s) as store:
        yield store


def commit(store: DeviceStore, round: int = 1) -> None:
    state = DeviceState(PublicState.initial(800), np.zeros(800, np.float32), {"w": np.zeros(25)})
    charge = Charge("device", "zero-out", "gaussian", noise_multiplier=1.0)
    store.commit_round(RoundCommit("t", round, charge, state, update=bytes(5000), public_before=b""))


def test_writes_take_their_time(tmp_path: Path) -> None:
    time = Time()
    with a_store(tmp_path, time.pacer(1.0), 0.01) as store:
        data = bytes(12_000)
        store.put_blob(hashlib.sha256(data).digest(), data)
        assert time.wall == pytest.approx(50 + 1.2), "12 kB at 10 kB a second"
        store.next_session()
        assert time.wall == pytest.approx(50 + 1.2)
        commit(store)
        public_bytes = len(PublicState.initial(800).to_bytes())
        written = 5000 + 4 * 800 + 8 * 25 + public_bytes
        assert time.wall == pytest.approx(50 + 1.2 + written / 10_000)


def test_without_a_rate_writes_take_no_time(tmp_path: Path) -> None:
    time = Time()
    with a_store(tmp_path, time.pacer(1.0), None) as store:
        commit(store)
    assert time.waited == []


def test_an_update_is_not_committed_before_the_board_would_have_it(tmp_path: Path) -> None:
    time = Time()
    pacer = time.pacer(10.0)
    with a_store(tmp_path, pacer, None) as store:
        time.work(2.0)
        seen: list[object] = []
        time.on_wait = lambda: seen.append(store.outbox("t", 1))
        commit(store)
        assert seen
        assert set(seen) == {None}, "at each moment of the wait nothing was committed"
        assert time.wall == pytest.approx(50 + 20)
        assert store.outbox("t", 1) is not None


def test_a_round_that_is_given_up_in_the_wait_costs_nothing_and_one_that_is_committed_is_not_given_up(
    tmp_path: Path,
) -> None:
    time = Time()
    pacer = time.pacer(10.0)

    def check() -> None:
        if time.wall > 60:
            raise Stopped

    with a_store(tmp_path, pacer, 0.001) as store:
        time.work(2.0)
        with pacer.checked_by(check), pytest.raises(Stopped):
            commit(store)
        assert store.outbox("t", 1) is None
        assert store.ledger.rounds_charged() == 0
        time.wall = 55.0
        pacer.begin()
        with pacer.checked_by(check):
            commit(store)
        assert time.wall > 60
        assert store.outbox("t", 1) is not None


def test_only_a_simulated_store_can_be_slow(tmp_path: Path) -> None:
    pacer = Pacer()
    with open_store(tmp_path / "field" / "s", device="d", simulation=None, pacer=pacer) as store:
        assert type(store) is DeviceStore
        assert store._connection.execute("PRAGMA synchronous").fetchone() == (2,)
    section = SimulationSection(seed=1, index=0, write_mb_s=3.0)
    with open_store(tmp_path / "sim" / "s", device="d", simulation=section, pacer=pacer) as store:
        assert isinstance(store, PacedStore)
        assert store._connection.execute("PRAGMA synchronous").fetchone() == (0,)


# the device


@pytest.fixture
def make_paced(package: Package, config: DeviceConfig) -> Iterator[MakePaced]:
    benches: list[Bench] = []

    def make(
        slowdown: float, *, work_s: float, write_mb_s: float | None = None, **simulation: object
    ) -> tuple[Bench, Time]:
        time, hub, clock = Time(work_s=work_s), LocalHub(), Clock()
        server = ScriptedAggregator(hub, package)
        pacer = time.pacer(slowdown)
        store = PacedStore(config.store_path, device=DEVICE, durable=False, pacer=pacer, write_mb_s=write_mb_s)
        changed = replace(config, simulation=replace(config.simulation, **simulation))
        agent = Agent(changed, lambda will: hub.link(DEVICE, will), store, clock=clock, pacer=pacer)
        bench = Bench(hub, server, changed, clock, store, agent)
        benches.append(bench)
        agent.start()
        server.announce()
        return bench, time

    yield make
    for bench in benches:
        bench.agent.close()
        bench.store.close()


def updates_of(bench: Bench) -> list[bytes]:
    bench.server.open_round(1)
    bench.until(lambda: bench.entry_status(1) == "acked")
    return bench.server.updates


def test_a_slow_device_sends_the_same_update(make_paced: MakePaced, make_bench: Callable[..., Bench]) -> None:
    slow, time = make_paced(20.0, work_s=0.1, write_mb_s=1.0)
    update = updates_of(slow)
    assert time.wall > 50 + 20 * 0.1 * 3, "a round of three batches"
    slow.agent.close()
    slow.store.close()
    shutil.rmtree(slow.config.store_path.parent)
    fast = updates_of(make_bench())
    # Signatures differ, since each store has a key of its own.
    assert [payload_digest(one) for one in fast] == [payload_digest(one) for one in update]
    assert len(fast) == 1


def test_what_waiting_for_others_takes_is_no_work(make_paced: MakePaced) -> None:
    bench, time = make_paced(20.0, work_s=0.0)
    bench.until(lambda: bench.agent.tasks.runtime is not None)
    time.wall += 10_000
    before = sum(time.waited)
    committing = bench.store.commit_round

    def commit_round(commit: RoundCommit) -> object:
        time.work(5.0)
        return committing(commit)

    bench.store.commit_round = commit_round
    updates_of(bench)
    assert sum(time.waited) - before == pytest.approx(20 * 5.0 - 5.0)


def test_loading_a_task_is_work(make_paced: MakePaced) -> None:
    bench, time = make_paced(20.0, work_s=0.1)
    bench.until(lambda: bench.agent.tasks.runtime is not None)
    assert sum(time.waited) > 20 * 0.1


def test_the_simulations_own_tests_of_a_model_are_no_work(
    make_paced: MakePaced, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench, time = make_paced(20.0, work_s=0.0, metrics=str(tmp_path / "metrics.jsonl"))
    monkeypatch.setattr(MetricsFile, "write", lambda *_, **__: time.work(500.0))
    updates_of(bench)
    assert time.cpu == 500.0
    assert time.waited == []


@pytest.mark.parametrize("what", ["newer plan", "deadline", "stop"])
def test_what_ends_training_ends_a_wait(make_paced: MakePaced, what: str) -> None:
    bench, time = make_paced(1000.0, work_s=0.0)
    bench.until(lambda: bench.agent.tasks.runtime is not None)
    time.work_s = 0.3  # each look at the CPU clock owes 300 s of wall time
    waits_before = len(time.waited)

    def happen() -> None:
        if len(time.waited) == waits_before + 5:
            if what == "newer plan":
                time.work_s = 0.0
                bench.server.open_round(2)
            elif what == "deadline":
                bench.clock.now += 10_000
            else:
                bench.agent.stop.set()
                time.stopped = True

    time.on_wait = happen
    bench.server.open_round(1)
    if what == "stop":
        with pytest.raises(Stopped):
            bench.steps()
        bench.agent.stop.clear()
    elif what == "deadline":
        bench.until(lambda: bench.server.declines != [])
        assert bench.server.declines[0].code == "busy"
    else:
        bench.until(lambda: bench.entry_status(2) == "acked")
    assert bench.entry_status(1) is None
    assert bench.store.ledger.rounds_charged() == (1 if what == "newer plan" else 0)


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
