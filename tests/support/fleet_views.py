"""A fleet that has everything that the page can show, names and reasons that try to be markup among it."""

from __future__ import annotations

from dataclasses import replace

from hushfleet.aggregator.fleet.advice import with_problems
from hushfleet.aggregator.fleet.view import (
    BoardView,
    FleetView,
    Problem,
    RolloutView,
    RoundPoint,
    RunView,
    Said,
    Stranger,
)

NOW = 1_790_000_000.0
HOSTILE = '<script>document.title="run"</script><img src=x onerror="document.title=1">'
_DAY = 86400.0


def a_board(number: int, **changes: object) -> BoardView:
    board = BoardView(
        device=f"greenhouse-{number:02}",
        board="raspberry-pi-4-4gb",
        place=f"bench {number}",
        state="accepted",
        seen=NOW - 12,
        version="0.3.0",
        slot="good",
        uptime_s=93_600,
        disk_percent=30,
        memory_percent=40,
        temperature_c=55,
        throttled=False,
        health_at=NOW - 12,
        certificate_end=NOW + 400 * _DAY,
        rounds=11,
        epsilon=3.21,
        sent_bytes=45_300,
    )
    return replace(board, **changes)  # type: ignore[arg-type]


def a_view() -> FleetView:
    boards = [
        a_board(1),
        a_board(2, state="training", temperature_c=80, throttled=True),
        a_board(3, state="lost", seen=NOW - 3 * 3600.0),
        a_board(4, state="declined", decline=Said(12, "budget", "round 12 would spend 8.2 of 8.0")),
        a_board(5, state="declined", disk_percent=90, decline=Said(12, "disk", HOSTILE)),
        a_board(
            6,
            standing="pending",
            reason="waits for its operator: hushfleet fleet approve DIR greenhouse-06",
            state="absent",
            seen=None,
            version="",
            health_at=None,
            rounds=0,
            epsilon=None,
        ),
        a_board(7, standing="new", state="absent", seen=None, version="", health_at=None, rounds=0, epsilon=None),
        a_board(8, standing="blocked", state="absent", place="stolen"),
        a_board(9, version="0.4.0", slot="trial", certificate_end=NOW + 3 * _DAY, place=HOSTILE),
        a_board(10, version="0.3.0", slot="returned", refusal=Said(12, "below-noise", "quieter than its noise")),
        *(a_board(number, state="fetching", carried=4 if number == 11 else 0) for number in (11, 12)),
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
        boards=tuple(with_problems(board, now=NOW, newest_round=12, service_runs=True) for board in boards),
        run=run,
        aggregator="running",
        service="running",
        strangers=(Stranger("greenhouse-99", "5f" * 32, 7, NOW - 60),),
        rollout=RolloutView("0.4.0", "goes on", "stage 2 of 3: 10 % of the boards", 12, 1, 1, ""),
        problems=(Problem("the broker's certificate ends in 9 days", "hushfleet fleet renew"),),
    )
