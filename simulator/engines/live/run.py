"""Runs a simulation's rounds with the live engine: its options, its fleet, and the scenario that is played on it."""

from __future__ import annotations

import os

from hushfleet.aggregator.observe.console import Console
from hushfleet.errors import BadInput
from hushfleet.simulator.engines.live.engine import LiveFleet
from hushfleet.simulator.engines.live.scenario import ScenarioPlayer
from hushfleet.simulator.options import RunOptions
from hushfleet.simulator.run_folder import Simulation
from hushfleet.simulator.schedule import schedule_of
from hushfleet.simulator.watch import Watch

LIVE_RESTARTS = 3


def run_live(simulation: Simulation, options: RunOptions, watch: Watch, console: Console) -> None:
    """Runs the rounds to the end; continues an interrupted run. Raises `BadInput`."""
    schedule = schedule_of(simulation.task, [device.name for device in simulation.fleet.devices])
    hosts = _hosts(simulation, options.own_processes)
    if hosts and not schedule.is_calm:
        raise BadInput("--own-processes cannot be combined with a scenario: it needs a process a device")
    player = ScenarioPlayer(simulation, schedule)
    fleet = LiveFleet(
        simulation,
        broker_kind=options.broker,
        restarts=LIVE_RESTARTS,
        emulate=options.emulate,
        proxied=schedule.needs_proxy,
        boards={device.name: simulation.mix[device.index].board for device in simulation.fleet.devices},
        absent=player.absent,
        write_mb_s=schedule.write_mb_s,
        memory_mib=schedule.memory_mib,
        hosts=hosts,
    )
    for line in fleet.describe():
        console.print(line, style="bright_black", highlight=False)
    with watch, fleet.running():
        player.play(fleet)


def _hosts(simulation: Simulation, own_processes: int) -> dict[str, list[str]]:
    """Divides the devices after the first `own_processes` among processes, one for each core."""
    hosted = [device.name for device in simulation.fleet.devices][own_processes:] if own_processes else []
    count = min(len(hosted), os.cpu_count() or 1)
    return {f"host-{number}": hosted[number::count] for number in range(count)}
