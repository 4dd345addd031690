"""Reads a Wi-Fi profile for cards: a small TOML file with `ssid`, `password`, `country`, `hidden`."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from hushfleet.errors import BadInput, Malformed
from hushfleet.schema import Checked, from_plain, read_file, require

_NO_NAME = ("Cc", "Cs", "Zl", "Zp")  # control characters and line ends: YAML and TOML do not keep all of them


@cache
def _countries() -> frozenset[str]:
    """Returns the codes of ISO 3166-1 that are in use, from the list in the time-zone package."""
    lines = (resources.files("tzdata") / "zoneinfo" / "iso3166.tab").read_text("utf-8").splitlines()
    return frozenset(line[:2] for line in lines if not line.startswith("#"))


@dataclass(frozen=True)
class Wifi(Checked):
    """A Wi-Fi network.

    :param password: 8 to 63 characters, or the 64 hex digits derived from password and ssid; empty: open network.
    :param country: two letters; determines the allowed channels. Without it, a Raspberry Pi keeps its radio off.
    """

    ssid: Annotated[str, Meta(min_length=1, description="the network's name")]
    country: Annotated[str, Meta(pattern=r"^[A-Z]{2}\Z", description="two capital letters, such as DE")]
    password: str = ""
    hidden: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.ssid.encode()) <= 32, "ssid", self.ssid, "at most 32 bytes")
        plain = not any(unicodedata.category(each) in _NO_NAME for each in self.ssid)
        require(plain, "ssid", self.ssid, "a name without control characters and line ends")
        code = "GB, the code of the United Kingdom" if self.country == "UK" else "a code of ISO 3166, such as DE or GB"
        require(self.country in _countries(), "country", self.country, code)
        hexadecimal = re.fullmatch("[0-9a-fA-F]{64}", self.password) is not None
        fits = not self.password or 8 <= len(self.password.encode()) <= 63 or hexadecimal
        require(fits, "password", "(not shown)", "8 to 63 characters, 64 hex digits, or nothing for an open network")

    @property
    def key(self) -> str:
        """The 64 hex digits on a card instead of the password (IEEE 802.11i, annex H.4); empty: open network."""
        if len(self.password) in (0, 64):
            return self.password.lower()
        return hashlib.pbkdf2_hmac("sha1", self.password.encode(), self.ssid.encode(), 4096, 32).hex()


def read_wifi(path: Path) -> Wifi:
    """Reads a Wi-Fi profile. Raises `BadInput` that names file and key, never the password."""
    try:
        return from_plain(Wifi, read_file(path))
    except Malformed as error:
        raise BadInput(f"{path}: {str(error).removeprefix('Wifi: ').removeprefix('Wifi.')}") from error
