"""Computes features of images with a fixed graph of the task: once for each image, before any training.

The graph is a program from the network like the others, and must follow the same rules; its constants may be larger,
because its weights are part of it. Each image is processed alone: with several images, a graph could mix one image into
the features of the others, but with the unit `record` an image may change only its own gradient.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime

from hushfleet.data.samples import FeatureSamples, Samples
from hushfleet.errors import GraphRefused
from hushfleet.learning.graph_safety import ValueFacts, check_graph
from hushfleet.learning.graph_session import open_session, that_gives_back
from hushfleet.learning.graph_shapes import MEMORY_BYTES, check_cost
from hushfleet.progress import doing
from hushfleet.user_files import read_cached, write_cached
from hushfleet.wire.format.spec import MAX_GRAPH_BYTES, FeatureSpec, Shape

_BLOCK = 32  # samples in memory


def check_features(graph: bytes, spec: FeatureSpec, *, memory_bytes: int = MEMORY_BYTES) -> None:
    """Raises `GraphRefused` unless the graph may run here, and its inputs and outputs match `spec`."""
    facts = check_graph(graph, max_bytes=MAX_GRAPH_BYTES, max_initializer_bytes=MAX_GRAPH_BYTES)
    for which, found, name, shape in (
        ("inputs", facts.inputs, "x", spec.image_shape),
        ("outputs", facts.outputs, "features", (spec.count,)),
    ):
        value = found.get(name, ValueFacts("", ()))
        fits = value.dtype == "float32" and isinstance(value.shape[0], str) and value.shape[1:] == shape
        if len(found) != 1 or not fits:
            raise GraphRefused(
                f"the {which} of the graph of features are {dict(found)}, not {name!r} float32 [batch, "
                f"{', '.join(map(str, shape))}]"
            )
    # Constants in bytes become floats when the graph is loaded.
    check_cost(facts, batch=1, memory_bytes=memory_bytes - 4 * facts.initializer_bytes)


class FeatureGraph:
    """`Samples -> FeatureSamples` with ONNX Runtime. Graph and session are released after each use, to save memory.

    :param graph: returns an ONNX file that `check_features` accepted.
    :param input_shape: that of the network, which takes the first features in it; None: all, as `(count, 1, 1)`.
    :param loaded: called when the graph is loaded, before it runs.
    :param stays: whether the session stays for the next samples; its free memory does not.
    :param cache: a folder where features are stored, with a hash of their inputs as key; none by default.
    """

    def __init__(
        self,
        graph: Callable[[], bytes],
        spec: FeatureSpec,
        *,
        input_shape: Shape | None = None,
        threads: int = 1,
        cache: Path | None = None,
        loaded: Callable[[], None] = lambda: None,
        stays: bool = False,
    ) -> None:
        self._stays, self._session = stays, None
        self._graph = graph
        self._spec = spec
        self._input_shape = input_shape
        self._threads = threads
        self._cache = cache
        self._loaded = loaded

    def of(self, samples: Samples, *, skipped: list[str] | None = None) -> FeatureSamples:
        """Returns the samples with features in place of images. Raises `GraphRefused` if ONNX Runtime fails.

        :param skipped: the list that receives a text for each sample without features, which is left out; None: it is
            an error.
        """
        shape = (len(samples), self._spec.count, 1, 1)
        path = None if self._cache is None else self._cache / f"{self._key(samples)}.f32"
        data = None if path is None else read_cached(path)
        if data is not None and len(data) == 4 * shape[0] * shape[1]:
            features = np.frombuffer(data, np.float32).reshape(shape)
            return FeatureSamples.of(features, samples, self._input_shape, None)
        features = self.computed(samples, skips=skipped is not None)
        made = FeatureSamples.of(features, samples, self._input_shape, skipped)
        if path is not None and len(made) == len(samples):
            with contextlib.suppress(OSError):  # after an error they are computed again next time
                write_cached(path, features.tobytes())
        return made

    def computed(self, samples: Samples, *, skips: bool) -> np.ndarray:
        """Computes float32 features `[n, count, 1, 1]`; NaN where ONNX Runtime fails, if this `skips` a sample."""
        features = np.empty((len(samples), self._spec.count, 1, 1), np.float32)
        if not len(samples):
            return features
        session = self._session
        if session is None:
            session = open_session(self._graph(), threads=self._threads, fold=False)  # weights in bytes stay in bytes
            self._loaded()
        if self._stays:
            self._session, self._graph = session, bytes  # the file is not read again
        with doing("features of images", total=len(samples)) as work:
            for place in range(len(samples)):
                if not place % _BLOCK:  # sound may still be in its files
                    block = samples.take(slice(place, place + _BLOCK))
                    block = replace(block, images=np.asarray(block.images))
                options = that_gives_back() if self._stays and place + 1 == len(samples) else None
                try:
                    features[place] = _run(session, block.take(slice(place % _BLOCK, place % _BLOCK + 1)), options)[0]
                except GraphRefused:
                    if not skips:
                        raise
                    features[place] = np.nan
                work.count()
        return features

    def _key(self, samples: Samples) -> str:
        """Returns the hex digest of everything that the features depend on."""
        digest = hashlib.sha256(self._spec.graph.digest)
        form = "each alone", onnxruntime.__version__, samples.images.shape, samples.mean, samples.std
        digest.update(repr(form).encode())
        for each in samples.images:  # sound may still be in its files
            digest.update(each.tobytes())
        return digest.hexdigest()


def _run(session: onnxruntime.InferenceSession, samples: Samples, options: onnxruntime.RunOptions | None) -> np.ndarray:
    """Returns features `[n, count, 1, 1]`. Raises `GraphRefused`."""
    try:
        found: np.ndarray = session.run(["features"], {"x": samples.x}, options)[0]
    except Exception as error:  # the binding raises its own class for every kind of failure
        raise GraphRefused(f"ONNX Runtime cannot compute features: {error}") from error
    return found[:, :, None, None]
