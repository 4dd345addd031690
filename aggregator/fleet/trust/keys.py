"""The keys that a fleet's boards trust: the operator's, whose private half may be elsewhere, and the service's."""

from __future__ import annotations

from pathlib import Path

from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.results.server_sees import SumFacts
from hushfleet.aggregator.storage.identity_file import load
from hushfleet.errors import BadInput
from hushfleet.public_keys import KEY_TEXT, parse_public_key
from hushfleet.wire.format.identity import Identity


def operator(folder: FleetFolder) -> Identity | None:
    """Returns the operator's private key if it is in the folder; None if it is elsewhere.

    Raises `BadInput` for a key that does not match the public key that boards know.
    """
    if not folder.operator_key.exists():
        return None
    key = load(folder.operator_key)
    if folder.operator_public.exists() and _public(folder) != key.public_key:
        raise BadInput(
            f"{folder.operator_key} is not the key of {folder.operator_public}, which the boards were told of: put "
            "the right key there, or remove the file"
        )
    return key


def operator_public(folder: FleetFolder) -> bytes:
    """Returns the operator's public key. Raises `BadInput` if neither half is in the folder."""
    if folder.operator_public.exists():
        return _public(folder)
    key = operator(folder)  # of a fleet that an earlier version made
    if key is None:
        raise BadInput(
            f"there is no {folder.operator_public}: write the operator's public key into it, 64 hex digits (`hushfleet "
            "fleet key FILE` shows it where the private key is)"
        )
    return key.public_key


def service(folder: FleetFolder) -> Identity:
    """Returns the fleet service's own key, with which it signs its messages to boards.

    In a fleet of an earlier version it is the operator's key, because the boards know no other. Raises `BadInput`.
    """
    own = folder.service_key if folder.service_key.exists() else folder.operator_key
    return load(own)


def in_folder(folder: FleetFolder) -> tuple[str, ...]:
    """Names the private keys in the folder. Each of them is enough to read what single boards send in secure
    aggregation.

    Anyone who signs releases can make boards run any code; root decides who signs them.
    """
    files = (folder.operator_key, folder.release_key, folder.path / "root.key")
    return tuple(file.name for file in files if file.exists())


def sum_facts(folder: FleetFolder) -> SumFacts:
    """Returns who could unmask a fleet's boards, which take a membership list of the operator only."""
    return SumFacts("operator", in_folder(folder))


def read_public(text: str, option: str) -> bytes:
    """Reads the public key that an option names: 64 hex digits, or a file with the private key, which stays there.

    Raises `BadInput`.
    """
    file = Path(text)
    if KEY_TEXT.fullmatch(text):
        return parse_public_key(text, option)
    if not file.is_file():
        raise BadInput(
            f"{option} {text!r} is neither a file nor 64 hex digits; make a key where it is to stay: hushfleet fleet "
            "key FILE"
        )
    return load(file).public_key


def _public(folder: FleetFolder) -> bytes:
    try:
        text = folder.operator_public.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{folder.operator_public} cannot be read: {error}") from error
    return parse_public_key(text, f"the operator's public key in {folder.operator_public}")
