"""Defines a forecast's devices and rounds: what each device has spent, and how each round went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import NamedTuple

from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.simulator.boards import BoardKind, FleetMix
from hushfleet.simulator.schedule import Schedule
from hushfleet.simulator.world.sizes import Sizes
from hushfleet.simulator.world.times import Costs, DeviceTimes, device_times

STARTS = datetime(2026, 1, 5)
"""The date on which a virtual run starts: a fixed Monday, so that a run is the same on every day it is made."""


class Arrival(NamedTuple):
    """An update that was accepted.

    :param at_s: when it was accepted.
    :param update_bytes: its predicted size.
    :param round: round that it was trained for; in buffered rounds it may be an earlier one.
    """

    device: str
    at_s: float
    update_bytes: int
    round: int


@dataclass(frozen=True)
class RoundOutcome:
    """The outcome of a round; times in virtual seconds since the run's start.

    Every member of the cohort is in one of `arrivals` (accepted in time, in this order), `late` (committed and
    charged, but not accepted), `given_up` (ended by the close before it was charged), `declined`, or `lost`
    (absent, or gone before it had committed).

    :param used: whether there were enough updates for a new global model.
    """

    round: int
    opened_s: float
    closed_s: float
    cohort: tuple[str, ...]
    arrivals: tuple[Arrival, ...]
    late: tuple[str, ...]
    given_up: tuple[str, ...]
    declined: tuple[str, ...]
    lost: tuple[str, ...]
    extensions: int
    used: bool

    @property
    def wall_s(self) -> float:
        return self.closed_s - self.opened_s


@dataclass(slots=True)
class Spent:
    """Totals of one device so far, for a forecast.

    :param up_bytes: whole packets; the same for `down_bytes`.
    :param chosen: rounds that chose the device; each is then `used`, `late`, `given_up`, `declined` or `lost`.
    :param charged: number of charged rounds by cohort size; in a forecast, key 0 counts the rounds in which the device
        answered a question.
    :param unused: the charged rounds whose update went into no model.
    """

    up_bytes: float = 0.0
    down_bytes: float = 0.0
    compute_s: float = 0.0
    on_s: float = 0.0
    chosen: int = 0
    used: int = 0
    late: int = 0
    given_up: int = 0
    declined: int = 0
    lost: int = 0
    charged: Counter[int] = field(default_factory=Counter)
    unused: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class FleetDevice:
    """A device of a forecast.

    :param kind: index of its board in the fleet's mix.
    :param board: the profile's name.
    """

    name: str
    times: DeviceTimes
    kind: int = 0
    board: str = "generic-x86"
    spent: Spent = field(default_factory=Spent)


def fleet_devices(
    prepared: PreparedTask,
    mix: FleetMix,
    *,
    names: Sequence[str],
    samples: Sequence[int],
    costs: Costs,
    sizes: Sizes,
    schedule: Schedule,
) -> list[FleetDevice]:
    """Returns new devices, in the order of `names`.

    :param samples: training samples of each device; the list is repeated if it is shorter than `names`.
    """
    config, privacy = prepared.method.config, prepared.spec.privacy

    @cache
    def times(kind: BoardKind, count: int, write_mb_s: float | None) -> DeviceTimes:
        return device_times(
            kind,
            samples=count,
            batch_size=config.batch_size,
            epochs=config.local_epochs,
            local_steps=config.local_steps * config.accumulate,
            sampled=(privacy.batches, privacy.sample_rate) if privacy.unit == "record" else None,
            costs=costs,
            sizes=sizes,
            write_mb_s=write_mb_s,
        )

    return [
        FleetDevice(
            name,
            times(
                mix[index],
                samples[index % len(samples)],
                schedule.write_mb_s.get(name),
            ),
            kind=mix.dealt[index],
            board=mix[index].profile,
        )
        for index, name in enumerate(names)
    ]
