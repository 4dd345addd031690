"""Keeps earlier settings on a boot partition, mostly from rpi-imager: a user, an SSH key, a Wi-Fi.

A writer adds its own settings to those in these files, and names a file in its error if it cannot read the file. The
original files stay in `hushfleet/before/`, so a card that is written again starts from them.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are a separate package

from hushfleet.errors import BadInput
from hushfleet.firmware_profiles.cards.boot_partition import BootPartition
from hushfleet.schema import parse_toml

FOLDER = "hushfleet"
BEFORE = f"{FOLDER}/before"
FIRST_BOOT = f"{FOLDER}/first-boot.sh"
_REMEDY = "delete that file, or write the system to the card anew without customisation"
_KNOWN_PASSWORDS = ('"ubuntu:ubuntu', '"name": "ubuntu", "password": "ubuntu"')  # in Ubuntu's stock image


def original(boot: BootPartition, name: str) -> bytes | None:
    """Reads a file of the partition's root as it was before the first card was written; None if there was none.

    The folder alone is no proof of a written card: a card may have been removed before it was complete.
    """
    if FOLDER in boot.names():
        kept = boot.read(f"{BEFORE}/{name}")
        is_ours = any(FIRST_BOOT.encode() in (boot.read(start) or b"") for start in ("user-data", "firstrun.sh"))
        if kept is not None or is_ours:
            return kept
    return boot.read(name)


def read_yaml(boot: BootPartition, name: str) -> dict[str, Any]:
    """Reads a file of cloud-init; empty if it is missing or has no content. Raises `BadInput` for other content."""
    text = _text(original(boot, name), name)
    if name == "user-data" and text.strip() and text.split()[0] != "#cloud-config":
        raise BadInput(
            f"user-data on the card is no #cloud-config (it begins with {text.split()[0]!r}), so nothing can be added: "
            f"{_REMEDY}"
        )
    try:
        content = yaml.safe_load(text)
        plain = json.loads(json.dumps({} if content is None else content, default=_day))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        said = getattr(error, "problem", None) or error
        raise BadInput(f"{name} on the card is not YAML ({said}{where}): {_REMEDY}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"{name} on the card has content that cannot be kept ({error}): {_REMEDY}") from error
    if not isinstance(plain, dict):
        raise BadInput(f"{name} on the card holds no keys and values: {_REMEDY}")
    return plain


def read_custom_toml(boot: BootPartition) -> dict[str, Any]:
    """Reads custom.toml; empty if there is none. Raises `BadInput` if it is not TOML."""
    try:
        return parse_toml(_text(original(boot, "custom.toml"), "custom.toml"))
    except ValueError as error:
        raise BadInput(f"custom.toml on the card is not TOML ({error}): {_REMEDY}") from error


def with_user_data(theirs: dict[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Joins our settings with theirs if they do not conflict: lists are joined; a common user gets the keys of both."""
    merged = dict(theirs)
    if any(known in json.dumps(theirs.get("chpasswd")) for known in _KNOWN_PASSWORDS):
        merged.pop("chpasswd")  # the password is public
        merged.pop("ssh_pwauth", None)
    merged["ssh_pwauth"] = merged.get("ssh_pwauth", ours["ssh_pwauth"])
    merged |= {name: ours[name] for name in ("hostname", "manage_etc_hosts")}
    for name in ("bootcmd", "runcmd"):
        known = _list(theirs, name)
        merged[name] = [*known, *(each for each in ours[name] if each not in known)]
    for login in ours.get("users", ()):
        users = _list(theirs, "users") if "users" in theirs else ["default"] if theirs else []
        same = next((each for each in users if isinstance(each, dict) and each.get("name") == login["name"]), {})
        both = [*_list(same, "ssh_authorized_keys"), *login["ssh_authorized_keys"]]
        joined = {**login, **same, "ssh_authorized_keys": list(dict.fromkeys(both))}
        merged["users"] = [*(each for each in users if each is not same and each != same), joined]
    return merged


def is_netplan(theirs: dict[str, Any]) -> bool:
    """Returns whether a network-config has netplan's format, cloud-init's version 2."""
    inner = theirs.get("network", theirs) or {}
    return isinstance(inner, dict) and inner.get("version", 2) == 2 and "config" not in inner


def with_network(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Joins their cables and networks with our Wi-Fi. An interface that requests IPv4 by DHCP also requests IPv6.

    Raises `BadInput` for a format other than netplan's.
    """
    if not is_netplan(theirs):
        raise BadInput(
            f"network-config on the card is not of netplan's format (version: 2), so no network can be added to it: "
            f"{_REMEDY}"
        )
    inner = theirs.get("network", theirs) or {}
    merged = {**ours, **inner}
    try:
        if "wifis" in ours and "wifis" in inner:
            ((name, wlan),) = ours["wifis"].items()
            known = inner["wifis"].get(name) or {}
            points = {**(known.get("access-points") or {}), **wlan["access-points"]}
            merged["wifis"] = {**inner["wifis"], name: {**wlan, **known, "access-points": points}}
        for kind in ("ethernets", "wifis"):
            each = merged.get(kind) or {}
            merged |= {kind: {name: _both_families(settings) for name, settings in each.items()}} if each else {}
    except (AttributeError, TypeError, ValueError) as error:
        raise BadInput(f"network-config on the card is not as netplan reads it ({error}): {_REMEDY}") from error
    return merged


def _both_families(settings: dict[str, Any]) -> dict[str, Any]:
    """Requests IPv6 too: netplan disables it if NetworkManager's settings only contain IPv4."""
    return {**settings, "dhcp6": True} if settings.get("dhcp4") is True and "dhcp6" not in settings else settings


def _list(section: Mapping[str, Any], name: str) -> list[Any]:
    value = section.get(name) or []
    if not isinstance(value, list):
        raise BadInput(f"user-data on the card has {name} in another form than a list: {_REMEDY}")
    return value


def _text(content: bytes | None, name: str) -> str:
    try:
        return (content or b"").decode("utf-8-sig")
    except ValueError as error:
        raise BadInput(f"{name} on the card is not text in UTF-8 ({error}): {_REMEDY}") from error


def _day(value: object) -> str:
    if isinstance(value, datetime.date):
        return str(value)
    raise TypeError(f"a value of the type {type(value).__name__}")
