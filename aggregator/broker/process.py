"""A broker as a child process: one of `hushfleet.aggregator.broker.programs`.

It is meant for laptops, tests and small labs: an aggregator that is given a broker's URL does not need it. Nothing is
persisted, because the protocol does not require the broker to remember anything (docs/wire.md).
"""

from __future__ import annotations

import contextlib
import ipaddress
import resource
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hushfleet.aggregator.broker.child import dies_with_parent
from hushfleet.aggregator.broker.config import BrokerTls
from hushfleet.aggregator.broker.programs import PROGRAMS, BrokerKind, BrokerProgram
from hushfleet.errors import BadInput, HushfleetError

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0
MOST_OPEN_FILES = 1 << 16
# CONNECT of MQTT 3.1.1 with a clean session, keep-alive 10 s and its own client id; and the answer "accepted"
_PROBE = b"\x10\x1b\x00\x04MQTT\x04\x02\x00\x0a\x00\x0fhushfleet-probe"
_PROBE_ANSWER = b"\x20\x02\x00\x00"


@dataclass(eq=False, kw_only=True)
class Broker:
    """A running broker; a context manager that stops it. Made by `start_broker`.

    :param path: where the program is.
    """

    program: BrokerProgram
    path: str
    host: str
    port: int
    data_dir: Path
    tls: BrokerTls | None
    log_path: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _keeper: threading.Thread | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'mqtts' if self.tls else 'mqtt'}://{host}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id; raises `HushfleetError` when the broker is not running."""
        if self._process is None or not self.is_running:
            raise HushfleetError(f"the {self.program.name} broker at {self.url} is not running")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self) -> int:
        """Waits until the broker ends by itself, and returns its exit status."""
        return self._process.wait() if self._process is not None else 0

    def stop(self) -> None:
        """Ends the broker with SIGTERM, then by force; does nothing if it has ended."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """Ends the broker with SIGKILL, which has the effect of a power cut."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._keeper is not None:
            self._keeper.join()
        self._process = self._keeper = None

    def restart(self) -> None:
        """Stops the broker if it runs, and starts it again on the same port; it remembers nothing."""
        self.stop()
        self.start()

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the broker, and waits until it answers."""
        check_port_free(self.host, self.port)
        command = self.program.command(self.path, self.host, self.port, self.data_dir, self.tls)
        spawned = threading.Event()
        # for the kernel the child's parent is the thread that forked it, so that thread stays alive
        self._keeper = threading.Thread(target=self._keep, args=(command, spawned), daemon=True)
        self._keeper.start()
        spawned.wait()
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def _keep(self, command: Sequence[str], spawned: threading.Event) -> None:
        try:
            with self.log_path.open("ab") as log_file:
                self._process = process = subprocess.Popen(
                    dies_with_parent(command),
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C ends the aggregator first, which then disconnects from the broker
                )
                _allow_open_files(process.pid)
        finally:
            spawned.set()
        process.wait()

    def _wait_until_ready(self) -> None:
        give_up = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < give_up:
            if not self.is_running:
                raise HushfleetError(f"the {self.program.name} broker ended at its start: {self._log_tail()}")
            if _answers(self.host, self.port) if self.tls is None else speaks_tls(self.host, self.port):
                return
            time.sleep(0.02)
        raise HushfleetError(
            f"the {self.program.name} broker did not answer within {START_TIMEOUT_S:g} s: {self._log_tail()}"
        )

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.log_path.read_text(errors="replace").strip().splitlines()[-4:]
            if lines:
                return " | ".join(lines)
        return f"its log {self.log_path} is empty"


def start_broker(
    kind: BrokerKind = "auto",
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    data_dir: Path,
    tls: BrokerTls | None = None,
    open_to_network: bool = False,
) -> Broker:
    """Starts a broker and waits until it answers. It ends with this process at the latest.

    :param kind: the name of a program; `auto` takes the first that is installed and can do what is asked.
    :param port: 0 takes a free one.
    :param data_dir: the folder for the generated configuration and the log.
    :param tls: certificates; needs Mosquitto.
    :param open_to_network: allow a `host` other than loopback without TLS, where anyone may connect.

    Raises `BadInput` for what a person can correct (the text says how), `HushfleetError` if it does not start.
    """
    if tls is None and not open_to_network and not _is_loopback(host):
        raise BadInput(
            f"a broker on {host} would let anyone on the network in: give it TLS certificates, or, on a "
            "network that you trust, say --open"
        )
    program, path = _choose(kind, tls)
    data_dir.mkdir(parents=True, exist_ok=True)
    log_path = data_dir / "broker.log"
    attempts = 1 if port else 3  # another process may take a free port in the meantime
    while True:
        used = port or _free_port(host)
        broker = Broker(program=program, path=path, host=host, port=used, data_dir=data_dir, tls=tls, log_path=log_path)
        try:
            broker.start()
            return broker
        except HushfleetError:
            attempts -= 1
            if not attempts:
                raise


def _choose(kind: BrokerKind, tls: BrokerTls | None) -> tuple[BrokerProgram, str]:
    """Returns the program, and where it is. Raises `BadInput`."""
    if kind not in ("auto", *PROGRAMS):
        raise BadInput(f"a broker of the kind {kind!r} is not known; use one of {', '.join(('auto', *PROGRAMS))}")
    wanted = list(PROGRAMS.values()) if kind == "auto" else [PROGRAMS[kind]]
    there = [(program, path) for program in wanted if (path := program.find()) is not None]
    fit = [each for each in there if tls is None or each[0].has_tls]
    if fit:
        return fit[0]
    secure = " or ".join(program.title for program in PROGRAMS.values() if program.has_tls)
    if there:
        raise BadInput(f"TLS needs {secure}, since {there[0][0].title} cannot require client certificates; install it")
    how = ", or ".join(program.get for program in wanted)
    raise BadInput(f"no broker is installed: {how}" if kind == "auto" else f"{wanted[0].title} was not found: {how}")


def _allow_open_files(pid: int) -> None:
    """Raises the broker's soft limit of open files, because each client is an open file of the broker.

    Measured: Mosquitto accepts 7 clients fewer than its soft limit of files, mostly 1,024, and refuses all others.
    """
    if not hasattr(resource, "prlimit"):  # not Linux
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError):  # it has ended already, and the code that started it will notice
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (wanted, hard))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _new_socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)


def _free_port(host: str) -> int:
    with _new_socket(host) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_port_free(host: str, port: int) -> None:
    """Raises `BadInput` if another process listens there."""
    with _new_socket(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise BadInput(
                f"a broker cannot listen on {host} port {port}: {error.strerror}; stop what uses it (another "
                "broker, perhaps the system's own) or choose another port"
            ) from error


def _answers(host: str, port: int) -> bool:
    """Returns whether a broker accepts an MQTT login there."""
    try:
        with socket.create_connection((_reached(host), port), timeout=2.0) as probe:
            probe.sendall(_PROBE)
            answer = probe.recv(4)
            probe.sendall(b"\xe0\x00")
            return answer == _PROBE_ANSWER
    except OSError:
        return False


def speaks_tls(host: str, port: int) -> bool:
    """Returns whether a server there takes part in a TLS handshake.

    Mosquitto listens before it has read its certificates, so an open port is not enough.
    """
    try:
        with socket.create_connection((_reached(host), port), timeout=2.0) as probe:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE  # nothing is sent; the question is only whether TLS is spoken
            with context.wrap_socket(probe):
                return True
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        return False
    except ssl.SSLError:
        return True  # TLS 1.2 asks for our certificate within the handshake
    except OSError:
        return False


def _reached(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
