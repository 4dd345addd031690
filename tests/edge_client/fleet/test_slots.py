"""Which release a board runs: counts of starts and checks, hostile files, kills at every point, the order of syncs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hushfleet.edge_client.fleet import slots as module
from hushfleet.edge_client.fleet.slot_state import SlotsError, State
from hushfleet.edge_client.fleet.slots import MOST_CHECKS, MOST_STARTS, STEADY_CHECKS, Slots
from hushfleet.firmware_profiles.cards.seed import slots_archive
from hushfleet.release import archive
from hushfleet.release.statements import Trust
from hushfleet.wire.format.identity import Identity
from support.kill import CALL, KillPoints, forked
from support.releases import put_trust, statement
from support.slots import KEY, ReleaseBoard, packed


def written(out: Path, version: str) -> Path:
    out.write_bytes(packed(version, store=3))
    return out


@pytest.fixture
def board(tmp_path: Path) -> ReleaseBoard:
    made = ReleaseBoard(tmp_path, store=3)
    put_trust(made.root, Identity.generate().public_key.hex(), KEY.public_key.hex())
    return made


def test_a_release_is_installed_tried_and_made_good(board: ReleaseBoard) -> None:
    board.put("2.0")
    assert board.slots.install().trial == "2.0"
    assert board.running() == "1.0", "what runs is left alone until the next start"
    assert not list((board.state / "incoming").iterdir())
    board.slots.begin()
    assert board.running() == "2.0"
    for _ in range(STEADY_CHECKS):
        assert board.slots.read().trial == "2.0"
        board.healthy("2.0")
        board.slots.check()
    state = board.slots.read()
    assert (state.good, state.previous, state.trial, state.outcome) == ("2.0", "1.0", None, "good")
    assert board.slots.back().good == "1.0"
    assert board.running() == "1.0"


def test_a_release_that_never_stays_up_is_taken_back(board: ReleaseBoard) -> None:
    board.put("2.0")
    board.slots.install()
    for _ in range(MOST_STARTS):
        board.slots.begin()
        assert board.running() == "2.0"
        for _ in range(STEADY_CHECKS - 1):
            board.healthy("2.0")
            board.slots.check()
    state = board.slots.begin()
    assert (state.good, state.trial, state.last, state.outcome) == ("1.0", None, "2.0", "returned")
    assert "never stayed healthy" in state.reason
    assert board.running() == "1.0"


@pytest.mark.parametrize("said", ["", "1.0", "hangs"])
def test_a_release_that_is_never_healthy_is_taken_back_and_the_client_started_anew(
    board: ReleaseBoard, said: str
) -> None:
    board.put("2.0")
    board.slots.install()
    assert board.slots.check() == (board.slots.read(), False), "before its first start nothing is counted"
    board.slots.begin()
    if said:
        board.healthy("2.0" if said == "hangs" else said)  # once: a release that hangs writes it no more
    restarts = [board.slots.check()[1] for _ in range(MOST_CHECKS)]
    assert restarts == [False] * (MOST_CHECKS - 1) + [True]
    assert board.slots.read().outcome == "returned"
    assert board.running() == "1.0"
    board.put("2.0")  # an offer that is made again
    assert board.slots.install().trial == "2.0"


@pytest.mark.parametrize(
    ("version", "changes", "reason"),
    [
        (packed("2.0", Identity.generate(), store=3), {}, "not signed"),
        ("2.0", {"python": "cp27"}, "cp27"),
        ("2.0", {"arch": "vax"}, "vax"),
        ("2.0", {"oldest_store": 4, "store": 5}, "4 to 5"),
        ("2.0", {"store": 2}, "1 to 2"),
        ("0.9", {}, "older"),
        ("1.0", {"downgrade_from": ("1.0",), "downgrade_serial": 1}, "installed already"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    board: ReleaseBoard, version: str | bytes, changes: dict[str, Any], reason: str
) -> None:
    board.put(version, **changes)
    state = board.slots.install()
    assert (state.good, state.trial, state.outcome) == ("1.0", None, "refused")
    assert reason in state.reason
    assert not list((board.state / "incoming").iterdir())
    assert [each.name for each in (board.root / "releases").iterdir()] == ["1.0"]
    assert board.slots.begin().good == "1.0"
    assert board.running() == "1.0"


@pytest.mark.parametrize("content", [b"", b"HR", b"HR\x02\x00\xff\xff\xff\xff", bytes(1000)])
def test_what_is_no_release_is_refused(board: ReleaseBoard, content: bytes) -> None:
    (board.state / "incoming" / "new.hfr").write_bytes(content)
    assert board.slots.install().outcome == "refused"
    assert board.running() == "1.0"


def test_a_downgrade_needs_its_own_word_in_what_was_signed(board: ReleaseBoard) -> None:
    board.put("0.9", downgrade_from=("1.0",), downgrade_serial=1)
    assert board.slots.install().trial == "0.9"


def test_after_a_release_that_brings_the_store_up_to_date_there_is_no_way_back(board: ReleaseBoard) -> None:
    board.put("2.0", store=4)
    board.slots.install()
    board.slots.begin()
    for _ in range(STEADY_CHECKS):
        board.healthy("2.0")
        board.slots.check()
    assert board.slots.read().good == "2.0"
    with pytest.raises(SlotsError, match="no release before"):
        board.slots.back()
    assert [each.name for each in (board.root / "releases").iterdir()] == ["2.0"]


def test_a_card_s_release_is_placed_once(board: ReleaseBoard, tmp_path: Path) -> None:
    assert board.slots.first(written(tmp_path / "other", "0.5")).good == "1.0"
    assert board.running() == "1.0"


def test_an_installation_that_ends_the_process_each_time_is_not_repeated_for_ever(
    board: ReleaseBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> str:
        raise Killed

    monkeypatch.setattr(Slots, "_place", die)
    board.put("2.0")
    for _ in range(module.MOST_INSTALLS):
        with pytest.raises(Killed):
            board.slots.install()
    assert "never ended" in board.slots.install().reason
    assert not list((board.state / "incoming").iterdir())


def test_an_installation_that_is_killed_leaves_no_copy_behind(board: ReleaseBoard, tmp_path: Path) -> None:
    board.put("2.0")
    packed("2.0", store=3)

    def die() -> None:
        archive.unpack = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        board.slots.install()

    assert forked(die, tmp_path / "result") == -signal.SIGKILL
    assert [each.name for each in (board.root / "releases").iterdir()] == ["1.0"]


@pytest.mark.parametrize("checks", [0, STEADY_CHECKS])
def test_a_release_that_was_begun_or_made_good_while_another_is_unpacked_is_not_undone(
    board: ReleaseBoard, monkeypatch: pytest.MonkeyPatch, checks: int
) -> None:
    """Else who is the client could go back to a release with a hole, below the one that has closed it."""
    board.put("3.0")
    board.slots.install()
    place = Slots._place

    def slowly(slots: Slots, state: State, path: Path) -> Any:
        manifest = place(slots, state, path)
        board.slots.begin()
        for _ in range(checks):
            board.healthy("3.0")
            board.slots.check()
        return manifest

    monkeypatch.setattr(Slots, "_place", slowly)
    board.put("2.0")
    state = board.slots.install()
    assert (state.good, state.trial) == (("3.0", None) if checks else ("1.0", "3.0"))
    assert (state.outcome, board.running()) == ("refused", "3.0")


def test_links_and_pipes_in_the_state_directory_are_not_followed(board: ReleaseBoard, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    written(secret, "2.0")
    (board.state / "incoming" / "link.hfr").symlink_to(secret)
    assert board.slots.install().outcome == "refused"
    os.mkfifo(board.state / "incoming" / "pipe.hfr")
    assert board.slots.install().outcome == "refused"
    assert not list((board.state / "incoming").iterdir())
    (board.state / "incoming").rmdir()
    (board.state / "incoming").symlink_to(tmp_path)
    written(tmp_path / "mine.hfr", "2.0")
    assert board.slots.install().outcome == "refused"
    assert secret.exists()
    assert (tmp_path / "mine.hfr").exists()
    (board.state / "healthy").symlink_to(secret)
    board.slots.begin()
    assert secret.exists()
    assert not (board.state / "healthy").is_symlink()


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", '{"good": "9.9"}', '{"good": 3}', '{"good": "../state"}', '{"unknown": 1}']
)
def test_without_the_truth_what_current_points_to_is_good(board: ReleaseBoard, text: str | None) -> None:
    if text is not None:
        (board.root / "slots.json").write_text(text)
    assert board.slots.begin().good == "1.0"
    (board.root / "current").unlink()
    (board.root / "slots.json").unlink()
    board.slots.begin()
    assert board.running() == "1.0"
    shutil.rmtree(board.root / "releases" / "1.0")
    with pytest.raises(SlotsError, match="no release"):
        board.slots.begin()


WRONG = [None, True, -1, 1.5, 10**30, "", "x", "9" * 5000, "\ud800", [], ["1.0"], {}, {"good": "1.0"}]
STRANGE = ["[" * 100_000, '{"good": ' * 50_000, '{"starts": ' + "9" * 5000 + "}", "\ufeff{}", "NaN", "\0"]


@pytest.mark.parametrize("name", [field.name for field in fields(State)])
def test_a_field_of_a_wrong_type_stops_no_start(board: ReleaseBoard, name: str) -> None:
    """Whatever it is, the board runs a release that is there, and can be updated."""
    board.put("2.0")
    board.slots.install()
    whole = json.loads((board.root / "slots.json").read_text())
    for value in WRONG:
        (board.root / "slots.json").write_text(json.dumps({**whole, name: value}))
        assert board.slots.read().good == "1.0"
        for _ in range(MOST_STARTS + 1):
            state = board.slots.begin()
            assert board.running() == state.runs
        board.slots.check()
        board.put("2.0")
        assert board.slots.install().trial == "2.0", value


@pytest.mark.parametrize("text", STRANGE, ids=range(len(STRANGE)))
def test_a_strange_file_stops_no_start(board: ReleaseBoard, text: str) -> None:
    (board.root / "slots.json").write_text(text)
    assert board.slots.begin() == State("1.0")
    (board.root / "slots.json").write_bytes(b"\xff\xfe\0")
    assert board.slots.begin() == State("1.0")


def test_a_field_of_later_software_is_left_out(board: ReleaseBoard) -> None:
    (board.root / "slots.json").write_text('{"good": "1.0", "floor": "3.0", "later": 1}')
    assert board.slots.read() == State("1.0", floor="3.0")


def test_a_release_whose_files_are_gone_is_not_run(board: ReleaseBoard) -> None:
    board.put("2.0")
    board.slots.install()
    board.slots.begin()
    shutil.rmtree(board.root / "releases" / "2.0")
    assert board.slots.begin().outcome == "returned"
    assert board.running() == "1.0"


def test_the_file_runs_alone_and_without_the_project(board: ReleaseBoard) -> None:
    script = board.root / "slots.pyz"
    script.write_bytes(slots_archive())

    def run(command: str) -> State:
        arguments = [command, "--root", str(board.root), "--state", str(board.state)]
        done = subprocess.run([sys.executable, "-I", "-S", str(script), *arguments], capture_output=True)
        assert done.returncode == 0, done.stderr
        return State(**json.loads(done.stdout))

    board.put("2.0")
    board.slots.install()
    assert run("begin").starts == 1
    assert run("check").checks == 1
    assert run("show").runs == board.running() == "2.0"
    assert run("back").outcome == "returned"


# kills and power cuts

NAMED = {
    "a release is placed": (CALL, ("place",)),
    "a release is unpacked": (CALL, ("unpack",)),
    "slots.json is replaced": ("replace", ("write_whole", "Slots._replace", "Slots._write")),
    "current is replaced": ("replace", ("Slots._settle",)),
}


def play(board: ReleaseBoard) -> None:
    """One good update, one that is taken back, and a return by hand."""
    board.put("2.0")
    board.slots.install()
    board.slots.begin()
    for _ in range(STEADY_CHECKS):
        board.healthy("2.0")
        board.slots.check()
    board.put("3.0")
    board.slots.install()
    for _ in range(MOST_STARTS + 1):
        board.slots.begin()
    board.slots.back()


def test_killed_at_any_point_a_board_has_a_whole_release_and_can_be_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sync", "fsync"):  # the machine lives on
        monkeypatch.setattr(module.os, name, lambda *_: None)
    for version in ("2.0", "3.0", "4.0"):
        packed(version, store=3)  # not in the play
    points, result = (
        KillPoints(("edge_client/fleet", "hushfleet/release", "hushfleet/atomic_file.py"), NAMED),
        tmp_path / "result",
    )
    calm = ReleaseBoard(tmp_path / "calm", store=3)
    labels = points.labels(lambda: play(calm), result)
    for point in points.chosen(labels, spread=80):  # all: three minutes
        board = ReleaseBoard(tmp_path / str(point), store=3)
        points.kill(lambda: play(board), point, result)  # noqa: B023
        before = board.running()
        state = board.slots.begin()
        assert board.running() == state.runs
        assert before in ("1.0", "2.0", "3.0")
        (board.state / "incoming" / "new.hfr").unlink(missing_ok=True)
        if state.trial:  # whatever was on trial comes to an end
            for _ in range(MOST_STARTS):
                board.slots.begin()
        board.put("4.0")
        assert board.slots.install().trial == "4.0", labels[point]
        board.slots.begin()
        assert board.running() == "4.0"
        shutil.rmtree(tmp_path / str(point))


def test_killed_while_it_takes_a_statement_a_board_has_the_former_or_the_newer_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.os, "fsync", lambda *_: None)  # the machine lives on
    named = {"release_keys is replaced": ("replace", ("write_whole", "Slots._replace", "Slots._take_keys"))}
    points, result = (
        KillPoints(("edge_client/fleet", "hushfleet/release", "hushfleet/atomic_file.py"), named),
        tmp_path / "result",
    )
    newer = statement(Identity.generate().public_key.hex(), number=2).to_line()

    def hearing(folder: Path) -> ReleaseBoard:
        board = ReleaseBoard(folder, store=3)
        (board.state / "release_keys").write_text(newer)
        return board

    calm = hearing(tmp_path / "calm")
    labels = points.labels(lambda: calm.slots.check(), result)
    for point, what in points.chosen(labels, spread=min(20, len(labels))).items():
        board = hearing(tmp_path / str(point))
        points.kill(lambda: board.slots.check(), point, result)  # noqa: B023
        assert Trust.of_board(board.root).number in (1, 2), what
        board.slots.check()
        assert Trust.of_board(board.root).line == newer, what


def test_whatever_is_renamed_was_synced_before_and_its_folder_is_afterwards(
    board: ReleaseBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, ...]] = []

    def noted(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def wrapper(*arguments: int | Path) -> None:
            paths = [os.readlink(f"/proc/self/fd/{a}") if isinstance(a, int) else str(a) for a in arguments]
            events.append((name, *paths))
            call(*arguments)

        return wrapper

    for name in ("fsync", "replace", "rename", "sync"):
        monkeypatch.setattr(module.os, name, noted(name, getattr(os, name)))
    play(board)
    renamed = [at for at, event in enumerate(events) if event[0] in ("replace", "rename")]
    assert {Path(events[at][2]).name for at in renamed} == {"slots.json", "current", "2.0", "3.0"}
    for at in renamed:
        _, source, target = events[at]
        assert events[at + 1] == ("fsync", str(Path(target).parent))
        if Path(target).name == "slots.json":
            assert events[at - 1] == ("fsync", source)
        elif Path(target).name != "current":  # a link has no content of its own
            assert events[at - 1] == ("sync",)
