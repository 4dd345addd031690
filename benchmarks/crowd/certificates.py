"""A private authority and its certificates for one run, as `examples/certificates.sh` makes them for the field."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hushfleet.simulator.engines.live.tls import FleetTls

_VALID = datetime.timedelta(days=2)


def make_certificates(folder: Path, *, devices: Iterable[str]) -> FleetTls:
    """One for the broker at 127.0.0.1, one for the aggregator, and one for each device, which carries its id."""
    folder.mkdir(parents=True)
    tls = FleetTls(folder)
    authority = ec.generate_private_key(ec.SECP256R1())
    issuer = _name("Hushfleet benchmark CA")
    own = (
        _builder(issuer, issuer, authority)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )
    tls.ca_file.write_bytes(own.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    for name in ("broker", "aggregator", *devices):
        key = ec.generate_private_key(ec.SECP256R1())
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if name == "broker" else ExtendedKeyUsageOID.CLIENT_AUTH
        certificate = (
            _builder(_name(name), issuer, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(
                x509.SubjectAlternativeName([address if name == "broker" else x509.DNSName(name)]), critical=False
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False
            )
            .sign(authority, hashes.SHA256())
        )
        tls.cert_file(name).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        tls.key_file(name).write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
    return tls


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _VALID)
        .not_valid_after(now + _VALID)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
