"""Whatever anyone may publish: nothing crashes, nothing changes, everything is counted."""

from __future__ import annotations

import hashlib
import logging
import random
import struct
import zlib
from collections.abc import Callable

import pytest

from hushfleet.wire.format.chunks import FRAME_OVERHEAD, split
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import (
    Ack,
    Decline,
    Message,
    Missing,
    Offer,
    Refused,
    RoundPlan,
    ServerState,
    TaskNotice,
    Want,
    encode_message,
)
from support.edge import CHUNK_BYTES, DEVICE, Bench
from support.stores import sql

MakeBench = Callable[..., Bench]
MUTATIONS = 10_000


def everything(bench: Bench) -> object:
    """All that must not change."""
    agent = bench.agent
    tables = ("facts", "states", "outbox", "privacy_ledger", "privacy_ledger_head", "blobs")
    rows = [sql(bench.store, f"SELECT * FROM {table} ORDER BY 1, 2") for table in tables]
    return rows, agent.tasks.notice, agent.tasks.declined, agent.rounds.plan, agent.rounds.decline, agent._status


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Never the same bytes, never empty."""
    result = bytearray(data)
    match rng.randrange(6):
        case 0:
            result[rng.randrange(len(result))] ^= 1 << rng.randrange(8)
        case 1:
            del result[rng.randrange(1, len(result)) :]
        case 2:
            result += rng.randbytes(rng.randrange(1, 40))
        case 3:
            at = rng.randrange(len(result))
            result[at : at + 8] = rng.randbytes(8)
        case 4:
            at = rng.randrange(len(result))
            del result[at : at + rng.randrange(1, 8)]
        case _:
            result = bytearray(rng.randbytes(rng.randrange(1, 300)))
    return bytes(result) if result and bytes(result) != data else b"\x00" + data


def messages(bench: Bench) -> dict[str, list[Message]]:
    """A valid message of each kind for each topic that the device listens to."""
    server, task, digest = bench.server, "digits-test", bench.store.outbox("digits-test", 1).digest
    return {
        server.topics.server: [ServerState(1, "ready", server.identity.public_key)],
        server.topics.task: [TaskNotice("evil-task", bytes(32), 500, 1)],
        server.topics.round: [server.plan(2), server.plan(5, phase="finished", cohort={})],
        server.topics.down(DEVICE): [
            Ack(task, 1, digest),
            Missing(task, 1, digest, ((0, 1),)),
            Refused(task, 1, digest, "late", "no"),
        ],
    }


@pytest.fixture
def idle(make_bench: MakeBench) -> Bench:
    """A device after one acknowledged round."""
    bench = make_bench()
    bench.train(1)
    bench.steps(20)
    return bench


def test_mutated_and_random_messages_change_nothing(idle: Bench) -> None:
    before, rng = everything(idle), random.Random(1)
    intruder, sent = idle.hub.link("intruder"), 0
    intruder.open()
    valid = [
        (topic, encode_message(message, idle.server.identity, federation="test"))
        for topic, kinds in messages(idle).items()
        for message in kinds
    ]
    for _ in range(MUTATIONS):
        topic, data = rng.choice(valid)
        intruder.publish(topic, mutated(data, rng), retain=rng.random() < 0.1)
        sent += 1
        idle.agent.step(0.0)
    idle.steps(20)
    assert idle.agent.rejected.total == sent
    assert everything(idle) == before
    # and it still works
    idle.server.announce()
    idle.train(2)


@pytest.mark.parametrize(("answer", "times"), [(None, 1), ("missing", 21), ("state-unknown", 2)])
def test_plans_of_a_round_that_rests_said_again_by_turns_use_up_no_metered_link(
    make_bench: MakeBench, answer: str | None, times: int
) -> None:
    """:param answer: that was recorded, and follows each time; `times`: an update is sent so often at most."""
    bench = make_bench()
    bench.server.answers = False
    bench.server.open_round(2)
    bench.until(lambda: len(bench.server.updates) == 1)
    chunks, digest = len(bench.server.chunks_seen), bench.server.offers[0].digest
    for _ in range(40):
        bench.server.open_round(1, phase="closed", cohort={})
        bench.steps(3)
        bench.server.open_round(2)
        bench.steps(3)
        if answer == "missing":
            bench.server.send(bench.server.topics.down(DEVICE), Missing("digits-test", 2, digest, ()))
        elif answer is not None:
            bench.server.send(bench.server.topics.down(DEVICE), Refused("digits-test", 2, digest, answer, ""))
        bench.steps(chunks + 5)
    assert times * chunks <= len(bench.server.chunks_seen) <= times * (chunks + 1)
    bench.server.answers = True
    bench.clock.now += 61.0
    bench.acked(2)


def test_well_formed_messages_of_a_stranger_change_nothing(idle: Bench) -> None:
    before, stranger, count = everything(idle), Identity.generate(), 0
    for topic, kinds in messages(idle).items():
        for message in kinds:
            if isinstance(message, ServerState):
                message = ServerState(message.epoch, "ready", stranger.public_key)
            idle.server.link.publish(topic, encode_message(message, stranger, federation="test"))
            count += 1
    idle.steps(20)
    assert everything(idle) == before
    assert idle.agent.rejected.counts["BadSignature"] == count


def test_messages_of_the_wrong_kind_for_their_topic_change_nothing(idle: Bench) -> None:
    """The aggregator's own signature, replayed by a broker on another topic."""
    before, count = everything(idle), 0
    by_topic = messages(idle)
    others: list[Message] = [
        Want(bytes(32), 1, ()),
        Offer("digits-test", 1, bytes(32), 1),
        Decline("digits-test", 1, "busy", ""),
    ]
    for topic, own in by_topic.items():
        kinds = {type(message) for message in own}
        if topic == idle.server.topics.down(DEVICE):
            kinds.add(ServerState)  # by which the device is asked to announce itself again
        for message in [m for group in by_topic.values() for m in group] + others:
            if type(message) not in kinds:
                idle.server.send(topic, message)
                count += 1
    idle.steps(count + 20)
    assert everything(idle) == before
    counts = idle.agent.rejected.counts
    assert counts["Malformed"] + counts["BadSignature"] + counts["Replayed"] == count


def test_replayed_plans_are_harmless(idle: Bench) -> None:
    """A broker may repeat what the aggregator once signed; a round that was done is never done again."""
    old = idle.server.plan(1)
    idle.train(2)
    idle.server.send(idle.server.topics.round, old)
    idle.steps(40)
    assert [entry.round for entry in idle.store.ledger.entries()] == [1, 2]
    assert len(idle.server.updates) == 2


def test_garbage_chunks_do_not_stop_a_fetch(make_bench: MakeBench) -> None:
    bench, rng = make_bench(), random.Random(2)
    bench.server.serves = False
    bench.until(lambda: len(bench.server.wants) == 1)
    ref = bench.server.wants[0]
    frames = list(split(bench.server.package.data, CHUNK_BYTES))
    topic = bench.server.topics.blob(ref.digest)
    for _ in range(1500):
        bench.server.link.publish(topic, mutated(rng.choice(frames), rng))
        bench.agent.step(0.0)
    bench.steps(20)
    assert bench.agent.rejected.total == 1500
    assert bench.agent.tasks.runtime is None
    bench.server.serves = True
    bench.clock.now += 100
    bench.until(lambda: bench.agent.tasks.runtime is not None)


def forged(frame: bytes) -> bytes:
    """Other content under the same digest, with a valid checksum."""
    payload = bytes(byte ^ 0xFF for byte in frame[FRAME_OVERHEAD:])
    head = frame[: FRAME_OVERHEAD - 4]
    return head + struct.pack("<I", zlib.crc32(payload, zlib.crc32(head))) + payload


def test_a_forged_chunk_is_found_by_the_digest_and_all_is_fetched_anew(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.until(lambda: len(bench.server.wants) == 2)
    bench.agent.rejected.counts.clear()
    bench.server.serves = False
    bench.restart()
    bench.until(lambda: len(bench.server.wants) == 3)
    want = bench.server.wants[-1]
    graph = bench.server.blobs[want.digest]
    topic = bench.server.topics.blob(want.digest)
    first, *rest = split(graph, CHUNK_BYTES)
    for frame in (forged(first), *rest):
        bench.server.link.publish(topic, frame)
    bench.steps(len(rest) + 20)
    assert bench.agent.rejected.counts == {"Malformed": 1}
    assert bench.store.blob(want.digest) is None
    bench.server.serves = True
    bench.clock.now += 10
    bench.until(lambda: bench.agent.tasks.runtime is not None)
    assert hashlib.sha256(graph).digest() == want.digest


def test_huge_sizes_are_refused_before_anything_is_allocated(make_bench: MakeBench) -> None:
    bench = make_bench(announce=False)
    bench.server.announce()
    bench.steps(20)
    bench.server.send(bench.server.topics.task, TaskNotice("vast", bytes(32), 1 << 30, 1), retain=True)
    bench.steps(5)
    assert bench.agent.rejected.counts["TooLarge"] == 1
    assert bench.agent.tasks.name == "digits-test"
    plan = bench.server.plan(1, global_bytes=1 << 30)
    assert isinstance(plan, RoundPlan)
    bench.server.send(bench.server.topics.round, plan, retain=True)
    bench.until(lambda: bench.server.declines != [])
    assert not bench.agent.blobs.is_fetching


def test_a_flood_is_reported_once_a_minute(idle: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hushfleet.edge"):
        for minute in range(3):
            for _ in range(200):
                idle.server.link.publish(idle.server.topics.down(DEVICE), b"garbage")
                idle.agent.step(0.0)
            idle.clock.now += 61 if minute < 2 else 0
    reports = [record.getMessage() for record in caplog.records if "were ignored" in record.getMessage()]
    assert len(reports) == 3
    assert reports[1].startswith("200 messages were ignored")


def test_an_error_in_a_handler_does_not_end_the_client(
    idle: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(idle.agent.rounds, "on_plan", broken)
    idle.server.open_round(2)
    with caplog.at_level(logging.ERROR, logger="hushfleet.edge"):
        idle.steps(5)
    assert "a defect" in caplog.text
    monkeypatch.undo()
    idle.train(3)
