"""Small releases for this machine, and a board on which root installs them."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hushfleet.edge_client.board.config import (
    BrokerSection,
    DeviceConfig,
    DeviceSection,
    FleetSection,
    LimitsSection,
    OwnDataSection,
)
from hushfleet.edge_client.fleet.slot_state import State
from hushfleet.edge_client.fleet.slots import STEADY_CHECKS, Slots
from hushfleet.edge_client.storage.store_file import SCHEMA_VERSION
from hushfleet.release.archive import add_signature, pack
from hushfleet.release.manifest import this_platform
from hushfleet.wire.format.identity import Identity
from support.releases import put_trust

KEY = Identity.generate()
"""The release key that these boards trust, where no other is named."""
AARCH64 = {"python": "cp313", "arch": "aarch64", "store": 5}
"""Of the manifest of a release for a Raspberry Pi."""


def pack_files(content: Path, out: Path, version: str, *keys: Identity, **manifest: Any) -> Path:
    """A release of the files in a folder, signed by these keys; the manifest is one for this machine."""
    python, arch = this_platform()
    fields = {"python": python, "arch": arch, "oldest_store": 1, "store": int(SCHEMA_VERSION), **manifest}
    pack(content, out, key=None, version=version, **fields)
    for key in keys:
        add_signature(out, key)
    return out


@cache
def packed(version: str, *keys: Identity, **manifest: Any) -> bytes:
    """A release with one file, `whole`, signed by these keys; without them by `KEY`."""
    with tempfile.TemporaryDirectory() as name:
        content = Path(name, "content")
        content.mkdir()
        (content / "whole").write_text(version)
        return pack_files(content, Path(name, "out"), version, *(keys or (KEY,)), **manifest).read_bytes()


class ReleaseBoard:
    """A board whose first release is installed: `root` belongs to root, the client writes `state`.

    :param keys: the release keys that it trusts; without them `KEY`.
    :param manifest: of all its releases, where nothing else is said.
    """

    def __init__(
        self, folder: Path, first: str = "1.0", *keys: Identity, boot: Path | None = None, **manifest: Any
    ) -> None:
        self.folder, self.root, self.state = folder, folder / "opt", folder / "state"
        (self.state / "incoming").mkdir(parents=True)
        self.slots, self._manifest, self._beats = Slots(self.root, self.state, boot), manifest, 0
        (folder / "first.hfr").write_bytes(packed(first, *keys, **manifest))
        self.slots.first(folder / "first.hfr")
        put_trust(self.root, *(key.public_key.hex() for key in keys or (KEY,)))

    def of_fleet(self, device: str, operator: Identity, **fleet: Any) -> DeviceConfig:
        """The board's DEVICE.toml in the fleet of an operator."""
        return DeviceConfig(
            device=DeviceSection(device, str(self.state), federation="greenhouse"),
            broker=BrokerSection("mqtt://localhost"),
            data=OwnDataSection("folder", str(self.folder)),
            limits=LimitsSection(epsilon_server=1.0),
            fleet=FleetSection(operator.public_key.hex(), "mqtts://localhost:1", releases=str(self.root), **fleet),
        )

    def put(self, release: bytes | str, *keys: Identity, **manifest: Any) -> None:
        """Puts a release, or one of this version, where the client puts what it has fetched."""
        data = packed(release, *keys, **self._manifest | manifest) if isinstance(release, str) else release
        (self.state / "incoming" / "new.hfr").write_bytes(data)

    def install(self, release: bytes | str, *keys: Identity, **manifest: Any) -> State:
        self.put(release, *keys, **manifest)
        return self.slots.install()

    def healthy(self, version: str) -> None:
        """What a client writes each minute whose release is on trial."""
        self._beats += 1
        (self.state / "healthy").write_text(version)
        os.utime(self.state / "healthy", ns=(0, self._beats))

    def prove(self, version: str) -> State:
        """The release on trial is started, and healthy for long enough."""
        self.slots.begin()
        for _ in range(STEADY_CHECKS):
            self.healthy(version)
            state, _ = self.slots.check()
        assert state.good == version
        return state

    def running(self) -> str:
        assert (self.root / "current" / "whole").exists(), "what runs is there, and whole"
        return (self.root / "current").readlink().name
