"""Renews the files outside of every release, `slots.pyz` and the units, from a release that root has signed.

This happens once, when the release has passed its trial. `slots.pyz` is replaced first, so it must also work with the
units of the former release: after a power cut at any moment, there is one complete `slots.pyz`, and the board's next
check continues. The former files stay in ROOT/before. This file uses only the standard library, like `slots.py`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hushfleet.atomic_file import read_object, write_whole

FOLDER = "system"
"""Folder in a release that contains `slots.pyz` and the folder `units`."""
NOTE = "system.json"
"""File in ROOT: the release whose files were handled last, and the reason if they were refused."""
_REHEARSAL_S = 120.0
_REHEARSED = ("show", "begin", "check")


def is_due(root: Path, version: str) -> bool:
    """Returns whether the good release `version` contains such files that were not handled yet."""
    manifest = read_object(root / "releases" / version / "release.json")
    return manifest.get("system") is True and note(root).get("release") != version


def note(root: Path) -> dict[str, str]:
    """Reads what was done last: `release`, and `refused`, which is empty after a renewal. Empty if nothing was done."""
    return read_object(root / NOTE)


def renew(root: Path, version: str, *, units: Path) -> bool:
    """Puts the files of the release in their places. Returns whether any has changed: systemd must then reload.

    If the new files do not run, the board keeps the files that it has, and the note gives the reason.
    Raises `StoreFull` or `OSError`; the next check then tries again.
    """
    source = root / "releases" / version / FOLDER
    wanted = {root / "slots.pyz": source / "slots.pyz"}
    wanted |= {units / each.name: each for each in sorted((source / "units").glob("hushfleet-*"))}
    changed = {
        place: new for place, new in wanted.items() if not place.is_file() or place.read_bytes() != new.read_bytes()
    }
    refused = _rehearsed(root, source) if changed else ""
    if not refused:
        for place, new in changed.items():
            _put(place, new.read_bytes(), kept=root / "before")
    write_whole(root / NOTE, json.dumps({"release": version, "refused": refused}).encode(), durable=True)
    return bool(changed) and not refused


def _rehearsed(root: Path, source: Path) -> str:
    """Tests the new `slots.pyz` on a copy of this board's state, and the units. Returns an error, or an empty text."""
    for left in root.glob(".rehearsal-*"):  # left by a power cut
        shutil.rmtree(left, ignore_errors=True)
    try:
        state = json.loads((root / "slots.json").read_text("utf-8"))
        with tempfile.TemporaryDirectory(dir=root, prefix=".rehearsal-") as name:
            stage = Path(name)
            for each in ("good", "previous", "trial"):
                if state.get(each):
                    (stage / "releases" / state[each]).mkdir(parents=True, exist_ok=True)
            (stage / "state").mkdir()
            shutil.copyfile(root / "slots.json", stage / "slots.json")
            for command in _REHEARSED:
                words = [sys.executable, "-I", str(source / "slots.pyz"), command, "--root", name]
                done = subprocess.run([*words, "--state", f"{name}/state"], capture_output=True, timeout=_REHEARSAL_S)
                if done.returncode != 0:
                    said = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it says nothing"]
                    return f"the new slots.pyz fails at `{command}`: {said[-1][:300]}"
                if json.loads(done.stdout)["good"] != state["good"]:
                    return f"the new slots.pyz says at `{command}` that another release is good"
            if (stage / "current").readlink().name not in (state["good"], state.get("trial")):
                return "the new slots.pyz would start neither the good release nor the one that is to be tried"
    except (OSError, ValueError, LookupError, TypeError, AttributeError, subprocess.SubprocessError) as error:
        return f"the new slots.pyz cannot be tried: {error}"[:400]
    files = [str(each) for each in sorted((source / "units").glob("hushfleet-*"))]
    if not files or shutil.which("systemd-analyze") is None:
        return ""  # systemd cannot be asked
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *files], capture_output=True, timeout=_REHEARSAL_S)
    said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [""]
    return f"systemd refuses a new unit: {said[-1][:300]}" if done.returncode != 0 else ""


def _put(place: Path, data: bytes, *, kept: Path) -> None:
    """Replaces a file whole or not at all, after keeping a copy of the former one."""
    if place.exists():
        write_whole(kept / place.name, place.read_bytes(), durable=True)
    write_whole(place, data, durable=True, mode=0o755 if place.suffix == ".pyz" else 0o644)
