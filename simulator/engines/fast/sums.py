"""Computes secure aggregation in the fast engine as in the field, but without the masks, which cancel in every sum.

A device's noised integers have no masks; a worker adds them up, modulo the prime, and no committee is asked. The global
models equal the live engine's bit for bit; digests of updates differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache, cached_property

import numpy as np

from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.secure.agreement import KeyAgreement
from hushfleet.secure.masking import Masked
from hushfleet.secure.membership_list import MembershipList
from hushfleet.secure.prime_field import add_into
from hushfleet.secure.secure_round import SecureRound
from hushfleet.simulator.run_folder import Simulation
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.update import read_header
from hushfleet.wire.format.update_values import LayerMagnitudes, Summed


class UnmaskedRound(SecureRound):
    """Omits the masks, so updates show the devices' values with their part of the noise, and have zeros as corrections.
    FOR SIMULATION ONLY."""

    def keys(self, agreement: KeyAgreement, device: str) -> tuple[bytes, ...]:
        return ()

    def masked(self, keys: Sequence[bytes], values: np.ndarray) -> Masked:
        return Masked(values, np.zeros((self.rule.may_miss, self.width), np.uint32))


class SummedRound(UnmaskedRound):
    """Adds up the values of a chunk of devices, and leaves them out of the updates. FOR SIMULATION ONLY."""

    @cached_property
    def total(self) -> np.ndarray:
        """The sum modulo the prime, uint32 `[length]`."""
        return np.zeros(self.length, np.uint32)

    def masked(self, keys: Sequence[bytes], values: np.ndarray) -> Masked:
        self._last = values
        return Masked(values[:0], np.zeros((0, 0), np.uint32))

    def add(self, update: bytes) -> Summed:
        """Adds the values of the last update, which is committed; returns what the aggregator knows of them."""
        add_into(self.total, self._last, self.prime)
        size = len(update) + self.sent * self.spec.bits // 8
        return Summed(read_header(update), LayerMagnitudes((), ()), size)


@cache
def nobody() -> Identity:
    """Returns a key for devices whose updates nobody signs."""
    return Identity.from_bytes(bytes(32))


def key_of(seed: int, index: int) -> Identity:
    """Makes a device's key from the run's seed, because the draw depends on the keys. FOR SIMULATION ONLY."""
    return Identity.from_bytes(hashlib.sha256(f"hushfleet simulated device|{seed}|{index}".encode()).digest())


def write_membership_list(simulation: Simulation, store: AggregatorStore) -> MembershipList:
    """Writes the membership list of the whole fleet; workers find it in the run folder."""
    keys = {row.device: row.public_key for row in store.devices()}
    devices = simulation.fleet.devices
    if len(keys) < len(devices):
        keys = {device.name: key_of(simulation.seed, device.index).public_key for device in devices}
        store.add_devices((device.name, keys[device.name], device.board, -1) for device in devices)
    membership_list = MembershipList.of(keys)
    simulation.folder.membership_list.write_bytes(membership_list.to_bytes())
    return membership_list
