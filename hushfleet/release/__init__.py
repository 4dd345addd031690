"""Releases of the board's software: one signed file for cards and for updates, `NAME.hfr`.

The standard library alone, and `cryptography` where a signature is made or checked: this package is also part of
`slots.pyz` (`firmware_profiles/cards/slots_archive.py`), which lies on a board outside of any release, so that a broken
release cannot break the way back.
"""

from hushfleet.release.archive import pack, place, read_head, unpack
from hushfleet.release.manifest import Manifest, SignedManifest, this_platform

__all__ = ["Manifest", "SignedManifest", "pack", "place", "read_head", "this_platform", "unpack"]
