"""A fleet on the virtual clock whose devices are made of plain seconds.

`Sizes` is real, but links are infinitely fast unless a test says otherwise, so bytes cost no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from hushfleet.aggregator.config.round_section import RoundSection
from hushfleet.aggregator.config.scenario import ScenarioSection
from hushfleet.simulator.engines.clock.calendar import Calendar
from hushfleet.simulator.engines.clock.device import ClockDevice
from hushfleet.simulator.engines.clock.engine import FleetClock
from hushfleet.simulator.schedule import make_schedule
from hushfleet.simulator.world.outcomes import ClockRound
from hushfleet.simulator.world.run import LinkOptions
from hushfleet.simulator.world.sizes import Sizes
from hushfleet.simulator.world.times import Costs, DeviceTimes

C = TypeVar("C", bound=FleetClock)
SIZES = Sizes(
    parameters=1000,
    chunk_bytes=1024,
    task_blobs=(100, 200),
    shared=(1000,),
    bits_per_value=8.0,
    header_bytes=400,
    name_bytes=1,
)
WIRE = SIZES.update(0, with_public=False).wire
FREE = Costs(batch_s=0, sample_s=0, release_s=0, start_s=0, load_s=0, accept_s=0, close_s=0)
PLAIN = DeviceTimes(
    latency_s=0.1,
    down_s_per_byte=0.0,
    up_s_per_byte=0.0,
    start_s=0.0,
    load_s=0.0,
    fetch_s=0.0,
    model_s=1.0,
    model_store_s=0.0,
    steps=3,
    step_s=2.0,
    release_s=0.5,
    write_s_per_byte=0.0,
    enough_memory=True,
    idle_w=1.0,
    active_w=2.0,
)
# Switched on at 0, a device of PLAIN is heard of after three round trips and one way: 0.7 s. With the round open at t:
#   t + 0.1 plan, + 0.1 want, + 0.05 gathered, + 0.1 and 1.0 model: trains from t + 1.35, third batch from t + 5.35,
#   until t + 7.35, committed at t + 7.85, at the aggregator at t + 7.95.
BORN, TRAINS, LAST, COMMITS, ARRIVES = 0.7, 1.35, 5.35, 7.85, 7.95
KILLED = LinkOptions(lost_noticed_s=0.0, first_backoff_s=0.5, server_start_s=3.0)


def clock(
    times: Sequence[DeviceTimes],
    *,
    costs: Costs = FREE,
    scenario: dict[str, Any] | None = None,
    options: LinkOptions = KILLED,
    logging: bool = False,
    sizes: Sizes = SIZES,
    calendar: Calendar | None = None,
    kind: type[C] = FleetClock,
    **rules: Any,
) -> C:
    devices = [ClockDevice("abcdefghijklmnopqrstuvwxyz"[index], each) for index, each in enumerate(times)]
    schedule = make_schedule(ScenarioSection(**(scenario or {})), [device.name for device in devices], seed=1)
    section = RoundSection(**{"rounds": 1, "deadline_s": 100, **rules})
    return kind(
        section,
        devices,
        costs=costs,
        sizes=sizes,
        schedule=schedule,
        seed=1,
        calendar=calendar,
        options=options,
        logging=logging,
    )


def run(fleet: FleetClock) -> list[ClockRound]:
    return list(fleet.rounds())


def arrivals(outcome: ClockRound) -> dict[str, float]:
    return {arrival.device: round(arrival.at_s, 6) for arrival in outcome.arrivals}


def rounded(*values: float) -> tuple[float, ...]:
    return tuple(round(value, 6) for value in values)
