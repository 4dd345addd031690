"""A fleet that has everything that the page can show, names and reasons that try to be markup among it."""

from __future__ import annotations

from dataclasses import replace

from hushfleet.aggregator.fleet.view import FleetView, RolloutView, RoundPoint, RunView
from hushfleet.aggregator.fleet.watching.columns import Circumstances, with_problems
from hushfleet.aggregator.storage.activity import RefusedBirth
from hushfleet.aggregator.storage.board import Board, Rejection
from hushfleet.wire.format.health import SHOWN, Health, Problem

NOW = 1_790_000_000.0
HOSTILE = '<script>document.title="run"</script><img src=x onerror="document.title=1">'
_DAY = 86400.0


def a_board(number: int, **changes: object) -> Board:
    board = Board(
        device=f"greenhouse-{number:02}",
        board="raspberry-pi-4-4gb",
        place=f"bench {number}",
        standing="enrolled",
        state="accepted",
        seen=NOW - 12,
        version="0.3.0",
        health_at=NOW - 12,
        certificate_end=NOW + 400 * _DAY,
        rounds=11,
        epsilon=3.21,
        spent=4.5,
        limit=8.0,
        sent_bytes=45_300,
    )
    of_health = {name: changes.pop(name) for name in list(changes) if name in SHOWN}
    told = Health(board.device, 1, "0.3.0", 93_600, 30, 40, 55, False, None, None, 0, "good")
    told = replace(told, **of_health)  # type: ignore[arg-type]
    return replace(board, health=told, **changes)  # type: ignore[arg-type]


def a_view(*only: Board) -> FleetView:
    """A fleet with all kinds of boards, or with these alone."""
    blank = Board("blank", "raspberry-pi-zero-2-w", standing="new")
    boards = [
        a_board(1),
        a_board(2, state="training", temperature_c=80, throttled=True),
        a_board(3, state="lost", seen=NOW - 3 * 3600.0),
        a_board(4, state="declined", decline=Rejection(12, "budget", "round 12 would spend 8.2 of 8.0")),
        a_board(5, state="declined", disk_percent=90, decline=Rejection(12, "disk", HOSTILE)),
        replace(blank, device="greenhouse-06", standing="pending", reason="waits for its operator: fleet approve"),
        replace(blank, device="greenhouse-07"),
        a_board(8, standing="blocked", state="absent", place="stolen"),
        a_board(9, version="0.4.0", slot="trial", certificate_end=NOW + 3 * _DAY, place=HOSTILE),
        a_board(10, version="0.3.0", slot="returned", refusal=Rejection(12, "below-noise", "quieter than its noise")),
        *(a_board(number, state="fetching", spent=7.9 if number == 11 else None) for number in (11, 12)),
    ]
    run = RunView(
        task="greenhouse-hush-1a2b3c4d",
        method="hush",
        unit="device",
        rounds=20,
        rounds_closed=11,
        open_round=12,
        opened=NOW - 240,
        asked=10,
        answered=5,
        accepted=3,
        accuracy=0.741,
        epsilon=3.21,
        epsilon_release=1.07,
        delta=1e-5,
        uplink_bytes=498_000,
        downlink_bytes=1_230_000,
        declines=(("budget", 3), ("disk", 1)),
        refusals=(("late", 4), ("below-noise", 1)),
        course=tuple(RoundPoint(n, 9, 45_000, 0.1 + 0.65 * (1 - 0.75**n)) for n in range(1, 12)),
    )
    return FleetView(
        federation="greenhouse",
        at=NOW,
        boards=tuple(with_problems(board, Circumstances(NOW, 12, True)) for board in only or boards),
        run=run,
        aggregator="running",
        service="running",
        refused_devices=(RefusedBirth("greenhouse-99", b"\x5f" * 32, 7, NOW - 60),),
        rollout=RolloutView("0.4.0", "goes on", "stage 2 of 3: 10 % of the boards", 12, 1, 1, ""),
        problems=(Problem("the broker's certificate ends in 9 days", "hushfleet fleet renew"),),
    )
