"""Defines a compact autoencoder for vectors and windows of series: it reconstructs its input from a few numbers."""

from __future__ import annotations

import math

from hushfleet.errors import BadInput
from hushfleet.models.layers import Layered, Linear
from hushfleet.models.model import Model

CODE = 4


def autoencoder(classes: int | None = None, input_shape: tuple[int, int, int] = (40, 1, 1)) -> Model:
    """Makes two linear layers, with four numbers between them and 9 parameters per value. They learn the span of the
    principal components of all boards together (Baldi and Hornik, Neural Networks 2, 1989), which no board has to show.

    The network is small because noise grows with the number of parameters and boards have few windows; with hidden
    layers and ReLU it was worse on the pumps of `examples/machines`, with noise and without.

    :param classes: the number of values of a sample, as in `input_shape`. Raises `BadInput` for another number.
    """
    values = math.prod(input_shape)
    if classes not in (None, values):
        raise BadInput(f"model.name = 'autoencoder': {classes} outputs, and a sample has {values} values")
    code = min(CODE, max(1, values // 2))
    network = Layered(input_shape, (Linear(code, relu=False), Linear(values, relu=False)))
    return Model("autoencoder", "Hushfleet", input_shape, values, network.layout, (), network)
