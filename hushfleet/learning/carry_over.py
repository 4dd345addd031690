"""Adapts a model to other classes: only the last layer changes, and classes that both tasks have keep their outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hushfleet.data.form import one_form
from hushfleet.errors import BadInput
from hushfleet.params import ParamLayout


def output_names(names: Sequence[str], layout: ParamLayout, *, are_inputs: bool) -> tuple[str, ...]:
    """Returns the names for matching outputs: the classes' names; for an autoencoder, the places of a sample's values.

    :param names: the names of the classes, or the meaning of a label in an autoencoder's task.
    """
    return tuple(map(str, range(layout.shapes[-1][0]))) if are_inputs else tuple(names)


def with_outputs(layout: ParamLayout, count: int) -> ParamLayout:
    """Returns the layout of the same network with `count` outputs."""
    last, shapes = _of_outputs(layout), zip(layout.names, layout.shapes, strict=True)
    return ParamLayout(layout.names, tuple((count, *shape[1:]) if name in last else shape for name, shape in shapes))


def _of_outputs(layout: ParamLayout) -> tuple[str, ...]:
    """Returns the names of the tensors that have a row for each output: those of the last layer, and of the one before
    it if the last layer is a bias alone (`models/linear.py`)."""
    layers = layout.layers
    is_bias = len(layers) > 1 and layers[-1].name in layout.names and len(layout.shapes[-1]) == 1
    begin = layers[-2 if is_bias else -1].start
    return tuple(name for name, place in layout.slices.items() if place.start >= begin)


def carry_over(
    vector: np.ndarray, names: Sequence[str], *, layout: ParamLayout, to_names: Sequence[str], softmax: bool
) -> np.ndarray:
    """Converts `vector` float32 `[d]` for outputs `names` to float32 `[d']` of `layout` for outputs `to_names`.

    The outputs of a removed class are dropped. With a softmax, a new class starts with the mean of the old ones, which
    does not change the old classes' probabilities relative to each other; otherwise it starts with zeros.

    Raises `BadInput` for a vector of another length.
    """
    before = with_outputs(layout, len(names))
    if vector.shape != (before.size,):
        raise BadInput(f"{vector.size:,} parameters are no such network with {len(names)} outputs ({before.size:,})")
    old, new = before.unflatten(vector), np.zeros(layout.size, np.float32)
    row_of = {one_form(name): row for row, name in enumerate(names)}
    last = _of_outputs(layout)
    for name, view in layout.unflatten(new).items():
        if name not in last:
            view[...] = old[name]
            continue
        fresh = old[name].mean(axis=0) if softmax else 0.0
        for place, each in enumerate(to_names):
            row = row_of.get(one_form(each))
            view[place] = fresh if row is None else old[name][row]
    return new
