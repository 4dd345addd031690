"""Runs the live engine: a real broker, a real aggregator and real client processes, on this machine.

Each process writes its log into the run folder. This code does not know the protocol: the aggregator ends when the task
is finished, the clients end when they have nothing left to send, and `LiveFleet` watches them.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hushfleet.aggregator.broker.child import dies_with_parent
from hushfleet.aggregator.broker.process import Broker, start_broker
from hushfleet.aggregator.broker.programs import BrokerKind
from hushfleet.errors import HushfleetError
from hushfleet.simulator.fleet import SimulatedDevice
from hushfleet.simulator.run_folder import RunFolder, Simulation
from hushfleet.simulator.world.tls import AGGREGATOR, FleetTls
from hushfleet.toml_text import to_toml
from hushfleet.wire.format.spec import SecureSpec

FEDERATION = "default"
STOP_TIMEOUT_S = 10.0
RECONNECT_S = 0.5
ARENAS = {"MALLOC_ARENA_MAX": "1"}
"""Environment of hosts: glibc reserves 64 MiB of address space for each further thread's heap."""
_TICK_S = 0.2
_LOG_TAIL_LINES = 8
_COMMAND = (sys.executable, "-c", "from hushfleet.aggregator.commands.main import main; main()", "aggregator")

_log = logging.getLogger("hushfleet.simulator")


class LiveFleet:
    """The processes of one live run.

    :param broker_kind: `auto`, `mosquitto` or `amqtt`.
    :param restarts: how often each process that dies unexpectedly is started again.
    :param client: command that starts a client, without the name of its DEVICE.toml.
    :param aggregator: command that starts the aggregator, without its options.
    :param absent: devices that are not started at the beginning.
    :param tls: certificates of all processes; needs Mosquitto.
    :param hosts: processes that hold many devices each (`hushfleet.simulator.world.hosted`), by name; each other
        device has its own process.
    :param tested: whether devices test their models on the simulation's test sets.

    A process whose name is in `expected_down` is intentionally down: `check` ignores it.
    """

    def __init__(
        self,
        simulation: Simulation,
        *,
        broker_kind: BrokerKind = "auto",
        restarts: int = 0,
        client: Sequence[str] = (sys.executable, "-m", "hushfleet.edge_client"),
        aggregator: Sequence[str] = _COMMAND,
        absent: Collection[str] = (),
        tls: FleetTls | None = None,
        hosts: Mapping[str, Sequence[str]] | None = None,
        tested: bool = True,
    ) -> None:
        self.simulation = simulation
        self.client = tuple(client)
        self.aggregator = tuple(aggregator)
        self.broker_kind: BrokerKind = broker_kind
        self.restarts = restarts
        self.broker: Broker | None = None
        self.expected_down: set[str] = set(absent)
        self._tls = tls
        self._tested = tested
        self.hosts = {name: tuple(devices) for name, devices in (hosts or {}).items()}
        self._hosted = {device for devices in self.hosts.values() for device in devices}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._restarted: Counter[str] = Counter()

    @contextmanager
    def running(self) -> Iterator[LiveFleet]:
        """Starts broker, aggregator and clients; stops all of them afterwards, also after an error."""
        folder = self.simulation.folder.path / "broker"
        try:
            with ExitStack() as stack:
                if not self.simulation.folder.common_test.exists():
                    self.simulation.write_samples()
                self.broker = stack.enter_context(self._start_broker(folder))
                self.start_aggregator()
                for name in self.clients:
                    if name not in self.expected_down:
                        self.start_client(name)
                stack.callback(self._stop_processes)  # before the broker
                yield self
        finally:
            self._stop_processes()
            self.broker = None

    def _start_broker(self, folder: Path) -> Broker:
        return start_broker(self.broker_kind, data_dir=folder, tls=self._tls.broker if self._tls else None)

    @property
    def devices(self) -> tuple[SimulatedDevice, ...]:
        return self.simulation.fleet.devices

    @property
    def clients(self) -> list[str]:
        """The names of the processes of devices: a device's own process, or its host."""
        return [device.name for device in self.devices if device.name not in self._hosted] + list(self.hosts)

    @property
    def identity(self) -> Path:
        """The file of the aggregator's key."""
        return self.simulation.folder.path / "aggregator.key"

    @property
    def finished(self) -> bool:
        """True if the aggregator has ended without an error: every round is closed."""
        return "aggregator" not in self.expected_down and self._exit_status("aggregator") == 0

    def start_aggregator(self) -> None:
        folder = self.simulation.folder
        options = {
            "broker": self._running_broker.url,
            "out": folder.aggregator,
            "identity": self.identity,
            "run-id": f"seed{self.simulation.seed}",
            "devices": self._known_devices(),
        }
        if self.simulation.data_dir:
            options["data-dir"] = self.simulation.data_dir
        for key, path in (self._tls.files(AGGREGATOR) if self._tls else {}).items():
            options[key.replace("_", "-")] = path
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        # rounds follow each other: a simulation does not wait for nights
        command = [*self.aggregator, str(folder.task), "--resume", "--rounds-only", "--set", "schedule={}", *words]
        self._start("aggregator", command, folder.path / "aggregator.log")

    def _known_devices(self) -> Path:
        """Writes the list of devices, as an operator would keep it; the aggregator pins each device's first key."""
        path = self.simulation.folder.path / "devices.toml"
        path.write_text("[devices]\n" + "".join(f'"{device.name}" = "certificate"\n' for device in self.devices))
        return path

    def start_client(self, name: str) -> None:
        """:param name: name of a device, or of a host of many devices."""
        if name in self.hosts:
            configs = [str(self._write_config(device)) for device in self.hosts[name]]
            command = [sys.executable, "-m", "hushfleet.simulator.world.hosted", *configs]
            self._start(name, command, self._log_of(name), **ARENAS)
        else:
            self._start(name, [*self.client, str(self._write_config(name))], self._log_of(name))

    def _write_config(self, device: str) -> Path:
        config = self.simulation.folder.device(device).path / "device.toml"
        config.write_text(self.device_config(device))
        return config

    def device_config(self, name: str) -> str:
        """Returns the text of the device's DEVICE.toml.

        The task sets budget and preference of simulated devices, and they accept its accounting, because simulated data
        have no owner.
        """
        (device,) = [device for device in self.devices if device.name == name]
        simulation = self.simulation
        folder = RunFolder(simulation.folder.path.resolve())
        files = folder.device(name)
        privacy = simulation.prepared.spec.privacy
        tests: dict[str, object] = {"common_test": folder.common_test, "local_test": files.local_test}
        tests |= {"metrics": files.metrics, "own_metrics": list(simulation.task.model.metrics)}
        sections: dict[str, dict[str, object]] = {
            "device": {"id": name, "federation": FEDERATION, "state_dir": files.path, "board": device.board},
            "broker": {"url": self.url_for(name), **(self._tls.files(name) if self._tls else {})},
            "data": {"kind": "arrays", "path": files.train},
            "limits": {
                "epsilon_server": device.epsilon_limit,
                "delta": privacy.delta,
                "noise_preference": device.preference,
                "accounting": privacy.accounting,
                **_trust(privacy.secure),
            },
            "simulation": {
                "seed": simulation.seed,
                "index": device.index,
                **(tests if self._tested else {}),
                "reconnect_s": RECONNECT_S,
            },
        }
        note = "# Written by the simulator. [simulation] makes the noise predictable: never use it in the field.\n"
        return note + to_toml(sections)

    def kill(self, name: str) -> None:
        """Sends SIGKILL to `broker`, `aggregator` or a device. `check` restarts it, unless it is expected down."""
        if name == "broker":
            self._running_broker.kill()
        elif name in self._processes:
            self._processes[name].kill()
            self._processes[name].wait()

    def start_again(self, name: str) -> None:
        """Starts a process that was killed, has ended, or was absent; the broker keeps its port, but not its memory."""
        self.expected_down.discard(name)
        if name == "broker":
            self._running_broker.restart()
        elif name == "aggregator":
            self.start_aggregator()
        else:
            self.start_client(name)

    def is_running(self, name: str) -> bool:
        if name == "broker":
            return self.broker is not None and self.broker.is_running
        return name in self._processes and self._processes[name].poll() is None

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def check(self) -> None:
        """Restarts processes that died unexpectedly, or logs the end of their log and raises `HushfleetError`."""
        if not self.is_running("broker") and "broker" not in self.expected_down:
            self._revive("broker", "ended")
        for name, process in list(self._processes.items()):
            status = process.poll()
            if status not in (None, 0) and name not in self.expected_down:
                self._revive(name, f"ended with status {status}")

    def _revive(self, name: str, what: str) -> None:
        if self._restarted[name] >= self.restarts:
            log = self._log_of(name)
            for line in _tail(log):
                _log.error("%s: %s", name, line)
            raise HushfleetError(f"the process of {name} {what}; its log is {log}")
        self._restarted[name] += 1
        self.start_again(name)

    def wait(self, end_within_s: float = STOP_TIMEOUT_S) -> None:
        """Waits until the task is finished and the clients have ended; restarts processes that die before."""
        while not self.finished:
            self.check()
            time.sleep(_TICK_S)
        deadline = time.monotonic() + end_within_s
        while time.monotonic() < deadline and any(map(self.is_running, self.clients)):
            time.sleep(_TICK_S)

    @property
    def _running_broker(self) -> Broker:
        if self.broker is None:
            raise HushfleetError("the broker is not running")
        return self.broker

    def url_for(self, device: str) -> str:
        """The address at which the device reaches the broker."""
        return self._running_broker.url

    def _exit_status(self, name: str) -> int | None:
        return self._processes[name].poll() if name in self._processes else None

    def _log_of(self, name: str) -> Path:
        if name == "broker":
            return self._running_broker.log_path
        folder = self.simulation.folder
        return folder.path / f"{name}.log" if name == "aggregator" or name in self.hosts else folder.device(name).log

    def _start(self, name: str, command: list[str], log: Path, **variables: str) -> None:
        # One thread each: the processes share the machine's cores.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables}
        with log.open("ab") as output:
            self._processes[name] = subprocess.Popen(
                dies_with_parent(command), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )

    def _stop_processes(self) -> None:
        running = [process for process in self._processes.values() if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            process.kill()
            process.wait()


def _tail(log: Path) -> list[str]:
    try:
        return log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    except OSError:
        return ["(no log was written)"]


def _trust(secure: SecureSpec | None) -> dict[str, object]:
    """Returns the limits of secure aggregation, as `LimitsSection.of_simulation` does."""
    return {} if secure is None else {"min_devices": secure.min_devices, "honest_fraction": secure.honest_fraction}
