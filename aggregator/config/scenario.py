"""`[scenario]` of the task file: what goes wrong in a simulated fleet, and when.

Each entry says which devices it happens to: a number (drawn by the task's seed), a list of names, or "all".
Names are checked when the fleet is known (`schedule`), since this says nothing about its size. A time is
`at_s`, seconds after the run's start, or `at_round`, which is when that round opens. Only simulations read this
section: in the field things go wrong by themselves.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

SERVERS = ("aggregator", "broker")
_LONGEST_S = 30 * 86400.0
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_ACCEPTED = "must be how many (1 or more), a list of names such as ['device-3'], or 'all'"


def _checked_devices(value: Any) -> Any:
    if value == "all" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    if not isinstance(value, list | tuple) or not value or not all(isinstance(name, str) for name in value):
        raise ValueError(_ACCEPTED)
    for name in value:
        if name in SERVERS:
            raise ValueError(f"{name!r} is no device; it goes down by [[scenario.crash]] with process = {name!r}")
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot be a device's name; {_ACCEPTED}")
    if len(set(value)) != len(value):
        raise ValueError("each name may stand there once")
    return tuple(value)


Devices = Annotated[int | Literal["all"] | tuple[str, ...], BeforeValidator(_checked_devices)]
Seconds = Annotated[float, Field(gt=0, le=_LONGEST_S, allow_inf_nan=False)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Timed(_Entry):
    """Has a moment: `at_s` seconds after the run's start, or when round `at_round` opens."""

    at_s: Annotated[float, Field(ge=0, le=_LONGEST_S, allow_inf_nan=False)] | None = None
    at_round: Annotated[int, Field(ge=1, le=1_000_000)] | None = None

    @model_validator(mode="after")
    def _one_moment(self) -> _Timed:
        if self.at_s is not None and self.at_round is not None:
            raise ValueError(f"at_s = {self.at_s:g} and at_round = {self.at_round}: give one of them, not both")
        if self.at_s is None and self.at_round is None:
            raise ValueError("needs at_s (seconds after the run's start) or at_round (when that round opens)")
        return self


class LateEntry(_Timed):
    """`[[scenario.late]]`: devices that are switched on only then."""

    devices: Devices


class DropOutEntry(_Timed):
    """`[[scenario.drop_out]]`: a power cut; the devices are back after `for_s` seconds."""

    devices: Devices
    for_s: Seconds


class CrashEntry(_Timed):
    """`[[scenario.crash]]`: a process of the server's side dies, and is started again after `for_s` seconds."""

    process: Literal["aggregator", "broker"]
    for_s: Seconds


class OutageEntry(_Timed):
    """`[[scenario.outage]]`: the devices' network is cut for `for_s` seconds; their processes live on."""

    devices: Devices
    for_s: Seconds


class DayEntry(_Entry):
    """`[[scenario.day]]`: switched on for `share` of every `period_s` seconds, each device at its own time of day.

    A day of less than a second would be over before a device has started.
    """

    devices: Devices
    period_s: Annotated[float, Field(ge=1, le=_LONGEST_S, allow_inf_nan=False)]
    share: Annotated[float, Field(gt=0, lt=1)]


class SlowDiskEntry(_Entry):
    """`[[scenario.slow_disk]]`: the device's store writes at most this fast, in 10^6 bytes a second."""

    devices: Devices
    write_mb_s: Annotated[float, Field(gt=0, le=100_000, allow_inf_nan=False)]


class OutOfMemoryEntry(_Entry):
    """`[[scenario.out_of_memory]]`: the device's process gets this limit instead of its board's memory."""

    devices: Devices
    memory_mib: Annotated[int, Field(ge=1, le=1 << 20)]


class ScenarioSection(_Entry):
    """`[scenario]`: any number of each kind of entry, none by default."""

    late: tuple[LateEntry, ...] = ()
    drop_out: tuple[DropOutEntry, ...] = ()
    crash: tuple[CrashEntry, ...] = ()
    outage: tuple[OutageEntry, ...] = ()
    day: tuple[DayEntry, ...] = ()
    slow_disk: tuple[SlowDiskEntry, ...] = ()
    out_of_memory: tuple[OutOfMemoryEntry, ...] = ()

    @field_validator("*", mode="before")
    @classmethod
    def _list_of_tables(cls, value: Any) -> Any:
        if isinstance(value, dict):
            raise ValueError("may stand there several times, so write its heading in double brackets")
        return value
