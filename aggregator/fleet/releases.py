"""The releases of a fleet: files that were checked and noted in the registry, by version and platform."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hushfleet import atomic_file
from hushfleet.aggregator.fleet.folder import FleetFolder
from hushfleet.aggregator.fleet.registry import FleetRegistry
from hushfleet.aggregator.fleet.release_keys import trust
from hushfleet.errors import BadInput
from hushfleet.release import Manifest, SignedManifest, check_payload, read_head

_COLUMNS = "version, platform, file, head, digest, size"


@dataclass(frozen=True)
class FleetRelease:
    """A release in the fleet's folder.

    :param platform: of the Python that it is for, as boards report it in `Health`: `cp313-aarch64`.
    :param file: its name in the fleet's folder `releases`.
    :param head: its manifest with the signature.
    :param digest: SHA-256 of the whole file.
    :param size: of the whole file, in bytes.
    """

    version: str
    platform: str
    file: str
    head: bytes
    digest: bytes
    size: int

    @property
    def manifest(self) -> Manifest:
        return SignedManifest.from_bytes(self.head).manifest

    @property
    def order(self) -> tuple[int, ...]:
        """The key for comparing versions."""
        return self.manifest.order


def add_release(folder: FleetFolder, registry: FleetRegistry, path: Path) -> FleetRelease:
    """Checks the whole file, copies it to the folder if it is not there, and adds it to the registry.

    A release that is known may come again with other signatures. Raises `BadInput` if a known version and platform
    come with other content, `BadSignature` if too few of the keys in force have signed it, and `Malformed`.
    """
    with path.open("rb") as file:
        head = read_head(file)
        manifest = trust(folder).verify(head)
        check_payload(file, manifest)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").digest()
    kept = folder.releases / f"hushfleet-{manifest.version}-{manifest.python}-{manifest.arch}.hfr"
    platform = f"{manifest.python}-{manifest.arch}"
    release = FleetRelease(manifest.version, platform, kept.name, head.to_bytes(), digest, path.stat().st_size)
    known = find_release(registry, release.version, platform)
    if known is not None and known.manifest != manifest:
        raise BadInput(
            f"another release {release.version} for {platform} is known; boards know a release by its version, so give "
            "this one a higher version"
        )
    if not (kept.exists() and kept.samefile(path)):
        atomic_file.write_whole(kept, path.read_bytes(), durable=True)  # before the row that names it
    row = (release.version, platform, release.file, release.head, digest, release.size)
    registry.write(f"INSERT OR REPLACE INTO releases ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", row)
    return release


def releases(registry: FleetRegistry) -> list[FleetRelease]:
    """Returns all releases, the newest version first."""
    found = [FleetRelease(*row) for row in registry.rows(f"SELECT {_COLUMNS} FROM releases")]
    return sorted(found, key=lambda each: (each.order, each.platform), reverse=True)


def find_release(registry: FleetRegistry, version: str, platform: str) -> FleetRelease | None:
    row = registry.row(f"SELECT {_COLUMNS} FROM releases WHERE version = ? AND platform = ?", (version, platform))
    return None if row is None else FleetRelease(*row)


def check_signed(folder: FleetFolder, registry: FleetRegistry, version: str | None) -> None:
    """Raises `BadSignature` if boards, with the keys in force, would refuse release `version` (None: the newest)."""
    found = [each for each in releases(registry) if version in (None, each.version)]
    for each in found:
        if each.version == found[0].version:
            trust(folder).verify(SignedManifest.from_bytes(each.head))


def mapped(folder: FleetFolder, found: Sequence[FleetRelease]) -> dict[bytes, memoryview]:
    """Returns the files by SHA-256, mapped into memory and not read; files that are gone are left out."""
    maps = {}
    for release in found:
        path = folder.releases / release.file
        if path.exists() and path.stat().st_size == release.size:
            with path.open("rb") as file:
                maps[release.digest] = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return maps
