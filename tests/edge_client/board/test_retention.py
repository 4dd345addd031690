"""A board deletes what its owner has said, the oldest first, and nothing else; a wrong clock deletes nothing."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hushfleet.data.walk import walked
from hushfleet.edge_client.board import retention
from hushfleet.edge_client.board.config import DeviceConfig, OwnDataSection
from hushfleet.edge_client.board.retention import DAY_S, LOOK_S, Retention
from hushfleet.edge_client.storage import state_files
from hushfleet.errors import StoreFull
from support.edge import Bench


class Wall:
    """A clock that a test sets.

    :param days: since now, which is when the test's files came.
    """

    days = 0.0

    def __call__(self) -> float:
        return time.time() + self.days * DAY_S


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for number in range(4):
        file = tmp_path / "images" / ("leaf", "mould")[number % 2] / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(1000))
    return tmp_path / "images"


def names(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def looks(section: OwnDataSection, wall: Wall, *days: float) -> None:
    """The client looks at these times, and is started anew in between."""
    for day in days:
        wall.days = day
        Retention(section, Path(section.path).parent / "state", now=wall).advance(0.0)


def test_nothing_is_deleted_unless_the_owner_says_so(images: Path) -> None:
    before = names(images)
    looks(OwnDataSection("folder", str(images)), Wall(), 0, 1000, 2000)
    assert names(images) == before
    assert not (images.parent / "state").exists()


def test_an_image_goes_when_it_is_too_old_at_two_daily_looks(images: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    section = OwnDataSection("folder", str(images), keep="90d")
    wall = Wall()
    looks(section, wall, 0, 30, 89, 90.5)
    assert len(names(images)) == 4
    looks(section, wall, 91, 91.4)
    assert len(names(images)) == 4, "a day has not passed since the last look"
    looks(section, wall, 91.6)
    assert names(images) == []
    assert "data.keep = '90d': deleted 4 files, the oldest: " in caplog.text
    assert "leaf/0.jpg" in caplog.text


@pytest.mark.parametrize(
    "days",
    [
        (0, 5000, 1, 2, 3),  # a jump into the future, corrected within a day
        (0, 1, 5000, 5000.5, 2, 3, 4),
        (-20000, 0, 1, 2),  # a board without a battery starts in the past
        (5000, 0, 1),  # the first look has the wrong time
        (0, 5000, 0.1, 5000, 0.2, 5000, 0.3),  # now and then
    ],
)
def test_a_wrong_clock_deletes_nothing(images: Path, days: tuple[float, ...]) -> None:
    looks(OwnDataSection("folder", str(images), keep="90d"), Wall(), *days)
    assert len(names(images)) == 4


def test_a_note_that_is_broken_or_lost_begins_a_new_day(images: Path) -> None:
    section, wall = OwnDataSection("folder", str(images), keep="1d"), Wall()
    looks(section, wall, 0)
    note = images.parent / "state" / state_files.RETENTION
    for content in (b"", b"[]", b'{"looked": "x"}', b"\xff"):
        note.write_bytes(content)
        looks(section, wall, 500)
        assert len(names(images)) == 4


def test_the_oldest_go_until_the_rest_fits(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MIB", 1100)
    inbox = images.with_name("inbox")
    inbox.mkdir()
    (inbox / "new.jpg").write_bytes(bytes(200))
    section = OwnDataSection("folder", str(images), inbox=str(inbox), max_mib=3)
    order = sorted(images.rglob("*.jpg"), key=lambda file: (file.stat().st_ctime, str(file)))
    looks(section, Wall(), 0)  # 4200 of 3300
    assert names(images) == sorted(file.relative_to(images).as_posix() for file in order[1:])
    assert names(inbox) == ["new.jpg"]
    looks(section, Wall(), 0)
    assert len(names(images)) == 3, "never more than needed"


def test_what_comes_while_the_clock_is_behind_is_not_the_oldest(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A board without a battery starts in 1970, and its camera goes on; dates of files cannot be set by a test."""
    monkeypatch.setattr(retention, "MIB", 1100)
    section, wall = OwnDataSection("folder", str(images), max_mib=4), Wall()
    looks(section, wall, 0)
    new = images / "leaf/new.jpg"
    new.write_bytes(bytes(1000))
    found = Retention._files

    def dated(self: Retention) -> list[Any]:
        files = found(self)
        return [file._replace(came=60.0) if file.path.endswith("new.jpg") else file for file in files]

    monkeypatch.setattr(Retention, "_files", dated)
    monkeypatch.setattr(Wall, "__call__", lambda self: 3600.0)
    looks(section, wall, 0)
    assert len(names(images)) == 4, "5000 bytes of 4400"
    assert new.exists()


def test_only_files_of_the_data_are_deleted(images: Path, tmp_path: Path) -> None:
    others = tmp_path / "others"
    (others / "holiday").mkdir(parents=True)
    (others / "holiday/1.jpg").write_bytes(bytes(9))
    (images / "leaf/link").symlink_to(others)
    (images / "leaf/link.jpg").symlink_to(others / "holiday/1.jpg")
    for name in ("notes.txt", "leaf/model.onnx", "leaf/.hidden.jpg", ".thumbnails/1.jpg", "held/leaf/1.jpg"):
        (images / name).parent.mkdir(parents=True, exist_ok=True)
        (images / name).write_bytes(bytes(9))
    section = OwnDataSection("folder", str(images), held_out=str(images / "held"), keep="1d")
    for name in ("saved.jfif", "saved.AVIF", "saved.jpe"):
        (images / "leaf" / name).write_bytes(bytes(9))
    looks(section, Wall(), 0, 10, 20)
    assert names(others) == ["holiday/1.jpg"]
    kept = [".thumbnails/1.jpg", "held/leaf/1.jpg", "leaf/.hidden.jpg", "leaf/link.jpg", "leaf/model.onnx", "notes.txt"]
    assert [name for name in names(images) if not name.startswith("leaf/link/")] == kept
    csv = tmp_path / "csv"
    csv.mkdir()
    for name in ("1.csv", "2.CSV", "picture.jpg"):
        (csv / name).write_bytes(bytes(9))
    looks(OwnDataSection("csv", str(csv), keep="1d"), Wall(), 100, 110, 120)
    assert names(csv) == ["picture.jpg"]


def test_the_size_is_limited_by_arrival_so_that_no_window_decides_about_a_later_one(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image of an earlier window that was copied again has a new date, and is as old as before."""
    monkeypatch.setattr(retention, "MIB", 1)
    arrived = {"0.jpg": 5.0, "1.jpg": 6.0, "2.jpg": 7.0, "3.jpg": 8.0}
    asked: list[str] = []

    def of_file(path: str) -> float | None:
        asked.append(Path(path).name)
        return arrived.get(Path(path).name)

    section = OwnDataSection("folder", str(images), max_mib=2500)
    (images / "leaf/0.jpg").write_bytes(bytes(1000))  # its date is the newest now
    board = Retention(section, images.parent, arrived=of_file)
    board.advance(0.0)
    assert names(images) == ["leaf/2.jpg", "mould/3.jpg"]
    (images / "leaf/new.jpg").write_bytes(bytes(1000))
    board.advance(LOOK_S)
    assert names(images) == ["leaf/new.jpg", "mould/3.jpg"], "what no task has seen yet is dated by its file"
    assert sorted(asked) == ["0.jpg", "1.jpg", "2.jpg", "3.jpg", "new.jpg"], "each file is read once"
    Retention(replace(section, max_mib=10**6), images.parent, arrived=of_file).advance(0.0)
    assert len(asked) == 5, "none, where nothing is deleted"


def test_what_waits_in_the_inbox_is_compared_by_date_where_counted_time_is_far_behind(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that is counted stands still while a board is off: by it all arrivals are older than any date."""
    monkeypatch.setattr(retention, "MIB", 1)
    inbox = images.with_name("inbox")
    inbox.mkdir()
    (inbox / "waits.jpg").write_bytes(bytes(1000))
    found = Retention._files

    def dated(self: Retention) -> list[Any]:  # 0.jpg arrived first, and was copied again; the inbox is older than 1.jpg
        came = {"0.jpg": 9.0, "1.jpg": 2.0, "2.jpg": 3.0, "3.jpg": 4.0, "waits.jpg": 1.0}
        return [file._replace(came=came[Path(file.path).name]) for file in found(self)]

    monkeypatch.setattr(Retention, "_files", dated)
    section = OwnDataSection("folder", str(images), inbox=str(inbox))
    arrived = {"0.jpg": 0.1, "1.jpg": 0.2, "2.jpg": 0.2, "3.jpg": 0.4}  # two came in one second
    for left in (4, 3, 2, 1):
        limited = replace(section, max_mib=left * 1000)
        Retention(limited, images.parent, arrived=lambda path: arrived.get(Path(path).name)).advance(0.0)
        assert sorted(Path(each).name for each in names(images)) == [f"{number}.jpg" for number in range(4 - left, 4)]
        assert names(inbox) == []


def test_an_arrival_that_is_noted_later_counts_then(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MIB", 1)
    arrived = dict[str, float]()
    board = Retention(
        OwnDataSection("folder", str(images), max_mib=3500), images.parent,
        arrived=lambda path: arrived.get(Path(path).name),
    )  # fmt: skip
    order = sorted(images.rglob("*.jpg"), key=lambda file: (file.stat().st_ctime, str(file)))
    board.advance(0.0)
    assert not order[0].exists()
    arrived |= {order[3].name: 5.0, order[1].name: 6.0, order[2].name: 7.0}
    (images / "leaf/new.jpg").write_bytes(bytes(1000))
    board.advance(LOOK_S)
    assert [each.exists() for each in order[1:]] == [True, True, False]


def test_a_file_that_cannot_be_deleted_keeps_no_other(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the unit `record` a file that stays would decide which others still train."""
    unlink = os.unlink

    def refused(path: str | Path) -> None:
        if "mould" in os.fspath(path):
            raise PermissionError(13, "Permission denied", path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", refused)
    looks(OwnDataSection("folder", str(images), keep="1d"), Wall(), 0, 10, 20)
    assert names(images) == ["mould/1.jpg", "mould/3.jpg"]


def test_folders_in_each_other_end_no_client(images: Path) -> None:
    """`os.walk` calls itself for each level before Python 3.12."""
    folder = os.open(images, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("a", dir_fd=folder)
        inside = os.open("a", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inside
    os.close(os.open("x.jpg", os.O_WRONLY | os.O_CREAT, dir_fd=folder))
    os.close(folder)
    looks(OwnDataSection("folder", str(images), keep="1d"), Wall(), 0, 10, 20)
    found = [file for _, _, files in walked(images) for file in files]
    subprocess.run(["rm", "-r", str(images)], check=True)  # `shutil.rmtree`, by pytest, calls itself for each level
    assert found == []


def test_what_cannot_be_deleted_is_told_once(images: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    def refused(path: str) -> None:
        raise OSError(30, "Read-only file system", path)

    monkeypatch.setattr(os, "unlink", refused)
    monkeypatch.setattr(retention, "MIB", 1)
    board = Retention(OwnDataSection("folder", str(images), max_mib=1), images.parent)
    for hour in range(3):
        board.advance(hour * LOOK_S)
    [record] = caplog.records
    assert "Read-only file system; the client's user must own its folder, and its unit allow it" in record.getMessage()


def test_the_client_looks_while_it_runs(
    make_bench: Callable[..., Bench], config: DeviceConfig, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "MIB", 1)
    data = OwnDataSection("folder", str(images), max_mib=2500)
    bench = make_bench(config=replace(config, data=data, simulation=None), announce=False)
    bench.agent.step(0.0)
    assert len(names(images)) == 2
    (images / "leaf/new.jpg").write_bytes(bytes(1000))
    bench.agent.step(0.0)
    assert len(names(images)) == 3
    bench.clock.now += LOOK_S
    bench.agent.step(0.0)
    assert len(names(images)) == 2


@pytest.mark.parametrize(
    ("date", "days"),
    [
        (-20000, [-20000, 1.1, 2.2, -20000, 2.3, 3.4, 60, 61, 62, 89.9, 91]),  # each day starts in 1970 for an hour
        (-20000, [-20000, -19999.9, -20000, 1.1, 2.2, 3.3, 90, 91]),  # and the client is started anew meanwhile
        (1.5, [1.6, 201, 202, 203, 204, 290]),  # the board was off, and its clock goes on where it stopped
        (1.5, [201, 202, 203, 204, 290]),
    ],
)
def test_a_file_that_came_while_the_clock_was_behind_stays_as_long_as_others(
    images: Path, monkeypatch: pytest.MonkeyPatch, date: float, days: list[float]
) -> None:
    found, stamp = Retention._files, time.time() + date * DAY_S

    def files(board: Retention) -> list[Any]:  # a date that no program can set
        return [file._replace(came=stamp) if file.path.endswith("late.jpg") else file for file in found(board)]

    monkeypatch.setattr(Retention, "_files", files)
    section, wall = OwnDataSection("folder", str(images), keep="90d"), Wall()
    looks(section, wall, 0, 1)
    (images / "leaf/late.jpg").write_bytes(bytes(9))
    looks(section, wall, *days)
    assert "leaf/late.jpg" in names(images)
    looks(section, wall, *(days[-1] + later for later in (1.5, 2.6)))
    assert names(images) == []


def test_a_full_disk_keeps_nothing_from_being_deleted(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner may have said how long images stay because the disk is full."""

    def full(path: Path, data: bytes, **_: object) -> None:
        raise StoreFull(f"{path} cannot be written: No space left on device")

    monkeypatch.setattr("hushfleet.atomic_file.write_whole", full)
    wall = Wall()
    board = Retention(OwnDataSection("folder", str(images), keep="90d"), images.parent, now=wall)
    for day in (0, 91, 92):
        wall.days = day
        board.advance(day * DAY_S)
    assert names(images) == []


def test_a_held_out_file_stays(images: Path) -> None:
    for name in ("a.csv", "test.csv"):
        (images / name).write_bytes(bytes(9))
    section = OwnDataSection("csv", str(images), held_out=str(images / "test.csv"), keep="1d")
    looks(section, Wall(), 0, 10, 20)
    assert [name for name in names(images) if name.endswith("csv")] == ["test.csv"]
