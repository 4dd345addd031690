"""Computes how long each part of a round takes on one device, from its board, its link and the costs of the work.

    plan ── model down ── stored ── steps ── clip, noise, encode ── commit ── update up ── ack

Compute time is CPU seconds of one core, scaled by the profile's relative speed. It
is an upper bound for a board in the field, whose runtime uses all cores. A store writes at the profile's rate. A link
sends at its rate after its latency, with the jitter and the stalls of its network; the overhead of radio and TCP is not
modelled. Energy is the profile's active power while computing and its idle power otherwise: an estimate from
data-sheet figures.

The constants of the protocol are listed here, each with the module that defines it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hushfleet.errors import BadInput
from hushfleet.simulator.boards import BoardKind
from hushfleet.simulator.world.hub import STEADY, Roughness
from hushfleet.simulator.world.sizes import Sizes
from hushfleet.wire.link.connection import Timing

IN_FLIGHT_UP = 20
"""Messages that a device sends before the broker must acknowledge one (`hushfleet.wire.link.mqtt.MqttLink`)."""
IN_FLIGHT_DOWN = 100
"""The same from broker to device (`hushfleet.aggregator.broker.config`)."""
CONNECT_LATENCIES = 6
"""One-way latencies from the first packet to a usable link: TCP, CONNECT and SUBSCRIBE, one round trip each
(`hushfleet.wire.link.connection.Connection`)."""
FIRST_BACKOFF_S = Timing().backoff_base_s
LONGEST_BACKOFF_S = Timing().backoff_cap_s
"""The n-th new attempt follows a random wait between 0 and first x 2^n, at most the longest (`mqtt`)."""
LOST_NOTICED_S = 90.0
"""A link that dies silently is noticed after one and a half keepalives of 60 s (MQTT 3.1.1, 3.1.2.10)."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of the work, measured once for a task (`hushfleet.simulator.world.measure`).

    `accept_s` and `close_s` are seconds of the aggregator, all others CPU seconds of one core of the board generic-x86.

    :param batch_s: for one batch of any size.
    :param sample_s: for each sample in the batch, in addition.
    :param release_s: for the rest of a device's round: clip, noise, encode, ledger.
    :param start_s: from the start of a device's process to its first packet.
    :param load_s: to start the process that trains, and to load a task's graphs in it.
    :param accept_s: to check, commit and add one update.
    :param close_s: to close a round: compute the new model and test it.
    :param pair_s: for a committee member, per device of secure aggregation.
    """

    batch_s: float
    sample_s: float
    release_s: float
    start_s: float
    load_s: float
    accept_s: float
    close_s: float
    pair_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise BadInput(f"costs: {name} = {value!r}: must be seconds, 0 or more")

    def step_s(self, batch_size: int) -> float:
        """Returns the CPU seconds of a batch of this size."""
        return self.batch_s + batch_size * self.sample_s


@dataclass(frozen=True, kw_only=True)
class DeviceTimes:
    """Seconds on one device.

    :param latency_s: one way.
    :param down_s_per_byte: on a busy link; the same for `up_s_per_byte`.
    :param start_s: from power to the first packet.
    :param load_s: to start the process that trains, with the task's graphs.
    :param steps: batches in a round.
    :param step_s: mean time of a batch.
    :param release_s: time for clip, noise and encoding after the last batch.
    :param write_s_per_byte: write time of the store.
    :param pair_s: for a committee member, per device of secure aggregation.
    """

    latency_s: float
    down_s_per_byte: float
    up_s_per_byte: float
    start_s: float
    load_s: float
    steps: int
    step_s: float
    release_s: float
    write_s_per_byte: float
    pair_s: float = 0.0
    idle_w: float
    active_w: float
    rough: Roughness = STEADY

    @property
    def train_s(self) -> float:
        return self.steps * self.step_s


def device_times(
    kind: BoardKind,
    *,
    samples: int,
    batch_size: int,
    epochs: int,
    local_steps: int = 0,
    sampled: tuple[int, float] | None = None,
    costs: Costs,
    sizes: Sizes,
    write_mb_s: float | None = None,
) -> DeviceTimes:
    """Returns the times of a device of this kind.

    :param samples: training samples of this device; `epochs` or `local_steps`: as in `TrainingConfig`.
    :param sampled: used instead for the unit `record`: batches per round, and the probability that one takes a sample.
    :param write_mb_s: write rate of the store, if a scenario slows it.
    """
    board, link = kind.board, kind.link
    batches = -(-samples // batch_size)
    epoch_s = batches * costs.batch_s + samples * costs.sample_s
    steps, parts = local_steps or batches * epochs, float(max(batches, 1))  # of an epoch
    if sampled is not None:
        steps, parts = sampled[0], 1 / sampled[1]
    speed = float(board.relative_cpu_speed)
    latency_s = link.latency_ms / 1000
    write_s = 1 / (1e6 * min(float(board.storage_write_mb_s), write_mb_s or math.inf))
    chunk = sizes.blob_wire_bytes(sizes.chunk_bytes, down=True)
    down_s = max(8e-6 / link.down_mbit_s, 2 * latency_s / (IN_FLIGHT_DOWN * chunk))
    up_s = max(8e-6 / link.up_mbit_s, 2 * latency_s / (IN_FLIGHT_UP * chunk))
    return DeviceTimes(
        latency_s=latency_s,
        down_s_per_byte=down_s,
        up_s_per_byte=up_s,
        start_s=costs.start_s / speed,
        load_s=costs.load_s / speed,
        steps=steps,
        step_s=epoch_s / parts / speed,
        release_s=costs.release_s / speed,
        write_s_per_byte=write_s,
        pair_s=costs.pair_s / speed,
        idle_w=float(board.power_idle_w),
        active_w=float(board.power_active_w),
        rough=Roughness(link.jitter_ms / 1000, link.stall_every_s, link.stall_s),
    )
