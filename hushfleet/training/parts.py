"""The part of the flat vector that a pass of local training moves, and clipped gradients of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hushfleet import array_api
from hushfleet.model.params import ParamLayout

Array = Any
BoundOf = Callable[[Array], Any]


class Part(NamedTuple):
    """:param mask: bool `[..., d]`, True where entries belong to it; None is the whole vector.
    :param span: the smallest range that holds all of it, for every client.
    :param fills: whether it is all of that range.
    :param layers: whether it is whole layers, one after the other.
    """

    mask: Array | None = None
    span: slice = slice(None)
    fills: bool = True
    layers: bool = True

    @classmethod
    def of(cls, mask: Array | None, layout: ParamLayout) -> Part:
        if mask is None:
            return WHOLE
        xp = array_api.array_namespace(mask)
        (places,) = xp.nonzero(xp.any(xp.reshape(mask, (-1, layout.size)), axis=0))
        if not len(places):
            return cls(mask, slice(0, 0), layers=False)
        span = slice(int(places[0]), int(places[-1]) + 1)
        fills = bool(xp.all(mask[..., span]))
        starts, stops = zip(*((layer.start, layer.stop) for layer in layout.layers), strict=True)
        return cls(mask, span, fills, fills and span.start in starts and span.stop in stops)

    def keep(self, gradient: Array) -> Array:
        """The `span` of `gradient [..., d]`, zero where entries are not of this part; in place, and a view.

        With clients `[c, d]`, those are the first of the mask's.
        """
        inside = gradient[..., self.span]
        if not self.fills:
            inside *= self.rows(gradient)
        return inside

    def rows(self, array: Array) -> Array:
        """The mask's `span`, for the clients of `array [d]` or `[c, d]`: the first ones."""
        return self.mask[..., self.span] if array.ndim == 1 else self.mask[: len(array), self.span]


WHOLE = Part()


def mean_of_clipped(each: Array, sizes: Array, bound_of: BoundOf, part: Part, out: Array) -> Array:
    """The mean over samples of `part` of their gradients, each clipped; zero on the rest.

    :param each: single gradients `[..., B, d]`, zero where a client has no more samples; they are overwritten.
    :param sizes: how many samples there are, `[...]`.
    :param bound_of: from norms `[..., B]` of the parts to their bound, a number or `[..., 1]`.
    :param out: `[..., d]`, where the mean is written.
    """
    xp = array_api.array_namespace(each)
    inside = each[..., part.span]
    if not part.fills:
        inside *= part.rows(out)[..., None, :]
    norms = xp.sqrt(xp.vecdot(inside, inside))
    factors = xp.astype(_factors(norms, bound_of(norms), xp) / xp.asarray(sizes)[..., None], each.dtype)
    out[...] = 0
    out[..., part.span] = xp.matmul(factors[..., None, :], inside)[..., 0, :]
    return out


def _factors(norms: Array, bound: Any, xp: Any) -> Array:
    """1 / max(1, norm / bound), and 1 for a norm of 0."""
    above = norms > bound
    return xp.where(above, bound / xp.where(above, norms, xp.ones_like(norms)), xp.ones_like(norms))
