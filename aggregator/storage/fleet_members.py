"""Who may take part in a fleet, for its aggregator: the members that the fleet has signed, less those it has blocked.

No row of the aggregator's own file makes a board a member or gives it a key, so a process with all rights of the
aggregator can shut boards out, but let none in. The list that counts is the newest: its number is kept here, over runs
and restarts, and an older list is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hushfleet.aggregator.storage.activity import ActivityStore
from hushfleet.aggregator.storage.admission_list import AdmissionList, load_authority, read_admissions
from hushfleet.aggregator.storage.board import Board, with_blocked
from hushfleet.aggregator.storage.list_file import ListFile
from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.errors import BadSignature

BY_FLEET = "by the fleet's operator: "


class FleetMembers(ActivityStore):
    """The members of a fleet.

    :param folder: the aggregator's own, with its file of activity.
    :param file: the admission list; the aggregator may not write it.
    :param authority: the certificate of the fleet's authority, PEM; nor this.
    :param settings: as for `ActivityStore`.

    Raises `BadInput` for an authority that cannot be read, and `StoreError`.
    """

    def __init__(self, folder: Path, *, file: Path, authority: Path, federation: str, **settings: Any) -> None:
        self._authority, self._federation = load_authority(authority), federation
        self._list = ListFile(file, self._read, name="admission list")
        self._of: tuple[AdmissionList | None, Mapping[str, str]] = None, {}
        self._boards: dict[str, Board] = {}
        super().__init__(folder, **settings)

    def devices(self) -> list[Board]:
        return list(self._known().values())

    def device(self, device: str) -> Board | None:
        return self._known().get(device)

    def was_changed(self) -> bool:
        before = self._of[0]
        return super().was_changed() or self._list.current() is not before

    def pin(self, keys: Mapping[str, bytes], *, may_add: bool) -> None:
        """Stores nothing: a fleet's keys come from its list."""

    def take_over(self, devices: Iterable[Board]) -> None:
        """Adds nothing: a fleet's members come from its list."""

    def _known(self) -> dict[str, Board]:
        of = self._list.current(), self.blocked()
        if of != self._of:
            listed, blocked = self._of = of
            keys, out = ({}, {}) if listed is None else (listed.keys, listed.blocked)
            boards = [Board(device, public_key=key, standing="enrolled") for device, key in keys.items()]
            boards += [Board(device).blocked(f"{BY_FLEET}{why}") for device, why in out.items()]
            # the fleet's own word is the last one: its reason is shown where both have blocked a board
            ours = {device: why for device, why in blocked.items() if device not in out}
            self._boards = {board.device: board for board in with_blocked(sorted(boards, key=_by_id), ours)}
        return self._boards

    def _read(self, data: bytes) -> AdmissionList:
        found = read_admissions(data, self._authority, federation=self._federation)
        row = self.row("SELECT number FROM newest_list")
        if row is not None and found.number < row[0]:
            raise BadSignature(
                f"it is list {found.number}, and list {row[0]} was seen before: it may bring back boards"
            )
        self.write("INSERT OR REPLACE INTO newest_list VALUES (0, ?)", (found.number,))
        return found


def _by_id(board: Board) -> str:
    return board.device


Members = DeviceRegister | FleetMembers
"""Who may take part, for an aggregator: in a run without a fleet, or in a fleet."""
