"""What the aggregator says, as a broker keeps it."""

from __future__ import annotations

from dataclasses import replace

from hushfleet.aggregator.rounds.outbox import Outbox
from hushfleet.simulator.world.hub import LocalHub
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import Message, RoundPlan, ServerState, TaskNotice, decode_message
from hushfleet.wire.format.spec import BlobRef

KEY = Identity.from_bytes(bytes(range(32)))
PLAN = RoundPlan(
    task="t", round=1, rounds=2, phase="open", global_digest=bytes(32), global_bytes=4,
    cohort={"a": bytes(16)}, noise_split=1, deadline_s=5.0,
)  # fmt: skip


def test_what_is_retained_is_signed_and_names_the_start_and_the_will_says_that_it_is_gone() -> None:
    hub = LocalHub()
    outbox = Outbox(lambda will: hub.link("aggregator", will), identity=KEY, epoch=7, federation="default")
    outbox.link.open()

    def retained(topic: str) -> Message:
        return decode_message(hub.retained[topic], federation="default", public_key=KEY.public_key)

    outbox.state("ready")
    outbox.task("t", BlobRef(b"d" * 32, 9))
    outbox.round(PLAN)
    assert retained(outbox.topics.server) == ServerState(7, "ready", KEY.public_key)
    assert retained(outbox.topics.task) == TaskNotice("t", b"d" * 32, 9, 7)
    assert retained(outbox.topics.round) == replace(PLAN, epoch=7)
    hub.cut("aggregator")
    assert retained(outbox.topics.server) == ServerState(7, "lost", KEY.public_key)
