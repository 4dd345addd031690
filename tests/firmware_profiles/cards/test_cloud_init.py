"""What cloud-init finds on the boot partition of a card, and what is there of earlier settings."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hushfleet.errors import BadInput
from hushfleet.firmware_profiles.cards.boot_partition import MountedBoot
from hushfleet.firmware_profiles.cards.cloud_init import _network, first_boot_files, require_cloud_init, write_card
from hushfleet.firmware_profiles.cards.seed import Card
from hushfleet.firmware_profiles.cards.stock_image import System
from hushfleet.firmware_profiles.cards.wifi import Wifi, read_wifi
from support.image_files import others_than_files
from support.stock import BOOKWORM, TRIXIE
from support.tools import find

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


DEVICE_TOML = """\
[device]
id = "bench-01"
state_dir = "/var/lib/hushfleet"
[broker]
url = "mqtts://[fd00::5]"
[data]
kind = "folder"
path = "/srv/photos"
[limits]
epsilon_server = 8.0
"""
IMAGER = {
    **TRIXIE,
    "user-data": "#cloud-config\nusers:\n- name: alice\nchpasswd: {list: ['ubuntu:ubuntu']}\nssh_pwauth: true\n",
    "network-config": "network: {version: 2, wifis: {wlan0: {access-points: {ShedNet: {password: '0011'}}}}}\n",
    "cmdline.txt": "console=tty1 rootwait systemd.run=/boot/firstrun.sh systemd.unit=kernel-command-line.target\n",
}


@pytest.fixture
def card(tmp_path: Path) -> Card:
    release = tmp_path / "a.hfr"
    release.write_bytes(b"release")
    return replace(CARD, device="bench-01", release=release, device_toml=DEVICE_TOML)


def written(folder: Path, card: Card, files: dict[str, str] | None = None) -> dict[str, str]:
    """All files on the partition afterwards. :param files: are put there before."""
    write_card(mounted(folder, files or {}), card)
    texts = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".pyz", ".hfr")]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in texts}


def test_earlier_settings_are_replaced_a_password_that_everybody_knows_too(tmp_path: Path, card: Card) -> None:
    files = written(tmp_path / "boot", card, IMAGER)
    user_data = json.loads(files["user-data"].partition("\n")[2])
    assert [each["name"] for each in user_data["users"]] == ["hushfleet-admin"]
    assert user_data["ssh_pwauth"] is False
    assert "ubuntu" not in files["user-data"]
    assert list(json.loads(files["network-config"])["wifis"]["wlan0"]["access-points"]) == ['Gärten "Süd"']
    assert files["cmdline.txt"] == "console=tty1 rootwait cgroup_enable=memory cfg80211.ieee80211_regdom=DE\n"
    assert files["hushfleet/secrets"] == "network-config\n"
    after = json.loads(files["hushfleet/after/network-config"])
    assert after == {name: value for name, value in json.loads(files["network-config"]).items() if name != "wifis"}
    assert written(tmp_path / "boot", card) == files, "written again"


def test_a_system_without_cloud_init_is_refused(tmp_path: Path) -> None:
    require_cloud_init(mounted(tmp_path / "a", TRIXIE), System())
    require_cloud_init(mounted(tmp_path / "b", BOOKWORM), System(cloud_init=True))
    for system, said in (
        (System(), "no user-data"),
        (System(name="Debian GNU/Linux 12 (bookworm)"), "it is Debian GNU/Linux 12"),
        (System(foreign="its partitions hold squashfs"), "hold squashfs"),
    ):
        with pytest.raises(BadInput, match=f"no cloud-init, .*{re.escape(said)}.* hushfleet push"):
            require_cloud_init(mounted(tmp_path / "b", BOOKWORM), system)


def test_cloud_init() -> None:
    files = first_boot_files(CARD, TRIXIE["cmdline.txt"].encode())
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
    assert key


def test_new_token_is_a_new_instance_that_tells_nothing() -> None:
    ids = {
        json.loads(first_boot_files(card, None)["meta-data"])["instance-id"]
        for card in (CARD, replace(CARD, token="u" * 43), replace(CARD, device="another"))
    }
    assert len(ids) == 3
    assert not any("ttt" in each for each in ids)


def test_instance_on_the_command_line_goes_with_meta_data() -> None:
    line = "console=tty1 ds=nocloud;i=rpi-imager-1787532598498 cfg80211.ieee80211_regdom=US rootwait\n"
    files = first_boot_files(CARD, line.encode())
    instance = json.loads(files["meta-data"])["instance-id"]
    assert files["cmdline.txt"] == (
        f"console=tty1 ds=nocloud;i={instance} rootwait cgroup_enable=memory cfg80211.ieee80211_regdom=DE\n"
    )


def test_board_with_a_cable_has_no_wifi() -> None:
    card = replace(CARD, wifi=None, ssh_keys=[])
    files = first_boot_files(card, None)
    assert "wifis" not in files["network-config"]
    assert "users" not in files["user-data"]
    assert "cmdline.txt" not in files


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


@pytest.mark.needs("netplan")
@pytest.mark.parametrize("renderer", ["NetworkManager", "networkd"])
def test_ipv6_is_on_and_names_arrive_as_netplan_reads_it(tmp_path: Path, card: Card, renderer: str) -> None:
    ssids = ["home", 'Gärten "Süd"', "📶; a=b", "1e5", "Anna’s #1"]
    (tmp_path / "etc/netplan").mkdir(parents=True)
    for number, ssid in enumerate(ssids):
        network = {**_network(replace(card, wifi=Wifi(ssid, "DE", "12345678")), with_wifi=True), "renderer": renderer}
        network["wifis"] = {f"wlan{number}": network["wifis"]["wlan0"]}
        file = tmp_path / f"etc/netplan/5{number}.yaml"
        file.write_text(json.dumps({"network": network}, ensure_ascii=False))
        file.chmod(0o600)
    generate = find("netplan")
    assert generate is not None
    command = [generate, "generate", "--root-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C.UTF-8"})
    assert done.returncode == 0, done.stderr
    if renderer == "NetworkManager":
        made = [path.read_text() for path in tmp_path.rglob("*.nmconnection")]
        assert len(made) == len(ssids) + 2
        assert all("method=auto" in text.partition("[ipv6]")[2] for text in made)
    else:
        made = [path.read_text() for path in tmp_path.rglob("*.network")]
        assert len(made) == len(ssids) + 2
        assert all("DHCP=yes" in text for text in made)


def test_only_files_are_copied_to_a_card(tmp_path: Path, card: Card) -> None:
    images = tmp_path / "images"
    (images / "cat").mkdir(parents=True)
    (images / "cat/1.jpg").write_bytes(b"image")
    assert written(tmp_path / "boot", replace(card, images=images))["hushfleet/images/cat/1.jpg"] == "image"
    with others_than_files(tmp_path):
        for kind in ("pipe", "socket", "device"):
            (tmp_path / f"{kind}.jpg").rename(images / "cat" / f"{kind}.jpg")
            said = f"{images}/cat/{kind}.jpg is a {kind}, and only files are copied to a card; take it away"
            with pytest.raises(BadInput, match=f"^{said}$"):
                written(tmp_path / kind, replace(card, images=images))
            (images / "cat" / f"{kind}.jpg").unlink()
    (images / "cat/link.jpg").symlink_to(tmp_path / "gone")
    with pytest.raises(BadInput, match=r"images cannot be copied to the card: .*link\.jpg: .*No such file"):
        written(tmp_path / "link", replace(card, images=images))
