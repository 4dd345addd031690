"""The releases of a board, as its client sees them: what is installed, what fits, and the state of the last offer."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from hushfleet.atomic_file import write_whole
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.fleet.client_files import read_inside
from hushfleet.edge_client.fleet.slots import Slots, SlotsError, State, check_fits
from hushfleet.edge_client.storage.store_file import SCHEMA_VERSION
from hushfleet.errors import BadInput, StoreFull, WireError
from hushfleet.release import Manifest, SignedManifest, Trust, this_platform
from hushfleet.release.statements import KEYS_FILE, TEXT_CAP
from hushfleet.wire.format.health import SlotState


@dataclass(frozen=True)
class ReleaseStanding:
    """The fields of `Health` about releases; see there."""

    slot: SlotState
    tried: str = ""
    attempt: int = 0


def standing_of(config: DeviceConfig) -> ReleaseStanding:
    return ReleaseStanding("none") if config.fleet is None else Installed.of(config).standing()


class Installed:
    """`STATE/update.json` says which offer was answered last, by a hand-over or a refusal, whether its release was good
    here later, and which offer was the newest.

    `STATE/release_keys` has what this client has heard of release keys, for `slots.py` to check and to take over.
    """

    def __init__(self, releases: Path, state_dir: Path) -> None:
        self._root, self._state_dir = releases, state_dir
        self._file = self._state_dir / "update.json"
        self.incoming = self._state_dir / "incoming"

    @classmethod
    def of(cls, config: DeviceConfig) -> Installed:
        assert config.fleet is not None
        return cls(Path(config.fleet.releases), Path(config.device.state_dir))

    def state(self) -> State | None:
        """Reads the state; None where no release is installed."""
        try:
            return Slots(self._root, self._state_dir).read()
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
        """Gives the keys whose releases are taken, also by a statement that `slots.py` takes over within the minute.

        Root calls this, too: it follows no link of the client. Raises `BadInput` where there is no public key of root.
        """
        trust = Trust.of_board(self._root)
        with contextlib.suppress(WireError):
            return trust.after(read_inside(self._state_dir, KEYS_FILE, TEXT_CAP)[0])
        return trust

    def hear_keys(self, text: str) -> Trust:
        """Takes statements about release keys that came from the broker. Returns the trust after them.

        Raises `BadInput`, a `WireError` where root has not signed one of them, and `StoreFull`.
        """
        before = self.trust()
        after = before.after(text)
        if after != before:
            write_whole(self._state_dir / KEYS_FILE, text.encode(), durable=True)
        return after

    def room_for(self, manifest: Manifest) -> None:
        """Raises `StoreFull` where the release, unpacked and with its caches, would not fit."""
        needed = manifest.payload_bytes + 2 * manifest.unpacked_bytes
        free = min(shutil.disk_usage(folder).free for folder in (self._root, self._state_dir))
        if free < needed:
            raise StoreFull(f"release {manifest.version} needs {needed >> 20} MiB, {free >> 20} MiB are free")

    def heard(self, attempt: int) -> None:
        """Notes that an offer is taken up; earlier ones are ignored from now on."""
        known = self._answer()
        if _whole_number(known.get("newest"), -1) < attempt:
            self._note({**known, "newest": attempt})

    def answered(self, version: str, attempt: int) -> None:
        """Notes that the offer, and all before it, are not taken again."""
        self._note({"version": version, "attempt": attempt, "newest": attempt})

    def note_good(self) -> None:
        """Notes that the release of the answered offer is good, so that one from a stick in its place is no return.

        Raises `StoreFull`.
        """
        known, state = self._answer(), self.state()
        if state is not None and known.get("version") == state.good and known.get("good") is not True:
            self._note({**known, "good": True})

    def was_answered(self, attempt: int) -> bool:
        """Whether the offer was answered. One that was withdrawn has a lower attempt than the newest."""
        known = self._answer()
        answered, newest = (_whole_number(known.get(name), -1) for name in ("attempt", "newest"))
        return attempt <= answered or attempt < newest

    def _note(self, answer: dict[str, object]) -> None:
        write_whole(self._file, json.dumps(answer).encode(), durable=True)

    @property
    def waits(self) -> bool:
        """Whether a release was handed over that `slots.py` has not dealt with yet."""
        return any(self.incoming.glob("*.hfr"))

    def say_healthy(self, version: str) -> None:
        """Reports health once; `slots.py` needs it again and again. Raises `StoreFull`."""
        write_whole(self._state_dir / "healthy", version.encode(), durable=False)

    def standing(self) -> ReleaseStanding:
        waits = self.waits  # looked at first: `slots.py` writes its state before it clears what it has dealt with
        state, known = self.state(), self._answer()
        if state is None:
            return ReleaseStanding("none")
        tried, attempt = str(known.get("version", "")), _whole_number(known.get("attempt"))
        if state.trial and state.starts:
            return ReleaseStanding("trial", tried, attempt)
        failed = bool(tried) and tried not in (state.good, state.trial) and not waits
        if known.get("good") is True and (state.last, state.outcome) != (tried, "returned"):
            failed = False  # it has proved itself, and a release from a stick has followed it
        return ReleaseStanding("returned" if failed else "good", tried, attempt)

    def _answer(self) -> dict[str, object]:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            known = json.loads(self._file.read_text())
            if isinstance(known, dict):
                return known
        return {}


def _whole_number(value: object, otherwise: int = 0) -> int:
    return value if isinstance(value, int) else otherwise
