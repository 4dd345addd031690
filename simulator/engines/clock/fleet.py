"""From a task and a fleet's boards to the devices of a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence

from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.publish.prepare import PreparedTask
from hushfleet.data.samples import DataSet
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.engines.clock.device import Device
from hushfleet.simulator.engines.clock.device_time import Costs, device_times
from hushfleet.simulator.engines.clock.sizes import Sizes
from hushfleet.simulator.fleet import make_fleet
from hushfleet.simulator.schedule import Schedule


def device_names(count: int) -> list[str]:
    """The names that a simulated fleet of so many devices has."""
    digits = len(str(count - 1))
    return [f"device-{index:0{digits}d}" for index in range(count)]


def sample_counts(task: Task, dataset: DataSet) -> list[int]:
    """How many training samples each device of the task's own partition has."""
    return [len(device.train) for device in make_fleet(task, dataset).devices]


def make_devices(
    prepared: PreparedTask,
    mix: FleetMix,
    *,
    names: Sequence[str],
    samples: Sequence[int],
    costs: Costs,
    sizes: Sizes,
    schedule: Schedule,
) -> list[Device]:
    """New devices, in the order of their names.

    :param samples: training samples of each device; where there are fewer numbers than devices, again and again.
    """
    config = prepared.method.config
    made = {}
    devices = []
    for index, name in enumerate(names):
        count = samples[index % len(samples)]
        slow, short = schedule.write_mb_s.get(name), schedule.memory_mib.get(name)
        key = (mix.dealt[index], count, slow, short)
        if key not in made:
            made[key] = device_times(
                mix[index],
                samples=count,
                batch_size=config.batch_size,
                epochs=config.local_epochs,
                local_steps=config.local_steps,
                costs=costs,
                sizes=sizes,
                task_memory_mib=prepared.spec.memory_mib,
                write_mb_s=slow,
                memory_mib=short,
            )
        devices.append(Device(name, made[key], kind=mix.dealt[index], board=mix[index].profile))
    return devices
