#!/usr/bin/env python3
"""Chooses the release that a board runs, and goes back to the former release if a new one is bad.

It is the file /opt/hushfleet/slots.pyz, outside of every release and together with `hushfleet.release`. The board's
units run it as root. It needs only the standard library of Python 3.10, so that a broken release cannot prevent going
back. Only to check a signature, it imports `cryptography` from the good release.

    /opt/hushfleet/releases/VERSION/    unpacked releases, each with its manifest as release.json
    /opt/hushfleet/current              symlink to the release that runs
    /opt/hushfleet/slots.json           decides which release is good and which one is on trial
    /opt/hushfleet/root_key             root's public key, 64 hex digits; root signs the statement of the release keys
    /opt/hushfleet/release_keys         the newest such statement; a newer one arrives in STATE/release_keys
    /opt/hushfleet/system.json          the release from which this file and the units were renewed last
    /opt/hushfleet/charged.txt          the board's charges by its boot partition (`ChargeLine`), as of the last start

slots.json is replaced as a whole, and synced. The symlink is set from it before every start. So after a kill or a power
cut at any moment, the board has either the old release or the new one. Starts of a release on trial are counted before
they happen, as U-Boot counts boots:

    begin    before each start of the client (ExecStartPre): counts it, and points `current` to the right release
    check    each minute (a timer): makes a release good if it was healthy for long enough, or ends a failed trial
    install  when the client has put a release into STATE/incoming (a path unit)
    first    called by `install.sh`: installs the release that came on the card
    back     called by hand: goes back to the release before the good one

A release on trial is healthy while the client writes its version into STATE/healthy repeatedly.

A board does not go back to a release with a security hole. Its floor is the highest version that was ever good here,
and nothing lowers it. A release that is signed as a downgrade names the versions that it takes the place of
(`downgrade_from`). When it is good, all versions up to the highest of them are withdrawn, whether they ever ran here or
not. A release that is below the floor or withdrawn is installed in one case only: its manifest names the release that
is good now, and its `downgrade_serial` is not below the highest one that was ever put on trial here. So a permission to
go back is valid from the named versions only, and ends when the board has used a newer permission. From there, a board
goes forward to releases above its floor that are not withdrawn.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hushfleet.atomic_file import sync_folder, write_whole
from hushfleet.edge_client.fleet import system_files
from hushfleet.edge_client.fleet.client_files import ChargeLine, clear_inside, only_release, read_inside, remove_inside
from hushfleet.edge_client.fleet.slot_state import ReleaseFolder, SlotsError, State, check_fits
from hushfleet.edge_client.storage.state_files import CHARGED, HEALTHY, INCOMING, RELEASE_KEYS
from hushfleet.output import say
from hushfleet.release.manifest import version_order

if TYPE_CHECKING:
    from hushfleet.release.manifest import Manifest

MOST_STARTS = 5
"""Largest number of starts of a release on trial. Some of them are used up on a board whose power fails often."""
MOST_CHECKS = 30
"""Largest number of checks (one a minute) of a trial. Checks are counted, because a board without a battery has no
correct clock."""
STEADY_CHECKS = 3
"""Number of consecutive checks that must find a release healthy, with no start in between."""
MOST_INSTALLS = 3
"""Largest number of attempts: an installation that kills the process each time must not be repeated forever."""
SERVICE = "hushfleet-client.service"
BOOT = (Path("/boot/firmware/hushfleet"), Path("/boot/hushfleet"))
"""The folder of a card on its boot partition; a board that was set up by `hushfleet push` has none."""


class Slots(ReleaseFolder):
    """The releases of a board, with what root does to them.

    :param state_dir: /var/lib/hushfleet, written by the client; nothing in it is trusted.
    :param boot: the card's folder on the boot partition; None if there is none.
    """

    def __init__(self, root: Path, state_dir: Path, boot: Path | None = None) -> None:
        super().__init__(root)
        self._state_dir, self._boot = state_dir, boot

    # the commands

    def begin(self) -> State:
        """Runs before each start of the client: counts it, and points `current` to the right release."""
        self._hand_over_charges()
        with self._locked():
            state = self.read()
            if state.trial and not self._is_there(state.trial):
                state = state.ended("returned", "its files are gone")
            elif state.trial and state.starts >= MOST_STARTS:
                state = state.ended("returned", f"it was started {state.starts} times and never stayed healthy")
            elif state.trial:
                state = replace(state, starts=state.starts + 1, steady=0)
            remove_inside(self._state_dir, HEALTHY)
            self._settle(state)
            return state

    def check(self) -> tuple[State, bool]:
        """Runs once a minute. Also returns whether the client must be restarted."""
        self._take_keys()
        self._keep_charges()
        with self._locked():
            state = self.read()
            if not state.trial or not state.starts:
                return state, False
            said, written = read_inside(self._state_dir, HEALTHY)
            alive = said == state.trial and written != state.seen
            state = replace(state, checks=state.checks + 1, steady=state.steady + 1 if alive else 0, seen=written)
            if state.steady >= STEADY_CHECKS:
                same_store = self.store_of(state.good) == self.store_of(state.trial)  # else the old one cannot read it
                is_left = version_order(state.good) in map(version_order, self._downgrade_from(state.trial))
                state = self._with_withdrawn(state.proved(previous=state.good if same_store and not is_left else None))
                self._settle(state)
                self._collect(state)
            elif state.checks >= MOST_CHECKS:
                state = state.ended("returned", f"it was not healthy within {state.checks} minutes")
                self._settle(state)
                return state, True
            else:
                self._write(state)
            return state, False

    def install(self) -> State:
        """Puts the release in STATE/incoming on trial from the next start on, or writes to slots.json why not."""
        with self._locked("install.lock"):
            self._take_keys()
            state = self._update(lambda state: replace(state, installs=state.installs + 1))
            incoming = self._state_dir / INCOMING
            try:
                if state.installs > MOST_INSTALLS:
                    raise SlotsError(f"its installation was begun {MOST_INSTALLS} times and never ended")
                self._collect(state)
                manifest = self._place(state, only_release(incoming))
                state = self._update(lambda state: self._with_trial(state, manifest))
            except Exception as error:  # whatever error an archive causes, the board keeps its releases
                reason = str(error)[:400] or type(error).__name__
                state = self._update(lambda state: replace(state, installs=0, outcome="refused", reason=reason))
                self._collect(state)
            clear_inside(incoming)
            return state

    def first(self, archive: Path) -> State:
        """Installs the release that came on the card. A good release that is already installed stays.

        Raises `HushfleetError`. Only the hash is checked: anyone who can change the release on the card can also change
        the key beside it.
        """
        from hushfleet.release.archive import place

        self.releases.mkdir(mode=0o755, parents=True, exist_ok=True)
        with self._locked():
            try:
                state = self.read()
            except SlotsError:
                state = self._with_withdrawn(State(place(archive, self.releases, trust=None).version, **self._kept()))
                self._replace("system.json", json.dumps({"release": state.good}))  # these files came on the card, too
            self._settle(state)
            return state

    def back(self) -> State:
        """Ends a running trial, or else goes back to the release before the good one. Raises `SlotsError` if none."""
        with self._locked():
            state = self.read()
            if state.trial and state.starts:
                state = state.ended("returned", "by hand")
            elif not self._is_there(state.previous):
                raise SlotsError(f"there is no release before {state.good} to go back to")
            else:
                state = state.before(state.previous, reason="by hand")
            self._settle(state)
            return state

    # helpers

    def _place(self, state: State, archive: Path) -> Manifest:
        with self._borrowing(state):
            from hushfleet.release.archive import place
            from hushfleet.release.statements import Trust

            return place(archive, self.releases, trust=Trust.of_board(self.root))

    def _take_keys(self) -> None:
        """Takes over a newer statement about release keys from the client's folder, if root has signed it."""
        text, _ = read_inside(self._state_dir, RELEASE_KEYS, 1 << 15)
        if not text:
            return
        try:
            with self._locked(), self._borrowing(self.read()):
                from hushfleet.release.statements import Trust

                known = Trust.of_board(self.root)
                if (newer := known.after(text)) != known:
                    self._replace("release_keys", f"{newer.line}\n")
        except Exception as error:  # whatever the client's file causes, the board keeps its statement
            say(f"error: {error}", error=True)

    def _keep_charges(self) -> None:
        """Copies the client's line about its charges to the boot partition, where a lower number replaces none."""
        here = ChargeLine.read(self._state_dir)
        if self._boot is None or here is None:
            return
        kept = ChargeLine.read(self._boot)
        if kept is None or kept.key != here.key or kept.rounds < here.rounds:
            try:
                write_whole(self._boot / CHARGED, here.text.encode(), durable=True)
            except Exception as error:  # a boot partition that is read only or full: the fleet still knows
                say(f"error: {error}", error=True)

    def _hand_over_charges(self) -> None:
        """Puts the boot partition's line where the client reads it; an empty file if the partition has lost it."""
        kept = None if self._boot is None else ChargeLine.read(self._boot)
        if self._boot is None or (kept is None and ChargeLine.read(self._state_dir) is None):
            return
        try:
            self._replace(CHARGED, "" if kept is None else kept.text)
        except Exception as error:  # the client starts without it
            say(f"error: {error}", error=True)

    @contextlib.contextmanager
    def _borrowing(self, state: State) -> Iterator[None]:
        """Lets Python import packages that `slots.pyz` lacks from the good release."""
        good = str(self.releases / state.good)
        sys.path.append(good)
        try:
            yield
        finally:
            sys.path.remove(good)

    def _with_trial(self, state: State, manifest: Manifest) -> State:
        """Puts the release on trial if it still fits: while it was unpacked, another trial may have begun."""
        if state.trial and state.starts:
            raise SlotsError(f"release {state.trial} is on trial; install another after the trial has ended")
        check_fits(manifest, state, store=self.store_of(state.good))
        return state.with_trial(manifest)

    def _update(self, change: Callable[[State], State]) -> State:
        with self._locked():
            state = change(self.read())
            self._write(state)
            return state

    def _settle(self, state: State) -> None:
        """Writes the state, then points `current` to the release that it names."""
        self._write(state)
        if not self.current.is_symlink() or self.current.readlink() != Path("releases", state.runs):
            fresh = self.root / ".current"
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(Path("releases", state.runs))
            os.replace(fresh, self.current)
            sync_folder(self.root)

    def _write(self, state: State) -> None:
        self._replace(self._file.name, json.dumps(asdict(state)))

    def _replace(self, name: str, text: str) -> None:
        """Replaces a file that root owns and the client reads."""
        write_whole(self.root / name, text.encode(), durable=True, mode=0o644)

    def _collect(self, state: State) -> None:
        """Deletes releases that the state does not name."""
        for each in self.releases.iterdir():
            if each.name not in (state.good, state.previous, state.trial):
                shutil.rmtree(each, ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self, name: str = "slots.lock") -> Iterator[None]:
        handle = os.open(self.root / f".{name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def main() -> int:
    parser = argparse.ArgumentParser(prog="slots.py", description="Choose and check the release that this board runs.")
    parser.add_argument("command", choices=("begin", "check", "install", "first", "back", "show"))
    parser.add_argument("archive", type=Path, nargs="?", metavar="FILE.hfr", help="release to install, with `first`")
    parser.add_argument("--root", type=Path, default=Path("/opt/hushfleet"))
    parser.add_argument("--state", type=Path, default=Path("/var/lib/hushfleet"))
    parser.add_argument("--units", type=Path, default=Path("/etc/systemd/system"))
    parser.add_argument("--boot", type=Path, default=next((each for each in BOOT if each.is_dir()), None))
    options = parser.parse_args()
    slots = Slots(options.root, options.state, options.boot)
    restart = False
    try:
        if options.command == "check":
            state, restart = slots.check()
        elif options.command in ("show", "first"):
            state = slots.read() if options.command == "show" else slots.first(options.archive)
        else:
            state = getattr(slots, options.command)()
            restart = options.command == "back"
    except Exception as error:
        say(f"error: {error}", error=True)
        return getattr(error, "exit_code", 1)
    if restart:
        subprocess.run(["systemctl", "restart", "--no-block", SERVICE], check=False)
    elif options.command == "check" and system_files.is_due(slots.root, state.good):
        try:
            if system_files.renew(slots.root, state.good, units=options.units):
                subprocess.run(["systemctl", "daemon-reload"], check=False)
        except Exception as error:  # the next check tries it again
            say(f"error: {error}", error=True)
    say(json.dumps(asdict(state)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
