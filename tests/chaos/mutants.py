"""Clients and an aggregator with a planted fault, started in place of the right ones: the audit must catch each.

python mutants.py FAULT ARGUMENTS...
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from hushfleet.edge_client.__main__ import main as client
from hushfleet.edge_client.storage.round_commit import CodedRound, OutboxEntry
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.store_check import StoreCheck
from hushfleet.edge_client.worker.handover import Handover
from hushfleet.privacy.ledger import Ledger


def _trust_itself() -> None:
    """Trains without asking what the aggregator knows of the device."""
    StoreCheck.may_train = lambda _: True


def _lose_all() -> NoReturn:
    """Ends the client as a power cut does, and starts it again: at this very step, on a machine of any speed."""
    os.execv(sys.executable, [sys.executable, *sys.argv])


def noises_again() -> int:
    """A client that trains and noises a round anew after each start, whatever it has committed, and sends that."""
    answered: set[tuple[str, int]] = set()
    outbox, commit_coded = DeviceStore.outbox, DeviceStore.commit_coded

    def forgetful(self: DeviceStore, task: str, round: int) -> OutboxEntry | None:
        return outbox(self, task, round) if (task, round) in answered else None

    def overwrite(self: DeviceStore, commit: CodedRound) -> OutboxEntry:
        answered.add((commit.task, commit.round))
        if outbox(self, commit.task, commit.round) is None:
            return commit_coded(self, commit)
        self._connection.execute("DELETE FROM outbox WHERE task = ? AND round = ?", (commit.task, commit.round))
        charge, Ledger.charge = Ledger.charge, lambda *_, **__: None
        try:
            return commit_coded(self, commit)
        finally:
            Ledger.charge = charge

    DeviceStore.outbox, DeviceStore.commit_coded = forgetful, overwrite
    DeviceStore.is_charged = lambda *_: False
    _trust_itself()
    return client(sys.argv[2:])


def noises_again_in_vain() -> int:
    """A client that loses all when it has committed a round, and noises it anew, which its ledger refuses to charge."""
    commit_coded = DeviceStore.commit_coded

    def commit(self: DeviceStore, commit: CodedRound) -> OutboxEntry:
        commit_coded(self, commit)
        _lose_all()

    DeviceStore.outbox, DeviceStore.commit_coded = lambda *_: None, commit
    DeviceStore.is_charged = lambda *_: False
    _trust_itself()
    return client(sys.argv[2:])


def charges_late() -> int:
    """A client that writes the charge of a round when it commits the next one."""
    charge = Ledger.charge
    owed: list[Callable[[], None]] = []

    def later(self: Ledger, *arguments: Any, **more: Any) -> None:
        while owed:
            owed.pop()()
        owed.append(lambda: charge(self, *arguments, **more))

    Ledger.charge = later
    return client(sys.argv[2:])


def does_not_sync() -> int:
    """A client whose store leaves it to the operating system when to write."""
    prepared = DeviceStore._prepare_to_write

    def unsynced(self: DeviceStore, **options: bool) -> None:
        prepared(self, **options)
        connection: sqlite3.Connection = self._connection
        connection.execute("PRAGMA synchronous = OFF")

    DeviceStore._prepare_to_write = unsynced
    return client(sys.argv[2:])


def begins_anew() -> int:
    """No fault: a client that loses all between the metrics of its first round and the commit, and goes on."""
    commit = Handover.commit

    def begin_anew(self: Handover, *arguments: Any) -> OutboxEntry:
        if "BEGAN_ANEW" not in os.environ:  # which a program keeps that takes this one's place
            os.environ["BEGAN_ANEW"] = "1"
            _lose_all()
        return commit(self, *arguments)

    Handover.commit = begin_anew
    return client(sys.argv[2:])


def adds_twice() -> int:
    """An aggregator that adds the first update of each round twice."""
    from hushfleet.aggregator.commands.main import main
    from hushfleet.aggregator.rounds.plain_sum import PlainSum

    add = PlainSum.add
    seen: set[int] = set()

    def twice(self: PlainSum, *arguments: Any, **more: Any) -> None:
        add(self, *arguments, **more)
        if id(self) not in seen:
            seen.add(id(self))
            add(self, *arguments, **more)

    PlainSum.add = twice
    sys.argv[1:] = ["aggregator", *sys.argv[2:]]
    return main() or 0


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1].replace("-", "_")]())
