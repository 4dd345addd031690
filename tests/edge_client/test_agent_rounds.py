"""Whole rounds of a real device against a scripted aggregator: real graphs, training, codec, signatures."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.methods.state import PublicState
from hushfleet.privacy.ledger import Ledger, epsilon_server_of
from hushfleet.wire.format.messages import Ack, Refused, ServerState
from hushfleet.wire.format.update import read_header
from hushfleet.wire.format.update_values import decode_update
from support.edge import DEVICE, Bench, Package, write_samples
from support.stores import sql

MakeBench = Callable[..., Bench]


def test_a_round_from_first_contact_to_acknowledgement(make_bench: MakeBench) -> None:
    bench = make_bench()
    server, spec = bench.server, bench.server.package.spec
    bench.steps()
    assert bench.agent.tasks.runtime is not None
    assert [birth.state for birth in server.births] == ["ready"]
    assert server.births[0].session == 1
    assert bench.store.server_key == server.identity.public_key
    # package, gradient graph and inference graph, each asked for once and as a whole
    assert [want.missing for want in server.wants] == [(), (), ()]

    server.open_round(1)
    bench.acked(1)
    assert [birth.state for birth in server.births] == ["ready", "training", "ready"]
    (update,) = server.updates
    counts = [layer.size for layer in spec.model.layout.layers]
    decoded = decode_update(update, public_key=bench.store.identity.public_key, counts=counts)
    assert decoded.header.device == DEVICE
    assert decoded.header.public_digest == server.initial_public().digest()
    assert decoded.public is None
    # noise of standard deviation clip_norm x multiplier = 2 on every coordinate
    assert np.std(decoded.values) == pytest.approx(2.0, rel=0.1)
    (entry,) = bench.store.ledger.entries()
    assert entry.payload_digest == hashlib.sha256(update).digest()
    assert sorted(server.chunks_seen) == list(range(len(server.chunks_seen)))
    assert server.declines == []
    assert bench.agent.rejected.total == 0


def test_the_budget_of_a_plan_is_computed_once(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    check = Ledger.check_budget

    def counted(self: Ledger, *arguments: Any, **more: Any) -> None:
        checked.append(bench.agent.rounds.plan.round)
        check(self, *arguments, **more)

    monkeypatch.setattr(Ledger, "check_budget", counted)
    bench = make_bench()
    for number in (1, 2):
        bench.server.open_round(number, cohort={DEVICE: held_by(bench)})
        bench.acked(number)
    assert checked == [1, 2]


def held_by(bench: Bench) -> bytes:
    state = bench.store.load_state(bench.server.package.spec.task)
    return (bench.server.initial_public() if state is None else state.public).digest()


@pytest.mark.parametrize("method", ["fedavg", "dp-fedavg", "fedglp-adp"])
def test_five_rounds_then_idle(make_bench: MakeBench, package: Package, config: DeviceConfig, method: str) -> None:
    noise = 0.0 if method == "fedavg" else 2.0
    privacy = replace(package.spec.privacy, noise_multiplier=noise)
    unlimited = replace(config, limits=replace(config.limits, epsilon_server=math.inf))
    bench = make_bench(package=package.with_spec(method=method, privacy=privacy), config=unlimited)
    public = bench.server.initial_public()
    for number in range(1, 6):
        bench.server.global_params = bench.server.global_params + np.float32(0.001)
        bench.server.open_round(number, cohort={DEVICE: public.digest()})
        bench.acked(number)
        public = bench.store.load_state("digits-test").public
    assert len(bench.server.updates) == 5
    charges = [entry.charge for entry in bench.store.ledger.entries()]
    told = [read_header(update).epsilon_server for update in bench.server.updates]
    assert told == [epsilon_server_of(charges[:count], delta=privacy.delta) for count in range(1, 6)]
    assert public.participations == 5
    assert public.mask.any() == (method == "fedglp-adp")
    assert bench.server.declines == []
    assert not bench.agent.rounds.finished
    bench.server.open_round(5, phase="finished", cohort={})
    bench.until(lambda: bench.agent.rounds.finished)
    assert bench.store.ledger.rounds_charged("digits-test") == 5
    # graphs, package and the last global model stay for a restart, older models do not
    assert sql(bench.store, "SELECT COUNT(*) FROM blobs") == [(4,)]


def test_a_device_outside_the_cohort_does_nothing(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.server.open_round(1, cohort={"another": bytes(16)})
    bench.steps()
    assert bench.server.updates == []
    assert bench.server.declines == []
    assert bench.entry_status(1) is None


def test_a_card_that_starts_between_two_rounds_says_so(make_bench: MakeBench, caplog: pytest.LogCaptureFixture) -> None:
    """W15: its log began with "round 0 of 8: closed"."""
    caplog.set_level(logging.INFO, "hushfleet.edge")
    bench = make_bench()
    bench.server.open_round(0, phase="closed", cohort={})
    bench.steps()
    assert "no round is open; 0 of 5 are done" in caplog.text
    assert "round 0" not in caplog.text


def test_the_plan_may_come_before_its_task(make_bench: MakeBench, package: Package) -> None:
    later = package.with_spec(task="digits-later")
    bench = make_bench()
    bench.steps()
    bench.server.package = later
    bench.server.open_round(1)
    bench.steps()
    assert bench.entry_status(1) is None
    bench.server.announce()
    bench.acked(1)
    assert bench.store.ledger.rounds_charged("digits-later") == 1


def test_a_replaced_task_ends_the_old_one(make_bench: MakeBench, package: Package) -> None:
    bench = make_bench()
    bench.server.answers = False
    bench.server.open_round(1)
    bench.until(lambda: bench.agent.rounds.upload is not None)
    bench.server.package = package.with_spec(task="digits-other")
    bench.server.announce()
    bench.steps()
    assert bench.agent.rounds.upload is None
    assert bench.agent.tasks.runtime.spec.task == "digits-other"
    bench.server.answers = True
    bench.train(1)
    assert bench.store.ledger.rounds_charged() == 2  # one round of each task


def test_a_public_state_that_differs_is_attached(make_bench: MakeBench) -> None:
    """The aggregator has lost what it held of the device, and takes it for a newcomer."""
    bench = make_bench()
    bench.train(1)
    before = bench.store.load_state("digits-test").public
    bench.server.open_round(2)
    bench.acked(2)
    entry = bench.store.outbox("digits-test", 2)
    counts = [layer.size for layer in bench.server.package.spec.model.layout.layers]
    decoded = decode_update(bench.server.updates[1], public_key=bench.store.identity.public_key, counts=counts)
    attached = PublicState.from_bytes(decoded.public, size=bench.server.package.spec.model.layout.size)
    assert attached.digest() == before.digest()
    assert entry.attached_digest == bench.server.offers[-1].digest
    plain = decode_update(entry.data, public_key=bench.store.identity.public_key, counts=counts)
    np.testing.assert_array_equal(plain.values, decoded.values)  # attached, not noised again


def test_state_unknown_makes_the_device_attach_its_state_once(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.server.refuse_next = "state-unknown"
    bench.train(1)
    digests = [offer.digest for offer in bench.server.offers]
    assert len(digests) == 2
    assert digests[0] != digests[1]
    assert bench.store.ledger.rounds_charged() == 1


@pytest.mark.parametrize("code", ["late", "out-of-bounds", "duplicate", "bad-signature"])
def test_a_final_refusal_ends_the_round(make_bench: MakeBench, code: str) -> None:
    bench = make_bench()
    bench.server.refuse_next = code
    plan = bench.server.open_round(1)
    bench.until(lambda: bench.entry_status(1) == f"refused:{code}")
    offers = len(bench.server.offers)
    bench.server.send(bench.server.topics.round, plan, retain=True)
    bench.clock.now += 100
    bench.steps()
    assert len(bench.server.offers) == offers
    assert bench.store.ledger.rounds_charged() == 1


def test_a_full_aggregator_is_offered_the_update_again(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.server.refuse_next = "store-full"
    bench.server.open_round(1)
    bench.until(lambda: bench.server.refuse_next is None)
    bench.steps(10)
    assert bench.entry_status(1) == "pending"
    bench.clock.now += 120
    bench.acked(1)


def test_another_aggregator_is_not_believed(make_bench: MakeBench, package: Package) -> None:
    bench = make_bench()
    bench.steps()
    honest, key = bench.server, bench.store.server_key
    honest.identity = type(honest.identity).generate()
    honest.announce()
    honest.open_round(1)
    bench.steps()
    assert bench.store.server_key == key
    assert bench.agent.rejected.counts["BadSignature"] == 3
    assert bench.store.ledger.rounds_charged() == 0
    assert honest.updates == []


def test_the_key_of_the_configuration_is_not_pinned_over(make_bench: MakeBench, config: DeviceConfig) -> None:
    trusted = replace(config, broker=replace(config.broker, server_key="cd" * 32))
    bench = make_bench(config=trusted)
    bench.steps()
    assert bench.store.server_key is None
    assert bench.agent.tasks.notice is None
    assert bench.agent.rejected.counts["BadSignature"] >= 1


def test_messages_before_the_key_is_known_are_kept(make_bench: MakeBench) -> None:
    bench = make_bench(announce=False)
    server = bench.server
    bench.steps()
    server.announce()
    announcement = bench.hub.retained.pop(server.topics.server)
    bench.restart()
    server.open_round(1)
    sql(bench.store, "DELETE FROM facts WHERE name = 'server_key'")
    bench.agent._verifier.key = None
    bench.steps()
    assert bench.agent.tasks.notice is None
    server.link.publish(server.topics.server, announcement, retain=True)
    bench.acked(1)


def test_answers_about_other_updates_change_nothing(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.server.answers = False
    bench.server.open_round(1)
    bench.until(lambda: len(bench.server.updates) == 1)
    down, ours = bench.server.topics.down(DEVICE), bench.store.outbox("digits-test", 1).digest
    for answer in (
        Ack("digits-test", 1, bytes(32)),
        Ack("digits-test", 2, ours),
        Ack("another-task", 1, ours),
        Refused("digits-test", 1, bytes(32), "late", ""),
    ):
        bench.server.send(down, answer)
    bench.steps()
    assert bench.entry_status(1) == "pending"
    bench.server.send(down, Ack("digits-test", 1, ours))
    bench.acked(1)


def test_a_simulation_measures_itself_in_its_own_file_only(
    make_bench: MakeBench, config: DeviceConfig, tmp_path: Path
) -> None:
    write_samples(tmp_path / "common.npz", count=300, seed=5)
    write_samples(tmp_path / "local.npz", count=10, seed=6)
    section = replace(
        config.simulation,
        common_test=str(tmp_path / "common.npz"),
        local_test=str(tmp_path / "local.npz"),
        metrics=str(tmp_path / "metrics.jsonl"),
    )
    bench = make_bench(config=replace(config, simulation=section))
    bench.train(1)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    layers = bench.server.package.spec.model.layout.layers
    assert metrics["round"] == 1
    assert 0 <= metrics["accuracy_own_common"] <= 1
    assert metrics["loss_own_common"] > 0
    assert metrics["accuracy_own_local"] * 10 == pytest.approx(round(metrics["accuracy_own_local"] * 10))
    assert metrics["personal_share"] == [0.0] * len(layers)
    assert metrics["clip_weights"] == [1.0] * len(layers)
    assert metrics["epsilon_server"] == pytest.approx(bench.store.ledger.epsilon_server(delta=1e-5))


def test_a_simulated_device_runs_to_the_end_by_itself(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.train(1)
    bench.server.open_round(1, phase="finished", cohort={})
    bench.restart()
    bench.agent.run()  # returns because the task has finished
    bench.server.pump()
    assert bench.server.births[-1].state == "sleeping"


def test_the_goodbye_of_the_aggregator_changes_nothing(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.steps()
    gone = ServerState(1, "lost", bench.server.identity.public_key)
    bench.server.send(bench.server.topics.server, gone, retain=True)
    bench.train(1)
