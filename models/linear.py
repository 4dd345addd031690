"""One linear layer, for fixed features: convex, small, and all that a fleet has to learn.

The bias is a tensor of its own, `prior`: for method `hush` it is the logarithm of a device's own label shares, which
the device sets and keeps. Where the features have a constant among them, that is the bias that all share.
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
    """Logits = head.weight x + prior of the flattened input; begins at zero.

    :param input_shape: of n features, (n, 1, 1).
    """
    layout = ParamLayout(("head.weight", "prior"), ((classes, math.prod(input_shape)), (classes,)))
    return Model(
        "linear", "multinomial logistic regression", input_shape, classes, layout, (), _logits, starts_at_zero=True
    )


def _logits(tensors: Mapping[str, Tensor], x: Tensor, dropout: Sequence[Tensor]) -> Tensor:
    from torch.nn import functional as F

    return F.linear(x.flatten(1), tensors["head.weight"], tensors["prior"])
