"""Manages the board's own TLS key, which is made on the board and never leaves it, and its fleet certificate."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from hushfleet import atomic_file
from hushfleet.edge_client.storage.state_files import TLS_CERTIFICATE, TLS_KEY
from hushfleet.errors import Malformed, StoreError

RENEW_AFTER = 2 / 3  # fraction of a certificate's life


@dataclass(frozen=True)
class Validity:
    """The validity of a certificate, unix seconds."""

    begin: float
    end: float

    @property
    def renew_at(self) -> float:
        return self.begin + RENEW_AFTER * (self.end - self.begin)


class TlsIdentity:
    """Key and certificate in `folder`, the board's state directory. The key is made when it is first asked for."""

    def __init__(self, folder: Path, *, device: str) -> None:
        self.device = device
        self.key_file, self.certificate_file = folder / TLS_KEY, folder / TLS_CERTIFICATE

    def request(self) -> bytes:
        """Makes a certificate signing request (PKCS #10, DER). Raises `StoreError`."""
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.device)])
        request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(self._key(), hashes.SHA256())
        return request.public_bytes(Encoding.DER)

    def validity(self) -> Validity | None:
        """Reads the validity of the certificate. Returns None if there is none for this key and this device."""
        try:
            return self._validity(self.certificate_file.read_bytes())
        except (OSError, Malformed):
            return None

    def is_usable(self, *, now: float | None = None) -> bool:
        """Returns whether there is a certificate that has not ended. If the clock is behind, it may have ended."""
        validity = self.validity()
        return validity is not None and validity.end > (time.time() if now is None else now)

    def keep(self, certificate: bytes) -> None:
        """Stores the certificate. Raises `Malformed` if it is not for this key and device, or `StoreError`."""
        self._validity(certificate)
        atomic_file.write_whole(self.certificate_file, certificate, durable=True)

    def _validity(self, pem: bytes) -> Validity:
        try:
            certificate = x509.load_pem_x509_certificate(pem)
            names = [each.value for each in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
            key = certificate.public_key()
        except ValueError as error:
            raise Malformed(f"this board's certificate cannot be read: {error}") from error
        if names != [self.device]:
            raise Malformed(f"the certificate names {names}, and this board is {self.device}")
        if key != self._key().public_key():
            raise Malformed("the certificate is for another key than this board's")
        begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        return Validity(begin.timestamp(), end.timestamp())

    def _key(self) -> ec.EllipticCurvePrivateKey:
        try:
            if not self.key_file.exists():
                pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(
                    Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
                )
                atomic_file.write_whole(self.key_file, pem, durable=True, mode=0o600)
            key = load_pem_private_key(self.key_file.read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise StoreError(
                f"the board's TLS key {self.key_file} cannot be used: {error}. Remove the file: the board then makes a "
                "new one and asks for a certificate again"
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise StoreError(f"the TLS key {self.key_file} is of another kind than this board makes; remove the file")
        return key
