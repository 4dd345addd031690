"""Cards that somebody has customised before, mostly by rpi-imager: nothing of it is lost, or it is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hushfleet.errors import BadInput, HushfleetError
from hushfleet.firmware_profiles.cards import boot_partition
from hushfleet.firmware_profiles.cards.boot_partition import MountedBoot
from hushfleet.firmware_profiles.cards.seed import Card, SeedWriter
from hushfleet.firmware_profiles.cards.wifi import Wifi
from hushfleet.firmware_profiles.cards.write import write_card
from hushfleet.firmware_profiles.cards.writers import WRITERS, _network
from support.image_files import others_than_files
from support.stock import BOOKWORM, TRIXIE
from support.tools import find

CLOUD_INIT, FIRSTRUN = WRITERS
KEY, OTHER_KEY = "ssh-ed25519 AAAAours me@desk", "ssh-ed25519 AAAAtheirs alice@desk"
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
USER_DATA = f"""\
#cloud-config
hostname: shed-pi
timezone: Europe/Berlin
users:
- name: alice
  groups: users,sudo,netdev
  expiredate: 2032-09-01
  ssh_authorized_keys: [{OTHER_KEY}]
runcmd:
- [touch, /theirs]
enable_ssh: true
ssh_pwauth: true
"""
NETWORK = """\
network:
  version: 2
  wifis:
    wlan0:
      dhcp4: true
      regulatory-domain: "DE"
      access-points:
        "ShedNet": {password: "0011"}
"""
CMDLINE = "console=tty1 root=PARTUUID=deadbeef-02 rootwait ds=nocloud;i=rpi-imager-1700000000\n"
CUSTOM = """\
config_version = 1
[system]
hostname = "shed-pi"
[user]
name = "alice"
password = "$5$hash"
password_encrypted = true
[ssh]
enabled = true
password_authentication = true
[wlan]
ssid = "ShedNet"
password = "0011"
country = "DE"
[locale]
keymap = "de"
"""


@pytest.fixture
def card(tmp_path: Path) -> Card:
    release = tmp_path / "a.hfr"
    release.write_bytes(b"release")
    return Card("bench-01", release, "3.13", DEVICE_TOML, b"", "ab" * 32, "statement", "t" * 43)


def written(folder: Path, card: Card, writer: SeedWriter, files: dict[str, str] | None = None) -> dict[str, str]:
    """All files on the partition afterwards. :param files: are put there before."""
    folder.mkdir(exist_ok=True)
    for name, text in (files or {}).items():
        (folder / name).write_text(text)
    write_card(MountedBoot(folder), card, writer)
    texts = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".pyz", ".hfr")]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in texts}


def imager() -> dict[str, str]:
    return {**TRIXIE, "user-data": USER_DATA, "network-config": NETWORK, "cmdline.txt": CMDLINE}


def content(files: dict[str, str], name: str) -> Any:
    return yaml.safe_load(files[name])


def test_user_key_and_wifi_of_rpi_imager_stay(tmp_path: Path, card: Card) -> None:
    files = written(tmp_path / "boot", card, CLOUD_INIT, imager())
    user_data, network = content(files, "user-data"), content(files, "network-config")
    (alice,) = user_data["users"]
    assert (alice["name"], alice["expiredate"], alice["ssh_authorized_keys"]) == ("alice", "2032-09-01", [OTHER_KEY])
    assert user_data["timezone"] == "Europe/Berlin"
    assert user_data["ssh_pwauth"] is True
    assert user_data["hostname"] == "bench-01"
    assert user_data["runcmd"][0] == ["touch", "/theirs"]
    assert "first-boot.sh" in user_data["runcmd"][1][2]
    assert network["wifis"]["wlan0"]["access-points"] == {"ShedNet": {"password": "0011"}}
    assert network["wifis"]["wlan0"]["dhcp6"] is True
    assert files["hushfleet/after/network-config"] == files["network-config"], "their key stays where they put it"
    for name, text in imager().items():
        if name != "config.txt":
            assert files[f"hushfleet/before/{name}"] == text
    assert written(tmp_path / "boot", card, CLOUD_INIT) == files, "written again"


def test_a_card_that_was_pulled_out_half_written_loses_nothing(
    tmp_path: Path, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = tmp_path / "boot"
    with monkeypatch.context() as patch:
        patch.setattr(boot_partition, "write_whole", lambda path, *_, **__: pull_out_at(path, "ca.pem"))
        with pytest.raises(HushfleetError):
            written(boot, card, CLOUD_INIT, imager())
    assert (boot / "hushfleet").is_dir()
    (alice,) = content(written(boot, card, CLOUD_INIT), "user-data")["users"]
    assert alice["name"] == "alice"


def pull_out_at(path: Path, name: str) -> None:
    if path.name == name:
        raise OSError("pulled out")


def test_our_wifi_and_login_come_beside_theirs_and_only_ours_is_erased(tmp_path: Path, card: Card) -> None:
    ours = replace(card, wifi=Wifi("home", "DE", "correct horse"), ssh_keys=[KEY], user="alice")
    files = written(tmp_path / "boot", ours, CLOUD_INIT, imager())
    (alice,) = content(files, "user-data")["users"]
    assert alice["ssh_authorized_keys"] == [OTHER_KEY, KEY]
    assert alice["groups"] == "users,sudo,netdev"
    points = content(files, "network-config")["wifis"]["wlan0"]["access-points"]
    assert set(points) == {"ShedNet", "home"}
    after = content(files, "hushfleet/after/network-config")
    assert set(after["wifis"]["wlan0"]["access-points"]) == {"ShedNet"}
    again = written(tmp_path / "boot", replace(ours, wifi=Wifi("new", "DE")), CLOUD_INIT)
    assert set(content(again, "network-config")["wifis"]["wlan0"]["access-points"]) == {"ShedNet", "new"}


def test_a_user_of_ours_comes_beside_the_systems_own(tmp_path: Path, card: Card) -> None:
    text = "#cloud-config\r\nssh_authorized_keys: [a]\r\n"
    files = written(tmp_path / "boot", replace(card, ssh_keys=[KEY]), CLOUD_INIT, {**TRIXIE, "user-data": text})
    default, login = content(files, "user-data")["users"]
    assert (default, login["name"]) == ("default", "hushfleet-admin")


@pytest.mark.parametrize(
    "chpasswd", ["{expire: true, users: [{name: ubuntu, password: ubuntu}]}", "{list: ['ubuntu:ubuntu']}"]
)
def test_the_password_that_everybody_knows_is_not_kept(tmp_path: Path, card: Card, chpasswd: str) -> None:
    text = f"#cloud-config\nchpasswd: {chpasswd}\nssh_pwauth: true\n"
    files = written(tmp_path / "boot", card, CLOUD_INIT, {**TRIXIE, "user-data": text})
    user_data = content(files, "user-data")
    assert "chpasswd" not in user_data
    assert user_data["ssh_pwauth"] is False


def test_their_network_of_the_older_format_stays_to_the_byte(tmp_path: Path, card: Card) -> None:
    text = "version: 1\nconfig:\n- {type: physical, name: eth0}\n"
    files = written(tmp_path / "boot", card, CLOUD_INIT, {**TRIXIE, "network-config": text})
    assert files["network-config"] == files["hushfleet/after/network-config"] == text


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("user-data", "#!/bin/sh\ntouch /theirs\n", "user-data on the card is no #cloud-config .*'#!/bin/sh'"),
        ("user-data", "#include\nhttps://example.org/seed\n", "no #cloud-config"),
        ("user-data", "#cloud-config\nusers: [\n", "user-data on the card is not YAML .*line 3"),
        ("user-data", "#cloud-config\nruncmd: touch /theirs\n", "has runcmd in another form"),
        ("user-data", "#cloud-config\n- a\n", "no keys and values"),
        ("user-data", "#cloud-config\na: !!binary aGVsbG8=\n", "cannot be kept"),
        ("network-config", "version: 1\nconfig: []\n", "network-config on the card is not of netplan's format"),
        ("network-config", "network: {config: disabled}\n", "not of netplan's format"),
        ("network-config", "network: {version: 2, wifis: [wlan0]}\n", "not as netplan reads it"),
    ],
)
def test_what_cannot_be_added_to_is_refused_by_name(
    tmp_path: Path, card: Card, name: str, text: str, said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        written(tmp_path / "boot", replace(card, wifi=Wifi("home", "DE")), CLOUD_INIT, {**TRIXIE, name: text})
    assert (tmp_path / "boot" / name).read_text() == text
    assert not (tmp_path / "boot" / "hushfleet").exists()


def test_custom_toml_of_older_systems(tmp_path: Path, card: Card) -> None:
    files = written(tmp_path / "boot", card, FIRSTRUN, {**BOOKWORM, "custom.toml": CUSTOM})
    theirs = tomllib.loads(CUSTOM)
    assert tomllib.loads(files["custom.toml"]) == {**theirs, "system": {"hostname": "bench-01"}}
    assert "hushfleet/before/custom.toml" in files["hushfleet/secrets"].split()
    with pytest.raises(BadInput, match="--ssh-user alice"):
        written(tmp_path / "boot", replace(card, ssh_keys=[KEY]), FIRSTRUN)
    files = written(tmp_path / "boot", replace(card, ssh_keys=[KEY], user="alice"), FIRSTRUN)
    custom = tomllib.loads(files["custom.toml"])
    assert custom["user"] == theirs["user"]
    assert custom["ssh"]["authorized_keys"] == [KEY]


def test_rpi_imagers_script_is_run_after_ours(tmp_path: Path, card: Card) -> None:
    boot, mark = tmp_path / "boot", tmp_path / "mark"
    script = f"#!/bin/bash\ntouch {mark}\nrm -f /boot/firstrun.sh\nexit 0\n"
    line = "root=PARTUUID=9710ec8c-02 rootwait systemd.run=/boot/firstrun.sh systemd.run_success_action=reboot\n"
    files = written(boot, card, FIRSTRUN, {**BOOKWORM, "firstrun.sh": script, "cmdline.txt": line})
    assert files["cmdline.txt"].count("systemd.run=") == 1
    assert "hushfleet/before/firstrun.sh" in files["hushfleet/secrets"].split()
    (boot / "hushfleet/first-boot.sh").write_text(f"[ ! -e {mark} ] || touch {tmp_path}/late\n")
    runnable = files["firstrun.sh"].replace("boot=/boot/firmware", f"boot={boot}")
    subprocess.run(["sh", "-c", runnable], check=True)
    assert mark.exists()
    assert not (tmp_path / "late").exists()
    assert "systemd.run" not in (boot / "cmdline.txt").read_text()
    files = written(tmp_path / "new", card, FIRSTRUN, {**BOOKWORM, "firstrun.sh": files["firstrun.sh"]})
    assert "hushfleet/before/firstrun.sh" not in files, "ours is not run by itself"


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
    assert written(tmp_path / "boot", replace(card, images=images), CLOUD_INIT)["hushfleet/images/cat/1.jpg"] == "image"
    with others_than_files(tmp_path):
        for kind in ("pipe", "socket", "device"):
            (tmp_path / f"{kind}.jpg").rename(images / "cat" / f"{kind}.jpg")
            said = f"{images}/cat/{kind}.jpg is a {kind}, and only files are copied to a card; take it away"
            with pytest.raises(BadInput, match=f"^{said}$"):
                written(tmp_path / kind, replace(card, images=images), CLOUD_INIT)
            (images / "cat" / f"{kind}.jpg").unlink()
    (images / "cat/link.jpg").symlink_to(tmp_path / "gone")
    with pytest.raises(BadInput, match=r"images cannot be copied to the card: .*link\.jpg: .*No such file"):
        written(tmp_path / "link", replace(card, images=images), CLOUD_INIT)
