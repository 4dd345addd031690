"""The attacker has recorded an earlier run and publishes it again: a board that goes back to the old task would spend
privacy on a model that nobody makes any more. Who may publish on the aggregator's topics (the broker, or anybody where
there is no access list) can try."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hushfleet.aggregator.broker.process import start_broker
from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.aggregator.storage.identity_file import load_or_create
from hushfleet.edge_client.verifier import MessageVerifier
from hushfleet.errors import LinkLost
from hushfleet.simulator.world.hub import LocalHub
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import (
    Ack,
    Message,
    Missing,
    Refused,
    RoundPlan,
    ServerState,
    TaskNotice,
    decode_message,
    encode_message,
)
from hushfleet.wire.link.interface import Delivery, Link, LinkUp, Will
from hushfleet.wire.link.mqtt import MqttLink
from support.tools import BROKERS
from support.whole import Board, Connect, Whole

Runs = tuple[PreparedTask, PreparedTask]


@pytest.fixture(params=["hub", *BROKERS])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    if request.param == "hub":
        yield LocalHub().link
        return
    with start_broker(request.param, data_dir=tmp_path) as broker:

        def link(client_id: str, will: Will | None = None) -> MqttLink:
            return MqttLink(broker.url, client_id=client_id, will=will)

        yield link


@pytest.fixture
def hub_only() -> Connect:
    return LocalHub().link


def record_a_run(whole: Whole, prepared: PreparedTask, *, wait_s: float) -> tuple[Board, list[Delivery]]:
    """A board takes part in round 1 of a run that ends there; and all that the aggregator and it have said."""
    whole.begin(prepared)
    victim, other = whole.board("victim"), whole.board("other")
    task = prepared.spec.task
    assert whole.drive(lambda: victim.entry_status(task, 1) == other.entry_status(task, 1) == "acked", wait_s=wait_s)
    assert whole.drive(lambda: whole.coordinator.engine.closed_rounds >= 1, wait_s=wait_s)
    whole.drive(steps=20, wait_s=wait_s)
    whole.coordinator.close()
    other.agent.close()  # says that it goes
    whole.lose(other)
    whole.drive_boards(wait_s=wait_s)
    return victim, list(whole.heard)


def come(stranger: Link) -> None:
    for _ in range(400):
        if stranger.receive(0.05) == LinkUp():
            break


def replay(whole: Whole, recorded: list[Delivery], connect: Connect) -> None:
    """All small messages of the aggregator and of the board itself, each where it was."""
    stranger = connect("stranger", None)
    stranger.open()
    come(stranger)
    while True:
        try:
            for delivery in recorded:
                topic = whole.topics.parse(delivery.topic)
                if topic.device in (None, "victim") and topic.kind not in ("blob", "chunk") and delivery.payload:
                    retain = topic.kind in ("server", "task", "round", "state")
                    stranger.publish(delivery.topic, delivery.payload, retain=retain)
                    whole.drive(steps=2)
            break
        except LinkLost:  # amqtt drops who connects while others subscribe, and what they have sent
            come(stranger)
    stranger.close()


def test_the_board_stays_with_the_current_run(
    connect: Connect, tmp_path: Path, prepared_runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    wait_s = 0.0 if isinstance(connect("x", None), type(LocalHub().link("x"))) else 0.01
    whole = Whole(tmp_path / "bench", connect)
    victim, recorded = record_a_run(whole, prepared_runs[0], wait_s=wait_s)
    kinds = {whole.topics.parse(delivery.topic).kind for delivery in recorded}
    assert {"server", "task", "round", "state", "msg", "chunk", "down"} <= kinds
    whole.begin(prepared_runs[1])
    assert whole.drive(lambda: victim.agent.rounds.plan.task == victim.agent.tasks.name == "digits-two", wait_s=wait_s)
    assert whole.drive(lambda: len(whole.coordinator.store.devices()) == 2, wait_s=wait_s)  # both births are retained
    charged, plan = victim.store.ledger.rounds_charged(), victim.agent.rounds.plan
    devices, rounds = whole.coordinator.store.devices(), whole.coordinator.store.rounds()
    with caplog.at_level(logging.WARNING, logger="hushfleet.edge"):
        replay(whole, recorded, connect)
        assert whole.drive(lambda: victim.agent.rejected.counts["Replayed"] >= 3, wait_s=wait_s)
        whole.drive(steps=60, wait_s=wait_s)
    assert "came again; the newest start that this device knows is" in caplog.text
    assert (victim.agent.tasks.name, victim.agent.rounds.plan) == ("digits-two", plan)
    assert victim.store.ledger.rounds_charged() == charged
    assert whole.coordinator.store.rounds() == rounds == []
    assert whole.coordinator.store.devices() == devices
    assert whole.coordinator.store.declines() == []

    # the board restarts while the broker holds the old run
    state_dir = victim.state_dir
    whole.lose(victim)
    victim = whole.board("victim", state_dir)
    assert whole.drive(lambda: victim.agent.rejected.counts["Replayed"] >= 3, wait_s=wait_s)
    whole.drive(steps=60, wait_s=wait_s)
    assert victim.agent.tasks.name is None
    assert victim.store.ledger.rounds_charged() == charged
    whole.close()


def test_the_attack_on_a_board_that_keeps_no_epoch(
    hub_only: Connect, tmp_path: Path, prepared_runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client as it was: it goes back to the old run."""
    monkeypatch.setattr(MessageVerifier, "_check_epoch", lambda *_: None)
    whole = Whole(tmp_path / "bench", hub_only)
    victim, recorded = record_a_run(whole, prepared_runs[0], wait_s=0.0)
    whole.begin(prepared_runs[1])
    assert whole.drive(lambda: victim.agent.tasks.name == "digits-two")
    replay(whole, recorded, hub_only)
    assert whole.drive(lambda: victim.agent.tasks.name == "digits-one")
    whole.close()


class Told:
    """A board after an acknowledged round, and somebody who has the aggregator's old messages."""

    def __init__(self, whole: Whole, victim: Board, other: Board) -> None:
        self.whole, self.victim, self.other = whole, victim, other
        self.aggregator: Identity = load_or_create(whole.key)

    def say(self, topic: str, *messages: Message) -> None:
        for message in messages:
            payload = encode_message(message, self.aggregator, federation="default")
            self.whole.spy.publish(topic, payload)
        self.whole.drive(steps=40)


@pytest.fixture
def told(hub_only: Connect, tmp_path: Path, prepared_runs: Runs) -> Iterator[Told]:
    whole = Whole(tmp_path / "bench", hub_only)
    whole.begin(prepared_runs[0])
    victim, other = whole.board("victim"), whole.board("other")
    whole.drive(lambda: whole.coordinator.engine.plan is not None)
    whole.boards.remove(other)
    assert whole.drive(lambda: victim.entry_status("digits-one", 1) == "acked")
    yield Told(whole, victim, other)
    whole.close()


def test_an_old_refusal_takes_no_acknowledgement_back(told: Told) -> None:
    digest = told.victim.store.outbox("digits-one", 1).digest
    for code in ("late", "out-of-bounds", "duplicate"):
        told.say(told.whole.topics.down("victim"), Refused("digits-one", 1, digest, code, "recorded"))
    assert told.victim.entry_status("digits-one", 1) == "acked"
    assert told.victim.stopped is None
    told.say(told.whole.topics.down("victim"), Refused("digits-one", 1, bytes(32), "late", "of another update"))
    assert told.victim.agent.rounds.upload is None


def test_an_old_gap_costs_a_bounded_number_of_chunks(told: Told) -> None:
    digest = told.victim.store.outbox("digits-one", 1).digest
    size = len(told.victim.store.outbox("digits-one", 1).data)
    chunks, before = -(-size // 1024), len(told.whole.heard)
    for _ in range(60):
        told.say(told.whole.topics.down("victim"), Missing("digits-one", 1, digest, ()))
    sent = [each for each in told.whole.heard[before:] if each.topic == told.whole.topics.chunk("victim")]
    assert len(sent) <= 21 * chunks
    assert told.victim.entry_status("digits-one", 1) == "acked"
    told.say(told.whole.topics.down("victim"), Ack("digits-one", 1, digest))


def test_rounds_of_one_start_go_forwards_only(told: Told) -> None:
    whole, victim = told.whole, told.victim
    topics, epoch = whole.topics, whole.coordinator.epoch
    open_plan = victim.agent.rounds.plan
    fields = {**vars(open_plan), "cohort": {}, "differences": ()}
    told.say(topics.round, RoundPlan(**{**fields, "phase": "closed"}))
    assert victim.agent.rounds.plan.phase == "closed"
    told.say(topics.round, open_plan)
    assert victim.agent.rounds.plan.phase == "closed"
    assert victim.agent.rejected.counts["Replayed"] == 1
    told.say(topics.round, RoundPlan(**{**fields, "round": 2}), open_plan)
    assert victim.agent.rounds.plan.round == 2
    assert victim.agent.rejected.counts["Replayed"] == 2
    # and starts, too
    told.say(topics.server, ServerState(epoch + 5, "ready", told.aggregator.public_key))
    told.say(topics.task, TaskNotice("digits-old", bytes(32), 100, epoch + 4))
    assert victim.agent.tasks.name == "digits-one"
    assert victim.agent.rejected.counts["Replayed"] == 3
    assert victim.store.ledger.rounds_charged() == 1


def test_a_board_that_has_just_come_is_told_where_the_run_is(told: Told) -> None:
    """It has seen no plan yet, and the first that it sees is an old one: the answer to its question knows better."""
    whole, victim = told.whole, told.victim
    first_plan = victim.agent.rounds.plan
    whole.boards.append(told.other)
    assert whole.drive(lambda: whole.coordinator.engine.announcement.round == 2)
    state_dir = victim.state_dir
    whole.lose(victim)
    newcomer = whole.board("newcomer", state_dir.with_name("newcomer"))
    assert whole.drive(lambda: newcomer.agent.store_check.confirmed)
    seen = newcomer.agent.rejected.counts["Replayed"]
    told.say(whole.topics.round, first_plan)
    assert newcomer.agent.rejected.counts["Replayed"] == seen + 1


def test_an_answer_to_another_question_is_none(told: Told) -> None:
    """A recorded answer names another process's nonce; it stops nobody and confirms nobody."""
    whole, victim = told.whole, told.victim
    key = told.aggregator.public_key
    answers = [
        delivery for delivery in whole.heard if delivery.topic == whole.topics.down("victim")
        and type(decode_message(delivery.payload, federation="default", public_key=key)).__name__ == "Known"
    ]  # fmt: skip
    state_dir = victim.state_dir
    whole.lose(victim)
    victim = whole.board("victim", state_dir)
    confirm: Callable[[], bool] = lambda: victim.agent.store_check.confirmed  # noqa: E731
    answer, whole.coordinator._on_ask = whole.coordinator._on_ask, lambda *_: None  # type: ignore[method-assign]
    for delivery in answers:
        whole.spy.publish(delivery.topic, delivery.payload)
    assert not whole.drive(confirm, steps=100)
    whole.coordinator._on_ask = answer  # type: ignore[method-assign]
    assert whole.drive(confirm)
    assert victim.stopped is None
