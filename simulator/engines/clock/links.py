"""Who has power and a network, and when: the schedule's effects on devices.

A device is linked while it is on and its network is not cut. A link that broke is tried again after
waits with full jitter, as `mqtt` does, and each attempt that finds the way still blocked fails at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from hushfleet.simulator.engines.clock.device import Device
from hushfleet.simulator.engines.clock.device_time import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, LOST_NOTICED_S
from hushfleet.simulator.engines.clock.events import EventQueue
from hushfleet.simulator.schedule import Action

if TYPE_CHECKING:
    from hushfleet.simulator.engines.clock.engine import FleetClock

_STREAM = 0x434C4B42


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """What takes time when a link breaks.

    :param lost_noticed_s: until the broker notices; 0 where a process is killed and its system closes the connection,
        as in the live engine.
    :param first_backoff_s: the first wait before a new attempt is drawn from 0 to this; likewise `longest_backoff_s`.
    """

    lost_noticed_s: float = LOST_NOTICED_S
    first_backoff_s: float = FIRST_BACKOFF_S
    longest_backoff_s: float = LONGEST_BACKOFF_S


class Links:
    """The links of the devices; tells the clock who came and went."""

    def __init__(
        self, fleet: Sequence[Device], queue: EventQueue, clock: FleetClock, *, seed: int, options: LinkOptions
    ) -> None:
        self._fleet = {device.name: device for device in fleet}
        self._queue, self._clock, self._options = queue, clock, options
        self._rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(_STREAM,))))

    def start(self, device: Device) -> None:
        """Power; the device connects at its first attempt."""
        now = self._queue.now
        device.on, device.on_since = True, now
        device.link_number += 1
        device.fresh = True
        device.down_since = now + device.times.start_s
        if not device.cut:
            self._link_from(device, device.down_since)

    def act(self, action: Action) -> None:
        """One action of the schedule, which falls due now."""
        self._queue.log("scenario", action=action.kind, target=action.target)
        device, kind = self._fleet[action.target], action.kind
        if kind == "start":
            self.start(device)
        elif kind == "mend":
            device.cut = False
            if device.on:
                self._link_from(device, self._reconnects_at(device.down_since, self._queue.now))
        elif kind == "cut":
            device.cut = True
            if device.on:
                self._break(device, power=False)
                self._miss(device, self._options.lost_noticed_s, "lost")
        else:
            device.spent.on_s += self._queue.now - device.on_since
            self._break(device, power=True)
            device.on = False
            if kind == "stop" and not device.cut:
                self._miss(device, device.times.latency_s, "sleeping")
            else:
                self._miss(device, self._options.lost_noticed_s, "lost")

    def _break(self, device: Device, *, power: bool) -> None:
        device.link_number += 1
        device.down_since = max(self._queue.now, device.down_since)  # later for one that is still starting
        was_linked, device.linked = device.linked, False
        if was_linked or power:
            self._clock.broke(device, power=power)

    def _miss(self, device: Device, after_s: float, state: Literal["lost", "sleeping"]) -> None:
        number = device.link_number

        def missed() -> None:
            if device.link_number == number and not device.linked:
                self._clock.missed(device, state)

        self._queue.at(self._queue.now + after_s, missed)

    def _link_from(self, device: Device, first_packet_at: float) -> None:
        latency_s = device.times.latency_s
        heard_at = first_packet_at + device.times.connect_s
        number = device.link_number

        def link() -> None:
            if device.link_number == number and not device.linked:
                device.linked = True
                self._clock.came(device, linked_at=heard_at - latency_s)

        self._queue.at(heard_at, link)

    def _reconnects_at(self, down_since: float, free_at: float) -> float:
        """When the first attempt is made that finds the way free."""
        at, ceiling_s = down_since, self._options.first_backoff_s
        while True:
            at += self._rng.uniform(0.0, ceiling_s)
            ceiling_s = min(2 * ceiling_s, self._options.longest_backoff_s)
            if at >= free_at:
                return at
