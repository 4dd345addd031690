"""The part of the fleet service that offers releases, serves their chunks, and advances the roll-out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from hushfleet.aggregator.fleet.folder import FleetFolder
from hushfleet.aggregator.fleet.registry import FleetRegistry
from hushfleet.aggregator.fleet.releases import Withdrawal, find_release, mapped, releases
from hushfleet.aggregator.fleet.rollout import HEARD_S, LISTENING, Rollout, board_rollouts, change, current, next_step
from hushfleet.aggregator.fleet.service import Service, ServicePart
from hushfleet.aggregator.fleet.sightings import HEARTBEAT_S
from hushfleet.aggregator.publish.blobs import ChunkServer
from hushfleet.errors import BadSignature, Malformed
from hushfleet.wire.format.fleet_messages import RELEASE_CHUNK_BYTES, ReleaseOffer
from hushfleet.wire.format.messages import Want, decode_message
from hushfleet.wire.format.topics import ParsedTopic, Topics
from hushfleet.wire.link.interface import Delivery

LOOK_EVERY_S = 1.0
GAP_S = 60.0
"""After this time without a look, the service has not listened: it was stopped, its broker away, or the clock set."""
LOOKED = "roll-out looked"
"""The entry of `processes` for the last look at a roll-out that runs, accurate to `HEARTBEAT_S`."""
MOST_FRAMES = 16  # in one turn of the service's loop, so that boards which enrol need not wait

_log = logging.getLogger("hushfleet.fleet")


class Updating(ServicePart):
    """Offers releases and serves them.

    :param wall: unix seconds.
    """

    every_s = LOOK_EVERY_S

    def __init__(self, folder: FleetFolder, registry: FleetRegistry, *, wall: Callable[[], float] = time.time) -> None:
        self._folder, self._registry, self._wall = folder, registry, wall
        self._rules = folder.config.updates
        self._files: dict[bytes, memoryview] = {}
        self._chunks = ChunkServer(self._files.get, chunk_bytes=RELEASE_CHUNK_BYTES)
        self._answered: dict[str, float] = {}  # device -> when the `Health` came that an offer has answered
        # the roll-out of the two above, and its files, because a release that is signed again is another file
        self._of: tuple[int, frozenset[bytes]] | None = None
        # unix seconds, and its value in the registry: a restart within `GAP_S` is no gap, a pause before it is one
        _, self._looked = registry.processes().get(LOOKED, ("", -GAP_S))
        self._noted = self._looked
        self._sent_until = 0.0  # monotonic seconds: the rate limit allows no frame before

    def filters(self, topics: Topics) -> Sequence[str]:
        return (topics.all_wants,)

    def take(self, service: Service, topic: ParsedTopic, delivery: Delivery) -> None:
        if topic.kind != "wants" or topic.device is None:
            return
        key = self._registry.key_of(topic.device)
        if key is None:
            raise BadSignature(f"no key of {topic.device} is known")
        want = decode_message(delivery.payload, federation=service.topics.federation, public_key=key)
        if not isinstance(want, Want):
            raise Malformed(f"expected a board's request for a release, got a {type(want).__name__}")
        self._chunks.want(topic.device, want, now=time.monotonic())

    def advance(self, service: Service, now: float) -> None:
        super().advance(service, now)
        self._serve(service, now)

    def act(self, service: Service, now: float) -> None:
        rollout = current(self._registry)
        if rollout is None or rollout.state != "running":
            self._stop_serving()
            return
        wall = self._wall()
        if not 0 <= wall - self._looked < GAP_S:
            self._listen_anew(rollout, wall)
        if not 0 <= wall - self._noted < HEARTBEAT_S:
            self._registry.write("INSERT OR REPLACE INTO processes VALUES (?, 'running', ?)", (LOOKED, wall))
            self._noted = wall
        self._looked = wall
        known = releases(self._registry)
        if (withdrawn := Withdrawal.of(known)) is not None and withdrawn.includes(rollout.version):
            self._stop(rollout, str(withdrawn))
            return
        offered = [each for each in known if each.version == rollout.version]
        served = rollout.number, frozenset(each.digest for each in offered)
        if served != self._of:
            self._stop_serving()
            self._of = served
            self._files.update(mapped(self._folder, offered))
        found = board_rollouts(self._registry, rollout, now=wall)
        with self._registry.transaction():
            for board in found:
                if board.outcome == "good" and board.offered and board.good_at is None:
                    _log.info("%s runs release %s", board.device, rollout.version)
                    self._registry.write(
                        "UPDATE offered SET good_at = ? WHERE number = ? AND id = ?",
                        (wall, rollout.number, board.device),
                    )
        step = next_step(rollout, board_rollouts(self._registry, rollout, now=wall), self._rules, now=wall)
        if step.stop:
            self._stop(rollout, step.stop)
            return
        if step.stage != rollout.stage:
            _log.info("the roll-out of release %s goes on to stage %d of 3", rollout.version, step.stage + 1)
            self._registry.write("UPDATE rollouts SET stage = ? WHERE number = ?", (step.stage, rollout.number))
        self._offer(service, rollout, step.offer, wall)

    def _stop(self, rollout: Rollout, reason: str) -> None:
        _log.error("the roll-out of release %s has stopped: %s", rollout.version, reason)
        change(self._registry, "stopped", reason)

    def _listen_anew(self, rollout: Rollout, wall: float) -> None:
        """Starts listening again, after boards were not heard or the roll-out stood still.

        Times that a clock noted while it was ahead become past times; such a board is away until it is heard again.
        """
        away = wall - HEARD_S
        with self._registry.transaction():
            self._registry.write("INSERT OR REPLACE INTO processes VALUES (?, 'running', ?)", (LISTENING, wall))
            self._registry.write("UPDATE boards SET health_at = ?2 WHERE health_at > ?1", (wall, away))
            # not after `health_at`: a board that was heard after the offer has taken it
            self._registry.write(
                "UPDATE offered SET at = CASE WHEN at > ?1 THEN ?2 ELSE at END, good_at = min(good_at, ?1) "
                "WHERE number = ?3",
                (wall, away, rollout.number),
            )

    def _offer(self, service: Service, rollout: Rollout, devices: Sequence[str], wall: float) -> None:
        heard = {board.device: board for board in self._registry.boards()}
        for device in devices:
            seen = heard[device]
            if seen.health is None or seen.health_at is None or seen.health_at == self._answered.get(device):
                continue
            release = find_release(self._registry, rollout.version, seen.health.platform)
            if release is None:
                continue
            # the row first, so that a board that has taken an offer is counted even if this process ends now
            self._registry.write("INSERT OR IGNORE INTO offered VALUES (?, ?, ?, NULL)", (rollout.number, device, wall))
            offer = ReleaseOffer(device, release.version, release.head, release.digest, release.size, rollout.number)
            service.publish(service.topics.fleet(device), offer)
            if device not in self._answered:
                _log.info("release %s is offered to %s", rollout.version, device)
            self._answered[device] = seen.health_at

    def _serve(self, service: Service, now: float) -> None:
        if self._chunks.due_at > now or self._sent_until > now:
            return
        second = 1024 * self._rules.kib_per_second
        for frame in self._chunks.frames(now=now, limit=MOST_FRAMES):
            service.send(service.topics.release(frame.digest), frame.data)
            self._sent_until = max(self._sent_until, now - 0.1) + len(frame.data) / second

    def _stop_serving(self) -> None:
        """Drops the requests of boards; they ask again."""
        self._chunks.clear()
        self._files.clear()
        self._answered.clear()
        self._of = None
