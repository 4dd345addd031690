"""The attacker publishes in one federation what was signed in another: same keys, same names, other rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.simulator.world.hub import LocalHub
from hushfleet.wire.format import messages
from support.whole import Board, Whole

Runs = tuple[PreparedTask, PreparedTask]


def both(tmp_path: Path, prepared_runs: Runs) -> tuple[Whole, Board, Whole, Board]:
    """Two federations of one operator, with one key and one task; a board of one name with one store in both."""
    hub = LocalHub()
    here = Whole(tmp_path / "here", hub.link, federation="here")
    here.begin(prepared_runs[0])
    board = here.board("victim")
    assert here.drive(lambda: board.agent.store_check.confirmed)
    state_dir = here.copy(board, "for-there")
    there = Whole(tmp_path / "there", hub.link, federation="there", key=here.key)
    there.begin(prepared_runs[0])
    elsewhere = there.board("victim", state_dir)
    silent = there.board("other")
    assert there.drive(
        lambda: elsewhere.entry_status("digits-one", 1) == silent.entry_status("digits-one", 1) == "acked"
    )
    return here, board, there, elsewhere


def refusals(whole: Whole) -> int:
    """What the aggregator has refused so far."""
    whole.coordinator._refusals.flush(now=0.0, force=True)
    return sum(sum(codes.values()) for codes in whole.coordinator.store.refusals().values())


def test_nothing_that_was_said_there_counts_here(tmp_path: Path, prepared_runs: Runs) -> None:
    here, board, there, elsewhere = both(tmp_path, prepared_runs)
    assert board.store.identity.public_key == elsewhere.store.identity.public_key
    assert here.coordinator.epoch < there.coordinator.epoch  # so an epoch alone would not tell them apart
    here.drive(steps=30)
    before = here.coordinator.store.devices(), here.coordinator.store.rounds(), dict(here.coordinator.present)
    refused, ignored = refusals(here), board.agent.rejected.total
    said = 0
    for delivery in there.heard:
        parsed = there.topics.parse(delivery.topic)
        if parsed.device in (None, "victim") and parsed.kind not in ("chunk", "blob"):
            topic = delivery.topic.replace("hushfleet/1/there/", "hushfleet/1/here/")
            here.spy.publish(topic, delivery.payload)
            said += 1
            here.drive(steps=3)
    here.drive(steps=60)
    refused, ignored = refusals(here) - refused, board.agent.rejected.total - ignored
    assert refused + ignored == said > 10
    assert board.agent.rejected.counts == {"BadSignature": ignored}
    assert (here.coordinator.store.devices(), here.coordinator.store.rounds()) == before[:2]
    assert here.coordinator.present == before[2]
    assert here.coordinator.engine.accepted == 0
    assert board.store.ledger.rounds_charged() == 0
    assert board.agent.rounds.plan.phase == "closed"
    assert board.stopped is None
    here.close()
    there.close()


def test_an_update_from_there_is_not_offered_here(tmp_path: Path, prepared_runs: Runs) -> None:
    """The update blob does not name the federation, but only an offer lets it in, and offers are signed for one."""
    here, board, there, _ = both(tmp_path, prepared_runs)
    silent = here.board("silent")
    assert here.drive(lambda: here.coordinator.engine.plan is not None)
    here.boards.clear()  # both are slow
    for delivery in there.heard:
        parsed = there.topics.parse(delivery.topic)
        if parsed.device == "victim" and parsed.kind in ("chunk", "msg"):
            here.spy.publish(delivery.topic.replace("/there/", "/here/"), delivery.payload)
    here.drive(steps=200)
    assert here.coordinator.engine.accepted == 0
    assert here.coordinator.store.updates(1) == []
    here.boards = [board, silent]
    here.close()
    there.close()


def test_the_attack_on_messages_that_name_no_federation(
    tmp_path: Path, prepared_runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format as it was: the other federation's task and plan are believed."""
    monkeypatch.setattr(messages, "_context", lambda _: b"")
    here, board, there, _ = both(tmp_path, prepared_runs)
    plans = [each.payload for each in there.heard if each.topic == there.topics.round]
    for payload in plans:
        here.spy.publish(here.topics.round, payload)
    assert here.drive(lambda: board.agent.rounds.plan is not None and board.agent.rounds.plan.round > 0)
    here.close()
    there.close()
