"""Stores presence and health of boards, and the aggregator's state, in the registry.

A message counts only if it is signed by the board's key in the registry, and is not older than the last one: a will of
an earlier session, or a replayed message, changes nothing. Messages are written once a second, in one transaction, for
any number of boards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from hushfleet.aggregator.fleet.service import FleetService, ServicePart
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.storage.board import Board
from hushfleet.errors import BadSignature, Malformed
from hushfleet.wire.format.health import Health
from hushfleet.wire.format.messages import Birth, ServerState, decode_as, decode_message
from hushfleet.wire.format.topics import ParsedTopic, Topics
from hushfleet.wire.link.interface import Delivery

FLUSH_S = 1.0
HEARTBEAT_S = 10.0
SERVICE, AGGREGATOR = "service", "aggregator"


class Listener(ServicePart):
    """A part of the fleet service that writes the messages of boards and aggregator to the registry.

    :param clock: unix seconds.
    """

    def __init__(self, registry: FleetRegistry, *, clock: Callable[[], float] = time.time) -> None:
        self._registry = registry
        self._clock = clock
        self._boards = {board.device: board for board in registry.boards()}
        self._changed: dict[str, Board] = {}
        self._processes: dict[str, str] = {}
        self._next_flush = self._next_beat = 0.0

    def filters(self, topics: Topics) -> tuple[str, ...]:
        return topics.all_states, topics.all_health, topics.server

    def take(self, service: FleetService, topic: ParsedTopic, delivery: Delivery) -> None:
        """Takes a message. Raises a `WireError` for one that is refused."""
        federation, payload = service.topics.federation, delivery.payload
        if topic.kind == "server" and payload:
            state = decode_as(ServerState, payload, federation=federation)
            self._processes[AGGREGATOR] = "running" if state.state == "ready" else "stopped"
        elif topic.kind in ("state", "health") and topic.device is not None and payload:
            self._of_board(topic.device, payload, federation)

    def act(self, service: FleetService, now: float) -> None:
        self.flush(now)

    def _of_board(self, device: str, payload: bytes, federation: str) -> None:
        key = self._registry.key_of(device)
        if key is None:
            raise BadSignature(f"no key of {device} is known")
        message = decode_message(payload, federation=federation, public_key=key)
        if not isinstance(message, Birth | Health) or message.device != device:
            raise Malformed(f"a {type(message).__name__} came on a topic of {device}")
        before = self._boards.get(device)
        if before is None or before.public_key != key:  # with another key an id is another board
            before = Board(device, public_key=key)
        if message.session < before.session:
            return
        now = self._clock()
        heard = replace(before, session=message.session, version=message.version, seen=now)
        if isinstance(message, Birth):
            heard = replace(heard, state=message.state)
        else:
            if before.health is not None and _order(message) < _order(before.health):
                return
            heard = replace(heard, health=message, health_at=now)
        self._boards[device] = self._changed[device] = heard

    def flush(self, now: float) -> None:
        """Writes new messages once a second, and each `HEARTBEAT_S` a note that the service runs. Raises `StoreError`.

        :param now: monotonic seconds, because a clock that is set back must not stop the writing.
        """
        if now < self._next_flush:
            return
        self._next_flush = now + FLUSH_S
        if now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_S
            self._processes[SERVICE] = "running"
        if not (self._changed or self._processes):
            return
        with self._registry.transaction():
            self._registry.hear(self._changed.values())
            self._registry.note_processes(self._processes, at=self._clock())
        self._changed.clear()
        self._processes.clear()


def _order(health: Health) -> tuple[int, bool, int]:
    """Orders health messages: a release on trial follows the client of the same session, and its uptime restarts."""
    return health.session, health.slot == "trial", health.uptime_s
