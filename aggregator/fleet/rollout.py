"""Rolls a release out: to one board, then to a share, then to all; it stops if too many boards go back.

A roll-out is a few rows of the registry; the state of each board follows from its health. An offer is sent when a board
has just been heard, and is never retained by the broker: a withdrawn offer is not repeated, and a board that was away
is offered the release when it is back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hushfleet.aggregator.fleet.folder import UpdatesPart
from hushfleet.aggregator.fleet.registry import FleetRegistry
from hushfleet.aggregator.fleet.releases import offered_releases, releases
from hushfleet.aggregator.fleet.sightings import Sighting, processes, sightings
from hushfleet.aggregator.fleet.view import RolloutView
from hushfleet.errors import BadInput
from hushfleet.release import Manifest
from hushfleet.release.manifest import VERSION, version_order

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
    heard = sightings(registry)
    offered = {
        device: (at, good_at)
        for device, at, good_at in registry.rows(
            "SELECT id, at, good_at FROM offered WHERE number = ?", (rollout.number,)
        )
    }
    manifests = {each.platform: each.manifest for each in releases(registry) if each.version == rollout.version}
    _, since = processes(registry).get(LISTENING, ("", 0.0))
    boards = [board.device for board in registry.boards() if board.state == "enrolled"]
    return [
        _board_rollout(device, rollout, heard.get(device), offered.get(device), manifests, since, now)
        for device in boards
    ]


def _board_rollout(
    device: str,
    rollout: Rollout,
    seen: Sighting | None,
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
    health, heard_at = (None, 0.0) if seen is None else (seen.health, seen.health_at or 0.0)

    def found(outcome: Outcome, why: str = "") -> BoardRollout:
        return BoardRollout(device, outcome, at is not None, good_at, why)

    if health is None:
        return found("away")
    if health.version == rollout.version and health.slot != "trial":
        return found("good")
    if health.slot == "none":
        return found("unmanaged", "it takes no releases")
    manifest = manifests.get(health.platform)
    if manifest is None:
        return found("no release", f"there is no release {rollout.version} for {health.platform or 'it'}")
    if at is None and _would_refuse(health.version, manifest):
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


def _would_refuse(version: str, manifest: Manifest) -> bool:
    """Returns whether a board that runs `version`, as it says itself, refuses an older release."""
    is_newer = VERSION.fullmatch(version) is not None and version_order(version) > manifest.order
    return is_newer and not manifest.is_downgrade_from(version)


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
    managed = [board for board in found if board.outcome not in ("unmanaged", "no release")]
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
    taken = [
        board for board in board_rollouts(registry, found, now=now) if board.outcome not in ("unmanaged", "no release")
    ]
    counts: Mapping[str, int] = {
        outcome: sum(board.outcome == outcome for board in taken) for outcome in ("good", "failed")
    }
    state = "done" if found.state == "running" and counts["good"] == len(taken) > 0 else found.state
    return RolloutView(
        version=found.version,
        state=state,
        stage=STAGES[found.stage],
        wanted=len(taken),
        reached=counts["good"],
        returned=counts["failed"],
        reason=found.reason,
    )
