"""Writes one board's SD card: the folder `hushfleet`, and cloud-init's NoCloud seed, which starts the installation.

Raspberry Pi OS from Trixie on reads the seed by `seedfrom: file:///boot/firmware`, Ubuntu for Raspberry Pi and Debian's
cloud images by the label of the partition. The YAML files are written as JSON, which needs no rules for quotes.
`bootcmd` runs at every start, so an installation that was interrupted by a power cut starts again.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are a separate package

from hushfleet.errors import BadInput
from hushfleet.firmware_profiles.cards.boot_partition import BootPartition, require_room
from hushfleet.firmware_profiles.cards.seed import FOLDER, Card, stage
from hushfleet.firmware_profiles.cards.stock_image import System

_FIRST_BOOT = f"{FOLDER}/first-boot.sh"
_START = f'for d in /boot/firmware /boot; do if [ -e "$d/{_FIRST_BOOT}" ]; then exec sh "$d/{_FIRST_BOOT}"; fi; done'


def write_card(boot: BootPartition, card: Card) -> list[str]:
    """Replaces the files of an earlier call; returns the names of the written files and folders in the root.

    Raises `BadInput` if the partition has no space.
    """
    with tempfile.TemporaryDirectory(prefix="hushfleet-card-") as name:
        folder = Path(name)
        # Without the file, cloud-init would treat the next start as the first start of another machine.
        stage(card, folder, afterwards={"network-config": _yaml("network-config", _network(card, with_wifi=False))})
        for file, text in first_boot_files(card, boot.read("cmdline.txt")).items():
            (folder / file).write_text(text, "utf-8")
        require_room(boot, folder)
        boot.write(folder, remove=[FOLDER])
        return sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())


def require_cloud_init(boot: BootPartition, system: System) -> None:
    """Raises `BadInput` if the system on the card is known to lack cloud-init, or cannot be recognised.

    :param system: known properties of the system, from its image.
    """
    names = boot.names()
    known = names & {"user-data", "meta-data"} or (system.cloud_init and names & {"config.txt", "efi"})
    if known and not system.foreign:
        return
    found = system.foreign or (f"it is {system.name}" if system.name else "its boot partition has no user-data")
    raise BadInput(
        f"the image has no cloud-init, which starts the installation: {found}. Use an image of Raspberry Pi OS Trixie "
        "or newer, Ubuntu or Debian, or install a board that runs already with hushfleet push"
    )


def first_boot_files(card: Card, kernel_line: bytes | None) -> dict[str, str]:
    """Returns the files for the root of the partition: name -> text. Raises `BadInput` for texts that YAML changes.

    :param kernel_line: the content of cmdline.txt; None: there is none.
    """
    user_data: dict[str, Any] = {
        "hostname": card.host,
        "manage_etc_hosts": True,
        "ssh_pwauth": False,
        "bootcmd": [["sh", "-c", _START]],
        "runcmd": [["sh", "-c", _START]],
    }
    if card.ssh_keys:
        login = {"name": card.user, "groups": "adm,sudo", "shell": "/bin/bash", "lock_passwd": True}
        user_data["users"] = [login | {"sudo": "ALL=(ALL) NOPASSWD:ALL", "ssh_authorized_keys": list(card.ssh_keys)}]
    # a new id for each card, so that cloud-init starts again; it reveals nothing about the token
    instance = f"hushfleet-{card.device}-{hashlib.sha256(b'instance' + card.token.encode()).hexdigest()[:12]}"
    files = {
        "user-data": "#cloud-config\n" + _yaml("user-data", user_data),
        "meta-data": _yaml("meta-data", {"instance-id": instance, "local-hostname": card.host, "dsmode": "local"}),
        "network-config": _yaml("network-config", _network(card, with_wifi=True)),
    }
    if card.ssh_keys:
        files["ssh"] = ""  # Raspberry Pi OS enables its SSH server if this file exists
    if kernel_line is not None:
        files["cmdline.txt"] = _kernel_line(kernel_line.decode("utf-8", "replace"), card, instance)
    return files


def _kernel_line(line: str, card: Card, instance: str) -> str:
    """Adds our arguments, each once, and removes rpi-imager's start of `firstrun.sh`.

    Raspberry Pi's firmware disables the control group that memory limits need.
    """
    words = [word for word in line.partition("\n")[0].split() if not word.startswith(("systemd.run", "systemd.unit="))]
    # an id on the kernel's command line, written by rpi-imager, overrides the id of meta-data
    words = [re.sub(r"^(ds=nocloud;.*?\bi=)[^;]*", rf"\g<1>{instance}", word) for word in words]
    ours = {"cgroup_enable=memory": ""} | ({"cfg80211.ieee80211_regdom=": card.wifi.country} if card.wifi else {})
    theirs = [word for word in words if not word.startswith(tuple(ours))]
    return " ".join([*theirs, *(name + value for name, value in ours.items())]) + "\n"


def _network(card: Card, *, with_wifi: bool) -> dict[str, Any]:
    """Returns settings in netplan's format, version 2. A cable always works, with the name eth0, end0 or enp1s0.

    IPv6 is requested explicitly: netplan disables it if NetworkManager's settings only contain IPv4.
    """
    automatic = {"dhcp4": True, "dhcp6": True, "optional": True}
    network: dict[str, Any] = {
        "version": 2,
        "ethernets": {"eth0": automatic, "others": {"match": {"name": "en*"}, **automatic}},
    }
    if card.wifi is not None and with_wifi:
        point: dict[str, Any] = {"password": card.wifi.key} if card.wifi.key else {}
        point |= {"hidden": True} if card.wifi.hidden else {}
        wlan = {**automatic, "regulatory-domain": card.wifi.country}
        network["wifis"] = {"wlan0": {**wlan, "access-points": {card.wifi.ssid: point}}}
    return network


def _yaml(name: str, value: dict[str, Any]) -> str:
    """Returns JSON, checked by reading it as YAML, because a few characters differ. Raises `BadInput` if they do."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    try:
        same = yaml.safe_load(text) == value
    except yaml.YAMLError:
        same = False
    if not same:
        raise BadInput(f"{name} would not be read as it was written: a value has a character that YAML does not keep")
    return text
