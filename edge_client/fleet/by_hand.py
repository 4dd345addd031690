"""Installs a release from a file, with the same checks as for an offer."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.fleet.installed import Installed
from hushfleet.edge_client.fleet.slots import SlotsError
from hushfleet.errors import BadInput, StoreError
from hushfleet.release import Manifest, check_payload, read_head


def hand_over(config: DeviceConfig, path: Path) -> Manifest:
    """Copies a release to where `slots.py` installs it. Raises `BadInput` or `WireError` if it cannot be installed."""
    if config.fleet is None:
        raise BadInput("this board has no section [fleet], and takes no releases")
    installed = Installed.of(config)
    state = installed.state()
    if installed.waits or (state is not None and state.trial):
        raise BadInput("another release is being installed or on trial; wait until that has ended")
    try:
        with path.open("rb") as file:
            manifest = installed.judge(read_head(file).to_bytes())
            check_payload(file, manifest)
            installed.room_for(manifest)
            file.seek(0)
            _copy(file, installed.incoming, f"{manifest.version}.hfr")
    except SlotsError as error:
        raise BadInput(str(error)) from error
    except OSError as error:
        raise StoreError(f"the release {path} cannot be copied: {error}") from error
    return manifest


def _copy(source: BinaryIO, folder: Path, name: str) -> None:
    """Copies whole or not at all, for the parent folder's owner. Root may call this: it follows no link."""
    folder.mkdir(mode=0o700, exist_ok=True)
    owner, part = folder.parent.stat(), f"{name}.part"
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part, dir_fd=inside)
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, 0o600, dir_fd=inside)) as target:
            shutil.copyfileobj(source, target)
            target.flush()
            os.fsync(target.fileno())
            for each in (target.fileno(), inside) if os.geteuid() == 0 else ():
                os.fchown(each, owner.st_uid, owner.st_gid)
        os.replace(part, name, src_dir_fd=inside, dst_dir_fd=inside)
        os.fsync(inside)
    finally:
        os.close(inside)
