"""Releases go to emulated boards over real brokers: each finds its way back from a bad one, and the roll-out stops."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hushfleet.aggregator.fleet.folder import FleetFolder
from hushfleet.aggregator.fleet.registry import FleetRegistry
from hushfleet.aggregator.fleet.releases import add_release
from hushfleet.aggregator.fleet.rollout import begin, current, seats
from support.desk import Board, make_folder, served, until
from support.releases import (
    Change,
    build_release,
    cannot_be_imported,
    crashes,
    crashes_after_connecting,
    eats_memory,
    hangs,
    never_connects,
)
from support.systemd import EmulatedBoard

slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory):
    return Releases(tmp_path_factory.mktemp("releases"))


class Releases:
    """Built once for all tests, signed by one key."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.key = folder, Ed25519PrivateKey.generate()
        self.public = self.key.public_key().public_bytes_raw()

    def get(self, version: str, change: Change | None = None) -> Path:
        out = self.folder / f"{version}.hfr"
        out = out if change is None else self.folder / f"{version}-{change.__name__}.hfr"
        return out if out.exists() else build_release(out, version, key=self.key, change=change)


def emulated(folder: FleetFolder, home: Path, device: str, releases: Releases, **limits: float) -> EmulatedBoard:
    """A board that was installed with release 1.0 and has not enrolled yet."""
    Board(folder, home, device).store.close()
    file = home / "device.toml"
    file.write_text(file.read_text().replace("[fleet]\n", f'[fleet]\nreleases = "{home / "opt"}"\n'))
    board = EmulatedBoard(home, **limits)
    board.install(releases.get("1.0"), keys=[releases.public.hex()])
    return board


@contextlib.contextmanager
def fleet(
    tmp_path: Path, releases: Releases, *, boards: int = 1, **limits: float
) -> Iterator[tuple[FleetFolder, list[EmulatedBoard]]]:
    folder = make_folder(tmp_path / "greenhouse", boards=boards)
    text = (folder.path / "fleet.toml").read_text()
    (folder.path / "fleet.toml").write_text(text.replace("soak_minutes = 10.0", "soak_minutes = 0.0"))
    devices = [f"greenhouse-{i + 1:02d}" for i in range(boards)]
    made = [emulated(folder, tmp_path / device, device, releases, **limits) for device in devices]
    with served(folder), contextlib.ExitStack() as powered:
        for board in made:
            powered.enter_context(board)
        yield folder, made


def roll_out(folder: FleetFolder, path: Path, releases: Releases) -> None:
    with FleetRegistry(folder.path) as registry:
        release = add_release(folder, registry, path, public_key=releases.public)
        begin(registry, release.version, now=time.time())


def outcomes(folder: FleetFolder) -> list[str]:
    with FleetRegistry(folder.path) as registry:
        rollout = current(registry)
        assert rollout is not None
        return [seat.outcome for seat in seats(registry, rollout, now=time.time())]


def test_a_board_goes_from_one_release_to_the_next(tmp_path: Path, releases: Releases) -> None:
    with fleet(tmp_path, releases) as (folder, [board]):
        roll_out(folder, releases.get("2.0"), releases)
        until(lambda: outcomes(folder) == ["good"], within_s=90)
        state = board.slots("show")
        assert (state.good, state.previous, state.trial) == ("2.0", "1.0", None)
        assert set(board.ends) == {"status 0"}


@pytest.mark.parametrize(
    ("change", "reason", "limits"),
    [
        (crashes, "was started 5 times", {}),
        slow(cannot_be_imported, "was started 5 times", {}),
        slow(hangs, "was not healthy within 30 minutes", {"check_s": 0.5, "watchdog_s": 5.0}),
        slow(eats_memory, "was started 5 times", {"memory_mib": 300}),
        slow(crashes_after_connecting, "was started 5 times", {}),
        slow(never_connects, "was not healthy within 30 minutes", {"check_s": 0.5}),
    ],
)
def test_a_board_finds_its_way_back_by_itself(
    change: Change, reason: str, limits: dict[str, float], tmp_path: Path, releases: Releases
) -> None:
    with fleet(tmp_path, releases, **limits) as (folder, [board]):
        roll_out(folder, releases.get("3.0", change), releases)
        until(lambda: outcomes(folder) == ["failed"], within_s=120)
        state = board.slots("show")
        assert (state.good, state.last, state.outcome) == ("1.0", "3.0", "returned")
        assert reason in state.reason
        with FleetRegistry(folder.path) as registry:
            stopped = until(lambda: current(registry).state == "stopped" and current(registry))
        assert "greenhouse-01" in stopped.reason
