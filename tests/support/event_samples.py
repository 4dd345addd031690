"""Event logs made up for tests: several boards with stragglers, drop-outs and an outage."""

from __future__ import annotations

import random
from typing import Any

BOARDS = {"jetson-orin-nano": 1.0, "raspberry-pi-5": 1.6, "raspberry-pi-4": 2.4, "raspberry-pi-zero-2-w": 6.0}
"""Seconds that a round's training takes, by board."""

Event = dict[str, Any]


def fleet_log(
    devices: int,
    rounds: int,
    *,
    seed: int = 1,
    away: float = 0.01,
    declines: float = 0.002,
    outage_round: int | None = None,
    quorum: float = 0.9,
    began: float = 1_700_000_000.0,
) -> list[Event]:
    """The events of a run, by time.

    :param away: how likely a device is cut off in a round, for some rounds.
    :param outage_round: in this round the broker crashes, and nearly all devices are lost for a while.
    :param quorum: the round closes when this share of the cohort has been accepted.
    """
    rng = random.Random(seed)
    boards = list(BOARDS)
    names = [f"device-{number:03d}" for number in range(devices)]
    board = {name: boards[number * len(boards) // devices] for number, name in enumerate(names)}
    speed = {name: rng.lognormvariate(0, 0.15) for name in names}
    events: list[Event] = [{"at": began, "event": "run", "devices": devices, "rounds": rounds}]
    back_in: dict[str, int] = {}

    def presence(at: float, name: str, state: str) -> None:
        events.append({"at": at, "event": "presence", "device": name, "state": state, "board": board[name]})

    for name in names:
        if rng.random() < 0.05:
            back_in[name] = rng.randint(2, max(2, rounds // 3))
        else:
            presence(began + rng.uniform(0.1, 2.0), name, "ready")
    now = began + 2.5
    for number in range(1, rounds + 1):
        for name in [name for name, when in back_in.items() if when <= number]:
            del back_in[name]
            presence(now - 0.2, name, "ready")
        cohort = [name for name in names if name not in back_in]
        events.append({"at": now, "event": "round_open", "round": number, "cohort": cohort})
        stretch, lost_at = 0.0, {}
        if number == outage_round:
            stretch = 6.0
            events += [
                {"at": now + 1.0, "event": "link", "state": "down"},
                {"at": now + 4.0, "event": "link", "state": "up"},
            ]
        planned, declined = [], []
        for name in cohort:
            fetched = now + rng.uniform(0.2, 0.6) + stretch
            trained = fetched + BOARDS[board[name]] * speed[name] * rng.lognormvariate(0, 0.2)
            sent = trained + 0.05 + rng.expovariate(1 / 0.6)
            if stretch and rng.random() < 0.9:
                presence(now + rng.uniform(4.0, 5.0), name, "lost")
                presence(now + rng.uniform(5.0, 5.9), name, "ready")
            if rng.random() < away:
                lost_at[name] = rng.uniform(fetched, sent)
                back_in[name] = number + rng.randint(1, 6)
            elif rng.random() < declines:
                declined.append(
                    {"at": fetched, "event": "decline", "round": number, "device": name, "code": "busy", "reason": ""}
                )
                continue
            planned.append((fetched, trained, sent, name))
        arrivals = sorted(sent for _, _, sent, name in planned if name not in lost_at)
        last = max(arrivals, default=now + 5.0)
        closes = arrivals[int(quorum * len(arrivals))] + 0.01 if quorum < 1 and arrivals else last + 0.01
        events += [event for event in declined if event["at"] < closes]
        for fetched, trained, sent, name in planned:
            ends = min(lost_at.get(name, sent), closes)
            if fetched < ends:
                presence(fetched, name, "training")
            if trained < ends:
                presence(trained, name, "ready")
                events.append({"at": trained + 0.02, "event": "offer", "round": number, "device": name, "bytes": 9})
            elif fetched < ends and name not in lost_at:
                presence(closes + 0.05, name, "ready")
            if name in lost_at:
                presence(lost_at[name], name, "lost")
            elif sent < closes:
                code = "malformed" if rng.random() < 0.001 else "accepted"
                events.append({"at": sent, "event": "update", "round": number, "device": name, "code": code})
        events.append({"at": closes, "event": "round_close", "round": number})
        now = max(closes, max(lost_at.values(), default=closes)) + 0.3
    events.append({"at": now, "event": "finished"})
    return sorted(events, key=lambda event: event["at"])
