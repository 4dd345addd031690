"""An aggregator that goes on from an older copy of its run, as from a backup: rounds that boards have done before."""

from __future__ import annotations

import shutil
from pathlib import Path

from hushfleet.aggregator.rounds.charge_book import ChargeBook
from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.simulator.world.hub import LocalHub
from support.whole import Whole, prepared_digits


def test_rounds_that_boards_have_done_are_declined_and_the_run_goes_on(tmp_path: Path) -> None:
    """They were silent, since their update had been acknowledged once: the round was extended for ever."""
    bench, prepared = Whole(tmp_path, LocalHub().link), prepared_digits("seed7")
    run, backup = tmp_path / prepared.spec.task, tmp_path / "backup"
    with DeviceRegister(tmp_path / "fleet", durable=False) as register:

        def begin() -> None:
            bench.begin(prepared)
            bench.coordinator.rounds.charges = ChargeBook(register, bench.coordinator.engine)

        begin()
        boards = [bench.board(name) for name in ("board-1", "board-2")]
        assert bench.drive(lambda: bench.coordinator.engine.closed_rounds == 1)
        bench.end()
        shutil.copytree(run, backup)
        begin()
        assert bench.drive(lambda: bench.coordinator.engine.finished)
        bench.end()
        shutil.rmtree(run)
        backup.rename(run)
        begin()
        engine = bench.coordinator.engine
        assert engine.closed_rounds == 1
        assert bench.drive(lambda: len(engine.store.declines(2)) == 2)
        assert {code for _, _, code, _ in engine.store.declines(2)} == {"error"}
        bench.now += prepared.task.round.deadline_s
        assert bench.drive(lambda: engine.finished), "the last round is sent again as the same bytes"
        rounds = {row.round: row.metrics["participants"] for row in engine.store.rounds() if row.metrics is not None}
        assert rounds == {1: 2, 2: 0, 3: 2}
        for board in boards:
            assert board.stopped is None
            entries = [board.store.outbox(prepared.spec.task, number) for number in (1, 2, 3)]
            stored = {digest for entry in entries if entry for digest in (entry.digest, entry.attached_digest)}
            assert bench.noisings(board.name) <= stored, (
                "none was noised twice: the last was sent with its state as well"
            )
            assert board.store.ledger.rounds_charged() == len(register.charges(board.name)) == 3
        bench.close()
