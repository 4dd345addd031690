"""An `Enroller` on a fleet's folder without a network, and boards that ask it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from hushfleet.aggregator.fleet.service import FleetService
from hushfleet.aggregator.fleet.trust.access import apply
from hushfleet.aggregator.fleet.trust.authority import Authority
from hushfleet.aggregator.fleet.trust.enrolment import Enroller
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.storage.activity import ActivityStore
from hushfleet.simulator.world.hub import LocalHub
from hushfleet.wire.format.fleet_messages import EnrolAnswer, EnrolRequest, proven_by_token, token_seed
from hushfleet.wire.format.identity import Identity
from support.desk import FEDERATION, issue_token, make_folder


class Desk:
    """A fleet of `boards` boards, and a clock that the test moves."""

    def __init__(self, path: Path, *, boards: int = 3, **policy: Any) -> None:
        self.now = 1_800_000_000.0
        self.folder = make_folder(path / "fleet", boards=boards, **policy)
        self.open()

    def open(self) -> None:
        """Also again, after `close`."""
        self.registry, self.register = FleetRegistry(self.folder.path), ActivityStore(self.folder.aggregator)
        self.authority = Authority.load(self.folder.ca)
        self.applied = 0
        self.enroller = Enroller(
            self.folder.config,
            self.registry,
            self.register,
            self.authority,
            on_granted=self._granted,
            clock=lambda: self.now,
        )

    def _granted(self) -> None:
        self.applied += 1
        apply(self.folder, self.registry)

    def token(self, device: str, *, days: float = 1) -> str:
        return issue_token(self.registry, device, days=days, now=self.now)

    def ask(self, asker: Asker, **changes: Any) -> EnrolAnswer:
        return self.enroller.answer(asker.request(**changes))

    def service(self, hub: LocalHub, **settings: Any) -> FleetService:
        """The fleet service, on the links of a hub."""
        settings = {"apply": lambda: None, "was_changed": lambda: False, **settings}
        return FleetService(
            federation=FEDERATION,
            identity=Identity.generate(),
            enrolment_link=hub.link("strangers"),
            fleet=hub.link("fleet"),
            enroller=self.enroller,
            **settings,
        )

    def state(self, device: str) -> str:
        return self.registry.board(device).standing

    def close(self) -> None:
        self.registry.close()
        self.register.close()


class Asker:
    """Somebody with an identity and a TLS key, and perhaps a token."""

    def __init__(self, device: str, token: str | None = None, *, seed: int = 1) -> None:
        self.device, self.token = device, token
        self.identity = Identity.from_bytes(bytes([seed]) * 32)
        self.tls_key = ec.generate_private_key(ec.SECP256R1())
        self.csr = signing_request(device, self.tls_key)

    def proof(self, csr: bytes, *, federation: str = FEDERATION, device: str | None = None) -> bytes:
        if self.token is None:
            return b""
        key = Identity.from_bytes(token_seed(hashlib.sha256(self.token.encode()).digest()))
        signed = proven_by_token(
            federation=federation, device=device or self.device, csr=csr, public_key=self.identity.public_key
        )
        return key.sign(signed)

    def request(self, **changes: Any) -> EnrolRequest:
        csr = changes.get("csr", self.csr)
        fields = {
            "device": self.device,
            "csr": csr,
            "public_key": self.identity.public_key,
            "proof": self.proof(csr),
            "nonce": bytes(16),
            "board": "generic-x86",
            "version": "0.3.0",
        }
        return EnrolRequest(**{**fields, **changes})


def signing_request(
    name: str,
    key: Any,
    *,
    also: Callable[[x509.CertificateSigningRequestBuilder], x509.CertificateSigningRequestBuilder] = lambda b: b,
) -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = also(x509.CertificateSigningRequestBuilder().subject_name(subject))
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)
