"""Certificates for what reads them; nobody has signed them but themselves."""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

BEGIN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
END = datetime.datetime(2028, 1, 1, tzinfo=datetime.UTC)


def a_certificate(name: str, *, begin: datetime.datetime = BEGIN, end: datetime.datetime = END) -> bytes:
    """PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
    dated = builder.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(end)
    return dated.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
