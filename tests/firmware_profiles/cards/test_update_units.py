"""The units that install a release, run by a real systemd."""

from __future__ import annotations

import contextlib
import re
import sys
from importlib import resources
from pathlib import Path

import pytest

from hushfleet.edge_client.fleet.slots import Slots
from hushfleet.firmware_profiles.cards.seed import slots_archive
from hushfleet.wire.format.identity import Identity
from support.own_systemd import OwnSystemd
from support.releases import put_trust
from support.slots import packed

UNITS = Path(str(resources.files("hushfleet.firmware_profiles.cards") / "kit" / "units"))
BROKEN = "#!/bin/sh\nexit 1\n"
WORKS = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
# What a service may not do is left out: systemd for a user cannot bring it about here, and it would hide these files.
KEPT = re.compile(r"\[|Type=|ExecStart=|Path|Condition|Wants=|StartLimit")


def unit(name: str, opt: Path, state: Path) -> str:
    text = (UNITS / name).read_text().replace("/opt/hushfleet", str(opt)).replace("/var/lib/hushfleet", str(state))
    text = re.sub(r"(slots\.pyz \w+)", rf"\1 --root {opt} --state {state}", text)
    return "".join(line for line in text.splitlines(keepends=True) if KEPT.match(line))


@pytest.mark.slow
@pytest.mark.needs("systemd")
def test_after_installations_that_failed_at_once_releases_are_installed_again(tmp_path: Path) -> None:
    """Five starts within ten seconds, and systemd lets the path unit fail: nothing would look for releases any more."""
    opt, state, key = tmp_path / "opt", tmp_path / "state", Identity.generate()
    for version in ("1.0", "2.0"):
        (tmp_path / f"{version}.hfr").write_bytes(packed(version, key))
    Slots(opt, state).first(tmp_path / "1.0.hfr")
    (opt / "slots.pyz").write_bytes(slots_archive())
    put_trust(opt, key.public_key.hex())
    (opt / "python").write_text(BROKEN)  # fails at once, as where the disk is full and slots.json cannot be written
    (opt / "python").chmod(0o755)
    names = ("hushfleet-update.path", "hushfleet-update.service", "hushfleet-check.service")
    units = {name: unit(name, opt, state) for name in names}
    (state / "incoming").mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        try:
            systemd = stack.enter_context(OwnSystemd(tmp_path / "systemd", units))
        except OSError as error:
            pytest.skip(f"no systemd of one's own here: {error}")
        systemd("start", "hushfleet-update.path")
        (tmp_path / "2.0.hfr").rename(state / "incoming" / "2.0.hfr")
        systemd.until(lambda: systemd.shown("hushfleet-update.path", "Result") == "unit-start-limit-hit")
        (opt / "python").write_text(WORKS)

        def installed() -> bool:
            systemd("start", "hushfleet-check.service", check=False)  # the timer does so once a minute
            return Slots(opt, state).read().trial == "2.0"

        systemd.until(installed, within_s=60.0, every_s=1.0)
