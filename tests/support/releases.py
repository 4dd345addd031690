"""Releases of this checkout that run on this machine, good ones and bad ones."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hushfleet.edge_client.storage.state_files import INCOMING
from hushfleet.edge_client.storage.store_file import OLDEST_SCHEMA, SCHEMA_VERSION
from hushfleet.firmware_profiles.cards.bundle import _START, _copy_ours
from hushfleet.release.archive import pack
from hushfleet.release.manifest import this_platform
from hushfleet.release.statements import KEYS_FILE, ROOT_FILE, ReleaseKeys, Signed, Trust
from hushfleet.wire.format.identity import Identity

Change = Callable[[Path], None]
_WAITS = {  # of a client in the field; shorter here, so that tests wait less
    "fleet/updates.py": ("LOOK_EVERY_S = 5.0", "LOOK_EVERY_S = 0.5"),
    "fleet/trial.py": ("BEAT_S = 1.0", "BEAT_S = 0.2"),
}


def build_release(out: Path, version: str, *, key: Any, change: Change | None = None, **manifest: Any) -> Path:
    """The client without the packages that it needs: those of this Python serve.

    :param change: of its files, as in a release that is broken.
    """
    python, arch = this_platform()
    fields = {"oldest_store": int(OLDEST_SCHEMA), "store": int(SCHEMA_VERSION), **manifest}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _copy_ours(folder, version)
        (folder / "__main__.py").write_text(_START)
        for name, waits in _WAITS.items():
            _replace(folder / "hushfleet" / "edge_client" / name, *waits)
        if change is not None:
            change(folder)
        pack(folder, out, key=key, version=version, python=python, arch=arch, **fields)
    return out


def put_in(state_dir: Path, release: Path) -> None:
    """Puts a release where the client puts one that it has fetched."""
    incoming = state_dir / INCOMING
    incoming.mkdir(exist_ok=True)
    shutil.copyfile(release, incoming / "fetched.part")
    (incoming / "fetched.part").replace(incoming / "fetched.hfr")


ROOT, DAILY = Identity.generate(), Identity.generate()
"""The root key of boards in tests, and the key that says each day which release is the newest."""


def statement(
    *keys: str, number: int = 1, threshold: int = 1, root: Identity = ROOT, **changes: Any
) -> Signed[ReleaseKeys]:
    """Root's word that these public keys sign releases."""
    fields = {"root": root.public_key.hex(), "newest_key": DAILY.public_key.hex(), **changes}
    return Signed(ReleaseKeys(number, keys=keys, threshold=threshold, **fields)).with_signature(root)


def trust_in(*keys: str, **changes: Any) -> Trust:
    """What a board trusts that was told so."""
    return Trust(ROOT.public_key.hex()).after(statement(*keys, **changes).to_line())


def put_trust(folder: Path, *keys: str, **changes: Any) -> None:
    """As a card brings it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ROOT_FILE).write_text(ROOT.public_key.hex())
    (folder / KEYS_FILE).write_text(statement(*keys, **changes).to_line())


def crashes(folder: Path) -> None:
    (folder / "__main__.py").write_text("raise SystemExit('this release crashes')\n")


def cannot_be_imported(folder: Path) -> None:
    (folder / "hushfleet" / "methods" / "__init__.py").write_text("import a_package_that_is_not_there\n")


def hangs(folder: Path) -> None:
    (folder / "__main__.py").write_text("import time\ntime.sleep(3600)\n")


def eats_memory(folder: Path) -> None:
    _after_connecting(folder, "kept = [bytearray(1 << 24) for _ in range(1 << 12)]")


def crashes_after_connecting(folder: Path) -> None:
    _after_connecting(folder, "raise SystemExit('too late')")


def never_connects(folder: Path) -> None:
    line = "self._client.connect(address.host"
    never = "raise OSError('this release never connects')\n            " + line
    _replace(folder / "hushfleet" / "wire" / "link" / "connection.py", line, never)


def _after_connecting(folder: Path, code: str) -> None:
    line = "                installed.say_healthy(trial)\n"
    _replace(folder / "hushfleet" / "edge_client" / "fleet" / "trial.py", line, f"{line}                {code}\n")


def _replace(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))
