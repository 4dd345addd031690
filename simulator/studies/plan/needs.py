"""Computes the needs of a fleet of method `hush` by formulas: rounds, noise, bytes and time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hushfleet.aggregator.planning.advice import Question
from hushfleet.aggregator.planning.gain_table import GainTable, gain_table
from hushfleet.errors import BadInput
from hushfleet.firmware_profiles import Board
from hushfleet.methods.hush_rule import rule
from hushfleet.privacy.accountant import epsilon
from hushfleet.privacy.noise_for import noise_multiplier_for
from hushfleet.privacy.ring import least_bits
from hushfleet.privacy.ring_length import chosen_length
from hushfleet.privacy.step import Step
from hushfleet.secure.committee import committee_rule
from hushfleet.secure.prime_field import PRIMES

HEADER_BYTES = 400  # signature, header and messages around an update or an answer
MEMBERSHIP_LIST_BYTES = 48  # a device in the membership list: its name and its key
DIFFERENCE_BITS = 3.2  # per value of an encoded model difference, with steps of half a standard deviation of noise
ROUND_S = 0.05
"""CPU seconds of one core of generic-x86 for a round without transfers: five steps on the head, noise, masks, store.
Rounded up: without masks it is 2 ms."""


@dataclass(frozen=True)
class Needs:
    """The needs of a fleet; bytes are for one device.

    :param directions: number of leading principal components for the shared head; None: they have no order.
    :param noise_multiplier: noise multiplier of a sum, over the honest devices.
    :param share_std: standard deviation of the noise that one device adds, in clip norms.
    :param bits: bits of a value on the wire; 0: the update is not masked.
    :param up: bytes of an update per round.
    :param answer: mean bytes of a committee answer per round; the device is not a member in each round.
    :param down: bytes of the global model per round.
    :param once: bytes of the feature extractor, the membership list and the first model, received once.
    :param epsilon_exchange: epsilon for replacing a device's data by others; epsilon is for adding or removing them.
    """

    rounds: int
    clip_norm: float
    directions: int | None
    noise_multiplier: float
    share_std: float
    epsilon_exchange: float
    values: int
    bits: int
    members: int
    up: float
    answer: float
    down: float
    once: float

    @property
    def total_up(self) -> float:
        return self.rounds * (self.up + self.answer)

    @property
    def total_down(self) -> float:
        return self.rounds * self.down + self.once


def needs(asked: Question, table: GainTable | None = None) -> Needs:
    """Returns the needs of a fleet. Raises `BadInput` or `PrivacyError` if there are too few devices for secure
    aggregation.

    :param table: gain table; by default the package's own.
    """
    steps = rule(devices=asked.counted, epsilon=asked.epsilon, delta=asked.delta)
    multiplier = noise_multiplier_for(epsilon=asked.epsilon, delta=asked.delta, steps=steps.rounds)
    features = feature_figures(asked, table)
    count = int(features["count"])
    given = min(steps.directions + 1, count) if asked.have_order else count
    values = asked.classes * given
    bits, members, up, answer, honest = 0, 0, values * 3.06 / 8, 0.0, 1
    if not asked.local:
        honest = asked.honest_devices
        length = chosen_length(values)
        bits = least_bits(
            PRIMES, noise_multiplier=multiplier, honest_devices=honest, devices=asked.devices, size=length
        )
        committee = committee_rule(asked.devices, honest_fraction=asked.honest_fraction)
        if committee.packed < 1:
            raise BadInput(
                f"no committee of {asked.devices} devices can open a sum if a share of {asked.honest_fraction:g} is "
                "honest; take more devices, or a larger --honest-fraction"
            )
        width, members = committee.width(length), committee.members
        up = (length + committee.may_miss * width) * bits / 8
        answer = members / asked.devices * (width * bits / 8 + HEADER_BYTES)
    replaced = epsilon([Step(multiplier, 1.0, steps.rounds)], delta=asked.delta, adjacency="replace-one")
    return Needs(
        rounds=steps.rounds,
        clip_norm=steps.clip_norm,
        directions=given - 1 if asked.have_order else None,
        noise_multiplier=multiplier,
        share_std=multiplier / math.sqrt(honest),
        epsilon_exchange=replaced,
        values=values,
        bits=bits,
        members=members,
        up=up + HEADER_BYTES,
        answer=answer,
        down=values * DIFFERENCE_BITS / 8 + HEADER_BYTES,
        once=features["graph_bytes"] + MEMBERSHIP_LIST_BYTES * asked.devices + 4 * values,
    )


@dataclass(frozen=True)
class BoardCosts:
    """A board's work in seconds and watt-hours: for the features of its images, once, and for a round with transfers.

    Energy is the profile's active power while the board computes, and its idle power while it transfers.
    """

    board: str
    features_s: float
    round_s: float
    features_wh: float
    round_wh: float

    @classmethod
    def of(cls, board: Board, asked: Question, needed: Needs, table: GainTable | None = None) -> BoardCosts:
        """:param table: as for `needs`."""
        speed = float(board.relative_cpu_speed)
        up_s = (needed.up + needed.answer) * 8e-6 / float(board.network_up_mbit_s)
        down_s = needed.down * 8e-6 / float(board.network_down_mbit_s)
        waits_s = 8 * float(board.network_latency_ms) / 1000  # plan, ask and known, want, offer, ack
        features_s = asked.images * feature_figures(asked, table)["image_s"] / speed
        active_w, idle_w = float(board.power_active_w), float(board.power_idle_w)
        transfers_s, computes_s = up_s + down_s + waits_s, ROUND_S / speed
        return cls(
            board.name,
            features_s,
            computes_s + transfers_s,
            active_w * features_s / 3600,
            (active_w * computes_s + idle_w * transfers_s) / 3600,
        )


def feature_figures(asked: Question, table: GainTable | None = None) -> dict[str, float]:
    """Returns the figures of `benchmarks/private_gain.py`; for features without a measurement, those of scattering."""
    known = (table or gain_table()).features
    return dict(known.get(asked.measured_as) or known["scattering"])
