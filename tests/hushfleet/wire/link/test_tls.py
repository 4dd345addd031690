"""Mutual TLS and the access list, with certificates made here and Mosquitto as the broker."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from hushfleet.aggregator.broker.config import BrokerTls
from hushfleet.aggregator.broker.process import Broker, start_broker
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link import connection_errors
from hushfleet.wire.link.address import BrokerAddress
from hushfleet.wire.link.connection import Timing
from hushfleet.wire.link.interface import Delivery, LinkDown, LinkUp
from hushfleet.wire.link.mqtt import MqttLink
from support.links import next_event
from support.tools import need

QUICK = Timing(backoff_base_s=0.05, backoff_cap_s=0.1)
NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)
TOPICS = Topics("plant")


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in files."""

    cert_file: Path
    key_file: Path


class Authority:
    """A CA that signs certificates into a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            self._builder(self._name, self._key, NOW + 10 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca_file = folder / f"{name}.pem"
        self.ca_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, address: str = "127.0.0.1", expired: bool = False) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        certificate = (
            self._builder(subject, key, NOW - DAY if expired else NOW + DAY)
            .add_extension(alternative, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pair = Pair(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        pair.cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        pair.key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return pair

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, end: datetime.datetime
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - 5 * DAY)
            .not_valid_after(end)
        )


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "fleet-ca")


def tls_broker(authority: Authority, server: Pair) -> Broker:
    need("mosquitto")
    tls = BrokerTls(ca_file=authority.ca_file, cert_file=server.cert_file, key_file=server.key_file)
    return start_broker("mosquitto", data_dir=authority.folder, tls=tls)


@pytest.fixture
def broker(authority: Authority) -> Iterator[Broker]:
    with tls_broker(authority, authority.issue("broker")) as running:
        assert running.url.startswith("mqtts://127.0.0.1:")
        yield running


class Links:
    def __init__(self, authority: Authority, broker: Broker) -> None:
        self.authority = authority
        self.broker = broker
        self.made: list[MqttLink] = []

    def started(self, name: str, *filters: str, pair: Pair | None, ca_file: Path | None = None) -> MqttLink:
        address = BrokerAddress.parse(
            self.broker.url,
            ca_file=ca_file or self.authority.ca_file,
            cert_file=pair and pair.cert_file,
            key_file=pair and pair.key_file,
        )
        link = MqttLink(address, client_id=name, timing=QUICK)
        self.made.append(link)
        for topic_filter in filters:
            link.subscribe(topic_filter)
        link.open()
        return link

    def opened(self, name: str, *filters: str) -> MqttLink:
        link = self.started(name, *filters, pair=self.authority.issue(name))
        assert next_event(link) == LinkUp()
        return link


@pytest.fixture
def links(authority: Authority, broker: Broker) -> Iterator[Links]:
    made = Links(authority, broker)
    yield made
    for link in made.made:
        link.close()


def down_reasons(link: MqttLink) -> str:
    """Of two attempts: a failure must not end the attempts."""
    reasons = []
    while len(reasons) < 2:
        event = next_event(link)
        assert isinstance(event, LinkDown)
        reasons.append(event.reason)
    return " / ".join(reasons)


def test_with_the_right_certificates_large_messages_pass(links: Links) -> None:
    aggregator = links.opened("aggregator", TOPICS.all_chunks)
    device = links.opened("pi-1")
    payloads = [bytes([index]) * 61_440 for index in range(40)]
    for payload in payloads:
        device.publish(TOPICS.chunk("pi-1"), payload)
    for payload in payloads:
        assert next_event(aggregator) == Delivery(TOPICS.chunk("pi-1"), payload, False)


def test_a_broker_of_another_ca_is_refused_by_the_device(links: Links, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other-ca")
    link = links.started("pi-1", pair=links.authority.issue("pi-1"), ca_file=other.ca_file)
    reasons = down_reasons(link)
    assert "Is it another fleet's broker?" in reasons
    for path in (links.authority.folder / "broker.crt", other.ca_file):
        pem = path.read_bytes()
        assert x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256()).hex() in reasons


def test_a_broker_with_another_name_is_refused_by_the_device(authority: Authority) -> None:
    with tls_broker(authority, authority.issue("broker", address="127.0.0.9")) as running:
        link = Links(authority, running).started("pi-1", pair=authority.issue("pi-1"))
        assert "IP address mismatch" in down_reasons(link)
        link.close()


def test_an_expired_broker_is_refused_by_the_device(authority: Authority) -> None:
    with tls_broker(authority, authority.issue("broker", expired=True)) as running:
        link = Links(authority, running).started("pi-1", pair=authority.issue("pi-1"))
        today = datetime.datetime.now(datetime.UTC).date()
        reasons = down_reasons(link)
        assert f"has ended, and it is {today}" in reasons
        assert "is the clock right?" in reasons
        link.close()


def test_an_encrypted_port_that_is_spoken_to_plainly_is_named(links: Links) -> None:
    link = MqttLink(links.broker.url.replace("mqtts", "mqtt"), client_id="pi-1", timing=QUICK)
    link.open()
    reasons = down_reasons(link)
    link.close()
    assert "this port speaks TLS: write mqtts://" in reasons


def test_a_plain_port_that_is_spoken_to_in_tls_is_named(authority: Authority) -> None:
    need("mosquitto")
    with start_broker("mosquitto", data_dir=authority.folder) as plain:
        address = BrokerAddress.parse(plain.url.replace("mqtt:", "mqtts:"), ca_file=authority.ca_file)
        link = MqttLink(address, client_id="pi-1", timing=QUICK)
        link.open()
        assert "speaks MQTT without TLS" in down_reasons(link)
        link.close()


@pytest.mark.parametrize("error", [ssl.SSLEOFError(8, "EOF occurred in violation of protocol"), ConnectionResetError()])
def test_a_handshake_that_is_cut_off_says_what_it_mostly_means(
    authority: Authority, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A board that was locked out said "EOF occurred in violation of protocol", and nothing else."""
    monkeypatch.setattr(connection_errors, "_speaks_plainly", lambda _: False)
    pair = authority.issue("pi-1")
    given = {"ca_file": authority.ca_file, "cert_file": pair.cert_file, "key_file": pair.key_file}
    said = connection_errors.explained(error, BrokerAddress.parse("mqtts://localhost:1", **given))
    assert "it does not accept our certificate, which was locked out or has ended; its operator knows why" in said
    without = BrokerAddress.parse("mqtts://localhost:1", ca_file=authority.ca_file)
    assert "certificate" not in connection_errors.explained(error, without)


def test_a_device_without_a_certificate_is_refused_by_the_broker(links: Links) -> None:
    assert "does not accept our certificate" in down_reasons(links.started("pi-1", pair=None))


def test_devices_of_another_ca_or_expired_are_refused_by_the_broker(links: Links, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    stranger = Authority(folder, "other-ca").issue("pi-1")
    assert "does not accept our certificate" in down_reasons(links.started("pi-1", pair=stranger))
    expired = links.authority.issue("pi-2", expired=True)
    assert "does not accept our certificate" in down_reasons(links.started("pi-2", pair=expired))


def test_a_device_writes_only_its_own_topics(links: Links) -> None:
    aggregator = links.opened("aggregator", f"{TOPICS.prefix}/#")
    device = links.opened("pi-1")
    allowed = [TOPICS.state("pi-1"), TOPICS.msg("pi-1"), TOPICS.chunk("pi-1")]
    forbidden = [
        TOPICS.state("pi-2"), TOPICS.msg("pi-2"), TOPICS.chunk("pi-2"), TOPICS.down("pi-1"), TOPICS.server,
        TOPICS.task, TOPICS.round, TOPICS.blob(bytes(32)),
    ]  # fmt: skip
    for topic in [*forbidden, *allowed]:
        device.publish(topic, b"mine")
    assert [next_event(aggregator) for _ in allowed] == [Delivery(topic, b"mine", False) for topic in allowed]
    assert aggregator.receive(0.1) is None


def test_a_device_reads_only_what_is_for_it(links: Links) -> None:
    device = links.opened("pi-1", f"{TOPICS.prefix}/#", TOPICS.down("pi-2"), TOPICS.all_chunks)
    aggregator = links.opened("aggregator")
    readable = [TOPICS.server, TOPICS.task, TOPICS.round, TOPICS.blob(bytes(32)), TOPICS.down("pi-1")]
    hidden = [TOPICS.down("pi-2"), TOPICS.state("pi-2"), TOPICS.msg("pi-2"), TOPICS.chunk("pi-2")]
    for topic in [*hidden, *readable]:
        aggregator.publish(topic, b"x")
    assert [next_event(device) for _ in readable] == [Delivery(topic, b"x", False) for topic in readable]
    assert device.receive(0.1) is None


def test_the_name_in_the_certificate_counts_not_the_client_id(links: Links) -> None:
    aggregator = links.opened("aggregator", TOPICS.all_msgs)
    impostor = links.started("pi-2", pair=links.authority.issue("pi-1"))
    assert next_event(impostor) == LinkUp()
    impostor.publish(TOPICS.msg("pi-2"), b"forged")
    impostor.publish(TOPICS.msg("pi-1"), b"own")
    assert next_event(aggregator) == Delivery(TOPICS.msg("pi-1"), b"own", False)
