"""The fleet service when its disk is full: nothing that the registry says is left undone."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from hushfleet.aggregator.fleet.service import APPLY_AGAIN_S, FleetService, ServicePart
from hushfleet.errors import LinkLost, StoreFull
from hushfleet.simulator.world.hub import LocalHub
from hushfleet.wire.format.messages import encode_message
from hushfleet.wire.link.interface import Delivery
from support.desk import FEDERATION
from support.enroller import Asker, Desk

BOARD = "greenhouse-01"


class Disk:
    """Where `apply` writes."""

    def __init__(self) -> None:
        self.is_full, self.written = False, 0

    def apply(self) -> None:
        if self.is_full:
            raise StoreFull("the membership list cannot be written: no space left")
        self.written += 1


@pytest.mark.parametrize("struck", ["a change of another process", "a board's first certificate"])
def test_what_a_full_disk_held_up_is_written_when_there_is_room(tmp_path: Path, struck: str) -> None:
    desk, hub, disk, now, changed = Desk(tmp_path), LocalHub(), Disk(), [0.0], [False]
    service = desk.service(
        hub, apply=disk.apply, clock=lambda: now[0], was_changed=lambda: bool(changed and changed.pop())
    )
    desk.enroller._on_granted = disk.apply
    service.start()
    service.step(0.0)
    before, disk.is_full = disk.written, True
    if struck == "a change of another process":
        changed.append(True)
        service.step(0.0)
    else:
        board = Asker(BOARD, desk.token(BOARD))
        frame = encode_message(board.request(), board.identity, federation=FEDERATION)
        service._on_event(Delivery(service.topics.request(BOARD), frame, False), "", service._on_request)
    service.step(0.0)
    assert disk.written == before
    disk.is_full = False
    now[0] += APPLY_AGAIN_S
    service.step(0.0)
    assert disk.written == before + 1
    service.step(0.0)
    assert disk.written == before + 1, "once"
    desk.close()


def test_a_board_of_another_version_is_named_once_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(tmp_path)
    service = desk.service(LocalHub(), clock=lambda: 0.0)
    board = Asker(BOARD, desk.token(BOARD))
    frame = bytearray(encode_message(board.request(), board.identity, federation=FEDERATION))
    frame[2] -= 1  # the version
    for _ in range(3):
        service._on_event(Delivery(service.topics.request(BOARD), bytes(frame), False), "", service._on_request)
    (said,) = caplog.messages
    assert BOARD in said
    assert "needs its card written anew" in said
    desk.close()


class Slow(ServicePart):
    """It takes two seconds whenever it acts."""

    every_s = 1.0

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock
        self.acted: list[float] = []

    def act(self, service: FleetService, now: float) -> None:
        self.acted.append(now)
        self._clock[0] += 2.0


def test_a_part_that_takes_long_leaves_time_to_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 10,000 boards a roll-out looked at all of them after each single message."""
    monkeypatch.setattr("hushfleet.aggregator.fleet.service.REST", 5.0)
    clock = [0.0]
    monkeypatch.setattr("hushfleet.aggregator.fleet.service.time.monotonic", lambda: clock[0])
    part, service = Slow(clock), cast(FleetService, None)
    while clock[0] < 30:
        part.advance(service, clock[0])
        clock[0] += 0.1
    assert part.acted == pytest.approx([0.0, 10.0, 20.0], abs=0.3)


class Failing(ServicePart):
    fails_as, again_s = "nothing is told", 10.0

    def __init__(self) -> None:
        self.why, self.acted = "the disk is full", list[float]()

    def act(self, service: FleetService, now: float) -> None:
        self.acted.append(now)
        if self.why:
            raise LinkLost(self.why) if self.why == "no link" else StoreFull(self.why)


def test_a_part_that_fails_is_told_once_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    part, service = Failing(), cast(FleetService, None)
    for now in (0.0, 5.0, 11.0):
        part.advance(service, now)
    part.why = "the disk is gone"
    part.advance(service, 30.0)
    assert part.acted == [0.0, 11.0, 30.0]
    assert caplog.messages == ["nothing is told: the disk is full", "nothing is told: the disk is gone"]
    part.why = ""
    part.advance(service, 60.0)
    part.advance(service, 60.1)
    assert part.acted[-1] == 60.1, "as often as it is due again"
    part.why = "no link"
    with pytest.raises(LinkLost):  # all parts wait for it
        part.advance(service, 90.0)
