"""The attacker wants two noisings of one update, whose average has half the variance: an old copy of a board's store
is put back while the round is open, or two clients run on copies of one store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.edge_client import __main__ as command
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.store_check import StoreCheck
from hushfleet.errors import CopiedStore
from hushfleet.simulator.world.hub import LocalHub
from support.whole import Board, Whole

TASK = "digits-one"
Runs = tuple[PreparedTask, PreparedTask]


@pytest.fixture
def whole(tmp_path: Path, prepared_runs: Runs) -> Iterator[Whole]:
    """Round 1 opens when a second board is there; it never answers, so that the round stays open."""
    hub = LocalHub()
    bench = Whole(tmp_path / "bench", hub.link)
    bench.hub = hub
    bench.begin(prepared_runs[0])
    yield bench
    bench.close()


def silent_board(whole: Whole) -> None:
    board = whole.board("silent")
    whole.drive(lambda: whole.coordinator.engine.plan is not None)
    whole.boards.remove(board)


def acked(board: Board, round: int = 1) -> Callable[[], bool]:
    return lambda: board.entry_status(TASK, round) == "acked"


def restored(whole: Whole) -> Board:
    """A board that took part in the open round, with a copy of its store from before."""
    victim = whole.board("victim")
    whole.drive(lambda: victim.agent.tasks.runtime is not None and victim.agent.store_check.confirmed)
    old = whole.copy(victim, "old")
    silent_board(whole)
    assert whole.drive(acked(victim))
    assert len(whole.noisings("victim")) == 1
    whole.lose(victim)
    return whole.board("victim", old)


def forget_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client as it was: it asks nobody, and believes every plan."""
    monkeypatch.setattr(StoreCheck, "confirmed", property(lambda _: True, lambda *_: None), raising=False)
    monkeypatch.setattr(StoreCheck, "on_known", lambda *_: False)
    monkeypatch.setattr(DeviceStore, "has_been", lambda *_: True)


def forget_updates(whole: Whole) -> None:
    """The aggregator has lost what it knew of the boards' updates."""
    whole.coordinator._uploads._latest.clear()
    whole.coordinator._seen = None


def test_the_attack_on_a_client_that_does_not_ask(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_to_ask(monkeypatch)
    monkeypatch.setattr("hushfleet.aggregator.rounds.coordinator.EVENTS_A_STEP", 1)  # refused after the chunks
    victim = restored(whole)
    whole.drive(lambda: len(whole.noisings("victim")) == 2)
    assert len(whole.noisings("victim")) == 2
    assert victim.stopped is None


def test_an_old_copy_stops_for_good_before_it_trains(
    whole: Whole, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    victim = restored(whole)
    whole.drive(lambda: victim.stopped is not None)
    assert isinstance(victim.stopped, CopiedStore)
    assert "the aggregator has an update of this device for round 1 of digits-one, and this store has none" in str(
        victim.stopped
    )
    assert victim.store.ledger.rounds_charged() == 0
    assert len(whole.noisings("victim")) == 1

    victim.store.close()
    file = tmp_path / "device.toml"
    file.write_text(
        f'[device]\nid = "victim"\nstate_dir = "{victim.state_dir}"\nallow_volatile_state = true\n[broker]\nurl = '
        '"mqtt://localhost:1"\n'
        f'[data]\nkind = "arrays"\npath = "{whole.samples}"\n[limits]\nepsilon_server = 8.0\n'
    )
    assert command.main(["run", str(file)]) == 2  # at once, without a connection
    assert "has stopped for good" in capsys.readouterr().err
    assert command.main(["status", str(file)]) == 0
    assert "stopped" in capsys.readouterr().out
    assert command.main(["status", str(file), "--json"]) == 0
    assert "old copy" in json.loads(capsys.readouterr().out)["stopped_because"]
    victim.store = DeviceStore(victim.config.store_path, device="victim", inspect=True)


def test_a_plan_that_is_ahead_of_the_store_stops_it(whole: Whole) -> None:
    """Where the aggregator's answer shows nothing, the public state in the plan does."""
    victim = whole.board("victim")
    whole.drive(lambda: victim.agent.tasks.runtime is not None and victim.agent.store_check.confirmed)
    old = whole.copy(victim, "old")
    other = whole.board("other")
    assert whole.drive(acked(victim))
    assert whole.drive(lambda: whole.coordinator.engine.closed_rounds >= 1)
    whole.boards.remove(other)
    whole.lose(victim)
    forget_updates(whole)
    victim = whole.board("victim", old)
    whole.drive(lambda: victim.stopped is not None)
    assert "holds a state of this device that this store has never been in" in str(victim.stopped)
    assert victim.store.ledger.rounds_charged() == 0


def test_duplicate_of_another_update_stops_it(whole: Whole) -> None:
    """Where nothing showed before, the round's plan being from before the update: then at least here."""
    victim = restored(whole)
    forget_updates(whole)
    whole.drive(lambda: victim.stopped is not None)
    assert isinstance(victim.stopped, CopiedStore)
    assert "this store holds another one" in str(victim.stopped)
    victim.store.close()
    with pytest.raises(CopiedStore, match="stopped for good"):
        DeviceStore(victim.config.store_path, device="victim")
    victim.store = DeviceStore(victim.config.store_path, device="victim", inspect=True)


def test_without_an_answer_a_board_waits(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole.coordinator, "_on_ask", lambda *_: None)
    victim = whole.board("victim")
    silent_board(whole)
    whole.drive(steps=200)
    assert victim.agent.rounds.plan.phase == "open"
    assert victim.store.ledger.rounds_charged() == 0
    monkeypatch.undo()
    victim.agent.store_check.aggregator_is_back(0.0)
    assert whole.drive(acked(victim))


def test_of_two_clients_on_copies_of_one_store_one_goes_on(whole: Whole) -> None:
    """They take each other's place at the broker again and again; the one that was started last stays."""
    first = whole.board("victim")
    whole.drive(lambda: first.agent.store_check.confirmed)
    second = whole.board("victim", whole.copy(first, "twin"))
    for board in (first, second, first, second):
        whole.drive(steps=30)
        board.agent.link.open()  # the one that was thrown out connects again
    assert isinstance(first.stopped, CopiedStore)
    assert "knows session 2 of this device, and this process, of session 1, is not the one" in str(first.stopped)
    assert second.stopped is None
    silent_board(whole)
    assert whole.drive(acked(second))
    assert len(whole.noisings("victim")) == 1


def test_a_board_that_restarts_with_its_own_store_goes_on(whole: Whole) -> None:
    victim = whole.board("victim")
    silent_board(whole)
    assert whole.drive(acked(victim))
    for _ in range(3):
        whole.lose(victim)
        victim = whole.board("victim", victim.state_dir)
        assert whole.drive(lambda: victim.agent.store_check.confirmed)  # noqa: B023
    assert victim.stopped is None
    assert len(whole.noisings("victim")) == 1
