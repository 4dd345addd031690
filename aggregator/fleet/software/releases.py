"""The releases of a fleet, and the keys that sign them.

A release is a file that was checked and noted in the registry, by version and platform. Statements of the root key,
which may be on another machine, name the keys. `root.pub` has the fleet's first root. `release_keys` has the
statements that boards receive: the newest, and those before it that named another root, because a board accepts a
statement only from the root that it knows.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hushfleet import atomic_file
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.trust.keys import read_public
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.storage.identity_file import load, load_or_create
from hushfleet.errors import BadInput, WireError
from hushfleet.release.archive import check_payload, read_head
from hushfleet.release.manifest import Manifest, SignedManifest, highest, version_order
from hushfleet.release.statements import ReleaseKeys, Signed, Trust, read_keys
from hushfleet.wire.format.identity import Identity

_COLUMNS = "version, platform, file, head, digest, size"
UNSIGNED_FILE = "release_keys.unsigned"


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


def trust(folder: FleetFolder) -> Trust:
    """Returns the root key and the statements for a new card. Raises `BadInput`."""
    if not folder.root_public.exists():
        raise BadInput(
            f"there is no {folder.root_public}: this fleet was made by an earlier version, which had no root key. Make "
            "a new fleet (hushfleet fleet init), and new cards"
        )
    found = Trust.read(folder.root_public, folder.release_keys)
    if found.keys is None and folder.release_keys.exists():  # else the next statement would get a number that was used
        try:
            read_keys(folder.release_keys.read_text("utf-8"))
        except (OSError, ValueError, WireError) as error:
            raise BadInput(f"{folder.release_keys} cannot be used: {error}. Restore it from a backup") from error
    return found


def keys_in_force(folder: FleetFolder) -> ReleaseKeys:
    """Returns the keys in force. Raises `BadInput` if root has signed no statement yet."""
    found = trust(folder).keys
    if found is None:
        waits = folder.path / UNSIGNED_FILE
        said = describe_signing(folder, waits, "root.key")
        raise BadInput(f"root has not said yet who signs this fleet's releases. {said}")
    return found


def name_keys(
    folder: FleetFolder,
    *,
    keys: Sequence[str],
    threshold: int = 1,
    new_daily_key: bool = False,
    next_root: str = "",
    holders: Sequence[Path],
) -> tuple[ReleaseKeys, Path | None]:
    """Makes the statement after the present one, signs it, and takes it; boards receive it from then on.

    If a signature is missing, the statement waits in a file, which is the second value. A new daily key is not in use
    before `take`. Raises `BadInput`, or `Malformed` for invalid values.

    :param holders: files with the private keys of the root, and of the next one; a file may be missing.
    """
    known = trust(folder)
    daily = Identity.generate() if new_daily_key else load_or_create(folder.newest_key)
    newest_key = daily.public_key.hex()
    signed = Signed(ReleaseKeys(known.number + 1, known.root, tuple(keys), threshold, newest_key, next_root))
    if new_daily_key:
        atomic_file.write_whole(_next_daily(folder), daily.to_bytes(), durable=True, mode=0o600)
    signers = [load(file) for file in holders if file.is_file()]
    for key in signers:
        signed = signed.with_signature(key)
    if len(signers) == len(signed.statement.signers):
        return take(folder, signed.to_line()), None
    waits = folder.path / UNSIGNED_FILE
    atomic_file.write_whole(waits, f"{signed.to_line()}\n".encode(), durable=True)
    return signed.statement, waits


def new_release_key(folder: FleetFolder) -> str:
    """Makes a new `release.key` and returns its public half; the former one is kept as `release.key.old`.

    If a key was made before and still waits for root's statement, it is used and no new one is made.
    """
    known = trust(folder).keys
    if folder.release_key.exists() and known and load(folder.release_key).public_key.hex() in known.keys:
        folder.release_key.replace(folder.release_key.with_name("release.key.old"))
    return load_or_create(folder.release_key).public_key.hex()


def _next_daily(folder: FleetFolder) -> Path:
    """Returns the file of a daily key that root has not named yet; until then the former key is in use."""
    return folder.newest_key.with_name("newest.key.next")


def take(folder: FleetFolder, text: str) -> ReleaseKeys:
    """Takes signed statements, to be sent to boards from now on, and the waiting daily key if the newest names it.

    Raises `BadInput` if none is newer, or `BadSignature`.
    """
    known = trust(folder)
    after, came = known, list[Signed[ReleaseKeys]]()
    for each in read_keys(text):
        if (newer := after.after(each.to_line())) != after:  # it was checked; boards that were away get it, too
            after = newer
            came.append(each)
    if after.keys is None or not came:
        raise BadInput(f"this fleet has statement {known.number} about release keys already, and nothing newer came")
    before = read_keys(folder.release_keys.read_text("utf-8")) if folder.release_keys.exists() else []
    kept = [each.to_line() for each in (*before, *came) if each.statement.next_root and each.statement != after.keys]
    text = "".join(f"{line}\n" for line in [*kept, after.line])
    waits = _next_daily(folder)
    if waits.exists() and load(waits).public_key.hex() == after.keys.newest_key:
        waits.replace(folder.newest_key)
        atomic_file.sync_folder(folder.service)  # before the statement, so the same one can be taken again
    atomic_file.write_whole(folder.release_keys, text.encode(), durable=True)
    (folder.path / UNSIGNED_FILE).unlink(missing_ok=True)
    return after.keys


def write_first(path: Path, *, root: str | None) -> None:
    """Writes the first statement of a fleet that is being made in `path`, signed if root's private key is available.

    :param root: 64 hex digits, or a file with the private key, which stays there; None: root's key is made in `path`.
    """
    folder = FleetFolder(path)
    private = folder.root_key if root is None else Path(root)
    key = load_or_create(private) if root is None else load(private) if private.is_file() else None
    public = key.public_key if key is not None else read_public(root or "", "--root-key")
    atomic_file.write_whole(folder.root_public, f"{public.hex()}\n".encode(), durable=True)
    name_keys(folder, keys=[load_or_create(folder.release_key).public_key.hex()], holders=[private])


def describe_signing(folder: FleetFolder, file: Path, key: str = "release.key") -> str:
    """Says what to do with a release or a statement that lacks a signature."""
    return (
        f"Where {key} is: hushfleet release sign {file.name} --key {key}; then here: hushfleet release add "
        f"{folder.path} {file}"
    )
