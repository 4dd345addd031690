"""The keys that sign a fleet's releases, named by statements of the root key, which may be on another machine.

`root.pub` has the fleet's first root. `release_keys` has the statements that boards receive: the newest, and those
before it that named another root, because a board accepts a statement only from the root that it knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hushfleet import atomic_file
from hushfleet.aggregator.fleet.folder import FleetFolder
from hushfleet.aggregator.fleet.keys import read_public
from hushfleet.aggregator.storage.identity_file import load, load_or_create
from hushfleet.errors import BadInput, WireError
from hushfleet.release import ReleaseKeys, Signed, Trust
from hushfleet.release.statements import read_keys
from hushfleet.wire.format.identity import Identity

UNSIGNED_FILE = "release_keys.unsigned"


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
        raise BadInput(
            f"root has not said yet who signs this fleet's releases. Where root's key is: hushfleet release "
            f"sign {UNSIGNED_FILE} --key root.key; then here: hushfleet release add {folder.path} "
            f"{folder.path / UNSIGNED_FILE}"
        )
    return found


def next_statement(
    folder: FleetFolder, *, keys: Sequence[str], threshold: int, new_daily_key: bool = False, next_root: str = ""
) -> Signed[ReleaseKeys]:
    """Makes the statement after the present one, not signed yet. A new daily key is not in use before `take`.

    Raises `BadInput`, or `Malformed` for invalid values.
    """
    known = trust(folder)
    daily = Identity.generate() if new_daily_key else load_or_create(folder.newest_key)
    newest_key = daily.public_key.hex()
    statement = ReleaseKeys(known.number + 1, known.root, tuple(keys), threshold, newest_key, next_root)
    if new_daily_key:
        atomic_file.write_whole(_next_daily(folder), daily.to_bytes(), durable=True, mode=0o600)
    return Signed(statement)


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
    private = path / "root.key" if root is None else Path(root)
    key = load_or_create(private) if root is None else load(private) if private.is_file() else None
    public = key.public_key.hex() if key is not None else read_public(root or "", "--root-key").hex()
    release, daily = load_or_create(path / "release.key"), load_or_create(path / "service" / "newest.key")
    signed = Signed(ReleaseKeys(1, public, (release.public_key.hex(),), 1, daily.public_key.hex()))
    name = UNSIGNED_FILE
    if key is not None:
        signed, name = signed.with_signature(key), "release_keys"
    atomic_file.write_whole(path / "root.pub", f"{public}\n".encode(), durable=True)
    atomic_file.write_whole(path / name, f"{signed.to_line()}\n".encode(), durable=True)
