"""systemd units for the four processes of a fleet. Each sees only what it needs of the folder.

All run as one user, so the units restrict which files a process sees: aggregator and broker cannot read the authority's
key. The aggregator may not write to the folder itself, because with this right it could put a journal beside the
registry, which SQLite would apply to it, or put another folder in the place of `ca`.
"""

from __future__ import annotations

import getpass
import sys
from collections.abc import Sequence
from pathlib import Path

from hushfleet import atomic_file
from hushfleet.aggregator.broker.programs import find_mosquitto
from hushfleet.aggregator.fleet.trust.folder import WRITTEN_BY_AGGREGATOR, FleetFolder

PREFIX = "hushfleet"

_UNIT = Path(__file__).parent / "templates" / "unit.service"
_NO_DEVICES = "PrivateDevices=yes\nDevicePolicy=closed"  # the aggregator may need a GPU
# Restart=always: for systemd, a broker that SIGHUP kills before the broker can handle it has ended successfully.
_OF_BROKER = (
    "Restart=always\nLimitNOFILE=65536\nExecReload=/bin/kill -HUP $MAINPID\nMemoryDenyWriteExecute=yes\n" + _NO_DEVICES
)
_OF_AGGREGATOR = (
    "# Who stops it has not found a fault; 75: the fleet has another task.\n"
    "SuccessExitStatus=130 75\nRestartForceExitStatus=75"
)
_OF_STRANGERS = "MemoryMax=256M"  # it keeps no state that boards need: after a restart they ask again


def write_units(folder: FleetFolder) -> list[Path]:
    """Writes the units to the fleet's folder `systemd`. Raises `StoreError`."""
    path, network = folder.path.resolve(), "network-online.target time-sync.target"
    here, own = _word(path), f"{_word(sys.executable)} -m hushfleet.aggregator.commands"
    mosquitto = find_mosquitto() or "/usr/sbin/mosquitto"
    broker = f"{PREFIX}-broker.service {PREFIX}-enrolment-broker.service"
    signing = ["release.key", "release.key.old", "root.key"]  # boards may not know yet that the second is old
    keys = ["ca/ca.key", "operator.key", *signing]
    of_broker = _files(path, writes=["broker"], hidden=[*keys, "service", "aggregator", "fleet.sqlite", "wifi"])
    brokers = (
        ("broker", "broker", "mosquitto", _OF_BROKER),
        ("enrolment-broker", "broker for boards without a certificate", "enrolment", f"{_OF_BROKER}\n{_OF_STRANGERS}"),
    )
    units = {
        name: (
            f"Hushfleet's {whose}",
            network,
            f"{mosquitto} -c {_word(path / f'broker/{stem}.conf')}",
            own_lines,
            of_broker,
        )
        for name, whose, stem, own_lines in brokers
    } | {
        "aggregator": (
            "Hushfleet's aggregator",
            f"{network} {broker}",
            f"{own} aggregator --fleet {here}",
            _OF_AGGREGATOR,
            _files(path, writes=WRITTEN_BY_AGGREGATOR, hidden=[*keys, "service", "broker", "fleet.sqlite", "wifi"]),
        ),
        "fleet": (
            "Hushfleet's fleet service",
            f"{network} {broker}",
            f"{own} fleet serve {here}",
            f"Restart=always\n{_NO_DEVICES}",
            _files(
                path,
                writes=[""],
                hidden=[
                    "aggregator/cert.key",
                    "aggregator/identity.key",
                    "broker/broker.key",
                    *signing,
                    "wifi",
                ],
            ),
        ),
    }
    for each in WRITTEN_BY_AGGREGATOR:  # systemd starts no service if a path that it may write to does not exist
        (path / each).mkdir(mode=0o700, exist_ok=True)
    written = []
    for name, (description, after, command, own_lines, files) in units.items():
        text = _UNIT.read_text("utf-8").format(
            description=f"{description} ({folder.config.federation})",
            after=after,
            command=command,
            user=getpass.getuser(),
            caches=" ".join(_word(f"{name}={path}/cache") for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME")),
            own=own_lines,
            files=files,
        )
        file = folder.path / "systemd" / f"{PREFIX}-{name}.service"
        atomic_file.write_whole(file, text.replace("\n\n\n", "\n\n").encode(), durable=True)
        written.append(file)
    return written


def _files(path: Path, *, writes: Sequence[str], hidden: Sequence[str]) -> str:
    """Writes the lines about files.

    :param writes: paths below the fleet's folder.
    :param hidden: paths below the fleet's folder.
    """
    lines = [f"ReadWritePaths={_word(path / each)}" for each in writes]
    return "\n".join([*lines, *(f"InaccessiblePaths={_word(f'-{path / each}')}" for each in hidden)])


def _word(text: str | Path) -> str:
    """Quotes one word of a unit's line (systemd.syntax(7), systemd.unit(5), "Specifiers")."""
    plain = str(text).replace("%", "%%")
    return f'"{plain}"' if " " in plain else plain
