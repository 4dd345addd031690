"""`[scenario]` of the task file: what goes wrong in a simulated fleet, and when.

Each entry says which devices it affects: a number (drawn by the task's seed), a list of names, or "all".
Names are checked when the fleet is known (`schedule`), because this section does not know its size. A time is
`at_s`, in seconds after the run's start, or `at_round`, the moment at which that round opens. Only simulations read
this section: in the field failures happen by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from hushfleet.schema import Checked, require
from hushfleet.wire.format.topics import Name

SERVERS = ("aggregator", "broker")
_LONGEST_S = 30 * 86400.0
_ACCEPTED = "how many (1 or more), a list of names such as ['device-3'], or 'all'"
Devices = Annotated[
    Annotated[int, Meta(ge=1)] | Literal["all"] | Annotated[tuple[Name, ...], Meta(min_length=1)],
    Meta(description=_ACCEPTED),
]
Seconds = Annotated[float, Meta(gt=0, le=_LONGEST_S)]
_Many = Meta(description="tables, each with its heading in double brackets, since it may stand there several times")
Moment = Annotated[float, Meta(ge=0, le=_LONGEST_S)]


@dataclass(frozen=True, kw_only=True)
class _OfDevices(Checked):
    """An entry that affects `devices`."""

    devices: Devices

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.devices if isinstance(self.devices, tuple) else ()
        for name in names:
            if name in SERVERS:
                raise ValueError(
                    f"{name!r} is not a device; it goes down by [[scenario.crash]] with process = {name!r}"
                )
        require(len(set(names)) == len(names), "devices", names, "names, each once")


@dataclass(frozen=True, kw_only=True)
class _Timed(Checked):
    """An entry with a time: `at_s` seconds after the run's start, or when round `at_round` opens."""

    at_s: Moment | None = None
    at_round: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.at_s is not None and self.at_round is not None:
            raise ValueError(f"at_s = {self.at_s:g} and at_round = {self.at_round}: give one of them, not both")
        if self.at_s is None and self.at_round is None:
            raise ValueError("needs at_s (seconds after the run's start) or at_round (when that round opens)")


@dataclass(frozen=True, kw_only=True)
class LateEntry(_OfDevices, _Timed):
    """`[[scenario.late]]`: devices that are switched on only at this time."""


@dataclass(frozen=True, kw_only=True)
class DropOutEntry(_OfDevices, _Timed):
    """`[[scenario.drop_out]]`: a power cut; the devices are back after `for_s` seconds."""

    for_s: Seconds


@dataclass(frozen=True, kw_only=True)
class CrashEntry(_Timed):
    """`[[scenario.crash]]`: a process of the server side dies, and is started again after `for_s` seconds."""

    process: Literal["aggregator", "broker"]
    for_s: Seconds


@dataclass(frozen=True, kw_only=True)
class OutageEntry(_OfDevices, _Timed):
    """`[[scenario.outage]]`: the devices' network is cut for `for_s` seconds; their processes keep running."""

    for_s: Seconds


@dataclass(frozen=True, kw_only=True)
class DayEntry(_OfDevices):
    """`[[scenario.day]]`: devices are switched on for `share` of every `period_s` seconds, each at its own time of day.

    A day of less than a second would be over before a device has started.
    """

    period_s: Annotated[float, Meta(ge=1, le=_LONGEST_S)]
    share: Annotated[float, Meta(gt=0, lt=1)]


@dataclass(frozen=True, kw_only=True)
class SlowDiskEntry(_OfDevices):
    """`[[scenario.slow_disk]]`: the highest write speed of the device's store, in 10^6 bytes per second."""

    write_mb_s: Annotated[float, Meta(gt=0, le=100_000)]


@dataclass(frozen=True, kw_only=True)
class OutOfMemoryEntry(_OfDevices):
    """`[[scenario.out_of_memory]]`: the device's process gets this limit instead of its board's memory."""

    memory_mib: Annotated[int, Meta(ge=1, le=1 << 20)]


@dataclass(frozen=True, kw_only=True)
class ScenarioSection(Checked):
    """`[scenario]`: any number of each kind of entry, none by default."""

    late: Annotated[tuple[LateEntry, ...], _Many] = ()
    drop_out: Annotated[tuple[DropOutEntry, ...], _Many] = ()
    crash: Annotated[tuple[CrashEntry, ...], _Many] = ()
    outage: Annotated[tuple[OutageEntry, ...], _Many] = ()
    day: Annotated[tuple[DayEntry, ...], _Many] = ()
    slow_disk: Annotated[tuple[SlowDiskEntry, ...], _Many] = ()
    out_of_memory: Annotated[tuple[OutOfMemoryEntry, ...], _Many] = ()
