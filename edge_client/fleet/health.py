"""Makes a board's health message, sent once a minute with coarse values; none is computed from the board's images.

The sending times are fixed when the client starts. The board sends nothing between the announced beginning and the
announced end of a training, because a busy loop would send the message late. Fields that could show a longer training
or more images (`HealthFormat.shows_work`) are left out if the task keeps secret how long a board works
(`TaskHandler.hides_duration`). docs/privacy.md, "Health", gives the reasons.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from hushfleet.edge_client.board.certificate import read_certificate
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.state_place import volatile_place
from hushfleet.edge_client.fleet.installed import standing_of
from hushfleet.edge_client.fleet.newest import Freshness
from hushfleet.edge_client.storage.kept import ChosenAccelerator
from hushfleet.errors import BadInput
from hushfleet.release.manifest import this_platform
from hushfleet.version import __version__
from hushfleet.wire.format.fields import DeclineCode
from hushfleet.wire.format.health import SHOWN, ErrorCode, Health

EVERY_S = 60.0
PERCENT_STEP = 10
DEGREE_STEP = 5
_NO_SENSORS = ("PMIC-Die",)  # on Jetsons before Orin: always 100 degrees (balena-os/balena-jetson, issue 142)
_THROTTLED_NOW = 0xF  # the higher bits say what has happened since the start
T = TypeVar("T")


class BoardHealth:
    """Knows when the next `Health` is due, and makes it.

    :param now: monotonic seconds, as in all methods.
    :param root: where the system's files are; another folder in tests.
    """

    def __init__(self, config: DeviceConfig, *, now: float, root: Path = Path("/")) -> None:
        self._config = config
        self._began = now
        self._root = root
        self._volatile = volatile_place(config, root=root).refused
        self.due_at = now
        self.last_decline: DeclineCode | None = None
        self.last_error: ErrorCode | None = None
        self.chosen: ChosenAccelerator | None = None

    def message(self, now: float, *, session: int, hides_duration: bool) -> Health:
        """Makes the message for `now`; the next one is due a whole number of minutes after the client's start.

        :param hides_duration: whether fields that could show how long the board trains are None.
        """
        standing = standing_of(self._config)
        self.due_at += EVERY_S * max(1, 1 + int((now - self.due_at) // EVERY_S))
        sensors: dict[str, Callable[[], Any]] = {
            "disk_percent": self._disk_percent,
            "memory_percent": self._memory_percent,
            "temperature_c": self._temperature_c,
            "throttled": self._throttled,
        }
        return Health(
            device=self._config.device.id,
            session=session,
            version=__version__,
            uptime_s=int(now - self._began),
            last_decline=self.last_decline,
            last_error=self.last_error,
            certificate_end=self._certificate_end(),
            slot=standing.slot,
            platform="-".join(this_platform()),
            tried=standing.tried,
            attempt=standing.attempt,
            accelerator=self.chosen.chosen if self.chosen else "",
            freeze="" if standing.slot == "none" else Freshness(Path(self._config.device.state_dir)).freeze,
            volatile=self._volatile,
            **{name: _known(read, omit=hides_duration and SHOWN[name].shows_work) for name, read in sensors.items()},
        )

    def _disk_percent(self) -> int:
        usage = shutil.disk_usage(self._config.device.state_dir)
        return _step(100 * usage.used / (usage.used + usage.free), PERCENT_STEP)

    def _memory_percent(self) -> int:
        lines = (line.split() for line in (self._root / "proc/meminfo").read_text("ascii").splitlines())
        kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
        return _step(100 * (1 - kib["MemAvailable"] / kib["MemTotal"]), PERCENT_STEP)

    def _temperature_c(self) -> int:
        """Reads the hottest zone. A Raspberry Pi has one zone; a Jetson has several, and some may not be sensors."""
        found = []
        for zone in self._root.glob("sys/class/thermal/thermal_zone*"):
            with suppress(OSError, ValueError):  # an Orin Nano has unreadable zones for parts that it lacks
                celsius = int((zone / "temp").read_text("ascii")) / 1000
                is_sensor = (zone / "type").read_text("ascii").strip() not in _NO_SENSORS
                if is_sensor and -100 <= celsius <= 200:  # ACPI reports -273.2 for a zone that is not set up
                    found.append(celsius)
        return _step(max(found) + DEGREE_STEP / 2, DEGREE_STEP)

    def _throttled(self) -> bool:
        """Returns whether a Raspberry Pi's firmware reports low voltage, or throttling because of voltage or heat."""
        (file,) = self._root.glob("sys/devices/platform/soc*/soc*firmware/get_throttled")
        return bool(int(file.read_text("ascii"), 16) & _THROTTLED_NOW)

    def _certificate_end(self) -> int:
        try:
            certificate = read_certificate(self._config)
        except BadInput:
            return 0
        return 0 if certificate is None else max(0, int(certificate.not_valid_after_utc.timestamp()))


def _step(value: float, step: int) -> int:
    return int(value // step) * step


def _known(read: Callable[[], T], *, omit: bool) -> T | None:
    """Reads a sensor. Returns None with `omit`, or if the file is missing or has another content than expected."""
    with suppress(OSError, ValueError, KeyError, IndexError, ZeroDivisionError):
        return None if omit else read()
    return None
