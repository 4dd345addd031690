"""Describes a fleet in words, the same on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

from hushfleet.aggregator.config.calendar import moment_text
from hushfleet.aggregator.fleet.trust.registry import RefusedRequest
from hushfleet.aggregator.fleet.view import FleetView, RolloutView, RunView, SeasonView, SumsView
from hushfleet.aggregator.planning.season import day_text, learns_until
from hushfleet.aggregator.report.readable import (
    ago,
    epsilon_number,
    format_lifetime,
    number,
    percent,
    size,
)
from hushfleet.aggregator.results.result import Lifetime
from hushfleet.aggregator.storage.activity import RefusedBirth
from hushfleet.privacy.protection import protection
from hushfleet.privacy.spending import describe_since
from hushfleet.wire.format.health import Problem

SHOWN_NAMES = 4
ON_THE_BOARD = "sudo -u hushfleet hushfleet-edge status /etc/hushfleet/device.toml"


def summary(view: FleetView) -> str:
    """Summarises: `38 of 40 boards are there, 2 need somebody (greenhouse-03, greenhouse-07)`."""
    urgent = [board.device for board in view.boards if board.is_urgent]
    parts = [f"{view.present} of {len(view.boards)} boards are there"]
    if urgent:
        parts.append(f"{len(urgent)} need{'s' if len(urgent) == 1 else ''} somebody ({named(urgent)})")
    if view.run is not None and view.run.finished and view.aggregator != "running":
        parts.append("the task is finished")
    elif view.aggregator != "unknown":
        parts.append(f"the aggregator {'runs' if view.aggregator == 'running' else 'does not run'}")
    return ", ".join(parts)


def named(devices: Sequence[str]) -> str:
    """Returns the first names, and how many more there are."""
    more = len(devices) - SHOWN_NAMES
    return ", ".join(devices[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def progress(run: RunView, season: SeasonView | None = None) -> str:
    """Describes progress: `round 3 of 20 is open: 5 of 8 have answered`.

    :param season: the season that this run is.
    """
    lost = "" if run.lost is None else f"; {run.lost.words(run.rounds_closed)}"
    if run.finished:
        done = "all" if run.rounds_closed >= run.rounds else f"it has ended, and {run.rounds_closed} of"
        told = f"{run.task}: {done} {run.rounds} rounds are done{lost}"
        if season is None:
            return f"{told}; boards wait for the next task: hushfleet fleet task DIR TASK.toml"
        return f"{told}; boards predict with their personalized heads"
    if run.open_round is None:
        return f"{run.task}: {run.rounds_closed} of {run.rounds} rounds are done{lost}"
    asked = f" of {run.asked}" if run.asked else ""
    return f"{run.task}: round {run.open_round} of {run.rounds} is open, {run.answered}{asked} have answered{lost}"


def next_round(view: FleetView) -> str:
    """Describes the next opening: `next round: tomorrow 01:00 (Europe/Berlin)`, or season; empty if none waits for a
    time."""
    if view.paused is not None:
        return f"training is paused, {ago(view.paused, view.at)}; let it go on: hushfleet fleet resume DIR"
    run, season = view.run, view.season
    if run is not None and run.finished and season is not None and season.further != 0 and season.ends is not None:
        return f"next season: {moment_text(season.ends, now=view.at, zone=season.zone)}"
    if run is None or run.finished or run.next_opening is None or run.next_opening.at <= view.at:
        return ""
    number, at, zone = run.next_opening
    what = f"round {number} goes on" if number == run.open_round else "next round"
    return f"{what}: {moment_text(at, now=view.at, zone=zone)}"


def figures(view: FleetView) -> list[str]:
    """Returns more figures, one per line, for engineers and for the person responsible for privacy."""
    found = [certificates(view)]
    if (run := view.run) is not None:
        found = [f"task {run.task}, method {run.method}", run_privacy(run, view.lifetime), traffic(run), *found]
    return [line for line in found if line]


def run_privacy(run: RunView, lifetime: Lifetime | None) -> str:
    """Describes the privacy loss of the board that has spent most, as charged: over all tasks, and in this one."""
    delta = "" if run.delta is None else f" at delta {number(run.delta)}"
    in_all = "" if lifetime is None else f"{format_lifetime(lifetime)}; "
    return (
        f"privacy spent, the most of any board, as charged: {in_all}in this task, per {run.unit}{delta}: "
        f"epsilon_server {epsilon_number(run.epsilon)}{meaning(run)}, epsilon_release {number(run.epsilon_release)}"
    )


def meaning(run: RunView) -> str:
    """Rates epsilon: ` (weak protection)`; empty if no epsilon is known yet."""
    return "" if run.epsilon is None else f" ({protection(run.epsilon)})"


def traffic(run: RunView) -> str:
    accuracy = "" if run.accuracy is None else f", accuracy of the global model {percent(run.accuracy)}"
    return f"sent up {size(run.uplink_bytes)}, down {size(run.downlink_bytes)}{accuracy}"


def rollout(rollout: RolloutView) -> str:
    back = f", {rollout.returned} went back" if rollout.returned else ""
    why = f": {rollout.reason}" if rollout.reason else ""
    counted = f"{rollout.reached} of {rollout.wanted} boards run it{back}"
    return f"release {rollout.version} {rollout.state} ({rollout.stage}): {counted}{why}"


def membership_list(sums: SumsView) -> str:
    """Describes the membership list: `roster 1785225600 of 2026-07-28: 40 boards, 36 of them honest at least, ...`."""
    if not sums.roster:
        return "no membership list is signed yet, so no round of secure aggregation begins"
    return (
        f"{sums.roster}: {sums.boards} boards, {sums.honest} of them honest at least, no sum of fewer than "
        f"{sums.min_devices}"
    )


def certificates(view: FleetView) -> str:
    """Describes the ends: `its certificates end 2036-11-20, its authority 2046-11-18`; empty if they are not known."""
    if view.certificates_end is None or view.authority_end is None:
        return ""
    own, authority = (f"{date.fromtimestamp(end):%Y-%m-%d}" for end in (view.certificates_end, view.authority_end))
    return f"its certificates end {own}, its authority {authority}"


def refused_device(refused: RefusedBirth) -> str:
    return f"{refused.device} announced itself {refused.count} times with a key that nobody has accepted"


def asks(request: RefusedRequest, now: float) -> str:
    """Describes a request that was not granted: who asks, since when, with which key, and why it waits."""
    token = "a valid token" if request.has_token else "no token"
    key = request.public_key.hex()[:16]
    return f"{request.device} asked {ago(request.at, now)} with {token} and the key {key}: {request.reason}"


def sentences(view: FleetView) -> dict[str, str]:
    """Answers the four questions of a fleet's owner, by name.

    Are the boards well? How many samples are used? Is the fleet's model better than a board's own? How much privacy
    is left, and for how many rounds? Results that depend on a board's samples and are not charged stay on the board
    (docs/privacy.md, "Health"), so the second and the third answer say where to read them.
    """
    found = {
        "boards": summary(view),
        "samples": samples(view),
        "model": model(view),
        "privacy": privacy_left(view),
    }
    return found if view.season is None else {**found, "season": season(view.season, now=view.at)}


def season(season: SeasonView, *, now: float) -> str:
    """Describes the seasons: `season 2 until 14 May 2027; learns until 14 August 2028; then ...`."""
    if season.ends is None:
        paid = "" if season.further is None else f"; the lifetime limit pays for {season.further + 1} of them"
        return f"season {season.number} of {season.every} begins with its first round{paid}"
    until = learns_until(season.learns_until, now=now, zone=season.zone)
    return f"season {season.number} until {day_text(season.ends, season.zone)}; {until}"


def season_problems(season: SeasonView | None) -> list[Problem]:
    """Tells urgently why the season of the present time does not go on."""
    if season is None or not season.obstacle:
        return []
    return [Problem(season.obstacle, "The fleet service looks again every ten minutes.", urgent=True)]


def samples(view: FleetView) -> str:
    where = f"How many a board uses or leaves out, and why, is private and stays on it; read it there: {ON_THE_BOARD}"
    without = [board.device for board in view.boards if board.decline is not None and board.decline.code == "no-data"]
    if not without:
        return where
    who = f"{len(without)} boards have" if len(without) > 1 else "1 board has"
    cure = "look at data.path there, and at the names of its folders"
    return f"{who} none that fit the task: {named(without)}; {cure}. {where}"


def model(view: FleetView) -> str:
    told = [view.pay] if view.pay else []
    if view.run is not None and view.run.accuracy is not None:
        told.append(f"The fleet's model is right on {percent(view.run.accuracy)} of the public test samples")
    better = "Whether the fleet's is better on a board than the board's own is private, too"
    return ". ".join([*told, f"{better}, and told by the same command there"])


def privacy_left(view: FleetView) -> str:
    left = view.privacy_left
    if left is None:
        return "Nothing is spent yet"
    told = f"{left.device}, which has spent most, stands at {epsilon_number(left.spent, left.limit)}"
    above = left.limit is not None and left.spent > left.limit
    if left.limit is not None:
        told += f"{', above' if above else ' of'} the {number(left.limit)} that its card allows"
    if left.period:
        told = f"{told} in all{describe_since(left.since)}, and at {left.period}"
    told += f" (epsilon; {protection(left.spent)})"
    if above:
        return f"{told}; its owner alone can allow more"
    if left.rounds is None:
        return told
    come = 0 if view.run is None or view.run.finished else view.run.rounds - view.run.rounds_closed
    if come and left.rounds >= come:
        come_words = f"all {come} rounds" if come > 1 else "the round"
        return f"{told}; the rest is enough for {come_words} that this task has to come"
    more = f"enough for {left.rounds} more round{'s' * (left.rounds > 1)}"
    told += f"; the rest is {more if left.rounds else 'not enough for another round'} of this task"
    return f"{told}, which has {come} to come" if come else told
