"""Updates through worker processes: the same model, charges and verdicts as one after the other in one process."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hushfleet.aggregator.ingest import verdicts as intake
from hushfleet.aggregator.ingest.decoding_pool import SLOTS_A_WORKER
from hushfleet.aggregator.ingest.verdicts import Intake
from hushfleet.aggregator.rounds.engine import Verdict
from hushfleet.errors import StoreError
from hushfleet.wire.format.messages import Offer

MakeFleet = Callable[..., Any]
WORKERS = 2


class Desk:
    """A fleet's engine behind an intake, and the verdicts in the order in which they came."""

    def __init__(self, fleet: Any) -> None:
        self.fleet = fleet
        self.verdicts: list[tuple[str, Verdict]] = []
        self.intake = Intake(fleet.engine, answer=self._note, cores=WORKERS + 1)

    def take(self, name: str, data: bytes) -> Offer:
        offer = Offer("tiny-0001", self.fleet.engine.plan.round, hashlib.sha256(data).digest(), len(data))
        self.intake.take(name, offer, data)
        return offer

    def codes(self) -> dict[str, str]:
        self.intake.finish()
        return {name: verdict.code for name, verdict in self.verdicts}

    @property
    def pids(self) -> list[int]:
        assert self.intake._pool is not None
        return self.intake._pool.pids

    def _note(self, device: str, offer: Offer, verdict: Verdict) -> None:
        self.verdicts.append((device, verdict))


@pytest.fixture
def make_desk(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Desk]]:
    monkeypatch.setattr(intake, "POOL_VALUES", 1)
    desks: list[Desk] = []

    def make(**settings: Any) -> Desk:
        desks.append(Desk(make_fleet(**settings)))
        return desks[-1]

    yield make
    for desk in desks:
        desk.intake.close()


MakeDesk = Callable[..., Desk]


def outcome(fleet: Any) -> list[Any]:
    """All that must not depend on where an update was decoded."""
    sums = fleet.engine._collected._sums
    rows = sorted(map(repr, fleet.store.updates(1))), sorted(map(repr, fleet.store.charges()))
    return [rows, sums.sums.tolist(), sums.counts.tolist(), sums.updates, fleet.engine.accepted]


@pytest.mark.parametrize("codec", ["quantized", "float32"])
def test_a_round_through_the_pool_is_the_round_without_it(make_desk: MakeDesk, codec: str) -> None:
    settings = {"devices": 12, "wire": {"codec": codec}}
    desk, calm = make_desk(**settings), make_desk(**settings).fleet
    for fleet in (desk.fleet, calm):
        fleet.open()
    for name in desk.fleet.names:
        data = desk.fleet.update(name).data
        assert calm.engine.accept(name, data).code == "accepted"
        desk.take(name, data)
        desk.intake.settle()
    assert set(desk.codes().values()) == {"accepted"}
    assert not desk.intake.busy
    assert outcome(desk.fleet) == outcome(calm)
    assert desk.fleet.engine.close().participants == calm.engine.close().participants == 12
    assert desk.fleet.engine.global_digest == calm.engine.global_digest


def test_killing_every_worker_in_the_middle_costs_nothing(make_desk: MakeDesk) -> None:
    desk, calm = make_desk(devices=6), make_desk(devices=6).fleet
    for fleet in (desk.fleet, calm):
        fleet.open()
    data = {name: desk.fleet.update(name).data for name in desk.fleet.names}
    for index, (name, update) in enumerate(data.items()):
        desk.take(name, update)
        if index == 0:
            desk.intake.finish()
            for pid in desk.pids:
                os.kill(pid, signal.SIGSTOP)
    # the slots of all workers are taken, so the last update was decoded here
    assert len(desk.intake._inside) == WORKERS * SLOTS_A_WORKER
    assert [name for name, _ in desk.verdicts] == ["dev-0", "dev-5"]
    for pid in desk.pids:
        os.kill(pid, signal.SIGKILL)
    assert set(desk.codes().values()) == {"accepted"}
    for name, update in data.items():
        calm.engine.accept(name, update)
    assert outcome(desk.fleet) == outcome(calm)


def test_a_worker_that_hangs_is_killed_when_the_round_must_end(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "STUCK_S", 0.05)
    desk = make_desk()
    desk.fleet.open()
    desk.take("dev-0", desk.fleet.update("dev-0").data)
    for pid in desk.pids:
        os.kill(pid, signal.SIGSTOP)
    desk.take("dev-1", desk.fleet.update("dev-1").data)
    assert set(desk.codes().values()) == {"accepted"}
    assert len(desk.verdicts) == 2


def test_what_is_refused_is_refused_alike(make_desk: MakeDesk) -> None:
    desk = make_desk(wire={"codec": "float32"})
    desk.fleet.open()
    good = desk.fleet.update("dev-0")
    loud = desk.fleet.devices.sign("dev-1", desk.fleet.update("dev-1").header, good.values * 1e6, good.counts)
    loud_of_all = desk.fleet.update("dev-2")
    louder = desk.fleet.devices.sign("dev-2", loud_of_all.header, loud_of_all.values * 1000, loud_of_all.counts)
    for name, data in (("dev-0", good.data), ("dev-1", loud.data), ("dev-2", louder.data), ("stranger", good.data)):
        desk.take(name, data)
    assert desk.codes() == {
        "dev-0": "accepted", "dev-1": "out-of-bounds", "dev-2": "out-of-bounds", "stranger": "unknown-device",
    }  # fmt: skip
    assert desk.fleet.engine._collected._sums.updates == 1


def test_two_updates_of_one_device_at_the_same_time_count_once(make_desk: MakeDesk) -> None:
    desk = make_desk()
    desk.fleet.open()
    first, second = (desk.fleet.update("dev-0", seed=seed, advance=False).data for seed in (1, 2))
    made = desk.fleet.update("dev-0", seed=1, advance=False)
    public = desk.fleet.devices.states["dev-0"].public.to_bytes()
    with_state = desk.fleet.devices.sign("dev-0", made.header, made.values, made.counts, public=public)
    for data in (first, second, with_state.data):
        desk.take("dev-0", data)
    desk.intake.finish()
    codes = [verdict.code for _, verdict in desk.verdicts]
    assert codes.count("accepted") == 1
    assert set(codes) <= {"accepted", "duplicate"}
    assert desk.fleet.engine._collected._sums.updates == len(desk.fleet.store.updates(1)) == 1


def test_what_is_still_inside_when_its_round_is_over_is_late(make_desk: MakeDesk) -> None:
    """The coordinator finishes before it closes a round; an engine that is closed all the same takes nothing."""
    desk = make_desk(min_updates=1)
    desk.fleet.open()
    desk.take("dev-0", desk.fleet.update("dev-0").data)
    assert desk.codes() == {"dev-0": "accepted"}
    for pid in desk.pids:
        os.kill(pid, signal.SIGSTOP)
    late = desk.fleet.update("dev-1", advance=False)
    desk.take("dev-1", late.data)
    desk.fleet.engine.close()
    desk.fleet.open()
    for pid in desk.pids:
        os.kill(pid, signal.SIGCONT)
    assert desk.codes() == {"dev-0": "accepted", "dev-1": "late"}
    assert desk.fleet.engine._collected._sums.updates == 0
    assert desk.fleet.engine.is_expected("dev-1")


def test_a_store_that_fails_refuses_and_the_update_may_come_again(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = make_desk()
    desk.fleet.open()
    data = desk.fleet.update("dev-0").data

    def fail(*args: object, **options: object) -> None:
        raise StoreError("locked")

    with monkeypatch.context() as patch:
        patch.setattr(desk.fleet.store, "put_update", fail)
        desk.take("dev-0", data)
        assert desk.codes() == {"dev-0": "store-full"}
    desk.take("dev-0", data)
    assert desk.codes() == {"dev-0": "accepted"}
    assert desk.fleet.engine._collected._sums.updates == 1


def test_small_cohorts_and_single_cores_have_no_pool(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = make_fleet()
    fleet.open()
    for cores, values in ((1, 1), (8, fleet.engine.layout.size * 3 + 1)):
        monkeypatch.setattr(intake, "POOL_VALUES", values)
        desk = Intake(fleet.engine, answer=lambda *_: None, cores=cores)
        desk.take("dev-0", Offer("tiny-0001", 1, bytes(32), 1), fleet.update("dev-0", advance=False).data)  # type: ignore[arg-type]
        assert desk._pool is None
        assert not desk.busy
