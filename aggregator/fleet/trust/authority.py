"""The fleet's certificate authority, which decides who may connect to the broker, and under which name.

The broker identifies a client by the certificate's common name alone. So the authority takes only the public key from a
signing request, and sets name, purpose and dates itself. Certificates have the extensions that a strict verifier
requires (RFC 5280; Python 3.13 checks them by default): key usage, key identifiers.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hushfleet.at_need import at_need
from hushfleet.errors import BadInput, Malformed

if TYPE_CHECKING:
    from cryptography import exceptions, x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509 import oid
else:  # for who signs or reads a certificate: most commands do neither
    exceptions = at_need("cryptography.exceptions")
    x509 = at_need("cryptography.x509")
    hashes = at_need("cryptography.hazmat.primitives.hashes")
    serialization = at_need("cryptography.hazmat.primitives.serialization")
    ec = at_need("cryptography.hazmat.primitives.asymmetric.ec")
    oid = at_need("cryptography.x509.oid")

CA_DAYS = 7300
BROKER_DAYS = 3650
MAX_COMMON_NAME = 64  # RFC 5280, ub-common-name
# Start of the authority's and the broker's certificates. Boards without a clock battery start at the date of their
# image. A certificate that begins before any supported image is valid for them at once; a later start has no benefit.
EARLIEST = datetime.datetime(2023, 1, 1, tzinfo=datetime.UTC)
_USES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip
_BACKDATED = datetime.timedelta(hours=1)  # a broker's clock may be a little behind


@dataclass(frozen=True)
class Issued:
    """A certificate that was signed.

    :param pem: the certificate, without the authority's.
    :param serial: serial number of the certificate.
    :param not_after: unix seconds.
    """

    pem: bytes
    serial: int
    not_after: float


class Authority:
    """A private CA: an EC key on P-256 and its certificate, both PEM."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, name: str, *, now: datetime.datetime) -> Authority:
        """Makes a new authority, which is valid for twenty years.

        :param name: the federation, part of the common name.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(f"Hushfleet {name}"[:MAX_COMMON_NAME])
        usage = _key_usage("key_cert_sign", "crl_sign")
        certificate = (
            _builder(subject, subject, key.public_key(), begin=EARLIEST, end=now + datetime.timedelta(days=CA_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """Loads `ca.pem` and `ca.key`. Raises `BadInput` for files that are missing or have other content."""
        certificate_file, key_file = folder / "ca.pem", folder / "ca.key"
        try:
            certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
        except (OSError, ValueError) as error:
            raise BadInput(f"the authority {certificate_file} cannot be read: {error}") from error
        key = read_key(key_file)
        if key.public_key() != certificate.public_key():
            raise BadInput(f"{key_file} is not the key of {certificate_file}")
        return cls(certificate, key)

    @property
    def pem(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def key_pem(self) -> bytes:
        """Returns the private key as PEM, which is secret."""
        return private_pem(self._key)

    def sign_client(self, name: str, key: ec.EllipticCurvePublicKey, *, days: float, now: datetime.datetime) -> Issued:
        """Signs a certificate for a client that the broker knows as `name`."""
        return self._sign(name, [name], key, oid.ExtendedKeyUsageOID.CLIENT_AUTH, now - _BACKDATED, days, now)

    def sign_server(self, names: Sequence[str], key: ec.EllipticCurvePublicKey, *, now: datetime.datetime) -> Issued:
        """Signs a certificate for the broker or the page, with all its host names and IP addresses."""
        return self._sign(names[0], names, key, oid.ExtendedKeyUsageOID.SERVER_AUTH, EARLIEST, BROKER_DAYS, now)

    def sign(self, data: bytes) -> bytes:
        """Signs bytes of the fleet's own, which no certificate begins with (`AdmissionList`)."""
        return self._key.sign(data, ec.ECDSA(hashes.SHA256()))

    def revocation_list(self, serials: Collection[int], *, now: datetime.datetime) -> bytes:
        """Signs the list of revoked certificates, PEM. The list is valid as long as the authority.

        A broker that reloads the list keeps the earlier one too, and uses the one with the later date (in seconds).
        """
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self._certificate.subject)
            .last_update(now)
            .next_update(self._certificate.not_valid_after_utc)
            .add_extension(self._own_identifier, critical=False)
            .add_extension(x509.CRLNumber(int(now.timestamp())), critical=False)
        )
        for serial in sorted(serials):
            builder = builder.add_revoked_certificate(
                x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
            )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    @property
    def _own_identifier(self) -> x509.AuthorityKeyIdentifier:
        own = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)

    def _sign(
        self,
        name: str,
        names: Sequence[str],
        key: ec.EllipticCurvePublicKey,
        purpose: x509.ObjectIdentifier,
        begin: datetime.datetime,
        days: float,
        now: datetime.datetime,
    ) -> Issued:
        end = min(now + datetime.timedelta(days=min(days, CA_DAYS)), self._certificate.not_valid_after_utc)
        certificate = (
            _builder(_name(name[:MAX_COMMON_NAME]), self._certificate.subject, key, begin=begin, end=end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage("digital_signature"), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.SubjectAlternativeName([general_name(each) for each in names]), critical=False)
            .add_extension(self._own_identifier, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Issued(certificate.public_bytes(serialization.Encoding.PEM), certificate.serial_number, end.timestamp())


def read_request(der: bytes, *, device: str) -> ec.EllipticCurvePublicKey:
    """Returns the public key of a signing request, after checking that the sender holds the private key.

    Raises `Malformed` for a request that does not parse, is not signed by its own key, names another device, or has a
    key of another kind.
    """
    try:
        request = x509.load_der_x509_csr(der)
        key, named = request.public_key(), request.subject.get_attributes_for_oid(oid.NameOID.COMMON_NAME)
        names = [attribute.value for attribute in named]
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise Malformed("the signing request has a key that is not of the curve P-256")
        is_signed = request.is_signature_valid
    except (
        ValueError,
        TypeError,
        exceptions.InvalidSignature,
        x509.UnsupportedGeneralNameType,
        RecursionError,
    ) as error:
        raise Malformed(f"the signing request cannot be read: {error}") from error
    if not is_signed:
        raise Malformed("the signing request is not signed by its own key")
    if names != [device]:
        raise Malformed(f"the signing request names {names}, and came from {device}")
    return key


def key_digest(key: ec.EllipticCurvePublicKey) -> bytes:
    """Returns SHA-256 of a public key, as SubjectPublicKeyInfo in DER."""
    return hashlib.sha256(
        key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    ).digest()


def tls_key_of(pem: bytes) -> bytes:
    """Returns `key_digest` of the public key in a certificate of this authority."""
    key = x509.load_pem_x509_certificate(pem).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key_digest(key)


def is_fresh(pem: bytes, *, now: float) -> bool:
    """Returns whether a certificate is in the first half of its life at `now`, unix seconds."""
    certificate = x509.load_pem_x509_certificate(pem)
    begin, end = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    return begin <= now < (begin + end) / 2


class Revocations(NamedTuple):
    """The content of a revocation list."""

    serials: set[int]
    date: datetime.datetime


def read_revocations(pem: bytes) -> Revocations:
    """Reads a revocation list. Raises `ValueError`."""
    revoked = x509.load_pem_x509_crl(pem)
    return Revocations({each.serial_number for each in revoked}, revoked.last_update_utc)


def make_key() -> ec.EllipticCurvePrivateKey:
    """Makes a private key for a certificate."""
    return ec.generate_private_key(ec.SECP256R1())


def read_key(file: Path) -> ec.EllipticCurvePrivateKey:
    """Reads the private key of a certificate. Raises `BadInput`."""
    try:
        key = serialization.load_pem_private_key(file.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"the key {file} cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BadInput(f"{file} holds no EC key")
    return key


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Returns the private key as PEM, which is secret."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    *,
    begin: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*uses: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{use: use in uses for use in _USES})


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(oid.NameOID.COMMON_NAME, common_name)])


def general_name(name: str) -> x509.GeneralName:
    """Returns an IP address if `name` is one, else a host name. Raises `BadInput`."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError as error:
        raise BadInput(f"{name!r} cannot be in a certificate: {error}") from error
