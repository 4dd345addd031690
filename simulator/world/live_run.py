"""Runs a simulation's rounds with the live engine."""

from __future__ import annotations

import os

from hushfleet.simulator.options import RunOptions
from hushfleet.simulator.run_folder import Simulation
from hushfleet.simulator.watch import Watch
from hushfleet.simulator.world.live import LiveFleet

LIVE_RESTARTS = 3


def run_live(simulation: Simulation, options: RunOptions, watch: Watch) -> None:
    """Runs the rounds to the end; continues an interrupted run."""
    hosts = _hosts(simulation, options.own_processes)
    fleet = LiveFleet(simulation, broker_kind=options.broker, restarts=LIVE_RESTARTS, hosts=hosts)
    with watch, fleet.running():
        fleet.wait()


def _hosts(simulation: Simulation, own_processes: int) -> dict[str, list[str]]:
    """Divides the devices after the first `own_processes` among processes, one for each core."""
    hosted = [device.name for device in simulation.fleet.devices][own_processes:] if own_processes else []
    count = min(len(hosted), os.cpu_count() or 1)
    return {f"host-{number}": hosted[number::count] for number in range(count)}
