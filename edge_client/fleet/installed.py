"""The releases of a board, as its client sees them: what is installed, what it would take, what became of an offer."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from hushfleet.atomic_file import write_whole
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.fleet.slots import Slots, SlotsError, State, check_fits
from hushfleet.edge_client.storage.store_file import SCHEMA_VERSION
from hushfleet.errors import BadInput, StoreFull, WireError
from hushfleet.release import Manifest, SignedManifest, Trust, this_platform
from hushfleet.release.statements import KEYS_FILE
from hushfleet.wire.format.health import SlotState


@dataclass(frozen=True)
class Standing:
    """What a board says of its releases in `Health`; see there."""

    slot: SlotState
    tried: str = ""
    attempt: int = 0


def standing_of(config: DeviceConfig) -> Standing:
    return Standing("none") if config.fleet is None else Installed.of(config).standing()


class Installed:
    """`STATE/update.json` says which offer was answered last, by a hand-over or a refusal, and which was the newest.

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
        """None where no release is installed, as `install.sh` does it: then there is nothing to change."""
        try:
            return Slots(self._root, self._state_dir).read()
        except (SlotsError, OSError):
            return None

    def judge(self, head: bytes) -> Manifest:
        """Of a release that this board could install. Raises `WireError`, `BadInput` or `SlotsError`: why not."""
        state = self.state()
        if state is None:
            raise BadInput(f"this board takes no releases: there is none in {self._root}")
        manifest = self.trust().verify(SignedManifest.from_bytes(head))
        manifest.require_platform(*this_platform())
        check_fits(manifest, state, store=int(SCHEMA_VERSION))
        return manifest

    def trust(self) -> Trust:
        """Whose releases are taken: also by a statement that `slots.py` takes over within the minute.

        Raises `BadInput` where there is no public key of root.
        """
        trust = Trust.of_board(self._root)
        with contextlib.suppress(OSError, ValueError, WireError):
            return trust.after((self._state_dir / KEYS_FILE).read_text("utf-8"))
        return trust

    def hear_keys(self, text: str) -> Trust:
        """Statements about release keys that came over the air, and what holds after them.

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
        """An offer is taken up; whoever sends an earlier one again is not listened to."""
        known = self._answer()
        if _whole_number(known.get("newest"), -1) < attempt:
            self._note({**known, "newest": attempt})

    def answered(self, version: str, attempt: int) -> None:
        """The offer is not to be taken again, nor is one that was made before it."""
        self._note({"version": version, "attempt": attempt, "newest": attempt})

    def was_answered(self, attempt: int) -> bool:
        """An offer that its operator has withdrawn, and somebody has kept, has a lower attempt than the newest."""
        known = self._answer()
        answered, newest = (_whole_number(known.get(name), -1) for name in ("attempt", "newest"))
        return attempt <= answered or attempt < newest

    def _note(self, answer: dict[str, object]) -> None:
        write_whole(self._file, json.dumps(answer).encode(), durable=True)

    @property
    def waits(self) -> bool:
        """A release was handed over, and `slots.py` has not dealt with it yet."""
        return any(self.incoming.glob("*.hfr"))

    def say_healthy(self, version: str) -> None:
        """Once; `slots.py` wants to hear it again and again. Raises `StoreFull`."""
        write_whole(self._state_dir / "healthy", version.encode(), durable=False)

    def standing(self) -> Standing:
        waits = self.waits  # looked at first: `slots.py` writes its state before it clears what it has dealt with
        state, known = self.state(), self._answer()
        if state is None:
            return Standing("none")
        tried, attempt = str(known.get("version", "")), _whole_number(known.get("attempt"))
        if state.trial and state.starts:
            return Standing("trial", tried, attempt)
        failed = bool(tried) and tried not in (state.good, state.trial) and not waits
        return Standing("returned" if failed else "good", tried, attempt)

    def _answer(self) -> dict[str, object]:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            known = json.loads(self._file.read_text())
            if isinstance(known, dict):
                return known
        return {}


def _whole_number(value: object, otherwise: int = 0) -> int:
    return value if isinstance(value, int) else otherwise
