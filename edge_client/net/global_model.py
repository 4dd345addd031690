"""The global model of a plan: kept already, made of one that is kept and the differences since, or fetched whole.

Differences are fetched into the store one after the other, and applied when all are there, one model and one
difference in memory at a time. The store then holds the new model beside the old one, so that whatever happens in
between leaves a device that can go on. Where a difference does not come or does not fit, the whole model is fetched.
"""

from __future__ import annotations

import logging

import numpy as np

from hushfleet.config.spec import BlobRef, TaskSpec
from hushfleet.edge_client.net.fetch import BlobSource
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import Malformed, WireError
from hushfleet.wire.format.difference import apply_difference
from hushfleet.wire.format.messages import BASE_BYTES, DifferenceRef, RoundPlan

MOST_ASKS = 4
"""For a difference without an answer: with the waits in between, 45 s of a link that is up."""

_log = logging.getLogger("hushfleet.edge")


class GlobalModel:
    """What the store lacks comes by `blobs`, one blob at a time."""

    def __init__(self, store: DeviceStore, blobs: BlobSource) -> None:
        self._store = store
        self._blobs = blobs
        self._whole: bytes | None = None
        """SHA-256 of the global model that differences have failed for: once for each is enough."""

    def need(self, plan: RoundPlan, spec: TaskSpec) -> bytes | None:
        """The model as it travels, float32 `[d]`; else None, and a part of it is being fetched. Raises `StoreError`."""
        model = self._store.blob(plan.global_digest)
        if model is None and plan.global_digest != self._whole:
            try:
                chain = plan.differences_from(self._store.blob_digests())
                if chain and not self._fetched(chain):
                    return None
                model = self._moved(plan, spec, chain) if chain else None
            except WireError as error:
                _log.warning("round %d: the whole global model is fetched: %s", plan.round, error)
                self._whole = plan.global_digest
        return model or self._blobs.need(BlobRef(plan.global_digest, plan.global_bytes))

    def _fetched(self, chain: tuple[DifferenceRef, ...]) -> bool:
        """Whether all are in the store; else the first that is not is being fetched. Raises `Malformed`."""
        held = self._store.blob_digests()
        lacking = next((ref for ref in chain if ref.digest not in held), None)
        if lacking is None:
            return True
        self._blobs.need(BlobRef(lacking.digest, lacking.size), most_asks=MOST_ASKS)
        return False

    def _moved(self, plan: RoundPlan, spec: TaskSpec, chain: tuple[DifferenceRef, ...]) -> bytes:
        """The kept model that the differences begin with, moved by all of them. Raises a `WireError`."""
        params = self._base(chain[0], plan.global_bytes)
        counts = [layer.size for layer in spec.model.layout.layers]
        for ref in chain:
            data = self._store.blob(ref.digest)
            if data is None:
                raise Malformed(f"the difference {ref.digest.hex()[:16]}... is damaged in the store")
            params = apply_difference(data, params, task=plan.task, counts=counts)
        model = params.astype("<f4", copy=False).tobytes()
        if BlobRef.of(model).digest != plan.global_digest:
            raise Malformed("the differences lead to another model than the plan names")
        self._store.put_blob(plan.global_digest, model)
        together = sum(ref.size for ref in chain)
        _log.info("round %d: the global model came as %d bytes of differences", plan.round, together)
        return model

    def _base(self, first: DifferenceRef, size: int) -> np.ndarray:
        for digest in self._store.blob_digests():
            data = self._store.blob(digest) if digest[:BASE_BYTES] == first.base else None
            if data is not None and len(data) == size:
                return np.frombuffer(data, "<f4").astype(np.float32, copy=False)
        raise Malformed("the model that the differences begin with is damaged in the store")
