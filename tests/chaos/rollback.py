"""Storms that put back older state folders of boards at random moments, over three tasks with one aggregator's key.

Real clients and a real aggregator in one thread (`support.whole`), with noise as in the field. Whatever happens, no
board trains with a ledger below the truth: the sum of the charges of all noised updates that it has ever offered. A
board whose ledger was put back below it stops for good, in words, before it trains.
"""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.edge_client.agent import Agent
from hushfleet.edge_client.storage.round_commit import CodedRound, OutboxEntry
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import CopiedStore
from hushfleet.simulator.world.hub import LocalHub
from hushfleet.wire.format.messages import Message, Offer
from support.whole import Whole

SLACK = 1e-9
MOST_TURNS = 500


@dataclass
class Rollbacks:
    """One storm. `findings` has what must never be, `stopped` why boards have stopped.

    :param tasks: played one after the other, each with a register and a store of its own.
    :param boards: how many take part. One that has stopped is replaced by another one.
    """

    folder: Path
    tasks: list[PreparedTask]
    seed: int
    boards: int = 3
    findings: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    lacking: int = 0
    """How many state folders were put back that lacked something."""
    whole: int = 0
    """How many were put back that lacked nothing."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._bench = Whole(self.folder, LocalHub().link)
        self._sent: dict[bytes, tuple[bytes, float]] = {}  # digest of an offer -> update, weight of its charge
        self._offered: dict[str, dict[bytes, float]] = defaultdict(dict)  # board -> its updates that were offered
        self._copies: dict[str, list[Path]] = defaultdict(list)
        self._made = 0

    def play(self) -> None:
        commit, attach, publish = DeviceStore.commit_coded, DeviceStore.note_attached, Agent._publish

        def committed(store: DeviceStore, new: CodedRound) -> OutboxEntry:
            self._compare(store, f"trains in round {new.round} of {new.task}")
            entry = commit(store, new)
            self._sent[entry.digest] = entry.digest, new.charge.weight
            return entry

        def attached(store: DeviceStore, task: str, round: int, digest: bytes) -> None:
            entry = store.outbox(task, round)
            assert entry is not None
            self._sent[digest] = self._sent[entry.digest]
            attach(store, task, round, digest)

        def published(agent: Agent, topic: str, message: Message) -> None:
            publish(agent, topic, message)
            if isinstance(message, Offer):
                update, weight = self._sent[message.digest]
                self._offered[agent.device][update] = weight

        with (
            patch.object(DeviceStore, "commit_coded", committed),
            patch.object(DeviceStore, "note_attached", attached),
            patch.object(Agent, "_publish", published),
        ):
            for task in self.tasks:
                self._play(task)
        for board in self._bench.boards:
            self._compare(board.store, "is at the end")
        self._bench.close()

    def _play(self, task: PreparedTask) -> None:
        bench = self._bench
        bench.begin(task)
        while len(bench.boards) < self.boards:
            self._join()
        for _ in range(self._random.randint(0, 2)):
            self._put_back()  # between two tasks, as after a card's backup
        for turn in range(1, MOST_TURNS):
            if turn % 50 == 0:
                bench.now += task.task.round.deadline_s  # a round waits for boards that are no more
            if bench.coordinator.engine.finished:
                break
            bench.drive(steps=self._random.randint(1, 12))
            self._replace_stopped()
            event = self._random.random()
            if event < 0.10:
                self._back_up()
            elif event < 0.12:
                self._put_back()
            elif event < 0.14:
                self._settle()
                bench.end()
                bench.begin(task)
        else:
            self.findings.append(f"{task.spec.task} did not end")
        self._settle()
        self._back_up()
        bench.end()

    def _join(self) -> None:
        self._made += 1
        self._bench.board(f"board-{self._made}")

    def _back_up(self) -> None:
        board = self._random.choice(self._bench.boards)
        self._copies[board.name].append(self._bench.copy(board, f"copy-{self._next()}"))

    def _put_back(self) -> None:
        """A board is switched off, an older copy of its state is put back, and it is switched on again."""
        able = [board for board in self._bench.boards if self._copies[board.name]]
        if not able:
            return
        board = self._random.choice(able)
        self._settle()
        self._bench.lose(board)
        state = self._bench.folder / f"state-{self._next()}"
        shutil.copytree(self._random.choice(self._copies[board.name]), state)
        again = self._bench.board(board.name, state)
        lacks = self._lacks(again.store)
        self.lacking, self.whole = self.lacking + lacks, self.whole + (not lacks)
        self._bench.drive(lambda: again.stopped is not None or again.agent.store_check.confirmed)
        if lacks and not isinstance(again.stopped, CopiedStore):
            self.findings.append(f"{again.name} goes on with a ledger that lacks something: {again.stopped}")
        self._replace_stopped()

    def _replace_stopped(self) -> None:
        for board in [each for each in self._bench.boards if each.stopped is not None]:
            if not isinstance(board.stopped, CopiedStore) or "old copy" not in str(board.stopped):
                self.findings.append(f"{board.name} ended: {board.stopped!r}")
            self.stopped.append(str(board.stopped))
            self._copies.pop(board.name, None)
            board.agent.close()  # as its process does; the round does not wait for it
            self._bench.lose(board)
            self._join()

    def _settle(self) -> None:
        """Lets the aggregator read what has come; an offer that nobody has read is known to nobody."""
        link = self._bench.coordinator.link
        while not link.events.empty():  # type: ignore[attr-defined]
            self._bench.coordinator.step(0.0)

    def _compare(self, store: DeviceStore, when: str) -> None:
        if self._lacks(store):
            charged, true = store.ledger.weight(), sum(self._offered[store.device].values())
            self.findings.append(f"{store.device} {when} with a ledger of {charged:.6g}, and the truth is {true:.6g}")

    def _lacks(self, store: DeviceStore) -> bool:
        true = sum(self._offered[store.device].values())
        return store.ledger.weight() < true * (1 - SLACK)

    def _next(self) -> int:
        self._made += 1
        return self._made
