"""Models a network link by arithmetic on times, with a seed, without sockets and without a clock.

Each direction of a link sends at a rate, and delivers after a latency and some jitter. TCP hides lost packets: an
application receives nothing for a while, and then everything in order. So loss is modelled as stalls, and the order
never changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from hushfleet.errors import BadInput

DirectionName = Literal["up", "down"]

BURST_S = 0.01

_STREAM = 0x4C494E4B
_STREAMS = ("up.jitter", "up.stalls", "down.jitter", "down.stalls")


@dataclass(frozen=True, kw_only=True)
class LinkConditions:
    """The conditions of a device's emulated link.

    :param up_mbit_s: rate from the device, 10^6 bits per second; inf: no limit. `down_mbit_s`: rate to the device.
    :param latency_ms: one way, in each direction.
    :param jitter_ms: largest additional delay of each piece of data.
    :param stall_every_s: mean seconds between stalls, in each direction; inf: never.
    :param stall_s: mean length of a stall; each is 0.5 to 1.5 times as long.
    """

    down_mbit_s: float = math.inf
    up_mbit_s: float = math.inf
    latency_ms: float = 0.0
    jitter_ms: float = 0.0
    stall_every_s: float = math.inf
    stall_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("down_mbit_s", "up_mbit_s", "stall_every_s"):
            if not getattr(self, name) > 0:
                raise BadInput(f"{name} of a link must be positive (inf: no limit), got {getattr(self, name)}")
        for name in ("latency_ms", "jitter_ms", "stall_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BadInput(f"{name} of a link must be 0 or more, and finite, got {getattr(self, name)}")

    def bytes_per_s(self, direction: DirectionName) -> float:
        return (self.up_mbit_s if direction == "up" else self.down_mbit_s) * 1e6 / 8


class Stall(NamedTuple):
    """Start and end of a stall, in seconds since the link was made."""

    begins_s: float
    ends_s: float


class Passage(NamedTuple):
    """Times at which a piece of data leaves the sender and reaches the receiver; seconds of the caller's clock."""

    sent_at: float
    delivered_at: float


def stalls(conditions: LinkConditions, direction: DirectionName, *, seed: int, device: str) -> Iterator[Stall]:
    """Yields the stalls of one direction, infinitely many or none; the same for the same arguments."""
    if math.isinf(conditions.stall_every_s) or conditions.stall_s == 0:
        return
    rng = _stream(f"{direction}.stalls", seed, device)
    at_s = 0.0
    while True:
        begins_s = at_s + rng.exponential(conditions.stall_every_s)
        at_s = begins_s + conditions.stall_s * rng.uniform(0.5, 1.5)
        yield Stall(begins_s, at_s)


def jitters(conditions: LinkConditions, direction: DirectionName, *, seed: int, device: str) -> Iterator[float]:
    """Yields the additional delay in seconds of each piece of data; the same for the same arguments."""
    rng = _stream(f"{direction}.jitter", seed, device)
    while True:
        yield rng.uniform(0.0, conditions.jitter_ms) / 1000.0


class Direction:
    """One direction of a device's link, which all its connections share.

    :param made_at: when the link was made, on the clock of `passage`'s argument `now`.
    """

    def __init__(
        self, conditions: LinkConditions, direction: DirectionName, *, seed: int, device: str, made_at: float
    ) -> None:
        self.bytes_passed = 0
        self.bytes_per_s = conditions.bytes_per_s(direction)
        self.latency_s = conditions.latency_ms / 1000.0
        # Bytes that a sender may have in flight before it must wait for an acknowledgement.
        delay_s = 2 * self.latency_s + conditions.jitter_ms / 1000.0
        self.window_bytes = 65536 + (int(self.bytes_per_s * delay_s) if math.isfinite(self.bytes_per_s) else 1 << 22)
        self._jitters = jitters(conditions, direction, seed=seed, device=device)
        self._stalls = stalls(conditions, direction, seed=seed, device=device)
        self._stall = next(self._stalls, Stall(math.inf, math.inf))
        self._made_at = made_at
        self._free_at = made_at

    def passage(self, now: float, size: int) -> Passage:
        """Sends `size` bytes that are ready at `now`; they queue behind earlier bytes.

        After a pause the first bytes are sent as if they had been ready `BURST_S` earlier, so that a sender that always
        wakes up a little late still reaches the rate.
        """
        self.bytes_passed += size
        self._free_at = max(now - BURST_S, self._free_at) + size / self.bytes_per_s
        due_at = max(now, self._free_at) + self.latency_s + next(self._jitters)
        return Passage(self._free_at, self._after_stall(due_at))

    def _after_stall(self, due_at: float) -> float:
        while due_at >= self._made_at + self._stall.ends_s:
            self._stall = next(self._stalls, Stall(math.inf, math.inf))
        stalled = due_at >= self._made_at + self._stall.begins_s
        return self._made_at + self._stall.ends_s if stalled else due_at


def _stream(name: str, seed: int, device: str) -> np.random.Generator:
    key = (_STREAM, _STREAMS.index(name), *device.encode())
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
