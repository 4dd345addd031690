"""Generates Mosquitto's configuration and the access list of docs/wire.md."""

from __future__ import annotations

import base64
import hashlib
import os
import pwd
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hushfleet.wire.format.topics import ROOT, UP
from hushfleet.wire.link.interface import DEFAULT_MESSAGE_CAP_BYTES

# above the links' own cap, topic and header included: Mosquitto disconnects a client that sends more
MAX_PACKET_BYTES = DEFAULT_MESSAGE_CAP_BYTES + 4096
MAX_ENROLMENT_PACKET_BYTES = 72 * 1024  # an answer holds at most a message's 64 KiB
MAX_ENROLMENT_CONNECTIONS = 1000
MAX_QUEUED_MESSAGES = 5_000
MAX_WAITING_BYTES = 8 << 20  # for one client: queued, and once more in flight
MEMORY_LIMIT_BYTES = 512 << 20  # of the heap; a client that publishes beyond it is disconnected
_HASH_ITERATIONS = 101


@dataclass(frozen=True, kw_only=True)
class BrokerTls:
    """Mutual TLS with Mosquitto: a client without a certificate of the CA cannot connect.

    A client's user name and its MQTT client id are its certificate's common name: a device's id, or `aggregator`. So
    no client can take the session of another, and each certificate has one connection.

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


_COMMON = """\
persistence false
max_packet_size {packet}
max_inflight_messages 100
max_inflight_bytes {bytes}
max_queued_messages {messages}
max_queued_bytes {bytes}
memory_limit {memory}
set_tcp_nodelay true
sys_interval 0
connection_messages false
log_dest stderr
log_type error
log_type warning
"""
_TLS = """\
allow_anonymous false
cafile {tls.ca_file}
certfile {tls.cert_file}
keyfile {tls.key_file}
require_certificate true
use_identity_as_username true
use_username_as_clientid true
tls_version tlsv1.2
acl_file {acl_path}
"""


def mosquitto_config(
    *, host: str, port: int, tls: BrokerTls | None, acl_path: Path, pid_file: Path | None = None
) -> str:
    """Returns the configuration of Mosquitto 2.0 and 2.1. Nothing persists; queues are bounded.

    No client of Hushfleet asks the broker to keep its session. If a client does so all the same, the broker keeps
    the content of its queue, up to `MAX_WAITING_BYTES`. With `persistent_client_expiration` that would end after an
    hour; but with names from certificates, Mosquitto 2.0.11 then writes to freed memory when it reads its lists again
    while such a session exists (measured: it ends by signal 6 or 11). So this is set only without TLS, and in a fleet
    the session ends with a lock-out (`lock_out.py`) or with the broker.

    :param host: the address on which it listens; empty: all addresses.
    """
    text = _head(host=host, port=port, pid_file=pid_file)
    text += _COMMON.format(
        packet=MAX_PACKET_BYTES, messages=MAX_QUEUED_MESSAGES, bytes=MAX_WAITING_BYTES, memory=MEMORY_LIMIT_BYTES
    )
    if tls is None:
        return text + "allow_anonymous true\npersistent_client_expiration 1h\n"
    text += _TLS.format(tls=tls, acl_path=acl_path)
    return text if tls.crl_file is None else f"{text}crlfile {tls.crl_file}\n"


def mosquitto_acl(
    *,
    federation: str = "+",
    aggregator: str = "aggregator",
    service: str | None = None,
    blocked: Iterable[str] = (),
    home_assistant: str | None = None,
) -> str:
    """Returns the access list: a device (its certificate's name is `%u`) writes only to its own topics below `up`.

    They are named one by one, because the broker keeps a retained message of each topic that a device may invent.

    :param federation: `+`: all federations; a device may then also invent names of federations.
    :param service: certificate name of the fleet service, if there is one.
    :param blocked: devices that are locked out. Mosquitto reads the list again on SIGHUP.
    :param home_assistant: certificate name of Home Assistant, for which `service` then publishes.
    """
    shared = ("server", "task", "round", "blob/+", "release/+", "c/%u/down", "c/%u/fleet")
    text = "".join(f"pattern write {ROOT}/{federation}/c/%u/up/{name}\n" for name in UP)
    text += "".join(f"pattern read {ROOT}/{federation}/{topic}\n" for topic in shared)
    for user in (aggregator, service):
        text += f"\nuser {user}\ntopic readwrite {ROOT}/#\n" if user else ""
    if home_assistant:
        topics = "homeassistant/device/+/config", f"hushfleet-home/{federation}/#"
        text += "".join(f"topic write {topic}\n" for topic in topics)
        text += f"\nuser {home_assistant}\ntopic deny {ROOT}/#\ntopic readwrite homeassistant/status\n"
        text += "".join(f"topic read {topic}\n" for topic in topics)
    return text + "".join(f"\nuser {device}\ntopic deny {ROOT}/#\n" for device in sorted(blocked))


_ENROLMENT = """\
allow_anonymous true
password_file {password_file}
acl_file {acl_path}
cafile {tls.ca_file}
certfile {tls.cert_file}
keyfile {tls.key_file}
require_certificate false
tls_version tlsv1.2
max_connections {connections}
max_keepalive 120
retain_available false
persistent_client_expiration 1h
"""


def enrolment_config(*, port: int, tls: BrokerTls, acl_path: Path, password_file: Path, pid_file: Path) -> str:
    """Returns the configuration of the broker for boards without a certificate: a client without a name is a stranger.

    This broker is a process of its own: a client that connects with another client's id takes its session (measured
    with 2.0.11), on every listener of the same Mosquitto, so strangers must not reach the broker that the fleet is
    connected to. They also cannot fill the memory of that broker or use up its connections.

    A session that a stranger asks it to keep takes some 1 KiB, for ever (20,000 of them: 18 MiB more, measured with
    2.0.11; clean ones: nothing), so such sessions are deleted after an hour, the shortest time that Mosquitto accepts.
    """
    text = _head(host="", port=port, pid_file=pid_file)
    text += _COMMON.format(packet=MAX_ENROLMENT_PACKET_BYTES, messages=200, bytes=4 << 20, memory=MEMORY_LIMIT_BYTES)
    return text + _ENROLMENT.format(
        tls=tls, acl_path=acl_path, password_file=password_file, connections=MAX_ENROLMENT_CONNECTIONS
    )


def enrolment_acl(*, service: str) -> str:
    """Returns the access list of enrolment: strangers can ask for a certificate and read answers; nothing else.

    :param service: user name of the fleet service.
    """
    ask, answer = f"{ROOT}/+/enrol/+/up", f"{ROOT}/+/enrol/+/down"
    return f"topic write {ask}\ntopic read {answer}\n\nuser {service}\ntopic read {ask}\ntopic write {answer}\n"


def password_line(user: str, password: str) -> str:
    """Returns a line of a password file, as `mosquitto_passwd` writes it: PBKDF2 with SHA-512."""
    salt = os.urandom(12)
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, _HASH_ITERATIONS)
    return f"{user}:$7${_HASH_ITERATIONS}${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}\n"


def _head(*, host: str, port: int, pid_file: Path | None) -> str:
    # as root it would become the user mosquitto, which must not read certificates and configuration here
    text = f"listener {port} {host}".rstrip() + f"\nuser {pwd.getpwuid(os.getuid()).pw_name}\n"
    return text if pid_file is None else f"{text}pid_file {pid_file}\n"
