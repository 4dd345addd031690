"""A model for other classes: the layers below the last stay, and each class that both tasks have keeps its outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hushfleet.data.labels import one_form
from hushfleet.errors import BadInput
from hushfleet.params import ParamLayout


def output_names(names: Sequence[str], layout: ParamLayout, *, are_inputs: bool) -> tuple[str, ...]:
    """The names by which outputs are matched: of the classes; of an autoencoder's, which are the values of a sample,
    their places.

    :param names: of the classes, or what a label of an autoencoder's task marks.
    """
    return tuple(map(str, range(layout.shapes[-1][0]))) if are_inputs else tuple(names)


def with_outputs(layout: ParamLayout, count: int) -> ParamLayout:
    """The same network with `count` outputs."""
    last = layout.layers[-1].name
    shapes = zip(layout.names, layout.shapes, strict=True)
    return ParamLayout(
        layout.names,
        tuple((count, *shape[1:]) if name.rpartition(".")[0] == last else shape for name, shape in shapes),
    )


def carry_over(
    vector: np.ndarray, names: Sequence[str], *, layout: ParamLayout, to_names: Sequence[str], softmax: bool
) -> np.ndarray:
    """The vector float32 `[d']` of `layout`, whose outputs are `to_names`, from `vector` float32 `[d]` for `names`.

    A class that has gone loses its outputs. A new one begins with the mean of the old ones in a softmax, which leaves
    the old classes' probabilities relative to each other as they were, and else with zeros.

    Raises `BadInput` for a vector of another length.
    """
    before = with_outputs(layout, len(names))
    if vector.shape != (before.size,):
        raise BadInput(f"{vector.size:,} parameters are no such network with {len(names)} outputs ({before.size:,})")
    old, new = before.unflatten(vector), np.zeros(layout.size, np.float32)
    row_of = {one_form(name): row for row, name in enumerate(names)}
    last = layout.layers[-1].name
    for name, view in layout.unflatten(new).items():
        if name.rpartition(".")[0] != last:
            view[...] = old[name]
            continue
        fresh = old[name].mean(axis=0) if softmax else 0.0
        for place, each in enumerate(to_names):
            row = row_of.get(one_form(each))
            view[place] = fresh if row is None else old[name][row]
    return new
