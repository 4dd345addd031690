"""A live fleet whose processes run on machines that lose power, and whose devices may have a twin."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

from chaos.machine import Machine
from chaos.plan import AGGREGATOR, Plan
from chaos.proxy import Proxy
from hushfleet.simulator.run_folder import Simulation
from hushfleet.simulator.world.live import LiveFleet

# Written by the simulator into a device's folder while it runs, or by the device as its output.
_NOT_ITS_OWN = ("device.toml", "log.txt")


class ChaosFleet(LiveFleet):
    """A fleet for one plan: stores are synced, as in the field.

    :param library: of `build_library`; None: machines without power cuts, full disks and clock jumps.
    :param options: of `LiveFleet`.
    """

    def __init__(self, simulation: Simulation, plan: Plan, *, library: Path | None, **options: Any) -> None:
        super().__init__(
            simulation,
            broker_kind=plan.broker,
            absent=(plan.hostile,) if plan.hostile else (),
            **options,
        )
        self._plan = plan
        self._proxy: Proxy | None = None
        self.starts: Counter[str] = Counter()
        self.machines: dict[str, Machine] = {}
        if library is not None:
            folder = simulation.folder
            disks = {device.name: folder.device(device.name).path for device in self.devices}
            for name, disk in {**disks, AGGREGATOR: folder.aggregator}.items():
                beside = folder.path / "machines" / name
                self.machines[name] = Machine(disk, beside, library=library, not_its_own=_NOT_ITS_OWN)

    @property
    def identity(self) -> Path:
        """On the aggregator's own disk."""
        return self.simulation.folder.aggregator / "identity.key"

    @property
    def broker_url(self) -> str:
        return self._running_broker.url

    @property
    def proxy(self) -> Proxy:
        """The network between devices and broker, which keeps its port."""
        if self._proxy is None:
            self._proxy = Proxy(self._running_broker.port)
        return self._proxy

    def url_for(self, device: str) -> str:
        if not self._plan.needs_proxy:
            return super().url_for(device)
        port = self.proxy.port(device, self._plan.links.get(device), seed=self._plan.seed)
        return f"mqtt://127.0.0.1:{port}"

    @property
    def honest(self) -> list[str]:
        """The devices that are not hostile."""
        return [device.name for device in self.devices if device.name != self._plan.hostile]

    def device_config(self, name: str) -> str:
        text = super().device_config(name)
        if self._plan.field_noise:
            return text.partition("\n[simulation]\n")[0].replace(
                "[device]\n", "[device]\nallow_volatile_state = true\n"
            )
        return f"{text}durable = true\n"

    def cut_power(self, name: str, rng: random.Random, *, kept: float) -> None:
        """The process dies, and of its disk stays what was synced; see `Machine.cut_power`."""
        self.kill(name)
        self.machines[name].cut_power(rng, kept=kept)

    def has_failed(self, name: str) -> bool:
        """Its process has ended, and not well."""
        return self._exit_status(name) not in (None, 0)

    def start_twin(self, device: str) -> str:
        """Starts a second client with the device's name and data, and another key; gives the process' name."""
        twin = f"twin of {device}"
        state = self.simulation.folder.path / "twins" / device
        state.mkdir(parents=True, exist_ok=True)
        text = re.sub(r"(?m)^state_dir = .*$", f'state_dir = "{state.resolve()}"', self.device_config(device))
        config = state / "device.toml"
        config.write_text(re.sub(r"(?m)^metrics = .*\n", "", text))
        self.expected_down.add(twin)  # how it ends is of no interest
        self._start(twin, [*self.client, str(config)], state / "log.txt")
        return twin

    def end(self) -> None:
        """Kills all, for everything that is looked at afterwards is on disks."""
        for name in list(self._processes):
            self.expected_down.add(name)
            self.kill(name)
        if self._proxy is not None:
            self._proxy.close()

    def _start(self, name: str, command: list[str], log: Path, **variables: str) -> None:
        self.starts[name] += 1
        machine = self.machines.get(name)
        super()._start(name, command, log, **(machine.environment if machine else {}), **variables)
