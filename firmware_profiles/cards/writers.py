"""How systems take their first configuration: cloud-init, and what Raspberry Pi OS had before it.

A new way is one more class in `WRITERS` (rpi-preseed is announced to replace cloud-init on Raspberry Pi OS).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from hushfleet.errors import BadInput
from hushfleet.firmware_profiles.cards.boot_partition import BootPartition
from hushfleet.firmware_profiles.cards.seed import FOLDER, Card, Writer

_SCRIPT = f"{FOLDER}/first-boot.sh"
_START = f'for d in /boot/firmware /boot; do if [ -e "$d/{_SCRIPT}" ]; then exec sh "$d/{_SCRIPT}"; fi; done'
_FIRSTRUN = f"""\
#!/bin/sh
# Started once by cmdline.txt; the installation follows after the next start.
boot=/boot/firmware
[ -d "$boot/{FOLDER}" ] || boot=/boot
sh "$boot/{FOLDER}/first-boot.sh" --later
sed -i 's| systemd\\.run[a-z_]*=[^ ]*||g; s| systemd\\.unit=kernel-command-line\\.target||' "$boot/cmdline.txt"
rm -f "$boot/firstrun.sh"
sync
exit 0
"""


class CloudInit:
    """cloud-init's NoCloud seed: Raspberry Pi OS from Trixie on, Ubuntu for Raspberry Pi, Debian's cloud images.

    Raspberry Pi OS reads it by `seedfrom: file:///boot/firmware`, Ubuntu by the label of the partition. YAML contains
    JSON, which needs no rules for quotes. `bootcmd` runs at every start: an installation that a power cut has ended is
    begun again.
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
            user_data |= {"users": [login | rights], "enable_ssh": True}
        instance = _instance(card)
        files = {
            "user-data": "#cloud-config\n" + _json(user_data),
            "meta-data": _json({"instance-id": instance, "local-hostname": card.host, "dsmode": "local"}),
            "network-config": _json(_network(card, with_wifi=True)),
        }
        line = _cmdline(boot)
        if line is not None:
            # an id on the kernel's command line, which rpi-imager writes, goes before that of meta-data
            words = [re.sub(r"^(ds=nocloud;.*?\bi=)[^;]*", rf"\g<1>{instance}", word) for word in line.split()]
            files["cmdline.txt"] = _one_line([*words, *_country(card)])
        return files

    def afterwards(self, card: Card) -> dict[str, str]:
        """Without these files cloud-init would take the next start for another machine's first."""
        return {"network-config": _json(_network(card, with_wifi=False))}


class FirstRun:
    """Raspberry Pi OS Bookworm and older: custom.toml names the board and its Wi-Fi, and is deleted by the system;
    firstrun.sh is started by cmdline.txt, as rpi-imager does it."""

    name = "firstrun"
    secrets: Sequence[str] = ("custom.toml",)

    def files(self, card: Card, boot: BootPartition) -> dict[str, str]:
        line = _cmdline(boot)
        if line is None:
            raise BadInput("there is no cmdline.txt: this is no boot partition of Raspberry Pi OS; see --writer")
        custom = f'config_version = 1\n\n[system]\nhostname = "{card.host}"\n'
        if card.ssh_keys:
            custom += f"\n[user]\nname = {_text(card.user)}\n\n[ssh]\nenabled = true\n"
            custom += f"password_authentication = false\nauthorized_keys = {_text(list(card.ssh_keys))}\n"
        if card.wifi is not None:
            custom += f"\n[wlan]\nssid = {_text(card.wifi.ssid)}\ncountry = {_text(card.wifi.country)}\n"
            custom += f"hidden = {_text(card.wifi.hidden)}\n"
            if card.wifi.key:
                custom += f'password = "{card.wifi.key}"\npassword_encrypted = true\n'
        words = [word for word in line.split() if not word.startswith(("systemd.run", "systemd.unit="))]
        words += ["systemd.run=/boot/firmware/firstrun.sh", "systemd.run_success_action=reboot"]
        words += ["systemd.unit=kernel-command-line.target"]
        return {"custom.toml": custom, "firstrun.sh": _FIRSTRUN, "cmdline.txt": _one_line([*words, *_country(card)])}

    def afterwards(self, card: Card) -> dict[str, str]:
        return {}


WRITERS: tuple[Writer, ...] = (CloudInit(), FirstRun())


def choose_writer(boot: BootPartition, name: str | None = None) -> Writer:
    """The one with this name, or the one that fits what lies on the partition. Raises `BadInput`."""
    if name is not None:
        found = next((writer for writer in WRITERS if writer.name == name), None)
        if found is None:
            raise BadInput(f"there is no writer {name!r}; there are {', '.join(writer.name for writer in WRITERS)}")
        return found
    names = boot.names()
    if names & {"user-data", "meta-data"}:
        return WRITERS[0]
    if {"config.txt", "cmdline.txt"} <= names:
        return WRITERS[1]
    raise BadInput(
        "this is no boot partition that is known: neither cloud-init's user-data or meta-data nor Raspberry Pi's "
        "config.txt and cmdline.txt are on it. If it is one all the same, name how it is configured with --writer"
    )


def _network(card: Card, *, with_wifi: bool) -> dict[str, Any]:
    """Netplan's format, version 2. A cable always works."""
    network: dict[str, Any] = {
        "version": 2,
        "ethernets": {"cable": {"match": {"name": "e*"}, "dhcp4": True, "optional": True}},
    }
    if card.wifi is not None and with_wifi:
        point: dict[str, Any] = {"password": card.wifi.key} if card.wifi.key else {}
        point |= {"hidden": True} if card.wifi.hidden else {}
        wlan = {"dhcp4": True, "optional": True, "regulatory-domain": card.wifi.country}
        network["wifis"] = {"wlan0": {**wlan, "access-points": {card.wifi.ssid: point}}}
    return network


def _instance(card: Card) -> str:
    """Another one for each card that is written, so that cloud-init begins anew; it tells nothing of the token."""
    return f"hushfleet-{card.device}-{hashlib.sha256(b'instance' + card.token.encode()).hexdigest()[:12]}"


def _cmdline(boot: BootPartition) -> str | None:
    line = boot.read("cmdline.txt")
    return None if line is None else line.decode("utf-8", "replace").strip().partition("\n")[0]


def _country(card: Card) -> list[str]:
    """Kernel arguments: limits on memory need the control group, which Raspberry Pi's firmware turns off."""
    country = [] if card.wifi is None else [f"cfg80211.ieee80211_regdom={card.wifi.country}"]
    return ["cgroup_enable=memory", *country]


def _one_line(words: Sequence[str]) -> str:
    """Of two settings of one name the latter counts; each word once."""
    latest = {word.partition("=")[0] if word.startswith("cfg80211.") else word: word for word in words}
    return " ".join(latest.values()) + "\n"


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _text(value: Any) -> str:
    """A value of TOML: what JSON writes without escapes for plain characters is TOML, too."""
    return json.dumps(value, ensure_ascii=False)
