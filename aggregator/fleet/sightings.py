"""What the fleet service hears of boards and of the aggregator, kept in the registry: presence and health.

Messages are believed only with the key that the registry or the aggregator's register has of the board, and only if
they are not older than what came: a will of an earlier session, or a message that is published again, changes nothing.
What comes is written once a second, in one transaction, however many boards there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from hushfleet.aggregator.fleet.registry import FleetRegistry
from hushfleet.config.schema import pack, unpack
from hushfleet.errors import BadSignature, Malformed
from hushfleet.wire.format.messages import Birth, Health, ServerState, decode_message
from hushfleet.wire.format.topics import Topics

FLUSH_S = 1.0
HEARTBEAT_S = 20.0
SERVICE, AGGREGATOR = "service", "aggregator"

KeyOf = Callable[[str], bytes | None]


@dataclass(frozen=True)
class Sighting:
    """A board, as it was heard last.

    :param state: of its newest `Birth`; `absent` before the first.
    :param seen, health_at: unix seconds.
    """

    device: str
    public_key: bytes
    state: str = "absent"
    session: int = 0
    version: str = ""
    seen: float = 0.0
    health: Health | None = None
    health_at: float | None = None


def sightings(registry: FleetRegistry) -> dict[str, Sighting]:
    """All that were heard, by id."""
    rows = registry.rows(
        "SELECT id, public_key, state, session, version, seen, health, health_at FROM sightings ORDER BY id"
    )
    return {device: Sighting(device, *fields, _health(body), at) for device, *fields, body, at in rows}


def processes(registry: FleetRegistry) -> dict[str, tuple[str, float]]:
    """State of `service` and `aggregator`, and since when it is known (unix seconds)."""
    return {name: (state, at) for name, state, at in registry.rows("SELECT name, state, at FROM processes")}


class Listener:
    """Takes in messages of the topics `filters`, and writes what they say to the registry.

    :param key_of: the public key that a board's messages must be signed with; None: it is not known, and not believed.
    :param clock: unix seconds.
    """

    def __init__(
        self, registry: FleetRegistry, topics: Topics, key_of: KeyOf, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._registry = registry
        self._topics = topics
        self._key_of = key_of
        self._clock = clock
        self._boards = sightings(registry)
        self._changed: dict[str, Sighting] = {}
        self._processes: dict[str, str] = {}
        self._next_flush = self._next_beat = 0.0

    @property
    def filters(self) -> tuple[str, ...]:
        return self._topics.all_states, self._topics.all_health, self._topics.server

    def take(self, topic_name: str, payload: bytes) -> None:
        """One message. Raises a `WireError` for one that is not believed."""
        topic = self._topics.parse(topic_name)
        if not payload:
            return
        if topic.kind == "server":
            state = decode_message(payload, federation=self._topics.federation)
            if not isinstance(state, ServerState):
                raise Malformed(f"a {type(state).__name__} came where the aggregator's state belongs")
            self._processes[AGGREGATOR] = "running" if state.state == "ready" else "stopped"
        elif topic.device is not None and topic.kind in ("state", "health"):
            self._of_board(topic.device, payload)

    def _of_board(self, device: str, payload: bytes) -> None:
        key = self._key_of(device)
        if key is None:
            raise BadSignature(f"no key of {device} is known")
        message = decode_message(payload, federation=self._topics.federation, public_key=key)
        if not isinstance(message, Birth | Health) or message.device != device:
            raise Malformed(f"a {type(message).__name__} came on a topic of {device}")
        before = self._boards.get(device)
        if before is None or before.public_key != key:  # with another key an id is another board
            before = Sighting(device, key)
        if message.session < before.session:
            return
        now = self._clock()
        heard = replace(before, session=message.session, version=message.version, seen=now)
        if isinstance(message, Birth):
            heard = replace(heard, state=message.state)
        else:
            told = before.health
            if told is not None and (message.session, message.uptime_s) < (told.session, told.uptime_s):
                return
            heard = replace(heard, health=message, health_at=now)
        self._boards[device] = self._changed[device] = heard

    def flush(self, *, stopping: bool = False) -> None:
        """Writes what came, if a second has passed; and now and then that the service runs. Raises `StoreError`."""
        now = self._clock()
        if not stopping and now < self._next_flush:
            return
        self._next_flush = now + FLUSH_S
        if stopping or now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_S
            self._processes[SERVICE] = "stopped" if stopping else "running"
        if not (self._changed or self._processes):
            return
        rows = [
            (s.device, s.public_key, s.state, s.session, s.version, s.seen, s.health and pack(s.health), s.health_at)
            for s in self._changed.values()
        ]
        with self._registry.transaction():
            self._registry.write_all("INSERT OR REPLACE INTO sightings VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
            states = [(name, state, now) for name, state in self._processes.items()]
            self._registry.write_all("INSERT OR REPLACE INTO processes VALUES (?, ?, ?)", states)
        self._changed.clear()
        self._processes.clear()


def _health(body: bytes | None) -> Health | None:
    """None also for one of another version of the kit."""
    try:
        return None if body is None else unpack(Health, body, what="the health")
    except Malformed:
        return None
