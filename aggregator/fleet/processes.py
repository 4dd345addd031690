"""Runs the processes of a fleet as children: for labs, demos and tests. In the field they are systemd services.

Brokers start first, then the fleet service and the aggregator; they end in the opposite order. A process that dies is
started again, after growing pauses; all of them can be killed at any moment.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hushfleet.aggregator.broker.child import dies_with_parent
from hushfleet.aggregator.broker.process import check_port_free, speaks_tls
from hushfleet.aggregator.broker.programs import find_mosquitto
from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.fleet.tasks.task_check import obstacles
from hushfleet.aggregator.fleet.trust.access import apply
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.errors import BadInput, HushfleetError

STOP_TIMEOUT_S = 10.0
START_TIMEOUT_S = 20.0
LONGEST_WAIT_S = 60.0
STABLE_S = 60.0
FINISHED, WRONG = 0, 2  # exit codes after which a child is not started again

log = logging.getLogger("hushfleet.fleet")


@dataclass
class FleetProcess:
    """One process of the fleet.

    :param log_file: file for its output; None: this terminal.
    :param port: port on which it listens, if others wait for that.
    :param when_done: message when it has ended successfully; empty: it should never end.
    """

    name: str
    command: Sequence[str]
    log_file: Path | None
    port: int | None = None
    when_done: str = ""
    process: subprocess.Popen[bytes] | None = None
    failures: int = 0
    started: float = 0.0
    again_at: float = 0.0
    over: bool = False

    def start(self) -> None:
        output = None if self.log_file is None else self.log_file.open("ab")
        self.started = time.monotonic()
        with output or contextlib.nullcontext():
            self.process = subprocess.Popen(
                dies_with_parent(self.command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches only this process, which ends them in order
            )

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT_S)
            self.process.kill()
            self.process.wait()

    def restart(self) -> None:
        """Restarts the process, also one that has ended."""
        self.stop()
        self.failures, self.again_at, self.over = 0, 0.0, False
        self.start()

    def watch(self, now: float) -> None:
        """Starts the process again if it has died."""
        if self.process is None or self.over:
            return
        status = self.process.poll()
        if status is None:
            self.failures = 0 if now - self.started > STABLE_S else self.failures
        elif status in (FINISHED, WRONG):
            self.over = True
            if status == FINISHED and self.when_done:
                log.info("%s", self.when_done)
            else:
                log.warning("%s has ended (%d)", self.name, status)
        elif not self.again_at:
            wait_s = min(LONGEST_WAIT_S, 2.0 ** min(self.failures, 10))  # 2.0**1024 is an error
            log.warning("%s died (%d); it is started again in %g s", self.name, status, wait_s)
            self.failures, self.again_at = self.failures + 1, now + wait_s
        elif now >= self.again_at:
            self.again_at = 0.0
            self.start()


def run_fleet(folder: FleetFolder, stop: threading.Event) -> None:
    """Runs all processes until `stop` is set. Raises `BadInput` if they cannot start, and `HushfleetError`."""
    ports, run = folder.config.broker, folder.run
    with started(folder, brokers_of(folder)) as brokers, started(folder, _services_of(folder)) as services:
        print(f"the broker listens on the ports {ports.port} and {ports.enrolment_port}; logs are in {folder.logs}")
        _print_obstacles(folder)
        while not stop.wait(0.2):
            with contextlib.suppress(BadInput):  # a task file that is being written by hand
                if folder.run != run:
                    run = folder.run
                    print(f"the aggregator goes on with {run}")
                    _print_obstacles(folder)
                    services[-1].restart()
            for child in (*brokers, *services):
                child.watch(time.monotonic())


def _print_obstacles(folder: FleetFolder) -> None:
    """Prints obstacles as notes and not as errors, because boards may come while the fleet runs."""
    with contextlib.suppress(BadInput):  # the aggregator says what is wrong with the task
        for why in obstacles(load_task(folder.task), folder):
            print(f"note: {why}", flush=True)


@contextlib.contextmanager
def started(folder: FleetFolder, children: Sequence[FleetProcess]) -> Iterator[Sequence[FleetProcess]]:
    """Runs the processes during a `with` block, which begins when each broker listens."""
    folder.logs.mkdir(mode=0o700, exist_ok=True)
    try:
        for child in children:
            if child.port is not None:
                check_port_free("0.0.0.0", child.port)
            child.start()
        for child in children:
            if child.port is not None:
                _wait_for(child.port, child)
        yield children
    finally:
        for child in reversed(children):
            child.stop()


def brokers_of(folder: FleetFolder) -> list[FleetProcess]:
    """Returns both brokers, after writing their configuration from the registry. Raises `BadInput`."""
    mosquitto = find_mosquitto()
    if mosquitto is None:
        raise BadInput("Mosquitto was not found; install it (Debian: apt install mosquitto)")
    with FleetRegistry(folder.path) as registry:
        apply(folder, registry)
    ports, logs = folder.config.broker, folder.logs
    named = (("broker", "mosquitto", ports.port), ("enrolment broker", "enrolment", ports.enrolment_port))
    return [
        FleetProcess(f"the {name}", [mosquitto, "-c", str(folder.broker / f"{stem}.conf")], logs / f"{stem}.log", port)
        for name, stem, port in named
    ]


def _services_of(folder: FleetFolder) -> list[FleetProcess]:
    own, path = [sys.executable, "-m", "hushfleet.aggregator.commands"], str(folder.path)
    done = f"the task is finished; boards wait for the next one: hushfleet fleet task {path} TASK.toml"
    return [
        FleetProcess("the fleet service", [*own, "fleet", "serve", path], folder.logs / "service.log"),
        FleetProcess("the aggregator", [*own, "aggregator", "--fleet", path], None, when_done=done),
    ]


def _wait_for(port: int, child: FleetProcess) -> None:
    give_up = time.monotonic() + START_TIMEOUT_S
    while not speaks_tls("127.0.0.1", port):
        if time.monotonic() > give_up or (child.process is not None and child.process.poll() is not None):
            raise HushfleetError(f"{child.name} does not listen on port {port}; see its log {child.log_file}")
        time.sleep(0.05)
