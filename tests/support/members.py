"""A fleet's admission list, as its authority signs it, beside an aggregator's own folder."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hushfleet import atomic_file
from hushfleet.aggregator.fleet.trust.authority import Authority
from hushfleet.aggregator.storage.admission_list import AdmissionList
from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.fleet_members import FleetMembers

FEDERATION = "greenhouse"


class SignedMembers:
    """The fleet's side of the list, in `folder`; `open` is the aggregator's side."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file, self.pem = folder, folder / "admissions", folder / "ca.pem"
        self.authority = Authority.create(FEDERATION, now=datetime.datetime.now(datetime.UTC))
        self.pem.write_bytes(self.authority.pem)
        self.number = 0

    def signed(self, boards: Sequence[Board], *, number: int | None = None, federation: str = FEDERATION) -> bytes:
        made = AdmissionList.of(boards, federation=federation, after=self.number)
        made = made if number is None else replace(made, number=number)
        self.number = max(self.number, made.number)
        return made.signed(self.authority.sign)

    def write(self, boards: Sequence[Board]) -> None:
        atomic_file.write_whole(self.file, self.signed(boards), durable=False)

    def open(self, **settings: Any) -> FleetMembers:
        own = self.folder / "aggregator"
        return FleetMembers(own, file=self.file, authority=self.pem, federation=FEDERATION, durable=False, **settings)


def member(device: str, key: bytes) -> Board:
    return Board(device, public_key=key, standing="enrolled")
