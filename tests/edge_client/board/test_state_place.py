"""A state directory that is forgotten without power: which mounts are, and what a client does there."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hushfleet.edge_client.__main__ import main
from hushfleet.edge_client.board import state_place
from hushfleet.edge_client.board.config import DeviceConfig, FleetSection, load_config
from hushfleet.edge_client.board.state_place import Mount, check_place, mount_of, volatile_place
from hushfleet.edge_client.fleet.health import BoardHealth
from hushfleet.errors import BadInput
from hushfleet.wire.format.health import alarms
from hushfleet.wire.format.identity import Identity

STATE = "/var/lib/hushfleet"
RASPI_OVERLAY = """\
22 28 0:20 / /sys rw,nosuid,nodev,noexec,relatime shared:7 - sysfs sysfs rw
28 1 0:27 / / rw,noatime shared:1 - overlay overlayroot rw,lowerdir=/media/root-ro,upperdir=/media/root-rw/overlay
29 28 179:2 / /media/root-ro ro,relatime shared:2 - ext4 /dev/mmcblk0p2 ro
30 28 0:26 / /media/root-rw rw,relatime shared:3 - tmpfs tmpfs-root rw,size=100%
41 28 179:1 / /boot/firmware ro,relatime shared:25 - vfat /dev/mmcblk0p1 ro,fmask=0022,dmask=0022
"""
RASPI = """\
28 1 179:2 / / rw,noatime shared:1 - ext4 /dev/mmcblk0p2 rw
35 28 0:31 / /run rw,nosuid,nodev shared:5 - tmpfs tmpfs rw,size=377600k
41 28 179:1 / /boot/firmware rw,relatime shared:25 - vfat /dev/mmcblk0p1 rw,fmask=0022
"""
OF_ITS_OWN = RASPI_OVERLAY + "55 28 179:3 / /var/lib/hushfleet rw,relatime shared:40 - ext4 /dev/mmcblk0p3 rw\n"
IN_MEMORY = RASPI + "56 28 0:44 / /var/lib rw,relatime - tmpfs tmpfs rw\n"
BOUND = IN_MEMORY + "57 56 179:2 /srv/state /var/lib/hushfleet rw,relatime - ext4 /dev/mmcblk0p2 rw\n"
STACKED = OF_ITS_OWN + "58 55 0:45 / /var/lib/hushfleet rw,relatime - ramfs ramfs rw\n"
SIMILAR = (
    RASPI + "59 28 0:46 / /var/lib/hush rw - tmpfs tmpfs rw\n60 28 0:47 / /var/lib/hushfleet2 rw - tmpfs tmpfs rw\n"
)
DOCKER = """\
641 502 0:85 / / rw,relatime master:233 - overlay overlay rw,lowerdir=/docker/l/AB,upperdir=/docker/9c/diff
642 641 0:88 / /proc rw,nosuid - proc proc rw
"""


@pytest.mark.parametrize(
    ("mountinfo", "kind", "refused"),
    [
        (RASPI_OVERLAY, "overlay", True),
        (RASPI_OVERLAY.replace("overlay overlayroot", "overlayfs overlayroot"), "overlayfs", True),
        (DOCKER, "overlay", True),
        (IN_MEMORY, "tmpfs", True),
        (STACKED, "ramfs", True),
        (RASPI, "ext4", False),
        (OF_ITS_OWN, "ext4", False),
        (BOUND, "ext4", False),
        (SIMILAR, "ext4", False),
    ],
    ids=["raspi-config", "older", "docker", "tmpfs", "stacked", "card", "own partition", "bind", "similar names"],
)
def test_the_mount_decides(tmp_path: Path, config: DeviceConfig, mountinfo: str, kind: str, refused: bool) -> None:
    found = mount_of(STATE, mountinfo)
    assert found is not None
    assert found.kind == kind
    put(tmp_path, mountinfo)
    config = replace(config, device=replace(config.device, state_dir=STATE), simulation=None)
    assert volatile_place(config, root=tmp_path).refused is refused


def put(root: Path, mountinfo: str) -> None:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/1").mkdir(exist_ok=True)
    (root / "proc/self/mountinfo").write_text(mountinfo)


def test_names_with_spaces_are_read_as_they_are_written() -> None:
    line = r"61 28 8:1 / /media/my\040card\134s rw,relatime - vfat /dev/sda1 rw"
    assert mount_of("/media/my card\\s/state", line) == Mount("/media/my card\\s", "vfat")
    assert mount_of("/media/my card", line) is None
    assert mount_of("/", "damaged") is None


@pytest.mark.parametrize("mark", [".dockerenv", "run/.containerenv", "proc/1/environ"])
def test_a_containers_overlay_is_a_warning_and_its_memory_is_refused(
    tmp_path: Path, config: DeviceConfig, mark: str
) -> None:
    config = replace(config, device=replace(config.device, state_dir=STATE), simulation=None)
    put(tmp_path, DOCKER)
    (tmp_path / mark).parent.mkdir(exist_ok=True)
    (tmp_path / mark).write_bytes(b"PATH=/bin\0container=podman\0")
    assert "whoever removes the container loses the ledger" in check_place(config, root=tmp_path)
    put(tmp_path, DOCKER + "643 641 0:9 / /var/lib rw - tmpfs tmpfs rw\n")
    with pytest.raises(BadInput, match=r"lies on /var/lib, a file system of the type tmpfs"):
        check_place(config, root=tmp_path)


def test_nothing_is_refused_in_a_simulation_or_where_nothing_is_known(tmp_path: Path, config: DeviceConfig) -> None:
    assert config.simulation is not None
    put(tmp_path, RASPI_OVERLAY)
    assert check_place(config, root=tmp_path) == ""
    assert check_place(replace(config, simulation=None), root=tmp_path / "nowhere") == ""


def file_of(folder: Path, *, allow: bool = False) -> Path:
    file = folder / "device.toml"
    file.write_text(
        f'[device]\nid = "board-1"\nstate_dir = "state"\nallow_volatile_state = {str(allow).lower()}\n[broker]\n'
        'url = "mqtt://127.0.0.1:9"\n[data]\nkind = "folder"\npath = "images"\n[limits]\nepsilon_server = 1\n'
    )
    return file


def test_a_client_does_not_start_there_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, RASPI_OVERLAY)
    monkeypatch.setattr(state_place.volatile_place, "__kwdefaults__", {"root": tmp_path})
    monkeypatch.setattr(state_place.check_place, "__kwdefaults__", {"root": tmp_path})
    file = file_of(tmp_path)
    assert main(["run", str(file)]) == 2
    said = capsys.readouterr().err
    assert "lies on /, a file system of the type overlay" in said
    assert "raspi-config" in said
    assert not (tmp_path / "state").exists(), "no ledger begins"


def test_its_health_tells_if_the_owner_lets_it_run_there(tmp_path: Path) -> None:
    put(tmp_path, RASPI_OVERLAY)
    config = load_config(file_of(tmp_path, allow=True))
    assert "may forget at each start" in check_place(config, root=tmp_path)
    config = replace(config, fleet=FleetSection(Identity.generate().public_key.hex(), "mqtts://x"))
    health = BoardHealth(config, now=0.0, root=tmp_path).message(0.0, session=1, hides_duration=False)
    assert health.volatile
    assert "keeps its ledger where it is forgotten without power" in [each.what for each in alarms(health)]
    os.remove(tmp_path / "proc/self/mountinfo")
    assert not BoardHealth(config, now=0.0, root=tmp_path).message(0.0, session=1, hides_duration=False).volatile
