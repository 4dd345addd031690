"""What makes a device sit a round out, under which code, and what it says about it."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.data.targets import Targets
from hushfleet.edge_client.board.budget_clock import LISTEN_S
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.status import sentences, status
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.trainer import DeviceRound
from hushfleet.errors import StoreError
from hushfleet.wire.format.fleet_messages import CarriedRounds
from hushfleet.wire.format.messages import ServerState
from hushfleet.wire.format.spec import BlobRef, PrivacySpec
from support.edge import DEVICE, Bench, Package, write_samples
from support.stores import sql

MakeBench = Callable[..., Bench]


def the_decline(bench: Bench, round: int = 1, **changes: object) -> tuple[str, str]:
    """Opens a round, expects it to be declined, and gives (code, reason)."""
    before = len(bench.server.declines)
    bench.server.open_round(round, **changes)
    bench.until(lambda: len(bench.server.declines) > before)
    bench.steps(10)
    (decline,) = bench.server.declines[before:]
    assert (decline.task, decline.round) == (bench.server.package.spec.task, round)
    assert bench.store.ledger.rounds_charged() == 0
    assert bench.server.updates == []
    return decline.code, decline.reason


def test_budget(make_bench: MakeBench, config: DeviceConfig) -> None:
    bench = make_bench(config=replace(config, limits=replace(config.limits, epsilon_server=0.5)))
    code, reason = the_decline(bench)
    assert code == "budget"
    assert "above its limit of 0.5" in reason
    assert "training" not in {birth.state for birth in bench.server.births}
    # the model was not even asked for
    assert len(bench.server.wants) == 3


def test_budget_is_kept_over_rounds(make_bench: MakeBench, config: DeviceConfig) -> None:
    # one Gaussian release with multiplier 2 at delta 1e-5 costs epsilon 1.99, two cost 3.0
    bench = make_bench(config=replace(config, limits=replace(config.limits, epsilon_server=2.5)))
    bench.train(1)
    bench.opens(2)
    bench.until(lambda: bench.server.declines != [])
    assert bench.server.declines[0].code == "budget"
    assert bench.store.ledger.rounds_charged() == 1
    bench.restart()
    bench.until(lambda: len(bench.server.declines) == 2)
    assert bench.store.ledger.rounds_charged() == 1


def test_a_spent_period_is_declined_until_it_is_over(make_bench: MakeBench, config: DeviceConfig) -> None:
    limits = replace(config.limits, epsilon_server=2.5, per="1d", epsilon_lifetime=100.0)
    bench = make_bench(config=replace(config, limits=limits))
    bench.train(1)
    bench.opens(2)
    bench.until(lambda: bench.server.declines != [])
    assert bench.server.declines[0].code == "budget"
    assert "that its owner allows in 1 day" in bench.server.declines[0].reason
    assert "takes part again, in " in bench.server.declines[0].reason
    bench.clock.now += 86400.0
    bench.train(3)
    first, second = bench.store.ledger.entries()
    assert second.at >= first.at + 86400


@pytest.fixture
def spent_once(make_bench: MakeBench, config: DeviceConfig) -> Bench:
    """A board in the field with a limit for a period, which pays for four rounds, after the first."""
    limits = replace(config.limits, epsilon_server=4.5, per="90d", epsilon_lifetime=100.0)
    bench = make_bench(config=replace(config, limits=limits, simulation=None))
    bench.train(1)
    return bench


def test_after_a_start_a_board_that_nobody_tells_the_time_declines_for_an_hour(spent_once: Bench) -> None:
    bench = spent_once
    bench.restart()
    bench.opens(2)
    bench.until(lambda: bench.server.declines != [])
    (decline,) = bench.server.declines
    assert decline.code == "budget"
    assert decline.reason == (
        f"device '{DEVICE}' may have been off for long. After a start it spends nothing until it hears from its fleet "
        "what time it is, or has run for an hour; it takes part again, in 1 hour at the latest"
    )
    told = sentences(status(bench.config, bench.store))["privacy"]
    assert told.endswith(
        "It may have been off for long: after a start it spends nothing until it hears from its fleet what time it is, "
        "or for another 1 hour"
    )
    bench.clock.now += 3600.0
    bench.steps(5)
    assert "spends nothing" not in sentences(status(bench.config, bench.store))["privacy"]
    bench.train(3)


def test_a_round_that_is_open_at_the_start_waits_for_the_statement_that_comes_soon(spent_once: Bench) -> None:
    """A board that is on only at night finds its round open at each start."""
    bench, said = spent_once, [1000.0]
    bench.restart(witness=lambda: said[0])
    bench.opens(2)
    bench.steps(100)
    assert (bench.server.declines, bench.entry_status(2)) == ([], None)
    said[0] = time.time()
    bench.acked(2)
    assert bench.server.declines == []


def test_a_round_does_not_wait_for_a_statement_that_does_not_come(spent_once: Bench) -> None:
    bench = spent_once
    bench.restart(witness=lambda: 1000.0)
    bench.opens(2)
    bench.steps(20)
    bench.clock.now += LISTEN_S
    bench.until(lambda: bench.server.declines != [])
    assert "it takes part again, in 58 minutes at the latest" in bench.server.declines[0].reason


def test_a_limit_for_ever_needs_no_time_and_no_wait(make_bench: MakeBench, config: DeviceConfig) -> None:
    bench = make_bench(config=replace(config, simulation=None))
    for round in (1, 2):
        bench.opens(round)
        bench.acked(round)
        bench.restart(witness=lambda: 1000.0)
    assert bench.server.declines == []


def test_a_clean_stop_keeps_all_that_was_counted(spent_once: Bench) -> None:
    """Else a board that is restarted comes free later than its period ends."""
    before = spent_once.store.ledger.counted()
    spent_once.clock.now += 1700.0  # less than the time between two saves
    spent_once.steps(2)
    assert spent_once.store.ledger.counted().now < before.now + 1700
    spent_once.agent.close()
    assert spent_once.store.ledger.counted().now >= before.now + 1700


def test_a_charge_counts_at_the_time_of_its_commit(spent_once: Bench) -> None:
    """A training may last for hours, and a period may end in it."""
    bench, trainer = spent_once, spent_once.loaded.trainer
    compute = trainer.gradient

    def slowly(*args: Any, **kwargs: Any) -> Any:
        bench.clock.now += 60.0
        return compute(*args, **kwargs)

    trainer.gradient = slowly
    began = bench.agent.tasks.runtime.party.now()
    bench.train(2)
    assert bench.store.ledger.entries()[1].at >= began + 60


def test_no_noise_is_no_privacy_for_a_limited_device(make_bench: MakeBench, package: Package) -> None:
    naked = package.with_spec(privacy=PrivacySpec("device", "strict", 1.0, 0.0, 1e-5), task="naked")
    assert the_decline(make_bench(package=naked))[0] == "budget"


def test_noise_divided_among_more_devices_than_take_part(make_bench: MakeBench) -> None:
    code, reason = the_decline(make_bench(), noise_split=5)
    assert code == "no-privacy"
    assert reason == "the plan divides the noise among 5 devices, but only 1 take part"


def test_a_tampered_ledger(make_bench: MakeBench) -> None:
    bench = make_bench()
    sql(bench.store, "UPDATE privacy_ledger_head SET entries = 7")
    bench.server.open_round(1)
    bench.until(lambda: bench.server.declines != [])
    assert bench.server.declines[0].code == "no-privacy"
    assert bench.entry_status(1) is None


def test_memory(make_bench: MakeBench, package: Package) -> None:
    code, reason = the_decline(make_bench(package=package.with_spec(memory_mib=9000, task="big")))
    assert (code, reason) == ("memory", "the task needs 9000 MiB, this device gives 500 MiB")


@pytest.mark.parametrize("data", ["missing", "empty", "wrong-shape", "wrong-labels", "garbage"])
def test_no_data_tells_nothing_about_the_data(
    make_bench: MakeBench, config: DeviceConfig, tmp_path: Path, data: str
) -> None:
    path = tmp_path / "secret-name.npz"
    images, labels = np.zeros((7, 1, 8, 8), np.uint8), np.zeros(7, np.int64)
    if data == "empty":
        np.savez(path, images=images[:0], labels=labels[:0])
    elif data == "wrong-shape":
        np.savez(path, images=np.zeros((7, 3, 9, 9), np.uint8), labels=labels)
    elif data == "wrong-labels":
        np.savez(path, images=images, labels=labels + 10)
    elif data == "garbage":
        path.write_bytes(os.urandom(500))
    bench = make_bench(config=replace(config, data=replace(config.data, path=str(path))))
    assert the_decline(bench) == ("no-data", "this device has no data that fit the task")
    write_samples(path)  # the camera has taken pictures
    bench.server.open_round(2)
    bench.acked(2)


def test_new_images_are_read_without_a_restart(make_bench: MakeBench, config: DeviceConfig) -> None:
    bench = make_bench()
    bench.train(1)
    assert len(bench.loaded.data.samples()) == 48
    first = bench.loaded.data.samples()
    assert bench.loaded.data.samples() is first
    write_samples(Path(config.data.path), count=80)
    assert len(bench.loaded.data.samples()) == 80


def with_graph(package: Package, graph: bytes, name: str) -> Package:
    model = replace(package.spec.model, gradient=BlobRef.of(graph))
    changed = package.with_spec(model=model, task=name)
    return replace(changed, blobs={**changed.blobs, hashlib.sha256(graph).digest(): graph})


@pytest.mark.parametrize("damage", ["garbage", "cut", "appended"])
def test_graph_refused(make_bench: MakeBench, package: Package, damage: str) -> None:
    whole = package.blobs[package.spec.model.gradient.digest]
    graph = {"garbage": b"not a graph at all", "cut": whole[:999], "appended": whole + b"\x99"}[damage]
    bench = make_bench(package=with_graph(package, graph, f"graph-{damage}"))
    assert the_decline(bench)[0] == "graph"


def test_what_kills_the_client_is_given_up(make_bench: MakeBench) -> None:
    """As where the system takes the client for its worker's memory: it may try in the next round."""
    kind, bench = "round", make_bench()
    for _ in range(3):
        bench.store.count_attempt(kind, "digits-test/1")
    code, reason = the_decline(bench)
    assert code == "memory"
    assert "training ended the client abruptly 3 times" in reason
    bench.server.open_round(2)
    bench.acked(2)
    assert bench.store.count_attempt(kind, "digits-test/2") == 1, "what has ended is not counted"


def test_an_unknown_method(make_bench: MakeBench, package: Package) -> None:
    code, reason = the_decline(make_bench(package=package.with_spec(method="fed-future", task="future")))
    assert code == "error"
    assert "fed-future" in reason


def test_a_method_of_classes_with_other_targets(make_bench: MakeBench, package: Package) -> None:
    numbers = replace(package.spec.model, targets=Targets("squared", tolerance=1.0))
    hostile = package.with_spec(method="pfedsd", method_config={}, model=numbers, task="numbers")
    code, reason = the_decline(make_bench(package=hostile))
    assert "'pfedsd' is defined for classes alone" in reason, code


def test_a_package_of_another_task(make_bench: MakeBench, package: Package) -> None:
    bench = make_bench(package=replace(package.with_spec(task="other"), spec=package.spec))
    code, reason = the_decline(bench)
    assert code == "error"
    assert "says that it is 'other'" in reason


@pytest.mark.parametrize("changes", [{"rounds": 9}, {"global_bytes": 12}])
def test_a_plan_that_contradicts_its_task(make_bench: MakeBench, changes: dict[str, int]) -> None:
    assert the_decline(make_bench(), **changes)[0] == "error"


def test_a_round_before_the_last_one(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.server.open_round(3)
    bench.acked(3)
    bench.server.epoch = 2  # it has come back with an older store
    bench.server.open_round(2)
    bench.until(lambda: bench.server.declines != [])
    assert bench.server.declines[0].reason == "this device has already committed round 3 of the task"
    assert bench.store.ledger.rounds_charged() == 1


@pytest.mark.parametrize("unit", ["device", "record"])
def test_a_round_of_an_earlier_card_is_not_trained_again(make_bench: MakeBench, unit: str) -> None:
    """Its update may have arrived: with a second one the noise would average out. The ledger alone refuses it only if
    the unit is the same, and after training."""
    bench = make_bench()
    terms = {"adjacency": "any", "mechanism": "gaussian", "noise_multiplier": 2.0, "noise_split": 1}
    card = CarriedRounds("digits-test", ((2, 4),), unit=unit, sample_rate=1.0, steps=1, raw=(), **terms)
    bench.store.note_enrolled((card,))
    bench.server.open_round(3)
    bench.until(lambda: bench.server.declines != [])
    (decline,) = bench.server.declines
    assert (decline.code, decline.reason) == (
        "error",
        "an earlier card of this device may have sent an update for this round",
    )
    assert "training" not in {birth.state for birth in bench.server.births}
    assert bench.store.ledger.rounds_charged() == 2
    bench.server.open_round(4)
    bench.acked(4)


def test_a_full_disk_and_then_room_again(make_bench: MakeBench) -> None:
    bench = make_bench(durable=True)
    bench.steps()
    pages = sql(bench.store, "PRAGMA page_count")[0][0]
    bench.store._connection.execute(f"PRAGMA max_page_count = {pages}")
    assert the_decline(bench) == ("disk", "the device's store cannot be read or written")
    bench.store._connection.execute("PRAGMA max_page_count = 100000")
    bench.server.open_round(2)
    bench.acked(2)


def test_a_disk_that_fills_up_while_training(make_bench: MakeBench) -> None:
    bench = make_bench(durable=True)
    bench.steps()

    def fill_up() -> None:
        """Another program takes the last free page while the device trains."""
        free = sql(bench.store, "PRAGMA page_count")[0][0]
        bench.store._connection.execute(f"PRAGMA max_page_count = {free}")

    bench.while_training(fill_up)
    code, _ = the_decline(bench)
    assert code == "disk"
    assert bench.store.load_state("digits-test") is None


def test_a_disk_that_is_full_before_the_task(make_bench: MakeBench) -> None:
    bench = make_bench(announce=False, durable=True)
    bench.steps()
    pages = sql(bench.store, "PRAGMA page_count")[0][0]
    bench.server.send(
        bench.server.topics.server,
        ServerState(1, "ready", bench.server.identity.public_key),
        retain=True,
    )
    bench.steps()
    bench.store._connection.execute(f"PRAGMA max_page_count = {pages}")
    bench.server.announce()
    assert the_decline(bench)[0] == "disk"
    bench.store._connection.execute("PRAGMA max_page_count = 100000")
    bench.server.open_round(2)
    bench.acked(2)


def test_a_disk_that_is_full_at_the_start(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench()
    bench.steps()

    def full(*_: object) -> None:
        raise StoreError("the disk is full")

    for write in ("next_session", "count_attempt", "put_blob", "commit_round"):
        monkeypatch.setattr(DeviceStore, write, full)
    bench.restart()
    assert the_decline(bench)[0] == "disk"
    assert bench.server.births[-1].session == 2


def test_an_unexpected_error_is_logged_and_declined_once(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench()
    bench.steps()

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("with 48 private samples")

    monkeypatch.setattr(DeviceRound, "run", broken)
    with caplog.at_level(logging.ERROR):
        code, reason = the_decline(bench)
    assert code == "error"
    assert "48" not in reason
    assert "with 48 private samples" in caplog.text
    assert "Traceback" in caplog.text
    monkeypatch.undo()
    bench.server.open_round(2)
    bench.acked(2)


def test_a_decline_is_repeated_when_the_plan_comes_again(make_bench: MakeBench, package: Package) -> None:
    bench = make_bench(package=package.with_spec(memory_mib=9000, task="big"))
    the_decline(bench)
    bench.hub.cut(DEVICE)
    bench.steps()
    bench.hub.restore(DEVICE)
    bench.steps()
    assert {decline.code for decline in bench.server.declines} == {"memory"}
    assert 2 <= len(bench.server.declines) <= 3


def test_a_global_model_that_is_not_finite(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.server.global_params = np.full_like(bench.server.global_params, np.nan)
    assert the_decline(bench)[0] in ("no-privacy", "error")


def test_tasks_that_are_declined_leave_nothing_in_the_store(make_bench: MakeBench, config: DeviceConfig) -> None:
    poor = replace(config, limits=replace(config.limits, epsilon_server=2.5))
    bench = make_bench(config=poor)
    bench.train(1)
    first, held = bench.server.package, bench.store.blob_digests()
    for number in range(1, 4):  # each with graphs of its own
        other = first.with_spec(task=f"later-{number}", model=replace(first.spec.model, gradient=padded(first, number)))
        other.blobs.update({other.spec.model.gradient.digest: graph_of(first, number)})
        bench.server.package = other
        bench.server.announce()
        assert the_decline_again(bench) == "budget"
    assert bench.store.blob_digests() >= held, "it predicts with the model that it has trained"
    assert len(bench.store.blob_digests() - held) == 2, "the package and one graph of the last task"
    bench.server.latest = (0, b"")  # of the first task
    bench.restart()
    bench.steps()
    assert len(bench.store.blob_digests() - held) == 2


def graph_of(package: Package, number: int) -> bytes:
    """The task's gradient graph with another name for its producer, so with another digest."""
    import onnx

    graph = onnx.load_from_string(package.blobs[package.spec.model.gradient.digest])
    graph.producer_name = f"test {number}"
    return bytes(graph.SerializeToString())


def padded(package: Package, number: int) -> BlobRef:
    return BlobRef.of(graph_of(package, number))


def the_decline_again(bench: Bench) -> str:
    before = len(bench.server.declines)
    bench.server.open_round(1)
    bench.until(lambda: len(bench.server.declines) > before)
    return bench.server.declines[-1].code


def test_an_update_that_another_tasks_has_replaced_is_declined_and_not_offered(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.server.answers = False
    bench.server.open_round(1)
    bench.until(lambda: bool(bench.server.updates))
    first = bench.server.package
    bench.server.package, bench.server.answers = first.with_spec(task="another"), True
    bench.server.announce()
    bench.train(1)
    bench.server.package = first
    bench.server.announce()
    offers = len(bench.server.offers)
    bench.server.open_round(1)
    bench.until(lambda: bool(bench.server.declines))
    assert (bench.server.declines[-1].task, bench.server.declines[-1].code) == (first.spec.task, "error")
    assert len(bench.server.offers) == offers


@pytest.mark.parametrize("tell_new", [True, False])
def test_only_an_owner_who_allows_it_tells_of_few_new_samples(
    make_bench: MakeBench, config: DeviceConfig, package: Package, tell_new: bool
) -> None:
    """Others take part as ever: whether they have new samples changes nothing that leaves the device."""
    limits = replace(config.limits, tell_new=tell_new, epsilon_server=100.0)
    task = package.with_spec(after_new=5, task="digits-new")
    bench = make_bench(config=replace(config, limits=limits), package=task)
    path = Path(config.data.path)
    bench.train(1)
    bench.restart()
    bench.opens(2)
    if not tell_new:
        bench.acked(2)
        assert bench.server.declines == []
        return
    bench.until(lambda: bench.server.declines != [])
    reason = "fewer than 5 new samples since the last update; this device's owner lets it say so"
    assert (bench.server.declines[0].code, bench.server.declines[0].reason) == ("paused", reason)
    assert bench.store.ledger.rounds_charged() == 1
    with np.load(path) as old:
        images, labels = old["images"], old["labels"]
    images[:5] = 255 - images[:5]  # as many were deleted as came
    np.savez(path, images=images, labels=labels)
    bench.train(3)


def test_samples_that_come_during_a_training_are_new_at_the_next_round(
    make_bench: MakeBench, config: DeviceConfig, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(config.limits, tell_new=True, epsilon_server=100.0)
    bench = make_bench(config=replace(config, limits=limits), package=package.with_spec(after_new=5))
    path, run = Path(config.data.path), DeviceRound.run

    def arriving(*args: Any, **more: Any) -> Any:
        with np.load(path) as old:
            images, labels = old["images"], old["labels"]
        images[:5] = 255 - images[:5]
        np.savez(path, images=images, labels=labels)
        monkeypatch.undo()
        return run(*args, **more)

    monkeypatch.setattr(DeviceRound, "run", arriving)
    bench.train(1)
    bench.train(2)
    assert bench.server.declines == []


def test_data_that_vanish_in_training_take_no_committed_update_back(
    make_bench: MakeBench, config: DeviceConfig, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decline would take its charge out of the aggregator's notes, though the device has spent it."""
    limits = replace(config.limits, tell_new=True, epsilon_server=100.0)
    bench = make_bench(config=replace(config, limits=limits), package=package.with_spec(after_new=5))
    commit = DeviceRound.commit

    def vanishing(*args: Any, **more: Any) -> Any:
        Path(config.data.path).unlink(missing_ok=True)
        return commit(*args, **more)

    monkeypatch.setattr(DeviceRound, "commit", vanishing)
    bench.train(1)
    assert not Path(config.data.path).exists()
    assert bench.server.declines == []


def test_a_board_that_hides_how_long_it_trains_counts_no_new_samples(
    make_bench: MakeBench, config: DeviceConfig, package: Package
) -> None:
    """Counting takes as long as there are samples, and would come after the slot."""
    limits = replace(config.limits, tell_new=True, constant_time=True, epsilon_server=100.0)
    bench = make_bench(config=replace(config, limits=limits), package=package.with_spec(after_new=5))
    bench.train(1)
    bench.train(2)
    noted = config.store_path.parent / "trained_samples"
    assert not noted.exists()
    noted.write_bytes(b"of a time when its owner let it tell")
    bench.restart(limits=config.limits)
    assert not noted.exists(), "digests of samples go with the leave to tell"
