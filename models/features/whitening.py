"""Raw features made ready for one linear layer: standardised, projected, partly whitened, of norm 1, with a bias.

PCA keeps the leading directions and divides each by the square root of its standard deviation. To divide by all of it,
as whitening does, spends a head's noise on directions that say little: measured on Fashion-MNIST (100 devices of 20
images, epsilon 2), half of it gave 73 % where the whole gave 70, and as much without noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import torch
from torch import Tensor
from torch.nn import functional as F

from hushfleet.models.onnx_nodes import Graph

BIAS = 0.3
POWER = 0.5
"""Of a direction's standard deviation, which it is divided by: 0 is PCA alone, 1 is whitening."""
LEVELS = 127
_LEAST_STD = 0.03  # of the largest: what public images hardly show must not be blown up
_LEAST_NORM = 1e-6
_BLOCK = 64  # columns that are floats at the same time on a board


@dataclass(frozen=True, eq=False)
class Whitening:
    """`raw -> raw @ matrix * scale + offset`, in bytes: a float's precision changes no accuracy, and weighs four times.

    :param matrix: int8 `[raw, kept]`.
    :param scale: float32 `[kept]`.
    :param offset: float32 `[kept]`.
    """

    matrix: np.ndarray
    scale: np.ndarray
    offset: np.ndarray

    @property
    def count(self) -> int:
        """The number of features, with the bias."""
        return len(self.scale) + 1

    @classmethod
    def fit(cls, raw: np.ndarray, kept: int) -> Whitening:
        """From raw features float64 `[n, raw]` of public images, n > kept.

        Float64 and rounding to bytes make it the same wherever it is fitted.
        """
        mean, std = raw.mean(0), raw.std(0)
        std = np.maximum(std, _LEAST_STD * std.max())
        z = (raw - mean) / std
        values, vectors = np.linalg.eigh(z @ z.T / len(z))
        values, vectors = values[::-1][:kept], vectors[:, ::-1][:, :kept]
        matrix = z.T @ vectors / np.sqrt(len(z) * values) / values ** (POWER / 2) / std[:, None]
        return cls.of(matrix, mean)

    @classmethod
    def of(cls, matrix: np.ndarray, mean: np.ndarray) -> Whitening:
        """`(raw - mean) @ matrix`, rounded to bytes, with the sign of each column as makes its largest entry positive.

        :param matrix: float64 `[raw, kept]`.
        :param mean: float64 `[raw]`.
        """
        largest = np.take_along_axis(matrix, np.abs(matrix).argmax(0)[None], 0)[0]
        scale = largest / LEVELS  # with its sign, which eigenvectors leave open
        whole = np.rint(matrix / scale).astype(np.int8)
        return cls(whole, scale.astype(np.float32), (-(mean @ (whole * scale))).astype(np.float32))

    def __call__(self, raw: Tensor) -> Tensor:
        """Features `[n, count]` of raw ones `[n, raw]`."""
        matrix, scale, offset = (torch.from_numpy(array).to(raw) for array in (self.matrix, self.scale, self.offset))
        return unit_with_bias(raw @ matrix * scale + offset)

    def add(self, graph: Graph, raw: str) -> str:
        """The same as ONNX nodes; the name of their result."""
        starts = range(0, self.matrix.shape[1], _BLOCK)
        blocks = [graph.constant(np.ascontiguousarray(self.matrix[:, first : first + _BLOCK])) for first in starts]
        parts = [graph.node("MatMul", raw, graph.node("Cast", block, to=1)) for block in blocks]
        scaled = graph.node("Mul", graph.node("Concat", *parts, axis=1), graph.constant(self.scale))
        return add_unit_with_bias(graph, graph.node("Add", scaled, graph.constant(self.offset)))


def unit_with_bias(features: Tensor) -> Tensor:
    """`[..., count]` -> `[..., count + 1]`: each row divided by its norm, and a constant for the bias."""
    norms = torch.linalg.vector_norm(features, dim=-1, keepdim=True).clamp_min(_LEAST_NORM)
    return F.pad(features / norms, (0, 1), value=BIAS)


def with_leading(made: bytes, directions: int, image_shape: tuple[int, int, int], count: int) -> bytes:
    """The graph `made`, whose features are of norm 1 with a bias, and before them the first `directions` of these
    alone, of norm 1 with a bias again: `[batch, directions + 1 + count]`."""
    ends, model = Graph(), onnx.load_from_string(made)
    model = onnx.compose.add_prefix(model, "whole.", rename_inputs=False)
    bounds = (ends.constant(np.array([each])) for each in (0, directions, 1))
    leading = add_unit_with_bias(ends, ends.node("Slice", "whole.features", *bounds))
    both = ends.node("Concat", leading, "whole.features", axis=1)
    return ends.appended_to(model, "x", both, image_shape, directions + 1 + count)


def add_unit_with_bias(graph: Graph, features: str) -> str:
    """Divides each row of `features [b, F]` by its norm and appends the bias; gives the result's name, `[b, F + 1]`."""
    squares = graph.node("Mul", features, features)  # as operator sets from 13 on have it
    norms = graph.node("Sqrt", graph.node("ReduceSum", squares, graph.constant(np.array([1])), keepdims=1))
    positive = graph.node("Max", norms, graph.constant(np.array([_LEAST_NORM], np.float32)))
    unit = graph.node("Div", features, positive)
    return graph.node("Pad", unit, graph.constant(np.array([0, 0, 0, 1])), graph.constant(np.array(BIAS, np.float32)))
