"""Computes secure aggregation in the fast engine as in the field, but without the masks, which cancel in every sum.

A device sends its noised integers without masks, and zeros as corrections, so that sizes stay the same; no committee is
asked. The global models equal the live engine's bit for bit; digests of updates differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import numpy as np

from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.secure.agreement import KeyAgreement
from hushfleet.secure.masking import Masked
from hushfleet.secure.membership_list import MembershipList
from hushfleet.secure.secure_round import SecureRound
from hushfleet.simulator.run_folder import Simulation
from hushfleet.wire.format.identity import Identity


class UnmaskedRound(SecureRound):
    """Omits the masks, so updates show the devices' values with their part of the noise. FOR SIMULATION ONLY."""

    def keys(self, agreement: KeyAgreement, device: str) -> tuple[bytes, ...]:
        return ()

    def masked(self, keys: Sequence[bytes], values: np.ndarray) -> Masked:
        return Masked(values, np.zeros((self.rule.may_miss, self.width), np.uint32))


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
