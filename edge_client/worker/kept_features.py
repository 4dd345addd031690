"""Keeps the features of a device's own samples in a file of its state directory, so that rounds need no ONNX Runtime.

Features are derived from private samples, and no less private: the file is as private as the store, nothing of it
leaves the board, and it has the features of exactly the samples that train. Where samples, task or software have
changed, it is written anew. A worker cannot open the file: its guardian hands it over (`process`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
from typing import TYPE_CHECKING

import numpy as np

from hushfleet.data.samples import FeatureSamples, Samples
from hushfleet.version import __version__
from hushfleet.wire.format.spec import ModelSpec

if TYPE_CHECKING:
    from hushfleet.learning.graph_features import FeatureGraph

_KEY_BYTES = 32


class FeaturesLacking(BaseException):
    """The file has other features than those of the present samples. No handler of a failed training takes it."""


class KeptFeatures:
    """Features `Samples -> FeatureSamples` from the file, or into it.

    The file has a SHA-256 of all that features depend on besides the samples, one of the rest, and a row a sample: the
    SHA-256 of its values, and its features, float32.

    :param makes: whether features are computed and written; otherwise `of` raises `FeaturesLacking` for others than the
        file has.
    """

    file = -1
    """The descriptor of the file, for the present job."""

    def __init__(self, *, makes: bool) -> None:
        self.makes = makes

    def of_task(self, model: ModelSpec, graph: FeatureGraph | None) -> KeptFeatures:
        """Returns itself, for the features of this model.

        :param graph: computes them, if this `makes` some.
        """
        assert model.features is not None
        self._spec, self._graph, self._input_shape = model.features, graph, model.input_shape
        runtime = importlib.util.find_spec("onnxruntime")
        origin = None if runtime is None else runtime.origin
        changed = None if origin is None else os.stat(origin).st_mtime_ns
        form = self._spec.graph.digest, self._spec.count, model.mean, model.std, __version__, origin, changed
        self._key = hashlib.sha256(repr(form).encode()).digest()
        return self

    def of(self, samples: Samples, *, skipped: list[str] | None = None) -> FeatureSamples:
        """Returns the samples with features in place of images; see `FeatureSamples.of`."""
        digests = [hashlib.sha256(image.tobytes()).digest() for image in samples.images]
        kept = self._read()
        if kept.keys() != set(digests):
            if self._graph is None:
                raise FeaturesLacking
            lacking = [place for place, digest in enumerate(digests) if digest not in kept]
            computed = self._graph.computed(samples.take(np.array(lacking, np.int64)), skips=skipped is not None)
            kept |= {digests[place]: row.ravel() for place, row in zip(lacking, computed, strict=True)}
            with contextlib.suppress(OSError):  # a full disk: the file is not whole, and the task trains without it
                self._write({digest: kept[digest] for digest in digests})
        features = np.empty((len(digests), self._spec.count, 1, 1), np.float32)
        for row, digest in zip(features, digests, strict=True):
            row[:, 0, 0] = kept[digest]
        return FeatureSamples.of(features, samples, self._input_shape, skipped)

    def _read(self) -> dict[bytes, np.ndarray]:
        """Returns the rows; none if the file is of another task, or was not written to its end."""
        os.lseek(self.file, 0, os.SEEK_SET)
        with open(self.file, "rb", closefd=False) as file:
            if file.read(_KEY_BYTES) != self._key:
                return {}
            digest, rows, whole = file.read(_KEY_BYTES), dict[bytes, np.ndarray](), hashlib.sha256()
            while row := file.read(_KEY_BYTES + 4 * self._spec.count):
                whole.update(row)
                if len(row) == _KEY_BYTES + 4 * self._spec.count:
                    rows[row[:_KEY_BYTES]] = np.frombuffer(row, "<f4", offset=_KEY_BYTES)
        return rows if whole.digest() == digest else {}

    def _write(self, rows: dict[bytes, np.ndarray]) -> None:
        """Writes the rows, and what says that they are whole at the end. Raises `OSError`."""
        os.ftruncate(self.file, 0)
        os.lseek(self.file, 2 * _KEY_BYTES, os.SEEK_SET)
        whole = hashlib.sha256()
        with open(self.file, "wb", closefd=False) as file:
            for digest, features in rows.items():
                row = digest + features.astype("<f4").tobytes()
                whole.update(row)
                file.write(row)
        os.fsync(self.file)
        os.pwrite(self.file, self._key + whole.digest(), 0)
