"""Reads which release a board runs: slots.json, and whether a release fits. Root and the client use it (`slots.py`).

It uses only the standard library, and is in `slots.pyz`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from hushfleet.atomic_file import read_object
from hushfleet.release.manifest import highest, is_version, version_order

if TYPE_CHECKING:
    from hushfleet.release.manifest import Manifest

_PERMANENT = ("floor", "withdrawn", "downgrade_serial")
"""The fields of `State` that stay, whatever becomes of single releases."""


@dataclass(frozen=True)
class State:
    """The content of slots.json.

    :param good: the release that has passed its trial.
    :param previous: the good release before it; None if there was none, if it cannot read the store any more, or if the
        good release is a downgrade from it.
    :param trial: the release to run from the next start on; None if nothing is on trial.
    :param starts: the number of starts of the trial.
    :param checks: the number of its checks.
    :param steady: how many of the last checks in a row found it healthy.
    :param seen: when STATE/healthy was last written, as the last check found it; nanoseconds.
    :param installs: how often the installation of the file in STATE/incoming was begun.
    :param floor: the highest version that was ever good.
    :param withdrawn: the highest version that a release which was good here names as one that it takes the place of;
        empty: none.
    :param downgrade_serial: the highest serial of a release that was put on trial.
    :param last: the release that was on trial last.
    :param outcome: the result of its trial, `good` or `returned`; `refused` if the last installation led to no trial.
    :param reason: the reason for the outcome, in words.
    """

    good: str
    previous: str | None = None
    trial: str | None = None
    starts: int = 0
    checks: int = 0
    steady: int = 0
    seen: int = 0
    installs: int = 0
    floor: str = ""
    withdrawn: str = ""
    downgrade_serial: int = 0
    last: str = ""
    outcome: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        before = self.previous or ""
        object.__setattr__(self, "floor", highest([self.floor, self.good, before]))
        if version_order(before) > version_order(
            self.good
        ):  # an earlier version kept the release that it went back from
            object.__setattr__(self, "withdrawn", highest([self.withdrawn, self.floor]))
            object.__setattr__(self, "previous", None)

    @property
    def runs(self) -> str:
        """The release for `current`: the one on trial after its first start was counted, else the good one."""
        return self.trial if self.trial and self.starts else self.good

    def ended(self, outcome: str, reason: str) -> State:
        """Ends the trial; the good release stays."""
        return self._next(self.good, self.previous, last=self.trial or "", outcome=outcome, reason=reason)

    def proved(self, *, previous: str | None) -> State:
        """Makes the release on trial the good one."""
        assert self.trial is not None
        return self._next(self.trial, previous, last=self.trial, outcome="good")

    def before(self, previous: str, *, reason: str) -> State:
        """Goes back to the previous release."""
        return self._next(previous, last=self.good, outcome="returned", reason=reason)

    def with_trial(self, manifest: Manifest) -> State:
        serial = max(self.downgrade_serial, manifest.downgrade_serial)
        return replace(self._next(self.good, self.previous, manifest.version), downgrade_serial=serial)

    def _next(self, good: str, previous: str | None = None, trial: str | None = None, **outcome: Any) -> State:
        return State(good, previous, trial, **{name: getattr(self, name) for name in _PERMANENT}, **outcome)


class SlotsError(Exception):
    """A problem that a person must solve."""


class ReleaseFolder:
    """The releases of a board.

    :param root: /opt/hushfleet, owned by root.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.releases, self.current = root, root / "releases", root / "current"
        self._file = root / "slots.json"

    def read(self) -> State:
        """Reads slots.json. If it is missing or damaged, the release that `current` points to counts as good.

        Raises `SlotsError`.
        """
        return self._with_withdrawn(self._read())

    def _read(self) -> State:
        known = self._read_fields()
        if "good" in known:
            state = State(**known)
            if self._is_there(state.good):
                return state
            if self._is_there(state.previous):
                return state.before(state.previous, reason="its files are gone")
        with contextlib.suppress(OSError):
            linked = self.current.readlink().name
            if self._is_there(linked):
                return State(linked, **self._kept())
        found = [each for each in self.releases.glob("*") if self._is_there(each.name)]
        if not found:
            raise SlotsError(f"there is no release in {self.releases}; install one")
        return State(max(found, key=lambda each: each.stat().st_mtime).name, **self._kept())

    def _read_fields(self) -> dict[str, Any]:
        """Reads the fields of slots.json that have the right type; others count as missing."""
        content = read_object(self._file)
        return {name: value for name, value in content.items() if name in _IS_VALID and _IS_VALID[name](value)}

    def _kept(self) -> dict[str, Any]:
        """Returns the fields that stay valid if the releases that slots.json names are gone."""
        return {name: value for name, value in self._read_fields().items() if name in _PERMANENT}

    def _is_there(self, version: str | None) -> TypeGuard[str]:
        return is_version(version) and (self.releases / version).is_dir()

    def store_of(self, version: str | None) -> int | None:
        """Returns the version of the device's store after a release has used it; None if it is not known."""
        store = self._manifest(version).get("store")
        return store if _is_count(store) else None

    def _manifest(self, version: str | None) -> dict[str, Any]:
        """Returns the manifest of an installed release, not checked; empty if it cannot be read."""
        return read_object(self.releases / f"{version}" / "release.json")

    def _downgrade_from(self, version: str | None) -> list[str]:
        """Returns the versions from which an installed release is signed as a downgrade."""
        named = self._manifest(version).get("downgrade_from")
        return [each for each in named if is_version(each)] if isinstance(named, list) else []

    def _with_withdrawn(self, state: State) -> State:
        """Adds the versions that the good release has withdrawn; earlier versions did not write them to slots.json."""
        return replace(state, withdrawn=highest([state.withdrawn, *self._downgrade_from(state.good)]))


def check_fits(manifest: Manifest, state: State, *, store: int | None) -> None:
    """Raises `SlotsError` if a board in this state must not change to this release.

    :param store: the version of the board's store; None if it is not known.
    """
    good, order = state.good, version_order(manifest.version)
    if order == version_order(good):
        raise SlotsError(f"release {manifest.version} is installed already, as {good}")
    barred = ""
    if order < version_order(state.floor):
        barred = f"release {manifest.version} is older than {state.floor}, which was good on this board, and"
    elif order <= version_order(state.withdrawn):
        barred = f"release {manifest.version} is not newer than {state.withdrawn}, which was withdrawn, and"
    if barred and not manifest.is_downgrade_from(good):
        raise SlotsError(f"{barred} is not signed as a downgrade from {good}")
    if barred and manifest.downgrade_serial < state.downgrade_serial:
        raise SlotsError(
            f"{barred} its signature as a downgrade ({manifest.downgrade_serial}) is older than the last downgrade of "
            f"this board ({state.downgrade_serial}); sign it again"
        )
    if store is not None and not manifest.oldest_store <= store <= manifest.store:
        raise SlotsError(
            f"release {manifest.version} takes stores of version {manifest.oldest_store} to {manifest.store}; this "
            f"board's has version {store}"
        )


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0  # isinstance takes JSON's true for an int


_IS_VALID: dict[str, Callable[[object], bool]] = {  # the fields of slots.json
    "good": is_version,
    **dict.fromkeys(("floor", "withdrawn"), is_version),
    **dict.fromkeys(("previous", "trial"), lambda value: value is None or is_version(value)),
    **dict.fromkeys(("starts", "checks", "steady", "seen", "installs", "downgrade_serial"), _is_count),
    **dict.fromkeys(("last", "outcome", "reason"), lambda value: isinstance(value, str)),
}
