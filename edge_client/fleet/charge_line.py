"""Defines the line with which a board's charges are kept a second time, outside of the file system of its store.

The client writes STATE/charged.txt; root's timer copies it to the boot partition, from which `slots.py begin` hands it
to the client at its next start. So a store that was put back, with all of its file system, is still detected. The line
has no secret and nothing of the board's data. This file uses only the standard library: `slots.pyz` contains it.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import NamedTuple

from hushfleet.edge_client.fleet.client_files import read_inside
from hushfleet.edge_client.state_files import CHARGED

_LINE = re.compile(r"([0-9a-f]{64}) ([0-9]{1,18}) ([0-9.e+-]{1,24}) ([0-9a-f]{8})")
_MOST_BYTES = 160


class ChargeLine(NamedTuple):
    """The charges of a store.

    :param key: the public key of its device, 64 hex digits: the line of another store is ignored.
    :param rounds: the number of charged rounds.
    :param weight: the sum of `Charge.weight`.
    """

    key: str
    rounds: int
    weight: float

    @property
    def text(self) -> str:
        said = f"{self.key} {self.rounds} {self.weight!r}"
        return f"{said} {zlib.crc32(said.encode()):08x}\n"

    @classmethod
    def read(cls, folder: Path) -> ChargeLine | None:
        """Reads the line in a folder; None if there is none, or it was cut or damaged."""
        found = _LINE.fullmatch(read_inside(folder, CHARGED, _MOST_BYTES)[0])
        try:
            line = None if found is None else cls(found[1], int(found[2]), float(found[3]))
        except ValueError:
            return None
        return line if line is not None and found is not None and line.text.split()[3] == found[4] else None
