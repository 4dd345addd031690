"""An emulated aarch64 board without a kernel of its own: its root, its card's `install.sh`, and what its units do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from arm.roots import board_root
from support.stock import read_back
from support.systemd import EmulatedBoard

NAMESPACE = Path(__file__).with_name("namespace.py")


class ArmBoard(EmulatedBoard):
    """:param home: for its root and its logs; :param card: the image file whose boot partition it has."""

    def __init__(self, home: Path, card: Path) -> None:
        # An emulated start takes minutes where the machine is busy: as long as the unit allows.
        super().__init__(home, check_s=30.0, watchdog_s=600.0, memory_mib=1 << 20)
        self.root = home / "root"
        subprocess.run(["cp", "-a", board_root(), self.root], check=True)  # device files, too
        boot = self.root / "boot/firmware"
        for name, data in read_back(card, home / "boot").items():
            (boot / name).parent.mkdir(parents=True, exist_ok=True)
            (boot / name).write_bytes(data)
        shim = self.root / "usr/bin/systemctl"  # systemd is not in this root
        shim.write_text('#!/bin/sh\necho "$*" >> /run/systemctl.log\n')
        shim.chmod(0o755)

    @property
    def opt(self) -> Path:
        return self.root / "opt/hushfleet"

    @property
    def state_dir(self) -> Path:
        return self.root / "var/lib/hushfleet"

    @property
    def run_dir(self) -> Path:
        return self.root / "run"

    def inside(self, *command: str) -> list[str]:
        return [sys.executable, str(NAMESPACE), "--root", str(self.root), *command]

    def install_card(self) -> str:
        """As cloud-init would; what it said."""
        done = subprocess.run(self.inside("/bin/sh", "/boot/firmware/hushfleet/install.sh"), capture_output=True)
        assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
        return done.stdout.decode()

    def slots_command(self, *arguments: str) -> list[str]:
        return self.inside("/opt/hushfleet/python", "-I", "/opt/hushfleet/slots.pyz", *arguments)

    def client_command(self) -> list[str]:
        client = ("/opt/hushfleet/python", "-I", "/opt/hushfleet/current", "/etc/hushfleet/device.toml")
        # Another user's process would outlive `namespace.py`, and train beside the next start.
        user = ("setpriv", "--pdeathsig=KILL", "--reuid=hushfleet", "--regid=hushfleet", "--init-groups")
        return self.inside(*user, "--no-new-privs", *client)

    def environment(self, **given: str) -> dict[str, str]:
        """`namespace.py` hands on what begins with BOARD_."""
        inside = {f"BOARD_{name}": text.removeprefix(str(self.root)) for name, text in given.items()}
        return {**super().environment(), "BOARD_HOME": "/var/lib/hushfleet", **inside}
