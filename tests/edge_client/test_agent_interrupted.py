"""Rounds of a real device whose link, power or aggregator fails, or whose training is given up."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.store_check import FIRST_WAIT_S
from hushfleet.simulator.world.hub import Chaos
from hushfleet.wire.format.messages import Missing, ServerState
from support.edge import DEVICE, Bench, Package

MakeBench = Callable[..., Bench]


def test_lost_chunks_are_sent_again_and_no_others(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.server.lose_chunks = {0, 2}
    bench.server.open_round(1)
    bench.until(lambda: not bench.server.lose_chunks)
    bench.steps()
    total = max(bench.server.chunks_seen) + 1
    assert len(bench.server.chunks_seen) == total
    bench.clock.now += 6  # silence: the device offers again, the aggregator names what it lacks
    bench.acked(1)
    assert sorted(bench.server.chunks_seen) == sorted([*range(total), 0, 2])


def test_silence_is_met_with_offers_that_grow_rarer(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.server.answers = False
    bench.server.open_round(1)
    bench.until(lambda: len(bench.server.updates) == 1)
    bench.steps(20)
    chunks = len(bench.server.chunks_seen)
    for _ in range(600):
        bench.clock.now += 1
        bench.steps(1)
    assert len(bench.server.chunks_seen) == chunks
    assert 8 <= len(bench.server.offers) <= 16  # after 5, 10, 20, 40, 60, 60, ... seconds


def test_a_device_that_the_broker_came_to_know_late_listens_again(make_bench: MakeBench) -> None:
    """What is retained never comes by itself, and the device's own state was dropped."""
    bench = make_bench(announce=False)
    bench.hub.denied.add(DEVICE)
    bench.server.announce()
    bench.server.open_round(0, phase="closed")
    bench.steps()
    bench.hub.denied.clear()
    bench.clock.now += 4
    bench.steps()
    assert bench.server.births == []
    bench.clock.now += 2
    bench.until(lambda: bench.agent.tasks.runtime is not None)
    bench.clock.now += 1000
    bench.steps()
    assert [birth.state for birth in bench.server.births] == ["ready"], "it hears, and listens no further"


@pytest.mark.parametrize("lost", ["task", "round"])
def test_a_device_that_the_broker_has_not_told_everything_listens_again(make_bench: MakeBench, lost: str) -> None:
    """Measured with NATS: what is published at the moment of a subscription may not come at all."""
    bench = make_bench(announce=False)
    topic = getattr(bench.server.topics, lost)
    bench.agent.link.unsubscribe(topic)
    bench.server.announce()
    bench.server.open_round(1)
    bench.steps()
    bench.clock.now += 4
    bench.steps()
    assert bench.entry_status(1) is None
    bench.clock.now += 2
    bench.acked(1)


def test_a_device_that_has_heard_of_a_later_round_than_its_plan_listens_again(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.train(1)
    bench.agent.link.unsubscribe(bench.server.topics.round)
    bench.opens(2)
    bench.agent.store_check.ask_again(bench.clock())
    bench.steps()
    assert bench.entry_status(2) is None
    bench.clock.now += 6
    bench.acked(2)


def test_a_device_announces_itself_when_the_aggregator_calls_or_has_connected_again(make_bench: MakeBench) -> None:
    """Not where its state comes from the broker's memory: then this device's was heard already."""
    bench = make_bench()
    bench.steps()
    births, topics = bench.server.births, bench.server.topics
    assert len(births) == 1
    state = ServerState(bench.server.epoch, "ready", bench.server.identity.public_key)
    bench.server.send(topics.down(DEVICE), state)
    bench.steps()
    assert len(births) == 2
    bench.server.send(topics.server, state, retain=True)
    bench.steps()
    assert len(births) == 3
    bench.hub.cut(DEVICE)
    bench.hub.restore(DEVICE)
    bench.steps()
    assert [birth.state for birth in births[3:]] == ["lost", "ready"]


def test_a_device_asks_soon_when_a_round_opens(make_bench: MakeBench) -> None:
    """Its key may have been unknown to the aggregator for an hour, in which its questions became rare."""
    bench = make_bench()
    bench.server.knows = False
    for _ in range(3600):
        bench.clock.now += 1
        bench.steps(1)
    asked = len(bench.server.asks)
    assert asked < 15
    bench.server.knows = True
    bench.server.open_round(1)
    bench.steps()
    bench.clock.now += FIRST_WAIT_S
    bench.acked(1)
    assert len(bench.server.asks) == asked + 1


def test_a_fetch_goes_on_with_what_is_missing(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.server.serves = False
    bench.steps()
    assert len(bench.server.wants) == 1
    bench.clock.now += 3.5
    bench.steps()
    assert len(bench.server.wants) == 2
    bench.hub.cut(DEVICE)
    bench.steps()
    bench.server.serves = True
    bench.hub.restore(DEVICE)
    bench.until(lambda: bench.agent.tasks.runtime is not None)


def test_the_cut_of_a_link_is_survived_in_every_step(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.server.open_round(1)
    for steps in range(400):
        if bench.entry_status(1) == "acked":
            break
        bench.hub.cut(DEVICE)
        bench.steps(1)
        bench.hub.restore(DEVICE)
        bench.steps(2 + steps % 7)  # each connection brings six messages to handle
        bench.clock.now += 1
    assert bench.entry_status(1) == "acked"
    assert bench.store.ledger.rounds_charged() == 1
    assert len(set(bench.server.updates)) == 1
    assert "lost" in {birth.state for birth in bench.server.births}


@pytest.mark.parametrize("seed", range(4))
def test_lost_doubled_and_reordered_messages(make_bench: MakeBench, seed: int) -> None:
    """Half of all messages meet some mishap, both ways; every round still gets through, once."""
    bench = make_bench(chaos=Chaos(seed=seed, drop=0.15, duplicate=0.2, reorder=0.2))
    public = bench.server.initial_public()
    for number in (1, 2, 3):
        bench.server.open_round(number, cohort={DEVICE: public.digest()}, deadline_s=1e6)
        for _ in range(3000):
            if bench.entry_status(number) == "acked":
                break
            bench.steps(1)
            bench.clock.now += 0.5
        assert bench.entry_status(number) == "acked"
        public = bench.store.load_state("digits-test").public
    assert [entry.round for entry in bench.store.ledger.entries()] == [1, 2, 3]
    digests = [hashlib.sha256(update).digest() for update in bench.server.updates]
    assert digests == [entry.payload_digest for entry in bench.store.ledger.entries()]


def test_an_aggregator_that_restarts_hears_everything_again(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.server.answers = False
    bench.server.open_round(1)
    bench.until(lambda: len(bench.server.updates) == 1)
    bench.steps(20)
    offers = len(bench.server.offers)
    bench.server.answers, bench.server.epoch = True, 2
    bench.server.announce()
    bench.acked(1)
    assert len(bench.server.offers) == offers + 1


def test_an_aggregator_that_was_cut_off_is_offered_the_update_as_soon_as_it_is_back(make_bench: MakeBench) -> None:
    """Its session is the same, but it says the plan again; what came while it was away, nobody took."""
    bench = make_bench()
    bench.server.answers = False
    plan = bench.server.open_round(1)
    bench.until(lambda: len(bench.server.updates) == 1)
    bench.steps(20)
    offers = len(bench.server.offers)
    bench.server.answers = True
    bench.server.send(bench.server.topics.round, plan, retain=True)
    bench.acked(1)
    assert len(bench.server.offers) == offers + 1


def test_an_aggregator_that_lost_its_store_gets_the_same_bytes(make_bench: MakeBench) -> None:
    bench = make_bench()
    plan = bench.server.open_round(1)
    bench.acked(1)
    (update,) = bench.server.updates
    bench.server.updates.clear()
    bench.server.send(bench.server.topics.round, plan, retain=True)
    bench.server._open.clear()
    bench.until(lambda: bench.server.updates != [])
    assert bench.server.updates == [update]
    assert bench.store.ledger.rounds_charged() == 1


def test_power_lost_between_commit_and_sending(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.server.answers = False
    bench.server.open_round(1)
    bench.until(lambda: bench.entry_status(1) == "pending")
    before = bench.store.outbox("digits-test", 1)
    assert bench.server.updates == []
    bench.server.answers = True
    bench.restart()
    bench.acked(1)
    assert bench.server.updates == [before.data]
    assert bench.store.ledger.rounds_charged() == 1
    assert [birth.session for birth in bench.server.births][-1] == 2


@pytest.mark.parametrize(
    "is_there",
    [
        pytest.param(lambda server: len(server.chunks_seen) == 3, id="half of the chunks were sent"),
        pytest.param(lambda server: len(server.updates) == 1, id="the Ack is on its way"),
    ],
)
def test_power_lost_while_sending(make_bench: MakeBench, is_there: Callable[[Any], bool]) -> None:
    bench = make_bench()
    bench.server.open_round(1)
    bench.until(lambda: is_there(bench.server))
    before = bench.store.outbox("digits-test", 1)
    assert before.pending
    bench.restart()
    bench.acked(1)
    assert bench.server.updates == [before.data]
    assert bench.store.ledger.rounds_charged() == 1


def test_power_lost_in_every_step_of_two_rounds(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.server.open_round(1)
    for steps in range(1, 60):
        if bench.entry_status(1) == "acked":
            break
        bench.restart()
        bench.steps(steps)
    assert bench.entry_status(1) == "acked"
    bench.train(2)
    assert len(bench.server.updates) == 2
    assert [(e.round, e.payload_digest) for e in bench.store.ledger.entries()] == [
        (number, hashlib.sha256(update).digest()) for number, update in enumerate(bench.server.updates, start=1)
    ]


def test_a_restart_needs_nothing_that_the_store_has(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.steps()
    wants = len(bench.server.wants)
    bench.server.serves = False
    bench.restart()
    bench.steps()
    assert bench.agent.tasks.runtime is not None
    assert len(bench.server.wants) == wants


def test_training_ends_with_its_deadline(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.server.open_round(1, deadline_s=10.0)
    bench.steps(4)

    def pass_time() -> None:
        bench.clock.now += 6

    slow = bench.while_training(pass_time)
    bench.until(lambda: bench.server.declines != [])
    assert bench.server.declines[0].code == "busy"
    assert bench.store.ledger.rounds_charged() == 0
    slow.meanwhile = lambda: None
    bench.server.open_round(1, deadline_s=500.0)  # extended: there is time again
    bench.acked(1)


def test_training_ends_when_another_round_begins(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.server.open_round(1)
    bench.steps(4)
    batches: list[int] = []

    def interrupt() -> None:
        """The next plan arrives while the device trains."""
        batches.append(bench.agent.rounds.plan.round)
        if len(batches) == 1:
            bench.server.open_round(2)

    waiting = bench.while_training(interrupt)
    bench.acked(2)
    assert [job.plan.round for job in waiting.jobs] == [1, 2]
    assert bench.entry_status(1) is None
    assert [entry.round for entry in bench.store.ledger.entries()] == [2]
    assert bench.server.declines == []


def test_training_ends_while_its_round_rests_and_begins_again(make_bench: MakeBench) -> None:
    """The aggregator says that no round is open, as in a pause, and later that the same one is."""
    bench = make_bench()
    bench.server.open_round(2)
    bench.steps(4)
    told: list[int] = []

    def pause() -> None:
        if not told:
            told.append(bench.server.open_round(1, phase="closed", cohort={}).round)

    bench.while_training(pause)
    bench.until(lambda: told != [])
    bench.steps(10)
    assert bench.store.ledger.entries() == []
    bench.server.open_round(2)
    bench.acked(2)
    assert [entry.round for entry in bench.store.ledger.entries()] == [2]


def test_a_board_that_was_away_beyond_its_deadline_trains_if_the_round_is_open_still(make_bench: MakeBench) -> None:
    """It has rested, or the aggregator has started again."""
    bench = make_bench()
    bench.server.serves = False
    bench.server.open_round(1, deadline_s=100.0)
    bench.steps(20)
    bench.hub.cut(DEVICE)
    bench.clock.now += 500.0
    bench.server.serves = True
    bench.hub.restore(DEVICE)
    bench.acked(1)
    assert bench.server.declines == []


def test_a_round_that_closes_ends_its_upload(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.server.open_round(1)
    bench.until(lambda: len(bench.server.chunks_seen) == 2)
    bench.server.open_round(1, phase="closed", cohort={})
    bench.steps()
    assert bench.agent.rounds.upload is None
    assert len(bench.server.chunks_seen) <= 4


@pytest.mark.parametrize(
    ("method", "stricter"),
    [
        ("dp-fedavg", {"min_noise_multiplier": 100.0}),
        ("dp-fedavg", {"noise_split": 1}),
        ("fedglp-adp", {"accounting": "strict"}),  # which sends raw values
    ],
)
def test_an_update_that_its_owner_has_come_to_forbid_is_not_sent(
    make_bench: MakeBench, package: Package, config: DeviceConfig, method: str, stricter: dict[str, Any]
) -> None:
    """It was committed, and before it was sent the owner has written stricter limits and started the client again."""
    published = replace(package.spec.privacy, accounting="as-published", noise_split=2)
    allowed = replace(config.limits, accounting="as-published", epsilon_server=math.inf)
    bench = make_bench(package.with_spec(method=method, privacy=published), replace(config, limits=allowed))
    cohort = dict.fromkeys([DEVICE, "other"], bench.server.initial_public().digest())
    bench.agent.topics.chunk = lambda device: "nowhere"  # type: ignore[method-assign] - the link is lost
    bench.server.open_round(1, noise_split=2, cohort=cohort)
    bench.until(lambda: bench.entry_status(1) == "pending")
    bench.restart(limits=replace(allowed, **stricter))
    bench.server.offers.clear()
    bench.until(lambda: bench.server.declines != [])
    assert bench.server.declines[0].code == "no-privacy"
    assert f"limits.{next(iter(stricter))}" in bench.server.declines[0].reason
    entry = bench.store.outbox("digits-test", 1)
    assert entry is not None
    bench.server.send(bench.server.topics.down(DEVICE), Missing(entry.task, 1, entry.digest, ()))
    bench.server.open_round(1, deadline_s=900.0, noise_split=2, cohort=cohort)
    bench.steps()
    bench.restart(limits=allowed)
    bench.steps()
    assert (bench.server.offers, bench.server.updates) == ([], [])
    assert [entry.round for entry in bench.store.ledger.entries()] == [1], "it stays charged"
