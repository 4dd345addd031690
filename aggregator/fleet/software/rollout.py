"""Rolls a release out: to one board, then to a share, then to all; it stops if too many boards go back.

A roll-out is a few rows of the registry; the state of each board follows from its health. An offer is sent when a board
has just been heard, and is never retained by the broker: a withdrawn offer is not repeated, and a board that was away
is offered the release when it is back.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hushfleet.aggregator.fleet.service import FleetService, ServicePart
from hushfleet.aggregator.fleet.sightings import HEARTBEAT_S
from hushfleet.aggregator.fleet.software.releases import Withdrawal, find_release, mapped, offered_releases, releases
from hushfleet.aggregator.fleet.trust.folder import FleetFolder, UpdatesPart
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.fleet.view import RolloutView
from hushfleet.aggregator.payloads.blobs import ChunkServer
from hushfleet.aggregator.storage.board import Board
from hushfleet.errors import BadInput, BadSignature
from hushfleet.release.manifest import VERSION, Manifest, version_order
from hushfleet.wire.format.fleet_messages import RELEASE_CHUNK_BYTES, ReleaseOffer
from hushfleet.wire.format.messages import Want, decode_as
from hushfleet.wire.format.topics import ParsedTopic, Topics
from hushfleet.wire.link.interface import Delivery

STAGES = ("one board", "a share of the boards", "all boards")
HEARD_S = 180.0
"""A board counts as present if its last health message is not older than this."""
SILENT_S = 6 * 3600.0
"""A board that took an offer counts as failed if it was not heard for longer than this, until it is heard again."""
LONGEST_S = 24 * 3600.0
"""A board that took an offer and is heard counts as failed if it has not finished in this time."""

LISTENING = "roll-out"
"""The entry of `processes` for the start of listening without a gap; earlier silence of a board does not count."""

RolloutState = Literal["running", "paused", "stopped", "cancelled"]
Outcome = Literal["away", "waits", "offered", "good", "failed", "unmanaged", "no release"]
LOOK_EVERY_S = 1.0
GAP_S = 60.0
"""After this time without a look, the service has not listened: it was stopped, its broker away, or the clock set."""
LOOKED = "roll-out looked"
"""The entry of `processes` for the last look at a roll-out that runs, accurate to `HEARTBEAT_S`."""
MOST_FRAMES = 16  # in one turn of the service's loop, so that boards which enrol need not wait

_log = logging.getLogger("hushfleet.fleet")


@dataclass(frozen=True)
class Rollout:
    """One roll-out; the one with the highest number is in force.

    :param number: sent to boards as the number of the attempt (`ReleaseOffer.attempt`).
    :param state: `stopped` is set by the fleet service, all others by a person.
    :param stage: index in `STAGES`; :param began: unix seconds.
    """

    number: int
    version: str
    state: RolloutState
    reason: str
    stage: int
    began: float


@dataclass(frozen=True)
class BoardRollout:
    """The state of a board in a roll-out.

    :param outcome: `away`: not heard lately; `unmanaged`: it takes no releases; `no release`: none for its platform, or
        one that it would refuse.
    :param good_at: unix seconds; :param offered: whether an offer was made to it.
    """

    device: str
    outcome: Outcome
    offered: bool
    good_at: float | None
    why: str = ""

    @property
    def takes_part(self) -> bool:
        return self.outcome not in ("unmanaged", "no release")


def current(registry: FleetRegistry) -> Rollout | None:
    row = registry.row("SELECT number, version, state, reason, stage, began FROM rollouts ORDER BY number DESC LIMIT 1")
    return None if row is None else Rollout(*row)


def begin(registry: FleetRegistry, version: str | None, *, now: float) -> Rollout:
    """Begins a roll-out, in place of the one before.

    :param version: None: the newest that was not withdrawn.

    Raises `BadInput` if there is no such release, or if it was withdrawn.
    """
    offered = offered_releases(registry, version)
    if not offered:
        raise BadInput("this fleet knows no release; give it one: hushfleet release add DIR FILE.hfr")
    registry.write("INSERT INTO rollouts (version, state, began) VALUES (?, 'running', ?)", (offered[0].version, now))
    found = current(registry)
    assert found is not None
    return found


def change(registry: FleetRegistry, state: RolloutState, reason: str = "") -> Rollout:
    """Pauses, resumes, stops or cancels the roll-out in force.

    Raises `BadInput` if there is none, or for one that is to go on, if its release was withdrawn.
    """
    found = current(registry)
    if found is None or found.state == "cancelled":
        raise BadInput("there is no roll-out; begin one with: hushfleet release rollout DIR")
    if state == "running":
        offered_releases(registry, found.version)
    registry.write("UPDATE rollouts SET state = ?, reason = ? WHERE number = ?", (state, reason, found.number))
    return Rollout(found.number, found.version, state, reason, found.stage, found.began)


def board_rollouts(registry: FleetRegistry, rollout: Rollout, *, now: float) -> list[BoardRollout]:
    """Returns the state of each board that may take part."""
    offered = {
        device: (at, good_at)
        for device, at, good_at in registry.rows(
            "SELECT id, at, good_at FROM offered WHERE number = ?", (rollout.number,)
        )
    }
    manifests = {each.platform: each.manifest for each in releases(registry) if each.version == rollout.version}
    _, since = registry.processes().get(LISTENING, ("", 0.0))
    return [
        _board_rollout(board, rollout, offered.get(board.device), manifests, since, now)
        for board in registry.boards()
        if board.standing == "enrolled"
    ]


def _board_rollout(
    board: Board,
    rollout: Rollout,
    offered: tuple[float, float | None] | None,
    manifests: Mapping[str, Manifest],
    since: float,
    now: float,
) -> BoardRollout:
    """Finds the state of one board.

    :param manifests: of the roll-out's release, by platform.
    :param since: start of listening (`LISTENING`), unix seconds; earlier silence does not count against a board.
    """
    at, good_at = offered or (None, None)
    health, heard_at = board.health, board.health_at or 0.0

    def found(outcome: Outcome, why: str = "") -> BoardRollout:
        return BoardRollout(board.device, outcome, at is not None, good_at, why)

    if health is None:
        return found("away")
    if health.version == rollout.version and health.slot != "trial":
        return found("good")
    if health.slot == "none":
        return found("unmanaged", "it takes no releases")
    manifest = manifests.get(health.platform)
    if manifest is None:
        return found("no release", f"there is no release {rollout.version} for {health.platform or 'it'}")
    is_newer = VERSION.fullmatch(health.version) is not None and version_order(health.version) > manifest.order
    if at is None and is_newer and not manifest.is_downgrade_from(health.version):
        why = f"it runs {health.version}, and release {rollout.version} is older and not signed as a downgrade from it"
        return found("no release", why)
    tried = (health.tried, health.attempt) == (rollout.version, rollout.number)
    if at is not None and tried and health.slot == "returned":
        return found("failed", "it refused the release, or went back")
    if good_at is not None and tried:
        return found("good")  # by now a board of 0.3 may run another release, from a USB stick
    if at is not None and health.attempt > rollout.number:
        later = f"it has answered roll-out {health.attempt}, which this registry does not know"
        return found("failed", f"{later}; begin roll-outs until their number is higher")
    if at is not None and now - max(heard_at, since) > SILENT_S and heard_at >= at:
        return found("failed", f"it has not been heard for {(now - heard_at) / 3600:.0f} hours")
    if at is not None and now - max(at, since) > LONGEST_S and now - heard_at < HEARD_S:
        return found("failed", f"it has not finished in {(now - max(at, since)) / 3600:.0f} hours")
    if at is not None:
        return found("offered")
    return found("waits" if now - heard_at < HEARD_S else "away")


@dataclass(frozen=True)
class RolloutStep:
    """The next actions of a roll-out.

    :param offer: boards to which the release is to be offered, for the first time or again.
    :param stage: the current stage.
    :param stop: why the roll-out must stop; empty if it goes on.
    """

    offer: tuple[str, ...]
    stage: int
    stop: str = ""


def next_step(rollout: Rollout, found: list[BoardRollout], rules: UpdatesPart, *, now: float) -> RolloutStep:
    """Decides the next step from the boards' states alone."""
    managed = [board for board in found if board.takes_part]
    taking = [board for board in managed if board.offered]
    failed = [board for board in taking if board.outcome == "failed"]
    sizes = stage_sizes(len(managed), rules)
    stage = min(rollout.stage, len(sizes) - 1)
    allowed = math.floor(rules.error_budget * sizes[stage])
    if len(failed) > allowed:
        named = ", ".join(board.device for board in failed[:5])
        return RolloutStep((), stage, f"{len(failed)} boards have failed ({named}), {allowed} may; {failed[0].why}")
    ended = [board for board in taking if board.outcome in ("good", "failed")]
    soaked = all(now - (board.good_at or now) >= 60 * rules.soak_minutes for board in ended if board.outcome == "good")
    if stage + 1 < len(sizes) and len(ended) == len(taking) >= sizes[stage] and soaked:
        stage += 1
    again = [board.device for board in taking if board.outcome == "offered"]
    waiting = [board.device for board in managed if board.outcome == "waits"]
    return RolloutStep((*again, *waiting[: max(0, sizes[stage] - len(taking))]), stage)


def stage_sizes(boards: int, rules: UpdatesPart) -> tuple[int, int, int]:
    """Returns the number of boards to which the release has been offered by the end of each stage."""
    return 1, max(1, math.ceil(rules.second_stage * boards)), max(1, boards)


def rollout_view(registry: FleetRegistry, *, now: float) -> RolloutView | None:
    """Describes the roll-out in force; None if there is none."""
    found = current(registry)
    if found is None or found.state == "cancelled":
        return None
    taken = [board for board in board_rollouts(registry, found, now=now) if board.takes_part]
    good, failed = (sum(board.outcome == outcome for board in taken) for outcome in ("good", "failed"))
    state = "done" if found.state == "running" and good == len(taken) > 0 else found.state
    return RolloutView(
        found.version, state, STAGES[found.stage], wanted=len(taken), reached=good, returned=failed, reason=found.reason
    )


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

    def take(self, service: FleetService, topic: ParsedTopic, delivery: Delivery) -> None:
        if topic.kind != "wants" or topic.device is None:
            return
        key = self._registry.key_of(topic.device)
        if key is None:
            raise BadSignature(f"no key of {topic.device} is known")
        want = decode_as(Want, delivery.payload, federation=service.topics.federation, public_key=key)
        self._chunks.want(topic.device, want, now=time.monotonic())

    def advance(self, service: FleetService, now: float) -> None:
        super().advance(service, now)
        self._serve(service, now)

    def act(self, service: FleetService, now: float) -> None:
        rollout = current(self._registry)
        if rollout is None or rollout.state != "running":
            self._stop_serving()
            return
        wall = self._wall()
        if not 0 <= wall - self._looked < GAP_S:
            self._listen_anew(rollout, wall)
        if not 0 <= wall - self._noted < HEARTBEAT_S:
            self._registry.note_processes({LOOKED: "running"}, at=wall)
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
            self._registry.note_processes({LISTENING: "running"}, at=wall)
            self._registry.write("UPDATE boards SET health_at = ?2 WHERE health_at > ?1", (wall, away))
            # not after `health_at`: a board that was heard after the offer has taken it
            self._registry.write(
                "UPDATE offered SET at = CASE WHEN at > ?1 THEN ?2 ELSE at END, good_at = min(good_at, ?1) "
                "WHERE number = ?3",
                (wall, away, rollout.number),
            )

    def _offer(self, service: FleetService, rollout: Rollout, devices: Sequence[str], wall: float) -> None:
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

    def _serve(self, service: FleetService, now: float) -> None:
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
