"""Writes the first configuration of systems: by cloud-init, and as in Raspberry Pi OS before cloud-init.

To support another system, add a class to `WRITERS` (rpi-preseed will replace cloud-init on Raspberry Pi OS).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are a separate package

from hushfleet.config.toml_text import to_toml
from hushfleet.errors import BadInput
from hushfleet.firmware_profiles.cards.boot_partition import BootPartition
from hushfleet.firmware_profiles.cards.customised import (
    BEFORE,
    FIRST_BOOT,
    FOLDER,
    is_netplan,
    original,
    read_custom_toml,
    read_yaml,
    with_network,
    with_user_data,
)
from hushfleet.firmware_profiles.cards.seed import Card, SeedWriter
from hushfleet.firmware_profiles.cards.stock_image import System

_START = f'for d in /boot/firmware /boot; do if [ -e "$d/{FIRST_BOOT}" ]; then exec sh "$d/{FIRST_BOOT}"; fi; done'
_FIRSTRUN = f"""\
#!/bin/sh
# Started once by cmdline.txt; the installation follows after the next start. What rpi-imager left to be run comes last,
# since it may end this system.
boot=/boot/firmware
[ -d "$boot/{FOLDER}" ] || boot=/boot
sh "$boot/{FIRST_BOOT}" --later
sed -i 's| systemd\\.run[a-z_]*=[^ ]*||g; s| systemd\\.unit=kernel-command-line\\.target||' "$boot/cmdline.txt"
rm -f "$boot/firstrun.sh"
sync
[ ! -f "$boot/{BEFORE}/firstrun.sh" ] || bash "$boot/{BEFORE}/firstrun.sh"
exit 0
"""


class CloudInit:
    """cloud-init's NoCloud seed: Raspberry Pi OS from Trixie on, Ubuntu for Raspberry Pi, Debian's cloud images.

    Raspberry Pi OS reads it by `seedfrom: file:///boot/firmware`, Ubuntu by the label of the partition. The YAML files
    are written as JSON, which needs no rules for quotes. `bootcmd` runs at every start, so an installation that was
    interrupted by a power cut starts again.
    """

    name = "cloud-init"
    secrets: Sequence[str] = ("network-config",)

    def files(self, card: Card, boot: BootPartition) -> dict[str, str]:
        user_data: dict[str, Any] = {
            "hostname": card.host,
            "manage_etc_hosts": True,
            "ssh_pwauth": False,
            "bootcmd": [["sh", "-c", _START]],
            "runcmd": [["sh", "-c", _START]],
        }
        if card.ssh_keys:
            login = {"name": card.user, "groups": "adm,sudo", "shell": "/bin/bash", "lock_passwd": True}
            rights = {"sudo": "ALL=(ALL) NOPASSWD:ALL", "ssh_authorized_keys": list(card.ssh_keys)}
            user_data["users"] = [login | rights]
        instance = _instance(card)
        files = {
            "user-data": _yaml("user-data", with_user_data(read_yaml(boot, "user-data"), user_data), "#cloud-config\n"),
            "meta-data": _yaml("meta-data", {"instance-id": instance, "local-hostname": card.host, "dsmode": "local"}),
            "network-config": _network_config(card, boot, with_wifi=True),
        }
        if card.ssh_keys:
            files["ssh"] = ""  # Raspberry Pi OS enables its SSH server if this file exists
        line = _cmdline(boot)
        if line is not None:
            # an id on the kernel's command line, written by rpi-imager, overrides the id of meta-data
            words = [re.sub(r"^(ds=nocloud;.*?\bi=)[^;]*", rf"\g<1>{instance}", word) for word in line.split()]
            words = sorted([*words, *_country(card)], key=_is_first_run)  # rpi-imager's script truncates the line there
            files["cmdline.txt"] = _one_line(words)
        return files

    def afterwards(self, card: Card, boot: BootPartition) -> dict[str, str]:
        """Keeps files without which cloud-init would treat the next start as the first start of another machine."""
        return {"network-config": _network_config(card, boot, with_wifi=False)}


class FirstRun:
    """Raspberry Pi OS Bookworm and older: custom.toml contains host name and Wi-Fi, and the system deletes it;
    cmdline.txt starts firstrun.sh, as with rpi-imager."""

    name = "firstrun"
    secrets: Sequence[str] = ("custom.toml", f"{BEFORE}/custom.toml", f"{BEFORE}/firstrun.sh")

    def files(self, card: Card, boot: BootPartition) -> dict[str, str]:
        line = _cmdline(boot)
        if line is None:
            raise BadInput("there is no cmdline.txt: this is not a boot partition of Raspberry Pi OS; see --writer")
        custom = read_custom_toml(boot)
        sections: dict[str, dict[str, Any]] = {name: {} for name in ("system", "user", "ssh", "wlan")}
        sections |= {name: value for name, value in custom.items() if isinstance(value, dict)}
        sections["system"] |= {"hostname": card.host}
        if card.ssh_keys:
            if sections["user"].setdefault("name", card.user) != card.user:
                made = sections["user"]["name"]
                raise BadInput(
                    f"custom.toml on the card makes the user {made!r}, and there can be only one: say --ssh-user {made}"
                )
            keys = [*sections["ssh"].get("authorized_keys", []), *card.ssh_keys]
            sections["ssh"].setdefault("password_authentication", False)
            sections["ssh"] |= {"enabled": True, "authorized_keys": list(dict.fromkeys(keys))}
        if card.wifi is not None:
            wlan = {"ssid": card.wifi.ssid, "country": card.wifi.country, "hidden": card.wifi.hidden}
            key = {"password": card.wifi.key, "password_encrypted": True} if card.wifi.key else {}
            sections["wlan"] = wlan | key
        words = [word for word in line.split() if not _is_first_run(word)]
        words += [*_country(card), "systemd.run=/boot/firmware/firstrun.sh", "systemd.run_success_action=reboot"]
        words += ["systemd.unit=kernel-command-line.target"]
        text = to_toml({"config_version": 1, **custom, **{name: each for name, each in sections.items() if each}})
        return {"custom.toml": text, "firstrun.sh": _FIRSTRUN, "cmdline.txt": _one_line(words)}

    def afterwards(self, card: Card, boot: BootPartition) -> dict[str, str]:
        return {}


WRITERS: tuple[SeedWriter, ...] = (CloudInit(), FirstRun())


def named_writer(name: str) -> SeedWriter:
    """Returns the writer of this name. Raises `BadInput` if there is none."""
    found = next((writer for writer in WRITERS if writer.name == name), None)
    if found is None:
        raise BadInput(f"there is no writer {name!r}; choose one of {', '.join(writer.name for writer in WRITERS)}")
    return found


def choose_writer(boot: BootPartition, system: System) -> SeedWriter:
    """Chooses the writer that fits the files on the partition. Raises `BadInput` if no writer fits the system.

    :param system: known properties of the system, from its image.
    """
    names = boot.names()
    otherwise = "If it is a system with systemd and Python all the same, give --writer and --python"
    if system.foreign:
        raise BadInput(
            f"the image is not Raspberry Pi OS, Ubuntu or Debian: {system.foreign}. Use an image of one of these, or "
            f"install a board that runs already with hushfleet push. {otherwise}"
        )
    if names & {"user-data", "meta-data"} or (system.cloud_init and names & {"config.txt", "efi"}):
        return WRITERS[0]
    if {"config.txt", "cmdline.txt"} <= names:
        _require_raspberry_pi_os(_cmdline(boot) or "", system, otherwise)
        return WRITERS[1]
    raise BadInput(
        "the boot partition is unknown: it has neither cloud-init's user-data or meta-data nor Raspberry Pi's "
        "config.txt and cmdline.txt. If it is one all the same, give --writer"
    )


def _require_raspberry_pi_os(line: str, system: System, otherwise: str) -> None:
    """Refuses other systems for Raspberry Pis, which have the same files.

    Raises `BadInput` if the system is known to be one of them.
    """
    root = next((word for word in line.split() if word.startswith("root=")), "")
    kind = re.search(r"(?:^|\s)rootfstype=(\S+)", line)
    if not root.startswith(("root=PARTUUID=", "root=UUID=", "root=LABEL=", "root=/dev/mmcblk", "root=/dev/sd")):
        found = f"its cmdline.txt names no partition for the root ({root or 'there is no root='})"
    elif kind is not None and kind[1] not in ("ext4", "btrfs", "f2fs"):
        found = f"its cmdline.txt names a root of the type {kind[1]}"
    elif system.is_raspberry_pi_os is False:
        found = f"it is {system.name}, without cloud-init"
    else:
        return
    raise BadInput(
        f"the system is not Raspberry Pi OS: {found}. Write Raspberry Pi OS to the card, or install the board by "
        f"hushfleet push once it runs. {otherwise}"
    )


def _network_config(card: Card, boot: BootPartition, *, with_wifi: bool) -> str:
    """Makes network-config; a file of the older format stays unchanged if nothing must be added."""
    theirs = read_yaml(boot, "network-config")
    if card.wifi is None and not is_netplan(theirs):
        return (original(boot, "network-config") or b"").decode("utf-8-sig")
    return _yaml("network-config", with_network(theirs, _network(card, with_wifi=with_wifi)))


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


def _instance(card: Card) -> str:
    """Returns a new id for each card, so that cloud-init starts again; it reveals nothing about the token."""
    return f"hushfleet-{card.device}-{hashlib.sha256(b'instance' + card.token.encode()).hexdigest()[:12]}"


def _cmdline(boot: BootPartition) -> str | None:
    line = boot.read("cmdline.txt")
    return None if line is None else line.decode("utf-8", "replace").strip().partition("\n")[0]


def _country(card: Card) -> list[str]:
    """Returns kernel arguments: memory limits need the control group, which Raspberry Pi's firmware disables."""
    country = [] if card.wifi is None else [f"cfg80211.ieee80211_regdom={card.wifi.country}"]
    return ["cgroup_enable=memory", *country]


def _one_line(words: Sequence[str]) -> str:
    """Joins the words, each once; if a setting occurs twice, the later one counts."""
    latest = {word.partition("=")[0] if word.startswith("cfg80211.") else word: word for word in words}
    return " ".join(latest.values()) + "\n"


def _is_first_run(word: str) -> bool:
    return word.startswith(("systemd.run", "systemd.unit="))


def _yaml(name: str, value: dict[str, Any], head: str = "") -> str:
    """Returns JSON, checked by reading it as YAML, because a few characters differ. Raises `BadInput` if they do."""
    text = head + json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    try:
        same = yaml.safe_load(text) == value
    except yaml.YAMLError:
        same = False
    if not same:
        raise BadInput(f"{name} would not be read as it was written: a value has a character that YAML does not keep")
    return text
