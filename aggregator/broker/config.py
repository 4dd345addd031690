"""What Mosquitto is told: the generated configuration, and the access list of docs/wire.md."""

from __future__ import annotations

import os
import pwd
import shutil
from dataclasses import dataclass
from pathlib import Path

from hushfleet.wire.format.topics import ROOT
from hushfleet.wire.link.interface import DEFAULT_MESSAGE_CAP_BYTES

# above the links' own cap, topic and header included: Mosquitto disconnects who sends more
MAX_PACKET_BYTES = DEFAULT_MESSAGE_CAP_BYTES + 4096
MAX_QUEUED_MESSAGES = 5_000
MAX_QUEUED_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class BrokerTls:
    """Mutual TLS with Mosquitto: who has no certificate of the CA does not get in.

    A client's user name and its MQTT client id are its certificate's common name: a device's id, or `aggregator`. So
    nobody takes the session of another, and each certificate has one connection.

    :param ca_file: the CA that signs the certificates of devices and aggregator (PEM).
    :param cert_file: the broker's own certificate, with `key_file`.
    :param crl_file: revoked certificates.
    :param aggregator: common name of the aggregator, which may do everything below `hushfleet/1`.
    """

    ca_file: Path
    cert_file: Path
    key_file: Path
    crl_file: Path | None = None
    aggregator: str = "aggregator"


def mosquitto_config(*, host: str, port: int, tls: BrokerTls | None, acl_path: Path) -> str:
    """The configuration of Mosquitto 2.0 and 2.1. Nothing persists; queues are bounded."""
    lines = [
        f"listener {port} {host}",
        # as root it would become the user mosquitto, who may not read certificates and configuration here
        f"user {pwd.getpwuid(os.getuid()).pw_name}",
        "persistence false",
        f"max_packet_size {MAX_PACKET_BYTES}",
        "max_inflight_messages 100",
        f"max_queued_messages {MAX_QUEUED_MESSAGES}",
        f"max_queued_bytes {MAX_QUEUED_BYTES}",
        "set_tcp_nodelay true",
        "sys_interval 0",
        "connection_messages false",
        "log_dest stderr",
        "log_type error",
        "log_type warning",
    ]
    if tls is None:
        lines.append("allow_anonymous true")
    else:
        lines += [
            "allow_anonymous false",
            f"cafile {tls.ca_file}",
            f"certfile {tls.cert_file}",
            f"keyfile {tls.key_file}",
            "require_certificate true",
            "use_identity_as_username true",
            "use_username_as_clientid true",
            "tls_version tlsv1.2",
            f"acl_file {acl_path}",
        ]
        if tls.crl_file is not None:
            lines.append(f"crlfile {tls.crl_file}")
    return "\n".join(lines) + "\n"


def mosquitto_acl(*, aggregator: str = "aggregator") -> str:
    """The access list: a device (its certificate's name is `%u`) writes only below its own `up`."""
    lines = [
        f"pattern write {ROOT}/+/c/%u/up/#",
        f"pattern read {ROOT}/+/c/%u/down",
        *(f"pattern read {ROOT}/+/{topic}" for topic in ("server", "task", "round", "blob/+")),
        "",
        f"user {aggregator}",
        f"topic readwrite {ROOT}/#",
    ]
    return "\n".join(lines) + "\n"


def find_mosquitto() -> str | None:
    """Debian puts it where only root's PATH looks."""
    elsewhere = "/usr/sbin:/usr/local/sbin:/opt/homebrew/sbin"
    return shutil.which("mosquitto") or shutil.which("mosquitto", path=elsewhere)
