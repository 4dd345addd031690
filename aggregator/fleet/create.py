"""Makes the folder of a fleet: authority, keys, certificates, configuration. The folder is complete or not there."""

from __future__ import annotations

import datetime
import os
import re
import secrets
import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hushfleet.aggregator.broker.config import password_line
from hushfleet.aggregator.config.task import Task, load_task
from hushfleet.aggregator.fleet.software.releases import write_first
from hushfleet.aggregator.fleet.tasks.next_task import copy, files_to_copy, task_text
from hushfleet.aggregator.fleet.tasks.task_check import season_limits
from hushfleet.aggregator.fleet.trust.authority import Authority, make_key, private_pem
from hushfleet.aggregator.fleet.trust.device_file import DATA, LIMITS, kind_of
from hushfleet.aggregator.fleet.trust.folder import FILE_NAME, SERVICE_NAME, FleetConfig, FleetFolder
from hushfleet.aggregator.fleet.trust.own_certificates import STEMS, write_own
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.storage.identity_file import load_or_create
from hushfleet.atomic_file import write_whole
from hushfleet.errors import BadInput
from hushfleet.schema import to_plain
from hushfleet.toml_text import to_toml, toml_value

_COMMENT = """\
# What a person may change of this fleet; docs/field.md explains every key. Boards are told what stands here when their
# card is written. After a change: restart the services, or `hushfleet fleet up`.
"""


def create_fleet(
    path: Path,
    config: FleetConfig,
    task: Path,
    *,
    classes: Sequence[str] = (),
    operator: bytes | None = None,
    root: str | None = None,
) -> FleetFolder:
    """Makes the folder `path`.

    :param config: without a section `device`, which gets defaults that allow what the task asks.
    :param task: copied to `task.toml`, with the files that it names beside itself; checked by the caller.
    :param classes: replace the task's `class_names`.
    :param operator: public key of the operator, whose private key lies elsewhere; None: a key is made in the folder.
    :param root: public key of root, or a file with its private key, which stays there; None: it is made in `path`.

    Raises `BadInput`, and leaves nothing behind, if `path` is not empty or a name cannot be used.
    """
    path = path.resolve()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise BadInput(f"{path} exists already and is not empty; choose another folder for the fleet")
    if path == Path.cwd():
        raise BadInput(
            f"{path} is the current folder, and the fleet needs a new one: change to the folder above and give its name"
        )
    beside = files_to_copy(task, path)
    text = _task_text(task, classes)
    config = replace(config, device=_device_defaults(load_task(task), text))
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        _fill(part, config, text, operator=operator, root=root)
        for file in beside:
            copy(task.parent / file, part / file)
        os.replace(part, path)
    except OSError as error:
        raise BadInput(f"the fleet's folder {path} cannot be made: {error.strerror or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return FleetFolder(path)


def _fill(path: Path, config: FleetConfig, task: str, *, operator: bytes | None, root: str | None) -> None:
    now = datetime.datetime.now(datetime.UTC)
    authority = Authority.create(config.federation, now=now)
    write = partial(write_whole, durable=True, mode=0o600)
    path.mkdir(parents=True, mode=0o700)
    for name in ("ca", "broker", "aggregator", "service", "releases", "wifi"):
        (path / name).mkdir(mode=0o700)
    write(path / "ca" / "ca.pem", authority.pem)
    write(path / "ca" / "ca.key", authority.key_pem())
    for stem in STEMS:
        write(path / f"{stem}.key", private_pem(make_key()))
    write_own(path, config, authority, now=now)
    password = secrets.token_urlsafe(24)
    write(path / "service" / "enrolment.password", f"{password}\n".encode())
    write(path / "broker" / "enrolment.passwords", password_line(SERVICE_NAME, password).encode())
    load_or_create(path / "aggregator" / "identity.key")
    load_or_create(path / "service" / "identity.key")
    if operator is None:
        operator = load_or_create(path / "operator.key").public_key
    write(path / "operator.pub", f"{operator.hex()}\n".encode())
    write(path / "task.toml", task.encode())
    write(path / FILE_NAME, (_COMMENT + to_toml(to_plain(config))).encode())
    write_first(path, root=root)
    FleetRegistry(path).close()


def _task_text(task: Path, classes: Sequence[str]) -> str:
    text = task_text(task)
    if not classes:
        return text
    line = f"class_names = {toml_value(list(classes))}"
    named, found = re.subn(r"(?m)^class_names\s*=\s*\[[^\]]*\]", lambda _: line, text)  # names may have a backslash
    if found != 1:
        raise BadInput(f"{task} has no line `class_names = [...]` that --classes could replace")
    return named


def _device_defaults(task: Task, text: str) -> dict[str, Any]:
    """Makes defaults of DEVICE.toml that allow what the task asks; without them every board would decline."""
    limits = {**LIMITS, **season_limits(task)}
    privacy = tomllib.loads(text).get("privacy", {})
    if "accounting" in privacy:
        limits["accounting"] = privacy["accounting"]
    kind = kind_of(task.data)
    path = DATA["path"] + "/samples.npz" * (kind == "arrays")
    return {"data": {"kind": kind, "path": path}, "limits": limits}
