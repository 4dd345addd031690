"""A broker as a child process: Mosquitto if a binary is found, else amqtt from PyPI.

For laptops, tests and small labs: an aggregator that is given a broker's URL does not need this. Nothing is
persisted, because the protocol does not rely on the broker remembering anything (docs/wire.md).

    python -m hushfleet.aggregator.broker.process --kind auto --port 1883      runs one in the foreground
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import ipaddress
import logging
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Literal, get_args

from hushfleet.aggregator.broker.child import dies_with_parent
from hushfleet.aggregator.broker.config import BrokerTls, find_mosquitto, mosquitto_acl, mosquitto_config
from hushfleet.aggregator.broker.port import answers, check_port_free, free_port
from hushfleet.errors import BadInput, HushfleetError

BrokerKind = Literal["auto", "mosquitto", "amqtt"]

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0
MOST_OPEN_FILES = 1 << 16


class Broker:
    """A running broker; a context manager that stops it. Made by `start_broker`."""

    def __init__(
        self,
        kind: Literal["mosquitto", "amqtt"],
        *,
        host: str,
        port: int,
        data_dir: Path,
        tls: BrokerTls | None,
        log_path: Path,
    ) -> None:
        self.kind = kind
        self.host = host
        self.port = port
        self.log_path = log_path
        self._data_dir = data_dir
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: threading.Thread | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'mqtts' if self._tls else 'mqtt'}://{host}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id; raises `HushfleetError` when the broker is not running."""
        if self._process is None or not self.is_running:
            raise HushfleetError(f"the {self.kind} broker at {self.url} is not running")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self) -> int:
        """Wait until the broker ends by itself; its exit status."""
        return self._process.wait() if self._process is not None else 0

    def stop(self) -> None:
        """End it politely, then by force; nothing happens if it has ended."""
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
        self._reap()

    def kill(self) -> None:
        """SIGKILL: what a power cut does to it."""
        if self._process is not None:
            self._process.kill()
            self._reap()

    def restart(self) -> None:
        """Stop it if it runs, and start it anew on the same port; it remembers nothing."""
        self.stop()
        self._start()

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        check_port_free(self.host, self.port)
        command = self._mosquitto_command() if self.kind == "mosquitto" else self._amqtt_command()
        started = threading.Event()
        self._keeper = threading.Thread(
            target=self._keep, args=(dies_with_parent(command), started), name=f"broker-{self.port}", daemon=True
        )
        self._keeper.start()
        started.wait()
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def _keep(self, command: Sequence[str], started: threading.Event) -> None:
        """The child's parent, to the kernel, is the thread that forked it: this one, which stays."""
        try:
            with self.log_path.open("ab") as log_file:
                self._process = self._spawn(command, log_file)
                _allow_open_files(self._process.pid)
        finally:
            started.set()
        self._process.wait()

    @staticmethod
    def _spawn(command: Sequence[str], log_file: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C ends the aggregator first, which then says goodbye to the broker
        )

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait()
        if self._keeper is not None:
            self._keeper.join()
        self._process = self._keeper = None

    def _wait_until_ready(self) -> None:
        give_up = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < give_up:
            if self._process is None or self._process.poll() is not None:
                raise HushfleetError(f"the {self.kind} broker ended at its start: {self._log_tail()}")
            if answers(self.host, self.port, plain=self._tls is None):
                return
            time.sleep(0.02)
        raise HushfleetError(f"the {self.kind} broker gave no answer in {START_TIMEOUT_S:g} s: {self._log_tail()}")

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.log_path.read_text(errors="replace").strip().splitlines()[-4:]
            if lines:
                return " | ".join(lines)
        return f"its log {self.log_path} is empty"

    def _mosquitto_command(self) -> list[str]:
        acl_path = self._data_dir / "mosquitto.acl"
        if self._tls is not None:
            acl_path.write_text(mosquitto_acl(aggregator=self._tls.aggregator))
            acl_path.chmod(0o600)
        config_path = self._data_dir / "mosquitto.conf"
        config_path.write_text(mosquitto_config(host=self.host, port=self.port, tls=self._tls, acl_path=acl_path))
        return [find_mosquitto() or "mosquitto", "-c", str(config_path)]

    def _amqtt_command(self) -> list[str]:
        arguments = ["--kind", "amqtt", "--host", self.host, "--port", str(self.port), "--open"]
        return [sys.executable, "-m", "hushfleet.aggregator.broker.process", *arguments]


def start_broker(
    kind: BrokerKind = "auto",
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    data_dir: Path,
    tls: BrokerTls | None = None,
    log_path: Path | None = None,
    open_to_network: bool = False,
) -> Broker:
    """Start a broker and wait until it answers. It ends with this process at the latest.

    :param kind: `auto` takes Mosquitto if its binary is found, else amqtt.
    :param port: 0 takes a free one.
    :param data_dir: where the generated configuration and the log are put.
    :param tls: certificates; needs Mosquitto.
    :param open_to_network: allow a `host` other than loopback without TLS, where anyone may connect.

    Raises `BadInput` for what a person can correct (the text says how), `HushfleetError` if it does not
    start.
    """
    if tls is None and not open_to_network and not _is_loopback(host):
        raise BadInput(
            f"a broker on {host} would let anyone on the network in: give it TLS certificates, or, on a "
            "network that you trust, say --open"
        )
    chosen = _choose(kind, tls)
    data_dir.mkdir(parents=True, exist_ok=True)
    for attempt in range(3):
        broker = Broker(
            chosen,
            host=host,
            port=port or free_port(host),
            data_dir=data_dir,
            tls=tls,
            log_path=log_path or data_dir / "broker.log",
        )
        try:
            broker._start()
            return broker
        except HushfleetError:
            # another process may have taken the free port in the meantime
            if port or attempt == 2:
                raise
    raise HushfleetError("no free port was found for the broker")


def _choose(kind: BrokerKind, tls: BrokerTls | None) -> Literal["mosquitto", "amqtt"]:
    if kind not in get_args(BrokerKind):
        raise BadInput(f"a broker of the kind {kind!r} is not known; use one of {get_args(BrokerKind)}")
    mosquitto = find_mosquitto() is not None
    if kind == "mosquitto" and not mosquitto:
        raise BadInput("Mosquitto was not found; install it (Debian: apt install mosquitto) or use amqtt")
    if kind == "mosquitto" or (kind == "auto" and mosquitto):
        return "mosquitto"
    if tls is not None:
        raise BadInput("TLS needs Mosquitto, since amqtt cannot require client certificates; install it")
    if importlib.util.find_spec("amqtt") is None:
        raise BadInput("no broker is installed: apt install mosquitto, or pip install amqtt")
    return "amqtt"


def _allow_open_files(pid: int) -> None:
    """Each client is an open file of the broker's. Measured: Mosquitto takes 7 clients fewer than its soft limit allows
    files, mostly 1,024, and turns away all others; it does not raise the limit itself.
    """
    if not hasattr(resource, "prlimit"):  # not Linux
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError):  # it has ended already, which its starter will notice
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (wanted, hard))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _serve_amqtt(host: str, port: int) -> None:
    """An amqtt broker in this process, until SIGTERM or SIGINT."""
    from amqtt.broker import Broker as AmqttBroker

    # logins without a user name make sessions that amqtt forgets at once: clean sessions need no more
    plugins = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}}
    address = f"[{host}]" if ":" in host else host
    broker = AmqttBroker({"listeners": {"default": {"type": "tcp", "bind": f"{address}:{port}"}}, "plugins": plugins})
    await broker.start()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await ended.wait()
    await broker.shutdown()


def run_foreground(
    kind: BrokerKind = "auto",
    *,
    host: str = "127.0.0.1",
    port: int = 1883,
    data_dir: Path,
    tls: BrokerTls | None = None,
    open_to_network: bool = False,
) -> int:
    """Run a broker until SIGTERM or Ctrl-C; the exit status. Raises as `start_broker` does."""
    with start_broker(
        kind, host=host, port=port, data_dir=data_dir, tls=tls, open_to_network=open_to_network
    ) as broker:
        print(f"{broker.kind} listens at {broker.url}; its log is {broker.log_path}", flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            return broker.wait()
        except KeyboardInterrupt:
            return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The broker in the foreground; amqtt in this very process, which is how `start_broker` runs it."""
    parser = argparse.ArgumentParser(prog="python -m hushfleet.aggregator.broker.process", description=main.__doc__)
    parser.add_argument("--kind", choices=get_args(BrokerKind), default="auto")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=1883)
    parser.add_argument("--data-dir", type=Path, default=Path("runs/broker"))
    parser.add_argument("--open", action="store_true", help="allow other hosts than loopback without TLS")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    try:
        if options.kind == "amqtt":
            asyncio.run(_serve_amqtt(options.host, options.port))
            return 0
        return run_foreground(
            options.kind,
            host=options.host,
            port=options.port,
            data_dir=options.data_dir,
            open_to_network=options.open,
        )
    except HushfleetError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
