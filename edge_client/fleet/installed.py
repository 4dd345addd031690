"""Tells a board's client which release is installed, which releases fit, and the state of the last offer."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hushfleet.atomic_file import read_object, write_whole
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.fleet.client_files import read_inside
from hushfleet.edge_client.fleet.slot_state import ReleaseFolder, SlotsError, State, check_fits
from hushfleet.edge_client.storage.state_files import HEALTHY, INCOMING, OFFERS, RELEASE_KEYS
from hushfleet.edge_client.storage.store_file import SCHEMA_VERSION
from hushfleet.errors import BadInput, StoreFull, WireError
from hushfleet.release.manifest import Manifest, SignedManifest, this_platform
from hushfleet.release.statements import TEXT_CAP, Trust
from hushfleet.wire.format.health import SlotState


@dataclass(frozen=True)
class ReleaseStanding:
    """The fields of `Health` about releases; see there."""

    slot: SlotState
    tried: str = ""
    attempt: int = 0


@dataclass(frozen=True)
class _LastOffer:
    """The content of `STATE/update.json`: the version and attempt of the last answer, and the newest attempt."""

    version: str = ""
    attempt: int = -1
    newest: int = -1


def standing_of(config: DeviceConfig) -> ReleaseStanding:
    return ReleaseStanding("none") if config.fleet is None else Installed.of(config).standing()


class Installed:
    """`STATE/update.json` records the offer that was answered last (its release was handed over or refused), and the
    newest offer.

    `STATE/release_keys` has the statements on release keys that this client received; `slots.py` checks and uses them.
    """

    def __init__(self, releases: Path, state_dir: Path) -> None:
        self._root, self._state_dir = releases, state_dir
        self._file = self._state_dir / OFFERS
        self.incoming = self._state_dir / INCOMING

    @classmethod
    def of(cls, config: DeviceConfig) -> Installed:
        assert config.fleet is not None
        return cls(Path(config.fleet.releases), Path(config.device.state_dir))

    def state(self) -> State | None:
        """Reads the state. Returns None if no release is installed."""
        try:
            return ReleaseFolder(self._root).read()
        except (SlotsError, OSError):
            return None

    def judge(self, head: bytes) -> Manifest:
        """Checks that this board can install a release.

        Raises `WireError`, `BadInput` or `SlotsError` with the reason.
        """
        state = self.state()
        if state is None:
            raise BadInput(f"this board takes no releases: {self._root} has none")
        manifest = self.trust().verify(SignedManifest.from_bytes(head))
        manifest.require_platform(*this_platform())
        check_fits(manifest, state, store=int(SCHEMA_VERSION))
        return manifest

    def trust(self) -> Trust:
        """Returns the accepted release keys, including those of a statement that `slots.py` takes over within a minute.

        Root calls this, too: it follows no link of the client. Raises `BadInput` if root's public key is missing.
        """
        trust = Trust.of_board(self._root)
        with contextlib.suppress(WireError):
            return trust.after(read_inside(self._state_dir, RELEASE_KEYS, TEXT_CAP)[0])
        return trust

    def hear_keys(self, text: str) -> Trust:
        """Takes over statements about release keys from the broker. Returns the trust after them.

        Raises `BadInput`, a `WireError` if root has not signed one of them, and `StoreFull`.
        """
        before = self.trust()
        after = before.after(text)
        if after != before:
            write_whole(self._state_dir / RELEASE_KEYS, text.encode(), durable=True)
        return after

    def room_for(self, manifest: Manifest) -> None:
        """Raises `StoreFull` if the disk has no room for the release, unpacked and with its caches."""
        needed = manifest.payload_bytes + 2 * manifest.unpacked_bytes
        free = min(shutil.disk_usage(folder).free for folder in (self._root, self._state_dir))
        if free < needed:
            raise StoreFull(f"release {manifest.version} needs {needed >> 20} MiB, {free >> 20} MiB are free")

    def heard(self, attempt: int) -> None:
        """Notes that work on an offer begins; earlier offers are ignored from now on."""
        last = self._last_offer()
        if last.newest < attempt:
            self._note(replace(last, newest=attempt))

    def answered(self, version: str, attempt: int) -> None:
        """Notes that this offer and all earlier ones must not be handled again."""
        self._note(_LastOffer(version, attempt, attempt))

    def was_answered(self, attempt: int) -> bool:
        """Returns whether the offer was answered or is withdrawn: its attempt is then below the newest one."""
        last = self._last_offer()
        return attempt <= last.attempt or attempt < last.newest

    def _note(self, last: _LastOffer) -> None:
        write_whole(self._file, json.dumps(asdict(last)).encode(), durable=True)

    def _last_offer(self) -> _LastOffer:
        known = read_object(self._file)
        with contextlib.suppress(ValueError, TypeError):
            return _LastOffer(
                str(known.get("version", "")), int(known.get("attempt", -1)), int(known.get("newest", -1))
            )
        return _LastOffer()

    @property
    def waits(self) -> bool:
        """True if a release was handed over that `slots.py` has not handled yet."""
        return any(self.incoming.glob("*.hfr"))

    def say_healthy(self, version: str) -> None:
        """Reports health once; `slots.py` needs repeated reports. Raises `StoreFull`."""
        write_whole(self._state_dir / HEALTHY, version.encode(), durable=False)

    def standing(self) -> ReleaseStanding:
        waits = self.waits  # read first: `slots.py` writes its state before it deletes a handled release
        state, last = self.state(), self._last_offer()
        if state is None:
            return ReleaseStanding("none")
        slot: SlotState = "trial" if state.trial and state.starts else "good"
        if slot == "good" and last.version not in ("", state.good, state.trial) and not waits:
            slot = "returned"
        return ReleaseStanding(slot, last.version, max(0, last.attempt))
