"""Reads an operator's list of known devices: a TOML file, or the folder of an earlier run.

[devices]
greenhouse-01 = "certificate"
greenhouse-02 = "5f0c...64 hex digits"
"""

from __future__ import annotations

from pathlib import Path

from hushfleet.aggregator.devices.register import DeviceRegister, KnownDevice
from hushfleet.errors import BadInput
from hushfleet.schema import read_file
from hushfleet.wire.format.identity import KEY_BYTES, can_have_owner
from hushfleet.wire.format.topics import check_name

BY_CERTIFICATE = "certificate"


def read_devices(path: Path) -> list[KnownDevice]:
    """Reads the devices of a file, or of an earlier run with its pinned keys and its blocks.

    Raises `BadInput`.
    """
    if path.is_dir():
        if not DeviceRegister.exists(path):
            raise BadInput(f"--devices {path}: the folder has no {DeviceRegister.file_of(path).name}, so no devices")
        with DeviceRegister(path) as register:
            return register.devices()
    content = read_file(path)
    listed = content.get("devices") if isinstance(content, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise BadInput(f'{path} needs a section [devices] with lines like: greenhouse-01 = "{BY_CERTIFICATE}"')
    return [_device(path, name, value) for name, value in listed.items()]


def parse_key(text: str, what: str) -> bytes:
    """Parses a public key. Raises `BadInput`, which names `what`."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise BadInput(f"{what} must be {2 * KEY_BYTES} hex digits, as `status` prints them on the board, not {text!r}")
    if not can_have_owner(key):
        raise BadInput(f"{what} is {text!r}, which no board can own; take the key that `status` prints on the board")
    return key


def _device(path: Path, name: str, value: object) -> KnownDevice:
    check_name(name, f"the device id in {path}")
    if value == BY_CERTIFICATE:
        return KnownDevice(name, pinned=True)
    if not isinstance(value, str):
        raise BadInput(f'{path}: {name} needs its key in quotes, or "{BY_CERTIFICATE}"')
    return KnownDevice(name, parse_key(value, f"{path}: the key of {name}"))
