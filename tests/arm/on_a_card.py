"""A card as it is: stock system, cloud-init, systemd, first start; then the power is cut in the middle of an update.

`make test-card`; a quarter of an hour or more on two cores. Needs root, Linux 6.7 or newer, qemu-system-arm,
qemu-user-static, mmdebstrap, arch-test, mtools and Mosquitto; the first run makes the card's system, ten minutes more.
"""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

from arm.card import Machine, stock_image
from arm.fleet import FIRST, ArmFleet, hushfleet, wait_for

NEXT = "0.3.1"
CUT_AFTER_S = 15.0
PATIENCE_S = 3600.0  # on a busy machine
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\r")


def test_a_card_becomes_a_board_and_an_update_survives_a_power_cut(tmp_path: Path) -> None:
    fleet = ArmFleet(tmp_path, host="10.0.2.2", devices=2)  # how a card reaches this machine
    fleet.release("0.3.0")
    stock, cards, console = stock_image(tmp_path / "stock.img"), tmp_path / "cards", tmp_path / "console.log"
    print(hushfleet("flash", "--fleet", fleet.folder.path, "--device", FIRST, "--image", stock, "--out", cards,
                    "--images", fleet.images()))  # fmt: skip
    image = cards / f"{FIRST}.img"
    for suffix in (".kernel", ".initrd"):
        shutil.copy(stock.with_suffix(suffix), image.with_suffix(suffix))
    stock.unlink()
    with fleet.up():
        with Machine(image, console) as machine:
            began = time.monotonic()

            def tell(what: str) -> None:
                print(f"{time.monotonic() - began:6.0f} s  {what}", flush=True)

            machine.wait_for("unpacking the release", timeout_s=PATIENCE_S)
            tell("cloud-init has started install.sh")
            tell(ESCAPES.sub("", machine.wait_for(r"Overall exposure level[^\n]*", timeout_s=PATIENCE_S)))
            machine.wait_for("release 0.3.0 is installed", timeout_s=PATIENCE_S)
            tell("release 0.3.0 is installed")
            wait_for("it has enrolled", lambda: fleet.seen()["standing"] == "enrolled", within_s=PATIENCE_S)
            wait_for("a round has ended", lambda: fleet.rounds() >= 1, within_s=PATIENCE_S)
            wait_for("all three have", lambda: fleet.rounds() >= 3, within_s=PATIENCE_S)
            before = fleet.seen()
            fleet.release(NEXT)
            print(hushfleet("release", "rollout", fleet.folder.path, "--to", NEXT))
            machine.wait_for(r"Starting .*hushfleet-update", timeout_s=PATIENCE_S)
            tell(f"release {NEXT} has come, and is being unpacked")
            time.sleep(CUT_AFTER_S)
            machine.cut_power()
            tell("the power is cut")
        with Machine(image, console) as machine:
            began = time.monotonic()
            machine.wait_for(r"Starting .*hushfleet-update", timeout_s=PATIENCE_S)
            tell("started again; the update is begun again")
            wait_for(f"it is seen with {NEXT}", lambda: fleet.seen()["version"] == NEXT, within_s=PATIENCE_S)
            wait_for("the release is good", lambda: fleet.seen()["slot"] == "good", within_s=PATIENCE_S)
            after = fleet.seen()
            tell(hushfleet("release", "rollout", fleet.folder.path).strip())
    assert after["spent"] == before["spent"]
    assert after["rounds"] == before["rounds"] == 3
