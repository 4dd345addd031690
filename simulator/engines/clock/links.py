"""Simulates power and network over time: the schedule's effects on devices, broker and aggregator.

A device is linked while it is on, its network is not cut, and the broker runs. After a link breaks, the device tries to
connect again after waits with full jitter, as `mqtt` does; an attempt fails immediately while the way is still blocked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from hushfleet.simulator.engines.clock.device import ClockDevice
from hushfleet.simulator.engines.clock.events import EventQueue
from hushfleet.simulator.schedule import Action
from hushfleet.simulator.world.run import LinkOptions

if TYPE_CHECKING:
    from hushfleet.simulator.engines.clock.engine import FleetClock

_STREAM = 0x434C4B42


class Links:
    """The links of devices and aggregator to the broker; reports to the clock which of them come and go.

    `server_up`: the aggregator's process runs. `server_linked`: it is also connected.
    """

    def __init__(
        self, fleet: Sequence[ClockDevice], queue: EventQueue, clock: FleetClock, *, seed: int, options: LinkOptions
    ) -> None:
        self.server_up = True
        self.server_linked = True
        self._broker_up = True
        self._server_life = 0  # number of its process
        self._server_number = 0  # number of its connection
        self._down_since = 0.0
        self._fleet = {device.name: device for device in fleet}
        self._queue, self._clock, self._options = queue, clock, options
        self._rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(_STREAM,))))

    def start(self, device: ClockDevice) -> None:
        """Switches a device on; it connects at its first attempt."""
        now = self._queue.now
        device.on, device.on_since = True, now
        device.link_number += 1
        device.fresh = True
        device.down_since = now + device.times.start_s
        if not device.cut and self._broker_up:
            self._link_from(device, device.down_since)

    def act(self, action: Action) -> None:
        """Carries out one action of the schedule, which is due now."""
        self._queue.log("scenario", action=action.kind, target=action.target)
        starts = action.kind == "start"
        if action.target == "aggregator":
            (self._start_server if starts else self._kill_server)()
        elif action.target == "broker":
            (self._start_broker if starts else self._kill_broker)()
        else:
            self._device(self._fleet[action.target], action.kind)

    def _device(self, device: ClockDevice, kind: str) -> None:
        if kind == "start":
            self.start(device)
        elif kind == "mend":
            device.cut = False
            self._link_again(device)
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

    def _break(self, device: ClockDevice, *, power: bool) -> None:
        device.link_number += 1
        device.down_since = max(self._queue.now, device.down_since)  # later for one that is still starting
        was_linked, device.linked = device.linked, False
        if was_linked or power:
            self._clock.broke(device, power=power)

    def _miss(self, device: ClockDevice, after_s: float, state: Literal["lost", "sleeping"]) -> None:
        number = device.link_number

        def missed() -> None:
            if device.link_number == number and not device.linked and self.server_linked:
                self._clock.missed(device, state)

        self._queue.at(self._queue.now + after_s, missed)

    def _link_again(self, device: ClockDevice) -> None:
        """Connects a device again if the way is free now, for a device that had a link or was blocked."""
        if device.on and not device.cut and self._broker_up:
            self._link_from(device, self._reconnects_at(device.down_since, self._queue.now))

    def _link_from(self, device: ClockDevice, first_packet_at: float) -> None:
        latency_s = device.times.latency_s
        heard_at = first_packet_at + device.times.connect_s
        number = device.link_number

        def link() -> None:
            if device.link_number == number and not device.linked and self._broker_up:
                device.linked = True
                self._clock.link_up(device, linked_at=heard_at - latency_s)

        self._queue.at(heard_at, link)

    def _reconnects_at(self, down_since: float, free_at: float) -> float:
        """Returns when the first attempt is made after the way is free."""
        at, ceiling_s = down_since, self._options.first_backoff_s
        while True:
            at += self._rng.uniform(0.0, ceiling_s)
            ceiling_s = min(2 * ceiling_s, self._options.longest_backoff_s)
            if at >= free_at:
                return at

    def _start_broker(self) -> None:
        self._broker_up = True
        if self.server_up:
            self._connect_server(self._reconnects_at(self._down_since, self._queue.now))
        for device in self._fleet.values():
            self._link_again(device)

    def _kill_broker(self) -> None:
        self._broker_up = False
        self._down_since = self._queue.now
        if self.server_linked:
            self._queue.log("link", state="down")
        self._unlink_server()
        for device in self._fleet.values():
            if device.linked:
                self._break(device, power=False)

    def _start_server(self) -> None:
        self._server_life += 1
        life = self._server_life

        def started() -> None:
            if life == self._server_life:
                self.server_up = True
                if self._broker_up:
                    self._connect_server(self._queue.now)

        self._queue.at(self._queue.now + self._options.server_start_s, started)

    def _kill_server(self) -> None:
        self._server_life += 1
        self.server_up = False
        self._unlink_server()
        self._clock.server_went()

    def _unlink_server(self) -> None:
        self._server_number += 1
        self.server_linked = False

    def _connect_server(self, at: float) -> None:
        self._server_number += 1
        number = self._server_number

        def connect() -> None:
            if number == self._server_number and self.server_up and self._broker_up:
                self.server_linked = True
                self._clock.server_came()

        self._queue.at(at, connect)
