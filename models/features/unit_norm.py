"""Scales a vector, a series or an image to norm 1, in place of features.

A linear layer with a bias decides the same about x and about every positive multiple of (x, 1). So if the task's mean
and deviation give all values a size of about 1, the bias is appended first and divided by the norm too: then no linear
decision about x is lost, not even one by the size of x. Otherwise the size of the values is not known, a constant could
be far larger than they are, and the bias is appended to x / |x|, as in all other features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hushfleet.at_need import at_need
from hushfleet.errors import BadInput
from hushfleet.models.features.whitening import BIAS, add_bias, add_unit, unit
from hushfleet.models.onnx_nodes import Graph
from hushfleet.wire.format.spec import MAX_SIDE, UNIT_NORM

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import functional as F
else:  # takes seconds to import, and kept features need none
    F = at_need("torch.nn.functional")

LEAST = 1e-18  # a sample with a smaller norm counts as zero; the square of a smaller float32 may be zero


@dataclass(frozen=True)
class UnitNorm:
    """Samples of (channels, height, width) with norm 1 and a bias.

    :param standardised: whether the task's mean and deviation scale the values.
    """

    image_shape: tuple[int, int, int]
    standardised: bool

    def __post_init__(self) -> None:
        if self.count > MAX_SIDE:
            raise BadInput(
                f"model.features = {UNIT_NORM!r} takes samples of at most {MAX_SIDE - 1} values, and "
                f"{' x '.join(map(str, self.image_shape))} are {self.count - 1}; for images take 'scattering', a "
                "trained network or a smaller data.input_shape, for others an ONNX file of your own with fewer features"
            )

    @property
    def count(self) -> int:
        """The number of features, with the bias."""
        return math.prod(self.image_shape) + 1

    @property
    def _bias(self) -> float:
        """The bias of a standardised sample, whose norm is about the root of the number of its values."""
        return BIAS * math.sqrt(self.count - 1)

    def __call__(self, x: Tensor) -> Tensor:
        """Computes `[n, C, H, W]` -> `[n, count]`, in the type of `x`."""
        flat = x.flatten(1)
        if self.standardised:
            return unit(F.pad(flat, (0, 1), value=self._bias), least=LEAST)
        return F.pad(unit(flat, least=LEAST), (0, 1), value=BIAS)

    def add(self, graph: Graph, x: str) -> str:
        """Adds the same function as ONNX nodes; returns the name of their result."""
        flat = graph.node("Flatten", x, axis=1)
        if self.standardised:
            return add_unit(graph, add_bias(graph, flat, self._bias), least=LEAST)
        return add_bias(graph, add_unit(graph, flat, least=LEAST))
