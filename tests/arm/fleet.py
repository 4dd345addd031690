"""A fleet on this machine for emulated boards: made, run and asked with the product's own commands."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from arm.roots import cache_folder
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.results.events import iterate_events
from hushfleet.aggregator.storage.identity_file import load_or_create
from hushfleet.firmware_profiles.cards import bundle
from hushfleet.release.archive import pack, read_head
from hushfleet.release.manifest import SignedManifest
from support.desk import TASK, Board
from support.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
FIRST, SECOND, THIRD = "greenhouse-01", "greenhouse-02", "greenhouse-03"
PYTHON, ARCH = "3.13", "aarch64"  # of Debian 13 and Raspberry Pi OS Trixie


def hushfleet(*arguments: object) -> str:
    """One command of the desk; what it prints. Fails where it fails."""
    command = [sys.executable, "-m", "hushfleet.aggregator.commands", *map(str, arguments)]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True)
    assert done.returncode == 0, f"hushfleet {' '.join(map(str, arguments))}:\n{done.stdout}{done.stderr}"
    return done.stdout


class ArmFleet:
    """The folder `greenhouse` in `home`, with as many boards as its task waits for; the first one is emulated.

    :param host: where the emulated board reaches this machine.
    """

    def __init__(self, home: Path, *, host: str = "127.0.0.1", devices: int = 3, rounds: int = 3) -> None:
        self.home, path, task = home, home / "greenhouse", home / "task.toml"
        text = TASK.replace("devices = 2", f"devices = {devices}").replace("rounds = 2", f"rounds = {rounds}")
        task.write_text(text)
        port, enrolment_port, page_port = free_ports(3)
        ports = ("--port", port, "--enrolment-port", enrolment_port, "--page-port", page_port)
        hushfleet("fleet", "init", path, "--broker-name", host, "--task", task, *ports)
        file = path / "fleet.toml"
        text = file.read_text().replace("soak_minutes = 10.0", "soak_minutes = 0.0")
        text = text.replace("kib_per_second = 1024.0", "kib_per_second = 8192.0")
        file.write_text(text.replace("epsilon_server = 8.0", "epsilon_server = inf"))
        hushfleet("fleet", "add", path, "--count", devices, "--board", "raspberry-pi-4-4gb")
        self.folder = FleetFolder(path)
        self.devices = [f"greenhouse-{number:02}" for number in range(1, devices + 1)]

    def release(self, version: str, change: Callable[[Path], None] | None = None) -> Path:
        """Made known to the fleet. What is in it is built once and kept; the fleet's key signs it.

        :param change: writes its files, in place of ours: a release that is broken.
        """
        out, key = self.home / f"{version}.hfr", load_or_create(self.folder.release_key)
        if change is not None:
            files = self.home / version
            files.mkdir()
            change(files)
            pack(files, out, key=key, version=version, python="cp313", arch=ARCH, oldest_store=1, store=_store_schema())
        else:
            with _built(version).open("rb") as file:
                manifest = read_head(file).manifest
                out.write_bytes(SignedManifest.sign(manifest, key).to_bytes() + file.read())
        hushfleet("fleet", "release", self.folder.path, out)
        return out

    def images(self) -> Path:
        """Some for each board, as `hushfleet flash --images` takes them."""
        folder, rng = self.home / "images", np.random.default_rng(1)
        for device in self.devices:
            for label in range(10):
                (folder / device / str(label)).mkdir(parents=True)
                for number in range(3):
                    pixels = rng.integers(0, 256, (8, 8), dtype=np.uint8)
                    Image.fromarray(pixels).save(folder / device / str(label) / f"{number}.png")
        return folder

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        """`hushfleet fleet up`, and all boards but the first, which run on this machine itself."""
        with contextlib.ExitStack() as running:
            command = ("hushfleet.aggregator.commands", "fleet", "up", self.folder.path)
            running.enter_context(_running(*command, log=self.home / "up.log"))
            for device in self.devices[1:]:
                board = Board(self.folder, self.home / device, device)
                board.store.close()
                text = board.file.read_text().replace("/var/lib/hushfleet-images", str(self.home / "images" / device))
                host = self.folder.config.broker.names[0]
                board.file.write_text(text.replace(f"//{host}:", "//127.0.0.1:"))
                running.enter_context(_running("hushfleet.edge_client", board.file, log=self.home / f"{device}.log"))
            yield

    def rounds(self) -> int:
        file = self.folder.run / "events.jsonl"
        return sum(event["event"] == "round_close" for event in iterate_events(file)) if file.exists() else 0

    def seen(self, device: str = FIRST) -> dict[str, Any]:
        """What `hushfleet fleet status --json` says of a board."""
        view = json.loads(hushfleet("fleet", "status", self.folder.path, "--json"))
        return next(board for board in view["boards"] if board["device"] == device)

    def log(self) -> str:
        return (self.home / "up.log").read_text(errors="replace")


def wait_for(what: str, condition: Callable[[], Any], *, within_s: float) -> Any:
    """What `condition` gives once it is true; says how long that took."""
    began = time.monotonic()
    while not (value := condition()):
        assert time.monotonic() < began + within_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.5)
    print(f"{time.monotonic() - began:6.0f} s  {what}", flush=True)
    return value


def _built(version: str) -> Path:
    sources = hashlib.sha256()
    for package in ("hushfleet", "edge_client", "firmware_profiles"):
        for path in sorted((ROOT / package).rglob("*.py")):
            sources.update(path.read_bytes())
    kept = cache_folder() / "releases" / f"{version}-{sources.hexdigest()[:12]}.hfr"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(".part")
        bundle.build(part, key=load_or_create(kept.parent / "any.key"), python=PYTHON, arch=ARCH, version=version)
        part.rename(kept)
    return kept


def _store_schema() -> int:
    from hushfleet.edge_client.storage.store_file import SCHEMA_VERSION

    return int(SCHEMA_VERSION)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "NOTIFY_SOCKET": ""}


@contextlib.contextmanager
def _running(module: str, *arguments: object, log: Path) -> Iterator[None]:
    with log.open("ab") as output:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        process = subprocess.Popen(command, stdout=output, stderr=output, env=_environment())
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()
