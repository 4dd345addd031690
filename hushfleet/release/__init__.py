"""Makes and checks releases of the board's software: one signed file for memory cards and for updates, `NAME.hfr`.

It uses only the standard library and `hushfleet.public_keys`, because both are also part of `slots.pyz`
(`firmware_profiles/cards/seed.py`), which is on a board outside of any release.
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
