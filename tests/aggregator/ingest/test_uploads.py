"""Updates through worker processes: the same model, charges and verdicts as one after the other in one process."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hushfleet.aggregator.ingest import uploads as uploads_module
from hushfleet.aggregator.ingest.decoding_pool import UPDATES_A_WORKER
from hushfleet.aggregator.ingest.uploads import Answer, Uploads
from hushfleet.errors import StoreError
from hushfleet.wire.format.messages import Offer

MakeFleet = Callable[..., Any]
WORKERS = 2


class Uploading:
    """A fleet's engine, what is on its way to it, and the answers in the order in which they came."""

    def __init__(self, fleet: Any) -> None:
        self.fleet = fleet
        self.answers: list[Answer] = []
        self.uploads = Uploads(fleet.engine, clock=lambda: fleet.now, cores=WORKERS + 1)

    def take(self, name: str, data: bytes) -> None:
        offer = Offer("tiny-0001", self.fleet.engine.plan.round, hashlib.sha256(data).digest(), len(data))
        answer = self.uploads.take(name, offer, data)
        if answer is not None:
            self.answers.append(answer)

    def codes(self) -> dict[str, str]:
        self.answers += self.uploads.finish()
        return {answer.device: answer.verdict.code for answer in self.answers if answer.verdict is not None}

    @property
    def pids(self) -> list[int]:
        assert self.uploads._pool is not None
        return self.uploads._pool.pids


@pytest.fixture
def make_uploading(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Uploading]]:
    monkeypatch.setattr(uploads_module, "POOL_VALUES", 1)
    monkeypatch.setattr(uploads_module, "POOL_FORMS", ("quantized", "float32"))
    made: list[Uploading] = []

    def make(**settings: Any) -> Uploading:
        made.append(Uploading(make_fleet(**settings)))
        return made[-1]

    yield make
    for field in made:
        field.uploads.close()


MakeUploading = Callable[..., Uploading]


def outcome(fleet: Any) -> list[Any]:
    """All that must not depend on where an update was decoded."""
    sums = fleet.engine._aggregate._sums
    rows = sorted(map(repr, fleet.store.updates(1))), sorted(map(repr, fleet.store.charges()))
    return [rows, sums.sums.tolist(), sums.weights.tolist(), sums.updates, fleet.engine.accepted]


@pytest.mark.parametrize("codec", ["quantized", "float32"])
def test_a_round_through_the_pool_is_the_round_without_it(make_uploading: MakeUploading, codec: str) -> None:
    settings = {"devices": 12, "wire": {"codec": codec}}
    field, calm = make_uploading(**settings), make_uploading(**settings).fleet
    for fleet in (field.fleet, calm):
        fleet.open()
    for name in field.fleet.names:
        data = field.fleet.update(name).data
        assert calm.engine.accept(name, data).code == "accepted"
        field.take(name, data)
        field.answers += field.uploads.answers()
    assert set(field.codes().values()) == {"accepted"}
    assert not field.uploads.busy
    assert outcome(field.fleet) == outcome(calm)
    assert field.fleet.engine.close().participants == calm.engine.close().participants == 12
    assert field.fleet.engine.global_digest == calm.engine.global_digest


def test_killing_every_worker_in_the_middle_costs_nothing(make_uploading: MakeUploading) -> None:
    field, calm = make_uploading(devices=6), make_uploading(devices=6).fleet
    for fleet in (field.fleet, calm):
        fleet.open()
    data = {name: field.fleet.update(name).data for name in field.fleet.names}
    for index, (name, update) in enumerate(data.items()):
        field.take(name, update)
        if index == 0:
            field.codes()
        for pid in field.pids:
            os.kill(pid, signal.SIGSTOP)
    # all workers are busy, so the last update was decoded here
    assert len(field.uploads._decoding) == WORKERS * UPDATES_A_WORKER
    assert [answer.device for answer in field.answers] == ["dev-0", "dev-5"]
    for pid in field.pids:
        os.kill(pid, signal.SIGKILL)
    assert set(field.codes().values()) == {"accepted"}
    for name, update in data.items():
        calm.engine.accept(name, update)
    assert outcome(field.fleet) == outcome(calm)


def test_a_worker_that_hangs_is_killed_when_the_round_must_end(
    make_uploading: MakeUploading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads_module, "STUCK_S", 0.05)
    field = make_uploading()
    field.fleet.open()
    field.take("dev-0", field.fleet.update("dev-0").data)
    for pid in field.pids:
        os.kill(pid, signal.SIGSTOP)
    field.take("dev-1", field.fleet.update("dev-1").data)
    assert set(field.codes().values()) == {"accepted"}
    assert len(field.answers) == 2


def test_what_is_refused_is_refused_alike(make_uploading: MakeUploading) -> None:
    field = make_uploading(wire={"codec": "float32"})
    field.fleet.open()
    good = field.fleet.update("dev-0")
    loud = field.fleet.devices.sign("dev-1", field.fleet.update("dev-1").header, good.values * 1e6, good.counts)
    loud_of_all = field.fleet.update("dev-2")
    louder = field.fleet.devices.sign("dev-2", loud_of_all.header, loud_of_all.values * 1000, loud_of_all.counts)
    for name, data in (("dev-0", good.data), ("dev-1", loud.data), ("dev-2", louder.data), ("stranger", good.data)):
        field.take(name, data)
    assert field.codes() == {
        "dev-0": "accepted", "dev-1": "out-of-bounds", "dev-2": "out-of-bounds", "stranger": "unknown-device",
    }  # fmt: skip
    assert field.fleet.engine._aggregate._sums.updates == 1


def test_two_updates_of_one_device_at_the_same_time_count_once(make_uploading: MakeUploading) -> None:
    field = make_uploading()
    field.fleet.open()
    first, second = (field.fleet.update("dev-0", seed=seed, advance=False).data for seed in (1, 2))
    made = field.fleet.update("dev-0", seed=1, advance=False)
    public = field.fleet.devices.states["dev-0"].public.to_bytes()
    with_state = field.fleet.devices.sign("dev-0", made.header, made.values, made.counts, public=public)
    for data in (first, second, with_state.data):
        field.take("dev-0", data)
    field.codes()
    codes = [answer.verdict.code for answer in field.answers if answer.verdict is not None]
    assert codes.count("accepted") == 1
    assert set(codes) <= {"accepted", "duplicate"}
    assert field.fleet.engine._aggregate._sums.updates == len(field.fleet.store.updates(1)) == 1


def test_what_is_still_decoding_when_its_round_is_over_is_late(make_uploading: MakeUploading) -> None:
    """The coordinator finishes before it closes a round; an engine that is closed all the same takes nothing."""
    field = make_uploading(min_updates=1)
    field.fleet.open()
    field.take("dev-0", field.fleet.update("dev-0").data)
    assert field.codes() == {"dev-0": "accepted"}
    for pid in field.pids:
        os.kill(pid, signal.SIGSTOP)
    late = field.fleet.update("dev-1", advance=False)
    field.take("dev-1", late.data)
    field.fleet.engine.close()
    field.fleet.open()
    for pid in field.pids:
        os.kill(pid, signal.SIGCONT)
    assert field.codes() == {"dev-0": "accepted", "dev-1": "late"}
    assert field.fleet.engine._aggregate._sums.updates == 0
    assert field.fleet.engine.responses.expects("dev-1")


def test_a_store_that_fails_refuses_and_the_update_may_come_again(
    make_uploading: MakeUploading, monkeypatch: pytest.MonkeyPatch
) -> None:
    field = make_uploading()
    field.fleet.open()
    data = field.fleet.update("dev-0").data

    def fail(*args: object, **options: object) -> None:
        raise StoreError("locked")

    with monkeypatch.context() as patch:
        patch.setattr(field.fleet.store, "put_update", fail)
        field.take("dev-0", data)
        assert field.codes() == {"dev-0": "store-full"}
    field.take("dev-0", data)
    assert field.codes() == {"dev-0": "accepted"}
    assert field.fleet.engine._aggregate._sums.updates == 1


def test_small_cohorts_and_single_cores_have_no_pool(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = make_fleet()
    fleet.open()
    for cores, values in ((1, 1), (8, fleet.engine.layout.size * 3 + 1)):
        monkeypatch.setattr(uploads_module, "POOL_VALUES", values)
        uploads = Uploads(fleet.engine, clock=lambda: fleet.now, cores=cores)
        answer = uploads.take("dev-0", Offer("tiny-0001", 1, bytes(32), 1), fleet.update("dev-0", advance=False).data)
        assert answer is not None
        assert uploads._pool is None
        assert not uploads.busy


def test_who_stops_between_two_answers_loses_none(make_uploading: MakeUploading) -> None:
    """As where the link is lost while an answer is sent."""
    field = make_uploading()
    field.fleet.open()
    for name in field.fleet.names:
        field.take(name, field.fleet.update(name).data)
    while len(field.answers) < len(field.fleet.names):
        field.answers += itertools.islice(field.uploads.answers(), 1)
    assert set(field.codes()) == set(field.fleet.names)
