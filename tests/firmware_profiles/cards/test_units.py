"""The units of a board: hardened, and what they start is what install.sh puts there."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

UNITS = Path(str(resources.files("hushfleet.firmware_profiles.cards") / "kit" / "units"))


@pytest.mark.needs("systemd")
@pytest.mark.parametrize(("unit", "most"), [("hushfleet-client.service", 1.5), ("hushfleet-update.service", 2.0)])
def test_exposure(unit: str, most: float) -> None:
    """Out of 10; a service without any limits has 9.6."""
    command = ["systemd-analyze", "security", "--offline=yes", str(UNITS / unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    score = re.search(r"exposure level for \S+: ([\d.]+)", done.stdout)
    if score is None:
        pytest.skip(f"this systemd cannot score a file: {done.stderr}")
    assert float(score[1]) <= most


def test_what_units_start_is_what_is_installed() -> None:
    installed = (UNITS.parent / "install.sh").read_text()
    for unit in UNITS.glob("*.service"):
        for path in re.findall(r"/opt/hushfleet/(\S+)", "".join(re.findall(r"^Exec.*$", unit.read_text(), re.M))):
            assert f"$opt/{path}" in installed or path == "current", (unit.name, path)
    client = (UNITS / "hushfleet-client.service").read_text()
    for line in ("Type=notify", "Restart=always", "RestartPreventExitStatus=2", "MemoryMax=", "WatchdogSec="):
        assert f"\n{line}" in client


@pytest.mark.parametrize("script", ["install.sh", "first-boot.sh", "hushfleet-edge.sh"])
def test_scripts_are_plain_sh(script: str) -> None:
    shell = shutil.which("dash") or "sh"
    subprocess.run([shell, "-n", str(UNITS.parent / script)], check=True)
