"""The current global model: its checkpoints, and the differences by which devices reach it from an earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hushfleet.aggregator.config.sections import WireSection
from hushfleet.aggregator.publish.differences import Differences
from hushfleet.aggregator.publish.model_step import make_difference
from hushfleet.aggregator.storage.checkpoints import Checkpoints
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.errors import StoreError
from hushfleet.model.params import ParamLayout
from hushfleet.wire.format.difference import EncodedDifference, params_digest


class NextModel(NamedTuple):
    """A model float32 `[d]` that may follow the current one, and the difference that leads to it, if one does."""

    params: np.ndarray
    digest: bytes
    difference: EncodedDifference | None


class PublishedModel:
    """`params` float32 `[d]`, read-only, and their `digest`; both are there once `load` has been called.

    :param store: keeps the differences, and the checkpoints in its folder.
    """

    params: np.ndarray
    digest: bytes

    def __init__(self, store: AggregatorStore, layout: ParamLayout) -> None:
        self.checkpoints = Checkpoints(store.folder, layout, durable=store.durable)
        self.differences = Differences(store, full_bytes=4 * layout.size)
        self._layout = layout
        self._as_bytes: bytes | None = None  # once somebody has asked for them

    def load(self, round: int, *, named: bytes | None, initial: np.ndarray) -> None:
        """The model after `round` rounds. Raises `StoreError`.

        :param named: the digest that the store has of it; None in a new run, which begins with `initial`.
        """
        if named is None and not self.checkpoints.path(0).exists():
            self.checkpoints.write(0, np.ascontiguousarray(initial, np.float32))
        params = self.checkpoints.read(round)
        digest = params_digest(params)
        if named is not None and digest != named:
            raise StoreError(f"{self.checkpoints.path(round)} is not the model that the store names; restore it")
        self._set(params, digest)
        self.differences.load(digest)

    @property
    def digests(self) -> set[bytes]:
        """SHA-256 of the model and of the differences that lead to it."""
        return {self.digest, *(difference.digest for difference in self.differences.refs)}

    def find(self, digest: bytes) -> bytes | None:
        """The model as devices download it, or a difference that leads to it, if this is its SHA-256."""
        if digest != self.digest:
            return self.differences.find(digest)
        if self._as_bytes is None:
            self._as_bytes = self.params.astype("<f4").tobytes()
        return self._as_bytes

    def step(
        self, target: np.ndarray, *, task: str, round: int, noise_stds: Sequence[float], wire: WireSection
    ) -> NextModel:
        """The old model plus a decoded difference to (about) `target`: both ways to it give a device the same bits.

        :param noise_stds: of the noise in each layer of `target`.
        """
        difference = None
        if wire.downlink != "full" and not np.array_equal(target, self.params):
            counts = [layer.size for layer in self._layout.layers]
            difference = make_difference(
                self.params, target, task=task, round=round, counts=counts, noise_stds=noise_stds, wire=wire
            )
        if difference is None:
            return NextModel(target, params_digest(target), None)
        moved = difference.header.base != difference.header.result
        return NextModel(difference.result, params_digest(difference.result), difference if moved else None)

    def write(self, round: int, following: NextModel) -> None:
        """Call it inside the transaction that closes the round with it. Raises `StoreFull`."""
        self.checkpoints.write(round, following.params)
        if following.digest != self.digest:
            self.differences.write(following.difference)

    def advance(self, round: int, following: NextModel) -> None:
        """It is the current one, now that the transaction is committed."""
        if following.digest != self.digest:
            self.differences.advance(following.difference)
        self._set(following.params, following.digest)
        self.checkpoints.drop_old(round)

    def _set(self, params: np.ndarray, digest: bytes) -> None:
        params.setflags(write=False)
        self.params, self.digest, self._as_bytes = params, digest, None
