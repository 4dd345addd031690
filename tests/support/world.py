"""Small worlds: real agents and a real coordinator on a tiny task, whose boards are made of plain seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hushfleet.aggregator.config.scenario import ScenarioSection
from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.simulator.schedule import make_schedule
from hushfleet.simulator.world.fleet import WorldFleet
from hushfleet.simulator.world.outcomes import FleetDevice, RoundOutcome
from hushfleet.simulator.world.run import LinkOptions
from hushfleet.simulator.world.times import Costs, DeviceTimes
from support.fleet import prepared_task

PROMPT = LinkOptions(lost_noticed_s=0.0, first_backoff_s=1e-4, longest_backoff_s=1e-4, server_start_s=3.0)
"""Whose links are tried again at once, so that moments can be told."""
FREE = Costs(batch_s=0, sample_s=0, release_s=0, start_s=0, load_s=0, accept_s=0, close_s=0)
BOARD = DeviceTimes(
    latency_s=0.01,
    down_s_per_byte=0.0,
    up_s_per_byte=0.0,
    start_s=0.0,
    load_s=0.0,
    steps=3,
    step_s=2.0,
    release_s=0.5,
    write_s_per_byte=0.0,
    idle_w=1.0,
    active_w=2.0,
)
"""Trains for 6 s, takes 0.5 s for the rest, and has a link that is never busy."""
TRAINS_S = 6.5


def world(
    times: Sequence[DeviceTimes],
    *,
    prepared: PreparedTask | None = None,
    scenario: dict[str, Any] | None = None,
    costs: Costs = FREE,
    options: LinkOptions = PROMPT,
    short: bool = False,
    most_boards: int = 1000,
    **rules: Any,
) -> WorldFleet:
    devices = [FleetDevice(_name(index), each) for index, each in enumerate(times)]
    rules = {"rounds": 1, "deadline_s": 100.0, "accounting": "strict", **rules}
    prepared = prepared or prepared_task(method="dp-fedavg", devices=len(devices), **rules)
    schedule = make_schedule(ScenarioSection(**(scenario or {})), [device.name for device in devices], seed=1)
    return WorldFleet(
        prepared,
        prepared.task.round,
        devices,
        costs=costs,
        schedule=schedule,
        seed=1,
        options=options,
        short=short,
        most_boards=most_boards,
    )


def _name(index: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[index % 26] * (1 + index // 26)


def played(fleet: WorldFleet) -> list[RoundOutcome]:
    return list(fleet.rounds())
