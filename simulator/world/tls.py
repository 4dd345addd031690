"""Locates the certificates of a live run with mutual TLS, in one folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hushfleet.aggregator.broker.config import BrokerTls

AGGREGATOR = "aggregator"


@dataclass(frozen=True)
class FleetTls:
    """A folder with `ca.pem`, and `NAME.pem` and `NAME.key` for `broker`, `aggregator` and each device."""

    folder: Path

    @property
    def ca_file(self) -> Path:
        return self.folder / "ca.pem"

    def cert_file(self, name: str) -> Path:
        return self.folder / f"{name}.pem"

    def key_file(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    @property
    def broker(self) -> BrokerTls:
        return BrokerTls(
            ca_file=self.ca_file,
            cert_file=self.cert_file("broker"),
            key_file=self.key_file("broker"),
            aggregator=AGGREGATOR,
        )

    def files(self, name: str) -> dict[str, str]:
        """Returns the files under the keys of `[broker]` in DEVICE.toml, which are also the aggregator's options."""
        return {
            "ca_file": str(self.ca_file.resolve()),
            "cert_file": str(self.cert_file(name).resolve()),
            "key_file": str(self.key_file(name).resolve()),
        }
