"""Releases of the board's software: one signed file for cards and for updates, `NAME.hfr`.

The standard library alone, and `cryptography` where a signature is checked: this package is also part of `slots.pyz`
(`firmware_profiles/cards/seed.py`), which lies on a board outside of any release.
"""

from hushfleet.release.archive import add_signature, check_payload, pack, place, read_head, unpack
from hushfleet.release.manifest import Manifest, SignedManifest, Signer, this_platform
from hushfleet.release.statements import Newest, ReleaseKeys, Signed, Trust

__all__ = [
    "Manifest",
    "Newest",
    "ReleaseKeys",
    "Signed",
    "SignedManifest",
    "Signer",
    "Trust",
    "add_signature",
    "check_payload",
    "pack",
    "place",
    "read_head",
    "this_platform",
    "unpack",
]
