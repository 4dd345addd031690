"""Wanted: a board that takes no part any more, though it is there and accepted.

Who may write on the board's topic (anybody, where the broker has no access list) puts a birth of his own in place of
the one that the broker keeps. An aggregator that starts again reads only that one, cannot verify it, and would wait for
the board for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.edge_client.agent import Agent
from hushfleet.simulator.world.hub import LocalHub
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import Birth, encode_message
from support.whole import Board, Whole

Runs = tuple[PreparedTask, PreparedTask]
TASK = "digits-one"


@pytest.fixture
def whole(tmp_path: Path, prepared_runs: Runs) -> Iterator[Whole]:
    bench = Whole(tmp_path / "bench", LocalHub().link)
    bench.begin(prepared_runs[0])
    yield bench
    bench.close()


def attacked(whole: Whole, prepared: PreparedTask) -> tuple[Board, Board]:
    """The victim waits for a second board; its birth is overwritten, and the aggregator has started again."""
    victim = whole.board("victim")
    assert whole.drive(lambda: "victim" in whole.coordinator.present and victim.agent.store_check.confirmed)
    whole.end()
    stranger = whole.connect("stranger", None)
    stranger.open()
    forged = Identity.generate()
    birth = Birth("victim", 10**6, "ready", "generic-x86", "0", forged.public_key, 100)
    payload = encode_message(birth, forged, federation=whole.federation)
    stranger.publish(whole.topics.state("victim"), payload, retain=True)
    stranger.close()
    whole.begin(prepared)
    return victim, whole.board("other")


def test_the_attack_on_boards_that_announce_themselves_once(
    whole: Whole, prepared_runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    say = Agent._announce

    def once(agent: Agent, status: str) -> None:
        """As it was: nothing is said when an aggregator has started again."""
        if status != agent._status or agent._ready_epoch is None:
            say(agent, status)

    monkeypatch.setattr(Agent, "_announce", once)
    boards = attacked(whole, prepared_runs[0])
    assert not whole.drive(lambda: all(board.entry_status(TASK, 1) == "acked" for board in boards), steps=1500)


def test_a_board_announces_itself_to_an_aggregator_that_has_started_again(whole: Whole, prepared_runs: Runs) -> None:
    boards = attacked(whole, prepared_runs[0])
    assert whole.drive(lambda: all(board.entry_status(TASK, 1) == "acked" for board in boards))
