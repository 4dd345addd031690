"""Defines one linear layer for fixed features: it is convex and small, and the fleet has to learn nothing else.

The bias is a separate tensor, `prior`: for method `hush` it is the logarithm of a device's own label shares, which the
device sets and keeps. If one of the features is a constant, its weights are the bias that all devices share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hushfleet.models.model import Model
from hushfleet.params import ParamLayout

if TYPE_CHECKING:
    from torch import Tensor


def linear(classes: int = 10, input_shape: tuple[int, int, int] = (784, 1, 1)) -> Model:
    """Makes the network logits = head.weight x + prior for the flattened input x; it starts at zero.

    :param input_shape: (n, 1, 1) for n features.
    """
    layout = ParamLayout(("head.weight", "prior"), ((classes, math.prod(input_shape)), (classes,)))
    return Model(
        "linear", "multinomial logistic regression", input_shape, classes, layout, (), _logits, starts_at_zero=True
    )


def _logits(tensors: Mapping[str, Tensor], x: Tensor, dropout: Sequence[Tensor]) -> Tensor:
    from torch.nn import functional as F

    return F.linear(x.flatten(1), tensors["head.weight"], tensors["prior"])
