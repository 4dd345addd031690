"""A fleet in words, the same on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

from hushfleet.aggregator.devices.roster_signing import RosterChanges
from hushfleet.aggregator.fleet.view import BoardView, FleetView, RolloutView, RunView, Stranger, SumsView
from hushfleet.aggregator.results.report.words import lifetime_words, number, percent, size
from hushfleet.aggregator.results.result import Lifetime
from hushfleet.privacy.protection import protection

SHOWN_NAMES = 4
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def duration(seconds: float) -> str:
    """`3 min`, `2 h`."""
    for length, unit in _UNITS:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def ago(at: float | None, now: float) -> str:
    return "never" if at is None else f"{duration(max(0.0, now - at))} ago"


def summary(view: FleetView) -> str:
    """`38 of 40 boards are there, 2 need somebody (greenhouse-03, greenhouse-07)`."""
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
    """The first of them, and how many more there are."""
    more = len(devices) - SHOWN_NAMES
    return ", ".join(devices[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def progress(run: RunView) -> str:
    """`round 3 of 20 is open: 5 of 8 have answered`."""
    if run.finished:
        told = f"{run.task}: all {run.rounds_closed} rounds are done"
        return f"{told}; boards wait for the next task: hushfleet fleet task DIR TASK.toml"
    if run.open_round is None:
        return f"{run.task}: {run.rounds_closed} of {run.rounds} rounds are done"
    asked = f" of {run.asked}" if run.asked else ""
    return f"{run.task}: round {run.open_round} of {run.rounds} is open, {run.answered}{asked} have answered"


def figures(view: FleetView) -> list[str]:
    """What engineers and whoever answers for privacy ask besides, a line each."""
    run = view.run
    of_run = [] if run is None else [f"task {run.task}, method {run.method}", privacy(run, view.lifetime), traffic(run)]
    return [line for line in (*of_run, certificates(view)) if line]


def privacy(run: RunView, lifetime: Lifetime | None) -> str:
    """The privacy loss of the board that has spent most, as charged: over all tasks, and in this one."""
    delta = "" if run.delta is None else f" at delta {number(run.delta)}"
    in_all = "" if lifetime is None else f"{lifetime_words(lifetime)}; "
    return (
        f"privacy spent, the most of any board, as charged: {in_all}in this task, per {run.unit}{delta}: "
        f"epsilon_server {number(run.epsilon)}{meaning(run)}, epsilon_release {number(run.epsilon_release)}"
    )


def meaning(run: RunView) -> str:
    """` (weak protection)`; nothing where no epsilon is known yet."""
    return "" if run.epsilon is None else f" ({protection(run.epsilon)})"


def traffic(run: RunView) -> str:
    accuracy = "" if run.accuracy is None else f", accuracy of the global model {percent(run.accuracy)}"
    return f"sent up {size(run.uplink_bytes)}, down {size(run.downlink_bytes)}{accuracy}"


def rollout(rollout: RolloutView) -> str:
    back = f", {rollout.returned} went back" if rollout.returned else ""
    why = f": {rollout.reason}" if rollout.reason else ""
    counted = f"{rollout.reached} of {rollout.wanted} boards run it{back}"
    return f"release {rollout.version} {rollout.state} ({rollout.stage}): {counted}{why}"


def roster(sums: SumsView) -> str:
    """`roster 1785225600 of 2026-07-28: 40 boards, 36 of them honest at least, no sum of fewer than 10`."""
    if not sums.roster:
        return "no roster is signed yet, so no round of secure sums begins"
    return (
        f"{sums.roster}: {sums.boards} boards, {sums.honest} of them honest at least, no sum of fewer than "
        f"{sums.min_devices}"
    )


def roster_waits(changes: RosterChanges) -> str:
    """`12 boards wait for a signed roster, and 1 is to leave it`."""
    joining, leaving = len(changes.added) + len(changes.changed), len(changes.removed)
    if joining:
        told = f"{joining} board{'s wait' if joining > 1 else ' waits'} for a signed roster"
        return told + f", and {leaving} {'are' if leaving > 1 else 'is'} to leave it" * bool(leaving)
    if leaving:
        return f"{leaving} board{'s are' if leaving > 1 else ' is'} to leave the roster, which waits to be signed"
    return "the limits of the roster have changed, which waits to be signed"


def roster_export(folder: str = "DIR") -> str:
    """The command that writes the list to be signed."""
    return f"hushfleet fleet roster export {folder} --out FILE"


def certificates(view: FleetView) -> str:
    """`its certificates end 2036-11-20, its authority 2046-11-18`; empty where it is not known."""
    if view.certificates_end is None or view.authority_end is None:
        return ""
    own, authority = (f"{date.fromtimestamp(end):%Y-%m-%d}" for end in (view.certificates_end, view.authority_end))
    return f"its certificates end {own}, its authority {authority}"


def stranger(stranger: Stranger) -> str:
    return f"{stranger.device} announced itself {stranger.count} times with a key that nobody has accepted"


def state(board: BoardView) -> str:
    """Its part in the run, unless its standing says that it has none."""
    if board.standing == "pending":
        return "waits for approval"
    if board.standing == "blocked":
        return "locked out"
    if board.standing == "new" and board.seen is None:
        return "not seen yet"
    return "not seen yet" if board.state == "absent" else board.state


def release(board: BoardView) -> str:
    mark = {"trial": " (on trial)", "returned": " (went back)"}.get(board.slot, "")
    frozen = {"unheard": ", hears of no newer one", "older": ", not the newest"}.get(board.freeze, "")
    return f"{board.version or '-'}{mark}{frozen}"


def health(board: BoardView) -> str:
    """`48 °C, disk 30 %, memory 40 %, trains on the GPU`."""
    told = [
        None if board.temperature_c is None else f"{board.temperature_c} °C",
        None if board.disk_percent is None else f"disk {board.disk_percent} %",
        None if board.memory_percent is None else f"memory {board.memory_percent} %",
        "slowed down" if board.throttled else None,
        {"cuda": "trains on the GPU", "cpu": "trains on the processor"}.get(board.accelerator),
    ]
    return ", ".join(filter(None, told)) or "-"


def spent(board: BoardView) -> str:
    """`3.2 of 8`: over all tasks, as charged, of what its card allows; or of this task alone."""
    if board.spent is None:
        return "-" if board.epsilon is None else number(board.epsilon)
    if board.is_above_limit:
        return f"{number(board.spent)}, above its card's {number(board.limit)}"
    told = number(board.spent) if board.limit is None else f"{number(board.spent)} of {number(board.limit)}"
    return f"up to {told}" if board.undecided else told


def sent(board: BoardView) -> str:
    return size(board.sent_bytes) if board.sent_bytes else "-"
