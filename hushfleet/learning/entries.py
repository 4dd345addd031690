"""The entries of the flat vector that a part of local training moves, and clipped gradients on these entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hushfleet import array_api
from hushfleet.array_api import Array
from hushfleet.params import ParamLayout

BoundOf = Callable[[Array], Any]


class Entries(NamedTuple):
    """Entries of the flat vector that train together.

    :param mask: bool `[..., d]`, True for the entries; None is the whole vector.
    :param span: the smallest range that contains all of them, for every client.
    :param fills: whether the entries are the whole range.
    :param layers: whether they are whole layers, one after the other.
    """

    mask: Array | None = None
    span: slice = slice(None)
    fills: bool = True
    layers: bool = True

    @classmethod
    def of(cls, mask: Array | None, layout: ParamLayout) -> Entries:
        """Finds the entries that a mask selects.

        :param mask: bool `[..., d]`, True where an entry is selected; None selects all.
        """
        if mask is None:
            return ALL
        for known, entries in _recent[0]:
            if known is layout and entries.mask is mask:
                return entries
        entries = cls._of_mask(mask, layout)
        _recent[0] = ((layout, entries), *_recent[0])[:_PARTS]
        return entries

    @classmethod
    def _of_mask(cls, mask: Array, layout: ParamLayout) -> Entries:
        xp = array_api.array_namespace(mask)
        (places,) = xp.nonzero(xp.any(xp.reshape(mask, (-1, layout.size)), axis=0))
        if not len(places):
            return cls(mask, slice(0, 0), layers=False)
        span = slice(int(places[0]), int(places[-1]) + 1)
        fills = bool(xp.all(mask[..., span]))
        starts, stops = zip(*((layer.start, layer.stop) for layer in layout.layers), strict=True)
        return cls(mask, span, fills, fills and span.start in starts and span.stop in stops)

    def keep(self, gradient: Array) -> Array:
        """Returns the `span` of `gradient [..., d]`, with other entries set to zero; in place, and a view.

        With clients `[c, d]`, they are the first clients of the mask.
        """
        inside = gradient[..., self.span]
        if not self.fills:
            inside *= self.rows(gradient)
        return inside

    def alone(self, gradient: Array) -> Array:
        """Returns `gradient [..., d]` with zeros at all other entries; in place."""
        if self.mask is not None:
            self.keep(gradient)
            gradient[..., : self.span.start] = 0
            gradient[..., self.span.stop :] = 0
        return gradient

    def rows(self, array: Array) -> Array:
        """Returns the mask's `span` for the clients of `array [d]` or `[c, d]`, which are the mask's first clients."""
        assert self.mask is not None
        return self.mask[..., self.span] if array.ndim == 1 else self.mask[: len(array), self.span]


ALL = Entries()
_PARTS = 2
_recent: list[tuple[tuple[ParamLayout, Entries], ...]] = [()]
"""The last layouts and entries: the parts of many devices have the same masks, and masks are read-only."""


def mean_of_clipped(each: Array, sizes: Array, bound_of: float | BoundOf, entries: Entries, out: Array) -> Array:
    """Returns the mean over samples of their gradients on `entries`, each clipped; zero elsewhere.

    :param each: single gradients `[..., B, d]`, zero after a client's last sample; they are overwritten.
    :param sizes: number of samples, `[...]`.
    :param bound_of: the bound, a number or `[..., 1]`; or a function from norms `[..., B]` on `entries` to the bound.
    :param out: `[..., d]`, where the mean is written.
    """
    xp = array_api.array_namespace(each)
    inside = each[..., entries.span]
    if not entries.fills:
        inside *= entries.rows(out)[..., None, :]
    norms = xp.sqrt(xp.vecdot(inside, inside))
    bound = bound_of(norms) if callable(bound_of) else bound_of
    factors = xp.astype(_factors(norms, bound, xp) / xp.asarray(sizes)[..., None], each.dtype)
    out[...] = 0
    out[..., entries.span] = xp.matmul(factors[..., None, :], inside)[..., 0, :]
    return out


def _factors(norms: Array, bound: Any, xp: Any) -> Array:
    """Returns 1 / max(1, norm / bound), and 1 for a norm of 0."""
    above = norms > bound
    return xp.where(above, bound / xp.where(above, norms, xp.ones_like(norms)), xp.ones_like(norms))
