"""Tests that a card's release runs on its board, before the installation takes the token and reports success.

It uses only the standard library, like `slots.py`. The release's own self-test runs in another process, as the user
of the client: it imports what the client imports, and computes one gradient.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

LONGEST_S = 900
"""Limit of the self-test in seconds: a Raspberry Pi Zero first reads 100 MB of libraries from its card."""
_CODE = """\
import sys, tempfile
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import hushfleet
assert Path(hushfleet.__file__).is_relative_to(sys.argv[1]), "the release has no client"
from hushfleet.edge_client.fleet.release_check import check_release
with tempfile.TemporaryDirectory() as folder:
    check_release(Path(folder), Path(folder, "store.sqlite"), device="first")
"""


class ProofFailed(Exception):
    """The release does not run on this board."""


def prove(release: Path, *, state_dir: Path, is_new: bool) -> None:
    """Runs the self-test. Raises `ProofFailed` if it fails; a release that is new here is then removed.

    :param state_dir: belongs to the client's user.
    """
    reason = _run(release, state_dir.stat())
    if reason and is_new:
        shutil.rmtree(release, ignore_errors=True)
        raise ProofFailed(f"release {release.name} does not run on this system: {reason}")
    if reason:
        raise ProofFailed(
            f"release {release.name}, which was installed before, does not run on this system: {reason}. To install "
            f"another: sudo rm -r {release.parent.parent}, then once more"
        )


def _run(release: Path, owner: os.stat_result) -> str:
    """Runs the self-test. Returns the error; empty if there is none."""
    command = [sys.executable, "-I", "-c", _CODE, str(release)]
    user = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []} if os.geteuid() == 0 else {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            cwd="/",
            timeout=LONGEST_S,
            **user,  # type: ignore[call-overload]
        )
    except subprocess.TimeoutExpired:
        return f"its self-test took longer than {LONGEST_S // 60} minutes"
    if done.returncode < 0:
        return f"its self-test was ended by {signal.Signals(-done.returncode).name}"
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return (said[-1] if said else "its self-test failed without a word") if done.returncode else ""
