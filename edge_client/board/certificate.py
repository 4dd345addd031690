"""Checks the board's own certificate before the broker does.

A broker whose access list uses the certificate's name accepts a connection with the wrong name, and then withholds all
messages, for ever and without an error. Therefore the name is compared with the device's id before connecting.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.storage.state_files import TLS_CERTIFICATE
from hushfleet.errors import BadInput
from hushfleet.wire.format.topics import is_name

if TYPE_CHECKING:
    from cryptography import x509

DAY_S = 86400.0
SOON_DAYS = 14


def certificate_file(config: DeviceConfig) -> Path | None:
    """Returns the file that DEVICE.toml names, otherwise the one that the fleet has issued; None without one."""
    if config.broker.cert_file is not None:
        return Path(config.broker.cert_file)
    given = Path(config.device.state_dir) / TLS_CERTIFICATE
    return given if config.fleet is not None and os.path.exists(given) else None


def read_certificate(config: DeviceConfig) -> x509.Certificate | None:
    """Reads the certificate; returns None without one. Raises `BadInput` if it cannot be read."""
    file = certificate_file(config)
    if file is None:
        return None
    from cryptography import x509  # more than a megabyte, which a board without a certificate does without

    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput(f"the certificate {file} cannot be read: {error}") from error


def describe_certificate(config: DeviceConfig, *, now: float | None = None) -> str | None:
    """Describes what is wrong with the certificate; returns None if nothing is.

    Raises `BadInput` for a certificate of another device. A name that cannot be a device's id is ignored: such brokers
    use something else. An unreadable certificate of the fleet does not stop the board, which asks for it again.

    :param now: unix seconds; by default the present time.
    """
    try:
        certificate = read_certificate(config)
    except BadInput as error:
        if config.broker.cert_file is not None:
            raise
        return f"{error}; this board asks its fleet for it again"
    if certificate is None:
        return None
    from cryptography.x509.oid import NameOID

    now = time.time() if now is None else now
    names = [str(name.value) for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    device = config.device.id
    if names and names[0] != device and is_name(names[0]):
        raise BadInput(
            f"the certificate names {names[0]}, and this device is {device}: the broker would let it in and deliver "
            f"no message to it. Give this board the certificate of {device} ({certificate_file(config)}), or correct "
            "device.id"
        )
    begin, end = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    if now < begin:
        return f"the certificate is not valid before {_day(begin)}, and it is {_day(now)}: is the clock right?"
    if now >= end:
        return f"the certificate has ended on {_day(end)}, and it is {_day(now)}: is the clock right?"
    if end - now < SOON_DAYS * DAY_S:
        return f"the certificate ends in {(end - now) / DAY_S:.0f} days, on {_day(end)}"
    return None


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at))
