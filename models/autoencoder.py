"""A compact autoencoder of vectors and windows of series: it gives its input back through a few numbers."""

from __future__ import annotations

import math

from hushfleet.errors import BadInput
from hushfleet.models.layers import Layered, Linear
from hushfleet.models.model import Model

CODE = 4


def autoencoder(classes: int | None = None, input_shape: tuple[int, int, int] = (40, 1, 1)) -> Model:
    """Two linear layers with four numbers between them: 9 parameters a value. It learns the span of the principal
    components of all boards together (Baldi and Hornik, Neural Networks 2, 1989), which no board has to show.

    It has no more since noise grows with the number of parameters and boards have few windows; with hidden layers and
    ReLU it was worse on the pumps of `examples/machines`, with noise and without.

    :param classes: the number of values of a sample, which `input_shape` says too. Raises `BadInput` for another.
    """
    values = math.prod(input_shape)
    if classes not in (None, values):
        raise BadInput(f"model.name = 'autoencoder': {classes} outputs, and a sample has {values} values")
    code = min(CODE, max(1, values // 2))
    network = Layered(input_shape, (Linear(code, relu=False), Linear(values, relu=False)))
    return Model("autoencoder", "Hushfleet", input_shape, values, network.layout, (), network)
