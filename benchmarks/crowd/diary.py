"""What each device of the generator notes of its rounds: a store and a link that are the board's own, and say when."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import IO, Any

from hushfleet.edge_client.board.pacing import PacedStore, Pacer
from hushfleet.edge_client.storage.store import OutboxEntry, RoundCommit
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.interface import Delivery, LinkEvent, publish_packet_bytes
from hushfleet.wire.link.mqtt import MqttLink


class Diary:
    """JSON lines of one generator process; its devices' threads share it. Times are unix seconds."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()
        self.messages: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def write(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def count(self, what: str, topic: str, payload: bytes) -> None:
        """One PUBLISH packet."""
        with self._lock:
            self.messages[what] += 1
            self.bytes[what] += publish_packet_bytes(topic, len(payload))

    def close(self) -> None:
        self._file.close()


class Rounds:
    """When one device did what in the round that it is in.

    plan_at      the plan was taken off the link
    model_at     the global model is there; training begins
    trained_at   noised, coded and committed; the offer is the next thing that leaves
    acked_at     the aggregator's acknowledgement is in the store
    """

    def __init__(self, device: str, diary: Diary) -> None:
        self._device = device
        self._diary = diary
        self._times: dict[str, float] = {}

    def note(self, what: str) -> None:
        self._times.setdefault(what, time.time())

    def note_plan(self) -> None:
        """What was announced last before training began: between rounds there may be word that none is open."""
        if "model_at" not in self._times:
            self._times["plan_at"] = time.time()

    def end(self, round: int) -> None:
        self.note("acked_at")
        self._diary.write({"device": self._device, "round": round, **self._times})
        self._times = {}


class NotedStore(PacedStore):
    """The store of a simulated device, which knows when training begins, when it ends, and when the ack is in.

    :param turn: held while the device trains.
    """

    def __init__(self, path: Path, *, device: str, rounds: Rounds, turn: threading.Lock) -> None:
        self._rounds, self._turn = rounds, turn
        super().__init__(path, device=device, durable=False, pacer=Pacer(), write_mb_s=None)

    def count_attempt(self, kind: str, what: str) -> int:
        if kind == "round":
            self._rounds.note("model_at")
            self._turn.acquire()
        return super().count_attempt(kind, what)

    def end_attempt(self, kind: str) -> None:
        if kind == "round":
            self._turn.release()
        super().end_attempt(kind)

    def commit_round(self, commit: RoundCommit) -> OutboxEntry:
        entry = super().commit_round(commit)
        self._rounds.note("trained_at")
        return entry

    def set_status(self, task: str, round: int, status: str) -> None:
        super().set_status(task, round, status)
        self._rounds.end(round)


class NotedLink(MqttLink):
    """The board's own link, which counts messages by kind and direction, and notes when a plan comes."""

    def __init__(self, url: str, *, topics: Topics, rounds: Rounds, diary: Diary, **options: Any) -> None:
        self._topics, self._rounds, self._diary = topics, rounds, diary
        super().__init__(url, **options)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        super().publish(topic, payload, retain=retain)
        self._diary.count(f"sent {self._topics.parse(topic).kind}", topic, payload)

    def receive(self, timeout_s: float) -> LinkEvent | None:
        event = super().receive(timeout_s)
        if isinstance(event, Delivery):
            kind = self._topics.parse(event.topic).kind
            self._diary.count(f"received {kind}", event.topic, event.payload)
            if kind == "round":
                self._rounds.note_plan()
        return event
