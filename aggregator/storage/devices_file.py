"""Reads an operator's list of known devices: a TOML file, or the folder of an earlier run.

[devices]
greenhouse-01 = "certificate"
greenhouse-02 = "5f0c...64 hex digits"
"""

from __future__ import annotations

from pathlib import Path

from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.errors import BadInput
from hushfleet.public_keys import can_have_owner, parse_public_key
from hushfleet.schema import read_file
from hushfleet.wire.format.topics import check_name

BY_CERTIFICATE = "certificate"


def read_devices(path: Path) -> list[Board]:
    """Reads the devices of a file, or of an earlier run with its pinned keys and its blocks.

    Raises `BadInput`.
    """
    if path.is_dir():
        if not DeviceRegister.exists(path):
            raise BadInput(f"--devices {path}: the folder has no {DeviceRegister.file_of(path).name}, so no devices")
        with DeviceRegister(path) as register:
            return [_checked(path, row) for row in register.devices()]
    content = read_file(path)
    listed = content.get("devices") if isinstance(content, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise BadInput(f'{path} needs a section [devices] with lines like: greenhouse-01 = "{BY_CERTIFICATE}"')
    return [_device(path, name, value) for name, value in listed.items()]


def parse_key(text: str, what: str) -> bytes:
    """Parses the public key of a board. Raises `BadInput`, which names `what`."""
    return parse_public_key(text, what, owner="no board", printed_by="`hushfleet-edge status` on the board")


def _checked(run: Path, row: Board) -> Board:
    """Returns a device of an earlier run; an earlier version may have taken a key that nobody can own."""
    if row.public_key is not None and not can_have_owner(row.public_key):
        raise BadInput(
            f"--devices {run}: the key of {row.device} is {row.public_key.hex()}, which no board can own; remove it: "
            f"hushfleet fleet forget {run} {row.device}"
        )
    return row


def _device(path: Path, name: str, value: object) -> Board:
    check_name(name, f"the device id in {path}")
    if value == BY_CERTIFICATE:
        return Board(name, standing="pinned")
    if not isinstance(value, str):
        raise BadInput(f'{path}: {name} needs its key in quotes, or "{BY_CERTIFICATE}"')
    return Board(name, public_key=parse_key(value, f"{path}: the key of {name}"))
