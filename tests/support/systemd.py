"""An emulated board: does what the units of `firmware_profiles/cards/kit/units` say, without systemd and without root.

ExecStartPre, Restart, RestartPreventExitStatus, the watchdog and the memory limit of the client; the path unit that
installs; the timer that checks. All waits are shorter.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hushfleet.edge_client.fleet.slot_state import ReleaseFolder, State
from hushfleet.edge_client.fleet.system_files import is_due
from hushfleet.edge_client.storage.state_files import RELEASE_KEYS
from hushfleet.firmware_profiles.cards.seed import slots_archive
from hushfleet.release.statements import Trust

RESTART_S = 0.3
TURN_S = 0.05
WRONG = 2  # RestartPreventExitStatus


@dataclass
class EmulatedBoard:
    """:param home: with `device.toml`, `state` and `opt`.
    :param check_s: how often the timer fires; a trial needs a beat of the client between two checks.
    :param watchdog_s: WatchdogSec; :param memory_mib: MemoryMax.
    :param preloaded: environment of the client, beside this process's own (`chaos.machine`).
    """

    home: Path
    check_s: float = 1.0
    watchdog_s: float = 30.0
    memory_mib: int = 600
    preloaded: Mapping[str, str] = field(default_factory=dict)
    starts: int = 0
    ends: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _client: subprocess.Popen[bytes] | None = None
    _slots: set[subprocess.Popen[bytes]] = field(default_factory=set)

    @property
    def opt(self) -> Path:
        return self.home / "opt"

    @property
    def state_dir(self) -> Path:
        return self.home / "state"

    @property
    def run_dir(self) -> Path:
        return self.home

    def install(self, release: Path, *, trust: Trust) -> None:
        """As `install.sh` does."""
        self.opt.mkdir()
        (self.opt / "root_key").write_text(trust.root)
        (self.opt / "release_keys").write_text(trust.line)
        (self.opt / "slots.pyz").write_bytes(slots_archive())
        self.slots("first", str(release))
        shim = self.home / "bin" / "systemctl"  # what `slots.py check` calls
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\necho "$*" >> {self.home}/systemctl.log\n')
        shim.chmod(0o755)

    def slots(self, *command: str) -> State:
        with subprocess.Popen(
            self.slots_command(*command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.environment()
        ) as process:
            self._slots.add(process)
            out, wrong = process.communicate()
            self._slots.discard(process)
        assert process.returncode == 0, wrong.decode()
        return State(**json.loads(out))

    @property
    def state(self) -> State:
        """What `slots("show")` prints, without a process: for those who ask again and again."""
        return ReleaseFolder(self.opt).read()

    def slots_command(self, *arguments: str) -> list[str]:
        places = ["--root", str(self.opt), "--state", str(self.state_dir)]
        return [sys.executable, "-I", str(self.opt / "slots.pyz"), *arguments, *places]

    def client_command(self) -> list[str]:
        return [sys.executable, "-I", str(self.opt / "current"), str(self.home / "device.toml")]

    def environment(self, **given: str) -> dict[str, str]:
        return {**os.environ, "PATH": f"{self.home / 'bin'}:{os.environ['PATH']}", **given}

    @property
    def log(self) -> str:
        return (self.home / "client.log").read_text(errors="replace")

    # the power

    def __enter__(self) -> EmulatedBoard:
        self._stop.clear()
        for work in (self._run_client, self._run_timer, self._run_path):
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self.cut_power()

    def cut_power(self) -> None:
        """Everything that runs is killed; `with` switches it on again."""
        self._stop.set()
        self.kill_client()
        for process in list(self._slots):
            process.kill()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def kill_client(self) -> None:
        if self._client is not None and self._client.poll() is None:
            self._client.kill()

    # the units

    def _oneshot(self, command: str) -> None:
        try:
            self.slots(command)
        except AssertionError:
            if not self._stop.is_set():  # the power has gone
                raise

    def _run_client(self) -> None:
        while not self._stop.is_set():
            self._oneshot("begin")
            if self._stop.is_set():
                return
            status = self._start_once()
            if status == WRONG:
                self._wait_for_restart()
            self._stop.wait(RESTART_S)

    def _start_once(self) -> int:
        address = self.run_dir / "notify"
        address.unlink(missing_ok=True)
        restarts = self._restarts()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, (self.home / "client.log").open("ab") as log:
            notify.bind(str(address))
            address.chmod(0o666)
            notify.settimeout(TURN_S)
            environment = self.environment(
                NOTIFY_SOCKET=str(address),
                WATCHDOG_USEC=str(int(self.watchdog_s * 1e6)),
                OMP_NUM_THREADS="1",
                **self.preloaded,
            )
            self._client = client = subprocess.Popen(self.client_command(), stdout=log, stderr=log, env=environment)
            self.starts += 1
            alive_at = time.monotonic()
            while client.poll() is None:
                try:
                    if notify.recv(64):
                        alive_at = time.monotonic()
                except TimeoutError:
                    pass
                if self._stop.is_set():
                    client.kill()
                elif time.monotonic() - alive_at > self.watchdog_s:
                    self._end(client, "watchdog")
                elif _resident_mib(client.pid) > self.memory_mib:
                    self._end(client, "memory")
                elif self._restarts() > restarts:
                    client.send_signal(signal.SIGTERM)
                    restarts = self._restarts()
                    try:
                        client.wait(5)
                    except subprocess.TimeoutExpired:
                        self._end(client, "TimeoutStopSec")
            self.ends.append(f"status {client.returncode}")
            return client.wait()

    def _end(self, client: subprocess.Popen[bytes], why: str) -> None:
        self.ends.append(why)
        client.kill()
        client.wait()

    def _restarts(self) -> int:
        """How often `systemctl restart` was called."""
        log = self.run_dir / "systemctl.log"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def _wait_for_restart(self) -> None:
        before = self._restarts()
        while not self._stop.wait(TURN_S) and self._restarts() == before:
            pass

    def _run_timer(self) -> None:
        """Leaves out checks that would find nothing to do (`test_slots` has them): each of them is a process."""
        while not self._stop.wait(self.check_s):
            if (self.opt / "slots.json").exists() and self._has_to_check():
                self._oneshot("check")

    def _has_to_check(self) -> bool:
        state, told, known = self.state, self.state_dir / RELEASE_KEYS, self.opt / "release_keys"
        is_newer = told.exists() and told.read_text().strip() != known.read_text().strip()
        return bool(state.trial) or is_newer or is_due(self.opt, state.good)

    def _run_path(self) -> None:
        while not self._stop.wait(TURN_S):
            if any((self.state_dir / "incoming").glob("*.hfr")):
                self._oneshot("install")


def _resident_mib(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    except (OSError, IndexError):
        return 0
