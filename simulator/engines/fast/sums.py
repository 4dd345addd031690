"""Secure sums in the fast engine: the field's own, without the masks, which cancel in every sum.

A device sends its integers with noise as they are, and zeros for corrections, so that sizes stay; nobody is asked to
answer. The global models are the live engine's, bit for bit; digests of updates are not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.secure.agreement import KeyAgreement
from hushfleet.secure.masking import Masked
from hushfleet.secure.roster import Roster
from hushfleet.secure.secure_round import SecureRound
from hushfleet.simulator.engines.fast.workers import WorkerPool
from hushfleet.simulator.run_folder import RunFolder, Simulation


class UnmaskedRound(SecureRound):
    """FOR SIMULATION ONLY: whoever sees an update sees what the device sent, with its part of the noise."""

    def masked(self, agreement: KeyAgreement, device: str, values: np.ndarray) -> Masked:
        return Masked(values, np.zeros((self.rule.may_miss, self.width), np.uint32))


class _Key(NamedTuple):
    folder: RunFolder
    device: str


def _public_key(job: _Key) -> bytes:
    path = job.folder.device(job.device).store
    with DeviceStore(path, device=job.device, durable=False) as store:
        return store.identity.public_key


def write_roster(simulation: Simulation, workers: WorkerPool, store: AggregatorStore) -> Roster:
    """Of the whole fleet, whose devices make their keys here; workers find it in the run folder."""
    folder = RunFolder(simulation.folder.path.absolute())
    keys = {row.device: row.public_key for row in store.devices()}
    devices = simulation.fleet.devices
    if len(keys) < len(devices):
        found = workers.map(_public_key, [_Key(folder, device.name) for device in devices])
        keys = {device.name: key for device, key in zip(devices, found, strict=True)}
        store.add_devices((device.name, keys[device.name], device.board, -1) for device in devices)
    roster = Roster.of(keys)
    folder.roster.write_bytes(roster.to_bytes())
    return roster
