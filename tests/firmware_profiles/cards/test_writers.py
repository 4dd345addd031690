"""First-boot configuration: what each system finds on its boot partition."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from hushfleet.errors import BadInput
from hushfleet.firmware_profiles.cards.boot_partition import MountedBoot
from hushfleet.firmware_profiles.cards.seed import Card
from hushfleet.firmware_profiles.cards.stock_image import System
from hushfleet.firmware_profiles.cards.wifi import Wifi, read_wifi
from hushfleet.firmware_profiles.cards.writers import WRITERS, choose_writer, named_writer
from support.stock import BOOKWORM, TRIXIE

CLOUD_INIT, FIRSTRUN = WRITERS
SSH = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5 me@desk"
CARD = Card(
    device="green.house_07",
    release=Path("a.hfr"),
    python="3.13",
    device_toml="",
    ca=b"",
    root_key="ab" * 32,
    release_keys="root's statement",
    token="t" * 43,
    wifi=Wifi(ssid='Gärten "Süd"', country="DE", password="correct horse"),
    ssh_keys=[SSH],
)


def mounted(folder: Path, files: dict[str, str]) -> MountedBoot:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return MountedBoot(folder)


def test_cloud_init(tmp_path: Path) -> None:
    files = CLOUD_INIT.files(CARD, mounted(tmp_path, TRIXIE))
    assert files["user-data"].startswith("#cloud-config\n")
    user_data = json.loads(files["user-data"].partition("\n")[2])  # JSON is YAML
    assert user_data["hostname"] == "green-house-07"
    assert user_data["bootcmd"] == user_data["runcmd"]
    assert "first-boot.sh" in user_data["bootcmd"][0][2]
    assert user_data["users"][0]["ssh_authorized_keys"] == [SSH]
    assert files["ssh"] == ""
    meta = json.loads(files["meta-data"])
    assert meta["local-hostname"] == "green-house-07"
    network = json.loads(files["network-config"])
    key = "5b3b1bfb"  # the first digits, by wpa_passphrase
    point = network["wifis"]["wlan0"]["access-points"]['Gärten "Süd"']
    assert len(point["password"]) == 64
    assert "correct horse" not in "".join(files.values())
    assert network["wifis"]["wlan0"]["regulatory-domain"] == "DE"
    after = CLOUD_INIT.afterwards(CARD, MountedBoot(tmp_path))
    assert json.loads(after["network-config"]) == {name: value for name, value in network.items() if name != "wifis"}
    assert set(after) == set(CLOUD_INIT.secrets)
    assert key


def test_new_token_is_a_new_instance_that_tells_nothing(tmp_path: Path) -> None:
    boot = mounted(tmp_path, TRIXIE)
    ids = {
        json.loads(CLOUD_INIT.files(card, boot)["meta-data"])["instance-id"]
        for card in (CARD, replace(CARD, token="u" * 43), replace(CARD, device="another"))
    }
    assert len(ids) == 3
    assert not any("ttt" in each for each in ids)


def test_instance_on_the_command_line_goes_with_meta_data(tmp_path: Path) -> None:
    line = "console=tty1 ds=nocloud;i=rpi-imager-1787532598498 cfg80211.ieee80211_regdom=US rootwait\n"
    files = CLOUD_INIT.files(CARD, mounted(tmp_path, {**TRIXIE, "cmdline.txt": line}))
    instance = json.loads(files["meta-data"])["instance-id"]
    assert files["cmdline.txt"] == (
        f"console=tty1 ds=nocloud;i={instance} cfg80211.ieee80211_regdom=DE rootwait cgroup_enable=memory\n"
    )


@pytest.mark.parametrize("writer", WRITERS)
def test_written_twice_is_written_once(tmp_path: Path, writer: type) -> None:
    boot = mounted(tmp_path, BOOKWORM)
    first = writer.files(CARD, boot)
    again = writer.files(CARD, mounted(tmp_path, first))
    assert again == first
    assert first["cmdline.txt"].count("\n") == 1


def test_firstrun(tmp_path: Path) -> None:
    files = FIRSTRUN.files(CARD, mounted(tmp_path, BOOKWORM))
    custom = tomllib.loads(files["custom.toml"])
    assert custom["config_version"] == 1
    assert custom["system"] == {"hostname": "green-house-07"}
    assert custom["wlan"]["ssid"] == 'Gärten "Süd"'
    assert custom["wlan"]["password_encrypted"] is True
    assert custom["ssh"]["authorized_keys"] == [SSH]
    assert files["cmdline.txt"].startswith(BOOKWORM["cmdline.txt"].strip())
    assert "systemd.run=/boot/firmware/firstrun.sh" in files["cmdline.txt"].split()
    assert "correct horse" not in "".join(files.values())
    assert "custom.toml" in FIRSTRUN.secrets


def test_firstrun_needs_a_command_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"cmdline\.txt"):
        FIRSTRUN.files(CARD, mounted(tmp_path, {}))


def test_board_with_a_cable_has_no_wifi(tmp_path: Path) -> None:
    card = replace(CARD, wifi=None, ssh_keys=[])
    files = CLOUD_INIT.files(card, mounted(tmp_path, {"meta-data": ""}))
    assert "wifis" not in files["network-config"]
    assert "users" not in files["user-data"]
    assert "cmdline.txt" not in files
    assert "wlan" not in FIRSTRUN.files(card, mounted(tmp_path, BOOKWORM))["custom.toml"]


def test_writer_is_found_by_what_lies_there(tmp_path: Path) -> None:
    assert choose_writer(mounted(tmp_path / "a", TRIXIE), System()) is CLOUD_INIT
    assert choose_writer(mounted(tmp_path / "b", BOOKWORM), System()) is FIRSTRUN
    assert choose_writer(mounted(tmp_path / "b", BOOKWORM), System(cloud_init=True)) is CLOUD_INIT
    with pytest.raises(BadInput, match="boot partition is unknown"):
        choose_writer(mounted(tmp_path / "c", {"DCIM.txt": ""}), System())
    with pytest.raises(BadInput, match="choose one of cloud-init, firstrun"):
        named_writer("ignition")


@pytest.mark.parametrize(
    ("line", "system", "said"),
    [
        (None, System(foreign="its partitions hold squashfs"), "not Raspberry Pi OS.*squashfs"),
        (None, System(name="Arch Linux ARM", is_raspberry_pi_os=False), "it is Arch Linux ARM"),
        ("boot=LABEL=LIBREELEC disk=LABEL=STORAGE quiet", System(), "names no partition"),
        ("root=PARTUUID=97-02 rootfstype=squashfs,ext4 rootwait", System(), "of the type squashfs"),
        ("root=/dev/ram0 rootwait", System(), "root=/dev/ram0"),
    ],
)
def test_other_systems_of_a_raspberry_pi_are_refused(
    tmp_path: Path, line: str | None, system: System, said: str
) -> None:
    boot = mounted(tmp_path, BOOKWORM if line is None else {**BOOKWORM, "cmdline.txt": line})
    with pytest.raises(BadInput, match=said):
        choose_writer(boot, system)


def test_wifi_key_is_that_of_the_standard() -> None:
    """Test vectors of IEEE 802.11i, annex H.4.3."""
    key = Wifi(ssid="IEEE", country="US", password="password").key
    assert key == "f42c6fc52df0ebef9ebb4b90b38a5f902e83fe1b135a70e23aed762e9710a12e"
    assert Wifi(ssid="IEEE", country="US", password=key.upper()).key == key
    assert Wifi(ssid="IEEE", country="US").key == ""


@pytest.mark.parametrize(
    "text",
    [
        'ssid = "a"',
        'ssid = ""\ncountry = "DE"',
        'ssid = "a"\ncountry = "de"',
        'ssid = "a"\ncountry = "DE"\npassword = "secret!"',
        "ssid = 5",
        'ssid = "a"\ncountry = "UK"',
        'ssid = "a"\ncountry = "XX"',
        'ssid = "a\\u0085"\ncountry = "DE"',
    ],
)
def test_wifi_profiles_are_checked_and_never_shown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "home.toml"
    file.write_text(text)
    with pytest.raises(BadInput, match=r"home\.toml") as caught:
        read_wifi(file)
    assert "secret!" not in str(caught.value)
