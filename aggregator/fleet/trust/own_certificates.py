"""Writes the certificates of a fleet's own processes: brokers, page, aggregator and fleet service.

A renewal keeps the keys and replaces each certificate's file as a whole. So a broker that starts or reloads its files
at any moment finds a certificate that fits its key.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hushfleet import atomic_file
from hushfleet.aggregator.fleet.trust.authority import Authority, general_name, make_key, private_pem, read_key
from hushfleet.aggregator.fleet.trust.folder import (
    AGGREGATOR_NAME,
    HOME_ASSISTANT_NAME,
    SERVICE_NAME,
    FleetConfig,
    FleetFolder,
)
from hushfleet.at_need import at_need
from hushfleet.errors import BadInput

if TYPE_CHECKING:
    from cryptography import x509
else:  # for who reads a certificate
    x509 = at_need("cryptography.x509")

CLIENT_DAYS = 3650
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_SERVERS = ("broker/broker", "service/page")
_CLIENTS = {"aggregator/cert": AGGREGATOR_NAME, "service/cert": SERVICE_NAME}
STEMS = (*_SERVERS, *_CLIENTS)
"""Their paths in the fleet's folder: STEM.pem, and STEM.key beside it."""
AUTHORITY = "ca/ca"
HOME_ASSISTANT = "home-assistant"


def write_own(path: Path, config: FleetConfig, authority: Authority, *, now: datetime.datetime) -> None:
    """Writes all these certificates, for the existing keys.

    Raises `BadInput` for a key that cannot be read, and `StoreFull`.
    """
    names = list(dict.fromkeys([*config.broker.names, config.broker.connect, *_LOCAL_NAMES]))
    for stem in STEMS:
        key = read_key(path / f"{stem}.key").public_key()
        if stem in _CLIENTS:
            issued = authority.sign_client(_CLIENTS[stem], key, days=CLIENT_DAYS, now=now)
        else:
            issued = authority.sign_server(names, key, now=now)
        atomic_file.write_whole(path / f"{stem}.pem", issued.pem, durable=True)


def write_home_assistant(folder: FleetFolder) -> None:
    """Writes `service/home-assistant.pem` and `.key`, once. Home Assistant connects to the broker with them."""
    pem, key_file = (folder.service / f"{HOME_ASSISTANT}.{end}" for end in ("pem", "key"))
    if pem.exists():
        return
    authority, key = Authority.load(folder.ca), make_key()
    issued = authority.sign_client(
        HOME_ASSISTANT_NAME, key.public_key(), days=CLIENT_DAYS, now=datetime.datetime.now(datetime.UTC)
    )
    for file, data in ((key_file, private_pem(key)), (pem, issued.pem)):
        atomic_file.write_whole(file, data, durable=True, mode=0o600)


def lost_names(folder: FleetFolder) -> list[str]:
    """Returns names of the broker's certificate that fleet.toml no longer has. Boards that use one would be lost."""
    found = _read(folder.path / "broker/broker.pem").extensions.get_extension_for_class(x509.SubjectAlternativeName)
    kept = [general_name(each) for each in (*folder.config.broker.names, folder.config.broker.connect, *_LOCAL_NAMES)]
    return [str(each.value) for each in found.value if each not in kept]


def ends(folder: FleetFolder) -> dict[str, float]:
    """Returns the end of each certificate and of `AUTHORITY`, unix seconds, by stem. Raises `BadInput`."""
    return {stem: _read(folder.path / f"{stem}.pem").not_valid_after_utc.timestamp() for stem in (*STEMS, AUTHORITY)}


def _read(file: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput(f"the certificate {file} cannot be read: {error}") from error
