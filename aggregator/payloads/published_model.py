"""The current global model: its checkpoints, and the differences that lead devices to it from an earlier model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hushfleet.aggregator.config.sections import WireSection
from hushfleet.aggregator.payloads.differences import Differences
from hushfleet.aggregator.payloads.model_step import make_difference
from hushfleet.aggregator.storage.checkpoints import Checkpoints
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.errors import StoreError
from hushfleet.wire.format.difference import EncodedDifference, params_digest
from hushfleet.wire.format.spec import TaskSpec


class NextModel(NamedTuple):
    """A model that may be published next.

    :param target: the model float32 `[d]` before the difference to it was rounded.
    :param published: the model and the vectors behind it, float32.
    :param digest: the digest of `published`.
    :param difference: the difference that leads to it, or None.
    """

    target: np.ndarray
    published: np.ndarray
    digest: bytes
    difference: EncodedDifference | None

    @property
    def params(self) -> np.ndarray:
        """The model, float32 `[d]`."""
        return self.published[: self.target.size]


class PublishedModel:
    """The global model and a method's vectors behind it, `published`, float32, read-only, and its `digest`.

    Both exist after `load` has been called.

    :param store: keeps the differences, and the checkpoints in its folder.
    :param spec: the task, which the checkpoints name, so that a later task can continue from one (`EarlierModel`).
    :param vectors: the names of the vectors.
    :param period: as in `PreparedTask`.
    """

    published: np.ndarray
    digest: bytes

    def __init__(self, store: AggregatorStore, spec: TaskSpec, vectors: Sequence[str] = (), *, period: int = 1) -> None:
        layout, features = spec.model.layout, spec.model.features
        about = {
            "task": spec.task,
            "classes": spec.model.class_names,
            "features": None if features is None else features.graph.digest.hex(),
            "normalisation": [spec.model.mean, spec.model.std],
            "columns": spec.model.form.columns,
            "period": period,
        }
        self.checkpoints = Checkpoints(store.folder, layout, vectors=vectors, about=about, durable=store.durable)
        self.differences = Differences(store, full_bytes=4 * layout.size * (1 + len(vectors)))
        self._layout, self._vectors = layout, vectors
        self._as_bytes: bytes | None = None  # set after the first request for them

    @property
    def first(self) -> np.ndarray:
        """The first model, float32 `[d]`, which the seed draws, or which an earlier task has left."""
        return self.checkpoints.read(0)[: self._layout.size]

    def load(self, round: int, *, named: bytes | None, initial: np.ndarray) -> None:
        """Loads the model after `round` rounds. Raises `StoreError`.

        :param named: its digest in the store; None in a new run, which begins with `initial`.
        """
        if named is None and not self.checkpoints.path(0).exists():
            zeros = np.zeros(initial.size * len(self._vectors), np.float32)
            self.checkpoints.write(0, np.concatenate([initial.astype(np.float32, copy=False), zeros]))
        published = self.checkpoints.read(round)
        digest = params_digest(published)
        if named is not None and digest != named:
            raise StoreError(f"{self.checkpoints.path(round)} is not the model that the store names; restore it")
        self._set(published, digest)
        self.differences.load(digest)

    @property
    def params(self) -> np.ndarray:
        """The model, float32 `[d]`, read-only."""
        return self.published[: self._layout.size]

    @property
    def vectors(self) -> dict[str, np.ndarray]:
        """Vectors that are published with the model, float32 `[d]`, by name."""
        return self.vectors_of(self.published)

    def vectors_of(self, published: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the vectors in `published`, float32 `[d]` each, by name."""
        parts = published.reshape(-1, self._layout.size)[1:]
        return dict(zip(self._vectors, parts, strict=True))

    @property
    def digests(self) -> set[bytes]:
        """SHA-256 of the model and of the differences that lead to it."""
        return {self.digest, *(difference.digest for difference in self.differences.refs)}

    def find(self, digest: bytes) -> bytes | None:
        """Returns the blob with this SHA-256: the model as devices download it, or a difference that leads to it."""
        if digest != self.digest:
            return self.differences.find(digest)
        if self._as_bytes is None:
            self._as_bytes = self.published.astype("<f4").tobytes()
        return self._as_bytes

    def step(
        self,
        target: np.ndarray,
        vectors: Mapping[str, np.ndarray],
        *,
        task: str,
        round: int,
        noise_stds: Sequence[float],
        wire: WireSection,
    ) -> NextModel:
        """Returns the old model plus a decoded difference to (about) `target`, so that a device gets the same bits by
        the difference and by the whole model.

        Each layer is rounded separately: the vectors do not change the model, unless there is no difference.

        :param vectors: the vectors that are published with it.
        :param noise_stds: standard deviation of the noise in each layer of `target`.
        """
        difference = None
        wanted = np.concatenate([target, *(vectors[name] for name in self._vectors)]) if self._vectors else target
        if wire.downlink != "full" and not np.array_equal(wanted, self.published):
            counts = [layer.size for layer in self._layout.layers] * (1 + len(self._vectors))
            stds = [*noise_stds, *[0.0] * (len(counts) - len(noise_stds))]
            difference = make_difference(
                self.published, wanted, task=task, round=round, counts=counts, noise_stds=stds, wire=wire
            )
        if difference is None:
            return NextModel(target, wanted, params_digest(wanted), None)
        moved = difference.header.base != difference.header.result
        result = difference.result
        return NextModel(target, result, params_digest(result), difference if moved else None)

    def write(self, round: int, following: NextModel) -> None:
        """Writes the model `following`; call it in the transaction that closes its round. Raises `StoreFull`."""
        self.checkpoints.write(round, following.published)
        if following.digest != self.digest:
            self.differences.write(following.difference)

    def advance(self, round: int, following: NextModel) -> None:
        """Makes a model the current one; call it after the transaction is committed."""
        if following.digest != self.digest:
            self.differences.advance(following.difference)
        self._set(following.published, following.digest)
        self.checkpoints.drop_old(round)

    def _set(self, published: np.ndarray, digest: bytes) -> None:
        published.setflags(write=False)
        self.published, self.digest, self._as_bytes = published, digest, None
