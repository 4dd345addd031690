"""A board in buffered rounds: it goes on with its own version while newer ones come, and hands it in late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.rounds import RETRY_S
from support.edge import Bench

MakeBench = Callable[..., Bench]


def begin(bench: Bench, round: int, **changes: object) -> None:
    bench.server.open_round(round, **({"cohort": {}, "max_staleness": 1} | changes))


def charged(bench: Bench) -> list[int]:
    return [entry.round for entry in bench.store.ledger.entries()]


class Interrupting:
    """Newer versions are announced while the board trains."""

    def __init__(self, bench: Bench, *rounds: int, **changes: object) -> None:
        self.rounds = list(rounds)

        def interrupt() -> None:
            if self.rounds:
                begin(bench, self.rounds.pop(0), **changes)

        bench.while_training(interrupt, looks=len(rounds) + 1)


def test_a_newer_version_ends_no_training_and_no_upload(make_bench: MakeBench) -> None:
    bench = make_bench()
    begin(bench, 1)
    bench.steps(4)
    Interrupting(bench, 2)
    bench.acked(1)
    bench.acked(2)
    assert charged(bench) == [1, 2]
    assert [offer.round for offer in bench.server.offers] == [1, 2]
    assert bench.server.declines == []


def test_versions_that_come_in_one_training_are_no_replay(make_bench: MakeBench) -> None:
    bench = make_bench()
    begin(bench, 1, max_staleness=9)
    bench.steps(4)
    Interrupting(bench, 2, 3, 4, max_staleness=9)
    bench.acked(4)
    assert charged(bench) == [1, 4]
    assert bench.agent.rejected.total == 0


def test_training_ends_once_its_result_would_be_too_stale(make_bench: MakeBench) -> None:
    bench = make_bench()
    begin(bench, 1)
    bench.steps(4)
    Interrupting(bench, 2, 3)
    bench.acked(3)
    assert charged(bench) == [3], "what was given up has cost nothing"


def test_a_training_has_its_time_from_its_beginning_however_long_the_version_is_open(make_bench: MakeBench) -> None:
    """The board hears of the version, and its link is gone for an hour before the model has come."""
    bench = make_bench()
    begin(bench, 1)
    bench.steps(4)
    bench.clock.now += 6 * bench.agent.rounds.plan.deadline_s
    bench.acked(1)
    assert bench.server.declines == []


def test_between_two_versions_an_upload_goes_on(make_bench: MakeBench) -> None:
    bench = make_bench()
    begin(bench, 1)
    bench.until(lambda: len(bench.server.chunks_seen) == 2)
    begin(bench, 1, phase="closed")
    bench.steps(3)
    begin(bench, 2)
    bench.acked(1)
    bench.acked(2)
    assert charged(bench) == [1, 2]


def test_a_board_that_slept_hands_in_what_it_had_and_trains_no_version_twice(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.server.answers = False
    begin(bench, 1)
    bench.until(lambda: len(bench.server.updates) == 1)
    (before,) = bench.server.updates
    bench.restart()
    bench.server.answers = True
    begin(bench, 2)
    bench.acked(1)
    assert bench.server.updates[0] == before, "the same bytes, noised once"
    bench.acked(2)
    bench.restart()
    bench.steps()
    assert charged(bench) == [1, 2]
    assert len(bench.server.updates) == 2


def test_an_update_that_is_too_stale_is_not_sent_again(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.server.answers = False
    begin(bench, 1)
    bench.until(lambda: len(bench.server.updates) == 1)
    bench.restart()
    bench.server.answers = True
    begin(bench, 3)
    bench.acked(3)
    assert [offer.round for offer in bench.server.offers][-1] == 3
    assert bench.entry_status(1) == "pending"
    assert charged(bench) == [1, 3], "it was charged, though it is in no model"


def test_a_state_that_the_aggregator_lacks_is_sent_when_it_asks(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.server.refuse_next = "state-unknown"
    begin(bench, 1)
    bench.acked(1)
    first, second = bench.server.offers[0], bench.server.offers[-1]
    assert first.digest != second.digest
    assert charged(bench) == [1]


def test_a_version_that_rests_ends_every_training_and_nothing_is_spent(make_bench: MakeBench) -> None:
    bench = make_bench()
    begin(bench, 2)
    bench.steps(4)
    interrupting = Interrupting(bench, 1, phase="closed", max_staleness=0)
    bench.until(lambda: not interrupting.rounds)
    bench.steps(10)
    assert charged(bench) == []
    begin(bench, 2)
    bench.acked(2)
    assert charged(bench) == [2]


def test_an_owners_limit_of_a_period_holds_for_each_version(make_bench: MakeBench, config: DeviceConfig) -> None:
    limits = replace(config.limits, epsilon_server=2.5, per="1d", epsilon_lifetime=100.0)
    bench = make_bench(config=replace(config, limits=limits))
    begin(bench, 1)
    bench.acked(1)
    begin(bench, 2)
    bench.until(lambda: bench.server.declines != [])
    assert bench.server.declines[0].code == "budget"
    assert charged(bench) == [1]
    bench.clock.now += 86400.0
    begin(bench, 3)
    bench.acked(3)
    assert charged(bench) == [1, 3]


def test_a_version_that_was_declined_is_looked_at_again(make_bench: MakeBench) -> None:
    """It is open until enough boards have come, perhaps until this one's period has passed. Nothing is announced."""
    bench = make_bench()
    begin(bench, 1)
    bench.acked(1)
    once = bench.store.ledger.epsilon_server(delta=bench.config.limits.delta)
    bench.restart(limits=replace(bench.config.limits, epsilon_server=1.1 * once, per="30d", epsilon_lifetime=9 * once))
    begin(bench, 2)
    bench.until(lambda: len(bench.server.declines) == 1)
    asked = len(bench.server.asks)
    bench.clock.now += RETRY_S
    bench.until(lambda: len(bench.server.declines) == 2)
    assert [decline.code for decline in bench.server.declines] == ["budget", "budget"]
    assert len(bench.server.asks) == asked
    bench.clock.now += 31 * 86400
    bench.acked(2)
    assert len(bench.server.asks) > asked, "the aggregator took its note of the charge back, and takes it again"
    assert charged(bench) == [1, 2]
