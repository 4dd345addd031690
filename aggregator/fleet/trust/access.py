"""Writes all files that are derived from the registry, for broker, aggregator and boards.

Commands and the fleet service call `apply` after each change, and the service also calls it at its start. Several
processes may call it at any time, and wait for each other. It compares, and replaces each changed file as a whole. So a
lock-out needs only the registry's row; after a crash between row and files the next call repairs the files.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hushfleet import atomic_file
from hushfleet.aggregator.broker.config import (
    BrokerTls,
    enrolment_acl,
    enrolment_config,
    mosquitto_acl,
    mosquitto_config,
)
from hushfleet.aggregator.broker.programs import MOSQUITTO
from hushfleet.aggregator.fleet.trust import keys
from hushfleet.aggregator.fleet.trust.authority import Authority, read_revocations
from hushfleet.aggregator.fleet.trust.folder import AGGREGATOR_NAME, HOME_ASSISTANT_NAME, SERVICE_NAME, FleetFolder
from hushfleet.aggregator.fleet.trust.membership_list import sign_here, waiting
from hushfleet.aggregator.fleet.trust.own_certificates import write_home_assistant
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.storage.activity import ActivityStore
from hushfleet.aggregator.storage.admission_list import AdmissionList, load_authority, read_admissions
from hushfleet.aggregator.storage.board import Board, with_blocked
from hushfleet.aggregator.storage.membership_list_signing import MembershipListChanges
from hushfleet.errors import WireError

PID_FILE, ENROLMENT_PID_FILE = "mosquitto.pid", "enrolment.pid"


def apply(
    folder: FleetFolder, registry: FleetRegistry, activity: ActivityStore | None = None, *, anew: bool = False
) -> MembershipListChanges:
    """Updates the admission list, access lists and membership list from the registry. Returns the changes that the
    operator must still sign elsewhere.

    :param activity: the aggregator's, if it is open already, because opening it reads the charges of all rounds.
    :param anew: whether to sign the admission list also if nothing has changed.

    Raises `StoreError`; and `BadInput` if the fleet's keys do not fit, after all except the membership list is written.
    """
    with contextlib.ExitStack() as opened:
        opened.enter_context(locked(folder))
        activity = activity or opened.enter_context(ActivityStore(folder.aggregator))
        boards = registry.boards()
        _write_admissions(folder, boards, anew=anew)
        boards = with_blocked(boards, activity.blocked())
        if folder.config.home_assistant.enabled:
            write_home_assistant(folder)
        if _write_broker_files(folder, registry):
            reload_brokers(folder)
        operator = keys.operator(folder)
        if operator is not None:
            sign_here(folder, boards, operator)
        return waiting(folder, boards)


@contextlib.contextmanager
def locked(folder: FleetFolder) -> Iterator[None]:
    """Holds a lock while files are written, because commands and the service write the same files."""
    with (folder.path / "apply.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_broker_files(folder: FleetFolder, registry: FleetRegistry) -> bool:
    """Writes configuration and access lists of both brokers. Returns whether any of them has changed."""
    path = folder.broker.resolve()
    tls = BrokerTls(
        ca_file=folder.ca.resolve() / "ca.pem",
        cert_file=path / "broker.pem",
        key_file=path / "broker.key",
        crl_file=path / "revoked.pem",
        aggregator=AGGREGATOR_NAME,
    )
    ports, acl, enrolment = folder.config.broker, path / "access.acl", path / "enrolment.acl"
    texts = {
        acl: mosquitto_acl(
            federation=folder.config.federation,
            aggregator=AGGREGATOR_NAME,
            service=SERVICE_NAME,
            blocked=registry.locked_out(),
            home_assistant=HOME_ASSISTANT_NAME if folder.config.home_assistant.enabled else None,
        ),
        enrolment: enrolment_acl(service=SERVICE_NAME),
        path / "mosquitto.conf": mosquitto_config(
            host="", port=ports.port, tls=tls, acl_path=acl, pid_file=path / PID_FILE
        ),
        path / "enrolment.conf": enrolment_config(
            port=ports.enrolment_port,
            tls=tls,
            acl_path=enrolment,
            password_file=path / "enrolment.passwords",
            pid_file=path / ENROLMENT_PID_FILE,
        ),
    }
    changed = [_write_changed(file, text.encode()) for file, text in texts.items()]
    return any([*changed, _write_revoked(folder, registry)])


def lists_written(folder: FleetFolder) -> list[int]:
    """Returns when the files that a broker reloads were written; these times differ after each change."""
    written = []
    for name in ("access.acl", "enrolment.acl", "revoked.pem", "broker.pem"):
        with contextlib.suppress(OSError):
            written.append((folder.broker / name).stat().st_mtime_ns)
    return written


def reload_brokers(folder: FleetFolder) -> int:
    """Asks brokers that run here to reload access lists, certificates and revocations. Returns their number.

    Mosquitto forgets a signal that comes while it reads, so the fleet service asks a second time (`ReloadLists`).
    """
    asked = 0
    for file in (PID_FILE, ENROLMENT_PID_FILE):
        with contextlib.suppress(OSError, ValueError):
            pid = int((folder.broker / file).read_text())
            name = Path(f"/proc/{pid}/comm")
            if (
                not name.exists() or name.read_text().strip() == MOSQUITTO.name
            ):  # another process may have this pid by now
                os.kill(pid, signal.SIGHUP)
                asked += 1
    return asked


def _write_admissions(folder: FleetFolder, boards: Sequence[Board], *, anew: bool) -> None:
    """Signs the list by which the aggregator knows who may take part, if it has changed.

    :param anew: sign it in any case, with a higher number: the folder may be an older copy.
    """
    authority, federation = Authority.load(folder.ca), folder.config.federation
    before = None
    with contextlib.suppress(OSError, WireError):
        before = read_admissions(
            folder.admissions.read_bytes(), load_authority(folder.ca / "ca.pem"), federation=federation
        )
    wanted = AdmissionList.of(boards, federation=federation, after=0 if before is None else before.number)
    if anew or before is None or replace(wanted, number=before.number) != before:
        atomic_file.write_whole(folder.admissions, wanted.signed(authority.sign), durable=True)


def _write_revoked(folder: FleetFolder, registry: FleetRegistry) -> bool:
    now = datetime.datetime.now(datetime.UTC)
    file, serials = folder.broker / "revoked.pem", registry.revoked_serials(now=now.timestamp())
    with contextlib.suppress(OSError, ValueError):
        before = read_revocations(file.read_bytes())
        # with a date in the future, which a clock that was ahead has written, brokers would refuse everybody
        if before.serials == serials and before.date <= now:
            return False
        if 0 <= (now - before.date).total_seconds() < 1:
            time.sleep(1)  # the broker distinguishes lists by their date in seconds
            now = datetime.datetime.now(datetime.UTC)
    authority = Authority.load(folder.ca)
    atomic_file.write_whole(file, authority.revocation_list(serials, now=now), durable=True)
    return True


def _write_changed(file: Path, data: bytes) -> bool:
    with contextlib.suppress(OSError):
        if file.read_bytes() == data:
            return False
    atomic_file.write_whole(file, data, durable=True)
    return True
