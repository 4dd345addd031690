"""A card's software on aarch64, without a kernel of its own: installed, enrolled, trained, updated, locked out.

`make test-arm`; ten to twenty-five minutes on two cores beside other work, half of it unpacking one release. Needs
root, Linux 6.7 or newer, qemu-user-static, mmdebstrap, mtools and Mosquitto. systemd does not run there:
`support.systemd` does what the units say.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from arm.board import NAMESPACE, ArmBoard
from arm.fleet import FIRST, ArmFleet, hushfleet, wait_for
from support.stock import make_image, needs_mtools

GOOD, BAD = "0.3.1", "0.3.2"
PATIENCE_S = 3600.0  # on a busy machine


def missing() -> str | None:
    """What this machine lacks, in words."""
    for program in ("qemu-aarch64-static", "mmdebstrap", "setpriv"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    done = subprocess.run([sys.executable, NAMESPACE, "/bin/true"], capture_output=True, text=True)
    return f"aarch64 programs cannot be run: {done.stderr.strip()}" if done.returncode else None


pytestmark = [needs_mtools, pytest.mark.skipif((WHY := missing()) is not None, reason=WHY or "")]


def crashes(folder: Path) -> None:
    (folder / "__main__.py").write_text("raise SystemExit('this release crashes')\n")


def test_a_card_on_aarch64(tmp_path: Path) -> None:
    fleet = ArmFleet(tmp_path)
    fleet.release("0.3.0")
    stock, cards = make_image(tmp_path / "stock.img", mib=64), tmp_path / "cards"
    print(hushfleet("flash", "--fleet", fleet.folder.path, "--device", FIRST, "--image", stock, "--out", cards,
                    "--images", fleet.images(), "--python", "3.13"))  # fmt: skip
    home = tmp_path / "arm"
    home.mkdir()
    board = ArmBoard(home, cards / f"{FIRST}.img")
    print(board.install_card())
    assert "is installed" in (board.root / "boot/firmware/hushfleet/install.log").read_text()
    token = board.state_dir / "enrol.token"
    assert token.stat().st_mode & 0o777 == 0o600
    with fleet.up(), board:
        wait_for("it has enrolled", lambda: fleet.seen()["standing"] == "enrolled", within_s=PATIENCE_S)
        assert not token.exists()
        wait_for("three rounds with two native boards", lambda: fleet.rounds() == 3, within_s=PATIENCE_S)
        assert fleet.seen()["rounds"] == 3
        roll_out(fleet, GOOD)
        wait_for(f"release {GOOD} has come", lambda: fleet.seen()["version"] == GOOD, within_s=PATIENCE_S)
        wait_for("and has proved itself", lambda: board.slots("show").good == GOOD, within_s=PATIENCE_S)
        fleet.release(BAD, crashes)
        print(hushfleet("release", "rollout", fleet.folder.path, "--to", BAD))
        wait_for("a release that crashes is taken back", lambda: board.slots("show").outcome == "returned",
                 within_s=PATIENCE_S)  # fmt: skip
        assert "this release crashes" in board.log
        wait_for("and the fleet knows", lambda: "stopped" in hushfleet("release", "rollout", fleet.folder.path),
                 within_s=PATIENCE_S)  # fmt: skip
        assert fleet.seen()["version"] == GOOD
        hushfleet("fleet", "block", fleet.folder.path, FIRST)
        wait_for("it is locked out", lambda: fleet.seen()["state"] != "present", within_s=PATIENCE_S)
    assert fleet.seen()["standing"] == "blocked"


def roll_out(fleet: ArmFleet, version: str) -> None:
    fleet.release(version)
    print(hushfleet("release", "rollout", fleet.folder.path, "--to", version))
