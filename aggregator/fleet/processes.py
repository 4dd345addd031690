"""The processes of a fleet as children of one: for labs, demos and tests. In the field they are systemd's services.

Brokers first, then the fleet service and the aggregator; the other way round at the end. One that dies is started
again, after a wait that grows; all of them can be killed at any moment.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hushfleet.aggregator.broker.child import dies_with_parent
from hushfleet.aggregator.broker.config import find_mosquitto
from hushfleet.aggregator.broker.process import check_port_free, speaks_tls
from hushfleet.aggregator.fleet.access import write_broker_files
from hushfleet.aggregator.fleet.folder import FleetFolder
from hushfleet.aggregator.fleet.registry import FleetRegistry
from hushfleet.errors import BadInput, HushfleetError

STOP_TIMEOUT_S = 10.0
START_TIMEOUT_S = 20.0
LONGEST_WAIT_S = 60.0
STABLE_S = 60.0
FINISHED, WRONG = 0, 2  # exit codes after which a child is not started again

log = logging.getLogger("hushfleet.fleet")


@dataclass
class Child:
    """One of them.

    :param log_file: where its output goes; None: to this terminal.
    """

    name: str
    command: Sequence[str]
    log_file: Path | None
    process: subprocess.Popen[bytes] | None = None
    failures: int = 0
    started: float = 0.0
    again_at: float = 0.0
    over: bool = field(default=False)

    def start(self) -> None:
        output = None if self.log_file is None else self.log_file.open("ab")
        self.started = time.monotonic()
        with output or contextlib.nullcontext():
            self.process = subprocess.Popen(
                dies_with_parent(self.command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for us, who end them in order
            )

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT_S)
            self.process.kill()
            self.process.wait()

    def watch(self, now: float) -> None:
        """Starts it again where it has died."""
        if self.process is None or self.over:
            return
        status = self.process.poll()
        if status is None:
            self.failures = 0 if now - self.started > STABLE_S else self.failures
        elif status in (FINISHED, WRONG):
            self.over = True
            log.warning("%s has ended (%d)", self.name, status)
        elif not self.again_at:
            wait_s = min(LONGEST_WAIT_S, 2.0**self.failures)
            log.warning("%s died (%d); it is started again in %g s", self.name, status, wait_s)
            self.failures, self.again_at = self.failures + 1, now + wait_s
        elif now >= self.again_at:
            self.again_at = 0.0
            self.start()


def run_fleet(folder: FleetFolder, stop: threading.Event, *, say: Callable[[str], None] = print) -> None:
    """All of them, until `stop` is set. Raises `BadInput` where they cannot start, and `HushfleetError`."""
    if find_mosquitto() is None:
        raise BadInput("Mosquitto was not found; install it (Debian: apt install mosquitto)")
    ports = folder.config.broker
    for port in (ports.port, ports.enrolment_port):
        check_port_free("0.0.0.0", port)
    with FleetRegistry(folder.path) as registry:
        write_broker_files(folder, registry)
    brokers, others = _children(folder)
    started: list[Child] = []
    try:
        for child in brokers:
            child.start()
            started.append(child)
        for port, child in zip((ports.port, ports.enrolment_port), brokers, strict=True):
            _wait_for(port, child)
        for child in others:
            child.start()
            started.append(child)
        say(f"the broker listens on the ports {ports.port} and {ports.enrolment_port}; logs are in {folder.logs}")
        while not stop.wait(0.2):
            for child in started:
                child.watch(time.monotonic())
    finally:
        for child in reversed(started):
            child.stop()


def _children(folder: FleetFolder) -> tuple[list[Child], list[Child]]:
    """Brokers, and all others."""
    mosquitto, path = find_mosquitto() or "mosquitto", folder.path
    folder.logs.mkdir(mode=0o700, exist_ok=True)
    own = [sys.executable, "-c", "from hushfleet.aggregator.commands.main import main; main()"]
    brokers = [
        Child("the broker", [mosquitto, "-c", str(folder.broker / "mosquitto.conf")], folder.logs / "broker.log"),
        Child(
            "the broker for enrolment",
            [mosquitto, "-c", str(folder.broker / "enrolment.conf")],
            folder.logs / "enrolment.log",
        ),
    ]
    others = [
        Child("the fleet service", [*own, "fleet", "serve", str(path)], folder.logs / "service.log"),
        Child("the aggregator", [*own, "aggregator", "--fleet", str(path)], None),
    ]
    return brokers, others


def _wait_for(port: int, child: Child) -> None:
    give_up = time.monotonic() + START_TIMEOUT_S
    while not speaks_tls("127.0.0.1", port):
        if time.monotonic() > give_up or (child.process is not None and child.process.poll() is not None):
            raise HushfleetError(f"{child.name} does not listen on port {port}; see its log {child.log_file}")
        time.sleep(0.05)
