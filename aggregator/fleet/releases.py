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
from hushfleet.release.manifest import highest, version_order

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


@dataclass(frozen=True)
class Withdrawal:
    """The versions that the operator has withdrawn by signing releases as downgrades; `slots.py` has the boards' rule.

    :param by: the version that was signed last as a downgrade; boards that have followed it take no other up to
        `up_to`.
    :param up_to: the highest version from which any release is signed as a downgrade.
    """

    by: str
    up_to: str

    @classmethod
    def of(cls, found: Sequence[FleetRelease]) -> Withdrawal | None:
        """Returns None if none of these releases is signed as a downgrade."""
        signed = [each.manifest for each in found if each.manifest.downgrade_from]
        if not signed:
            return None
        last = max(signed, key=lambda each: each.downgrade_serial)
        return cls(last.version, highest(version for each in signed for version in each.downgrade_from))

    def includes(self, version: str) -> bool:
        """Returns whether boards that have followed the last downgrade refuse this version."""
        order = version_order(version)
        return order <= version_order(self.up_to) and order != version_order(self.by)

    def __str__(self) -> str:
        return (
            f"release {self.by} is signed as a downgrade, which withdraws all others up to {self.up_to}: boards that "
            "have followed it refuse them"
        )


def offered_releases(registry: FleetRegistry, version: str | None = None) -> list[FleetRelease]:
    """Returns the releases that boards and new cards may be given, the newest version first.

    :param version: only those of this version. Raises `BadInput` if there are none, or if they were withdrawn.
    """
    known = releases(registry)
    withdrawn = Withdrawal.of(known)
    if version is None:
        return [each for each in known if withdrawn is None or not withdrawn.includes(each.version)]
    found = [each for each in known if each.version == version]
    if not found:
        versions = dict.fromkeys(each.version for each in reversed(known))
        raise BadInput(f"there is no release {version} in this fleet; it has {', '.join(versions) or 'none'}")
    if withdrawn is not None and withdrawn.includes(version):
        raise BadInput(f"{withdrawn}. Build what is in {version} with a version above {withdrawn.up_to}")
    return found


def find_release(registry: FleetRegistry, version: str, platform: str) -> FleetRelease | None:
    row = registry.row(f"SELECT {_COLUMNS} FROM releases WHERE version = ? AND platform = ?", (version, platform))
    return None if row is None else FleetRelease(*row)


def check_signed(folder: FleetFolder, registry: FleetRegistry, version: str | None) -> None:
    """Raises `BadSignature` if boards, with the keys in force, would refuse release `version` (None: the newest).

    Raises `BadInput` if the release was withdrawn.
    """
    found = offered_releases(registry, version)
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
