"""Releases go to emulated boards over real brokers: each finds its way back from a bad one, and the roll-out stops."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from hushfleet.aggregator.fleet.processes import FleetProcess, brokers_of, started
from hushfleet.aggregator.fleet.software.releases import add_release, trust
from hushfleet.aggregator.fleet.software.rollout import begin, board_rollouts, current
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.edge_client.fleet.newest import Freshness
from hushfleet.errors import BadSignature
from hushfleet.release.statements import Trust
from hushfleet.wire.format.identity import Identity
from support.desk import Board, adopt, make_folder, served, until
from support.releases import (
    Change,
    build_release,
    cannot_be_imported,
    crashes,
    crashes_after_connecting,
    eats_memory,
    hangs,
    never_connects,
    put_in,
)
from support.systemd import EmulatedBoard

pytestmark = pytest.mark.needs("mosquitto")


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory):
    return Releases(tmp_path_factory.mktemp("releases"))


class Releases:
    """Built once for all tests, signed by one key."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.key = folder, Identity.generate()

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
    board.install(releases.get("1.0"), trust=trust(folder))
    return board


@contextlib.contextmanager
def fleet(
    tmp_path: Path, releases: Releases, *limits: Mapping[str, float], boards: int = 1
) -> Iterator[tuple[FleetFolder, list[EmulatedBoard]]]:
    """:param limits: of each board, where they are not the usual ones."""
    limits = limits or ({},) * boards
    folder = make_folder(tmp_path / "greenhouse", boards=len(limits))
    text = (folder.path / "fleet.toml").read_text()
    (folder.path / "fleet.toml").write_text(text.replace("soak_minutes = 10.0", "soak_minutes = 0.0"))
    adopt(folder, releases.key)
    named = {f"greenhouse-{i + 1:02d}": each for i, each in enumerate(limits)}
    made = [emulated(folder, tmp_path / device, device, releases, **each) for device, each in named.items()]
    with served(folder), contextlib.ExitStack() as powered:
        for board in made:
            powered.enter_context(board)
        yield folder, made


def roll_out(folder: FleetFolder, path: Path, releases: Releases) -> None:
    with FleetRegistry(folder.path) as registry:
        release = add_release(folder, registry, path)
        begin(registry, release.version, now=time.time())


def outcomes(folder: FleetFolder) -> list[str]:
    with FleetRegistry(folder.path) as registry:
        rollout = current(registry)
        assert rollout is not None
        return [board.outcome for board in board_rollouts(registry, rollout, now=time.time())]


def test_a_board_goes_from_one_release_to_the_next(tmp_path: Path, releases: Releases) -> None:
    with fleet(tmp_path, releases) as (folder, [board]):
        roll_out(folder, releases.get("2.0"), releases)
        until(lambda: outcomes(folder) == ["good"])
        state = board.slots("show")
        assert (state.good, state.previous, state.trial) == ("2.0", "1.0", None)
        assert set(board.ends) == {"status 0"}


def test_other_keys_and_the_newest_release_are_told_over_the_air(tmp_path: Path, releases: Releases) -> None:
    """The former key was stolen: the board, whose card names it, takes nothing of it any more once it is connected."""
    folder = make_folder(tmp_path / "greenhouse", boards=1)
    adopt(folder, releases.key)
    board = emulated(folder, tmp_path / "board", "greenhouse-01", releases)
    fresh = Identity.generate()
    adopt(folder, fresh)
    with served(folder), board:
        until(lambda: Trust.of_board(board.opt).number == trust(folder).number)
        with pytest.raises(BadSignature, match="not signed"):
            roll_out(folder, releases.get("2.0"), releases)
        put_in(board.state_dir, releases.get("2.0"))
        until(lambda: "not signed" in board.state.reason)
        roll_out(folder, build_release(tmp_path / "2.1.hfr", "2.1", key=fresh), releases)
        until(lambda: outcomes(folder) == ["good"])
        until(lambda: Freshness(board.state_dir).version == "2.1")
    assert board.slots("show").good == "2.1"


def test_a_bad_release_stops_the_rollout(tmp_path: Path, releases: Releases) -> None:
    with fleet(tmp_path, releases) as (folder, [board]):
        roll_out(folder, releases.get("3.0", crashes), releases)
        until(lambda: outcomes(folder) == ["failed"])
        state = board.slots("show")
        assert (state.good, state.last, state.outcome) == ("1.0", "3.0", "returned")
        with FleetRegistry(folder.path) as registry:
            stopped = until(lambda: current(registry).state == "stopped" and current(registry))
        assert "greenhouse-01" in stopped.reason


BAD: list[tuple[Change, str, dict[str, float]]] = [
    (cannot_be_imported, "was started 5 times", {"check_s": 60.0}),
    (hangs, "was started 5 times", {"check_s": 60.0, "watchdog_s": 2.0}),
    (eats_memory, "was started 5 times", {"check_s": 60.0, "memory_mib": 300}),
    (crashes_after_connecting, "was started 5 times", {}),
    (never_connects, "was not healthy within 30 minutes", {"check_s": 0.25}),
]


@pytest.mark.slow
def test_each_board_returns_by_itself_from_a_release_that_is_bad_in_its_own_way(
    tmp_path: Path, releases: Releases
) -> None:
    with fleet(tmp_path, releases, *(limits for _, _, limits in BAD)) as (_, boards):
        for board, (change, _, _) in zip(boards, BAD, strict=True):
            put_in(board.state_dir, releases.get("3.0", change))
        for board, (_, reason, _) in zip(boards, BAD, strict=True):
            until(lambda board=board: board.state.last == "3.0")
            state = board.slots("show")
            assert (state.good, state.outcome) == ("1.0", "returned")
            assert reason in state.reason


@pytest.mark.slow
def test_a_bad_release_reaches_one_board_and_the_next_good_one_all(tmp_path: Path, releases: Releases) -> None:
    with fleet(tmp_path, releases, boards=3) as (folder, boards):
        until(lambda: outcomes_before(folder) == 3)
        roll_out(folder, releases.get("3.0", crashes), releases)
        with FleetRegistry(folder.path) as registry:
            until(lambda: current(registry).state == "stopped")
        assert sorted(outcomes(folder)) == ["failed", "waits", "waits"]
        assert [board.slots("show").good for board in boards] == ["1.0"] * 3
        roll_out(folder, releases.get("3.1"), releases)
        until(lambda: outcomes(folder) == ["good"] * 3)
        assert [board.slots("show").good for board in boards] == ["3.1"] * 3


def outcomes_before(folder: FleetFolder) -> int:
    """How many boards have been heard."""
    with FleetRegistry(folder.path) as registry:
        return sum(seen.health is not None for seen in registry.boards())


@pytest.mark.slow
def test_board_broker_and_service_are_killed_at_each_step_and_the_update_goes_on(
    tmp_path: Path, releases: Releases
) -> None:
    folder = make_folder(tmp_path / "greenhouse", boards=1)
    file = folder.path / "fleet.toml"
    file.write_text(file.read_text().replace("kib_per_second = 1024.0", "kib_per_second = 40.0"))
    adopt(folder, releases.key)
    board = emulated(folder, tmp_path / "board", "greenhouse-01", releases)
    main = [sys.executable, "-c", "from hushfleet.aggregator.commands.main import main; main()"]
    service = FleetProcess("the service", [*main, "fleet", "serve", str(folder.path)], folder.logs / "service.log")
    steps = {
        "fetching": lambda: any((board.state_dir / "incoming").glob("*.part")),
        "handed over": lambda: (board.state_dir / "update.json").exists(),
        "installed": lambda: board.state.trial is not None,
        "on trial": lambda: board.state.starts > 0,
        "healthy": lambda: board.state.steady > 0,
    }
    with started(folder, brokers_of(folder)) as brokers, started(folder, [service]), board:
        roll_out(folder, releases.get("2.0"), releases)
        for reached in steps.values():
            until(reached)
            board.cut_power()
            for child in (service, brokers[0]):
                child.process.kill()
                child.process.wait()
            for child in (brokers[0], service):
                child.start()
            board.__enter__()
        until(lambda: outcomes(folder) == ["good"])
    state = board.slots("show")
    assert (state.good, state.previous) == ("2.0", "1.0")
