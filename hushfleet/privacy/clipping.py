"""Clipping: the bound on what one device (or one record) can contribute.

The same code serves NumPy `[d]` on a board and PyTorch `[clients, d]` in the simulator, through the
array-API standard. Norms are computed in float64. A value that is not finite is refused, because NaN passes
every comparison and would leave unclipped. The bound is checked again on the result, so that float32
rounding can never bring a contribution above the sensitivity that the noise is scaled to.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

from hushfleet import array_api
from hushfleet.array_api import np
from hushfleet.errors import PrivacyError
from hushfleet.params import ParamLayout

# Scaling rounds each entry (factor and product) by at most 2^-23 of its value, and so the norm, too.
_ROUNDING_MARGIN = 1 - 2.0**-22
_BLOCK_ENTRIES = 1 << 20
_PIECE_ENTRIES = 1 << 15  # float64 copies of this many entries fit in a cache


def layer_norms(x: Any, layout: ParamLayout) -> Any:
    """Returns the Euclidean norm of each layer: `x [..., d]` -> float64 `[..., L]`.

    Raises `PrivacyError` if the trailing axis does not fit the layout, or a norm is not finite.

    >>> layout = ParamLayout(("a.w", "b.w"), ((2,), (1,)))
    >>> layer_norms(np.array([3.0, 4.0, 2.0]), layout).tolist()
    [5.0, 2.0]
    """
    xp = array_api.array_namespace(x)
    _check_width(x, layout)
    squares = [_sum_of_squares(x, span.start, span.stop) for span in layout.layers]
    return _finite(xp, xp.sqrt(xp.stack(squares, axis=-1)))


def clip(x: Any, clip_norm: float, *, drop: bool = False) -> Any:
    """Scales each vector of `x [..., d]` down to Euclidean norm `clip_norm`, if it is above; same dtype.

    A vector within the bound is returned unchanged, so the zero vector stays zero. A bound of inf clips
    nothing. Raises `PrivacyError` for a bound that is not positive, or a value that is not finite.

    :param drop: a vector for which `can_clip` is False is replaced by zero.

    >>> clip(np.array([3.0, 4.0]), 1.0).round(6).tolist()
    [0.6, 0.8]
    """
    xp = array_api.array_namespace(x)
    bound = float(clip_norm)
    if not bound > 0:
        raise PrivacyError(f"a clip norm must be above zero, got {clip_norm!r}")
    norms = xp.sqrt(_sum_of_squares(x, 0, x.shape[-1]))
    if drop and not bool(xp.all(can_clip(norms, bound))):
        kept = can_clip(norms, bound)
        x, norms = xp.where(kept[..., None], x, xp.zeros_like(x)), xp.where(kept, norms, xp.zeros_like(norms))
    bounds = xp.full_like(_finite(xp, norms), bound)
    clipped = x * xp.astype(clip_factors(norms, bounds), x.dtype)[..., None]
    _check_bound(xp, xp.sqrt(_sum_of_squares(clipped, 0, x.shape[-1])), bounds)
    return clipped


def clipped_sum(gradients: Iterable[Any], clip_norm: float, out: Any) -> Any:
    """Writes the sum of single records' gradients, each clipped to `clip_norm`, into `out`, float64 `[..., d]`.

    A gradient that is not finite counts as zero: otherwise, the party that chose the model could see which records
    cause one.

    :param gradients: `[..., d]` of one record, or `[..., k, d]` of several.
    """
    xp = array_api.array_namespace(out)
    out[...] = 0
    for gradient in gradients:
        clipped = gradient if math.isinf(clip_norm) else clip(gradient, clip_norm, drop=True)
        out += clipped if clipped.ndim == out.ndim else xp.sum(clipped, axis=-2, dtype=out.dtype)
    return out


def scale(x: Any, norm: float) -> Any:
    """Scales each vector of `x [..., d]`, up or down, to Euclidean norm `norm`, except for rounding; same dtype.

    The zero vector stays zero. Raises `PrivacyError` as `clip` does, and if `norm` is inf.

    >>> scale(np.array([0.3, 0.4]), 1.0).round(6).tolist()
    [0.6, 0.8]
    """
    xp = array_api.array_namespace(x)
    if not 0 < norm < math.inf:
        raise PrivacyError(f"a norm to scale to must be above zero and finite, got {norm!r}")
    norms = _finite(xp, xp.sqrt(_sum_of_squares(x, 0, x.shape[-1])))
    # First scale to about 1: a tiny vector's factor would overflow float32.
    unit = x / xp.astype(xp.where(norms > 0, norms, xp.ones_like(norms)), x.dtype)[..., None]
    factors = scale_factors(xp.sqrt(_sum_of_squares(unit, 0, x.shape[-1])), norm)
    scaled = unit * xp.astype(factors, x.dtype)[..., None]
    _check_bound(xp, xp.sqrt(_sum_of_squares(scaled, 0, x.shape[-1])), xp.full_like(norms, norm))
    return scaled


def scale_factors(norms: Any, norm: float) -> Any:
    """Returns the factors with which `scale` brings vectors of norms of about 1 to `norm`.

    :param norms: float64 `[...]`.
    """
    xp = array_api.array_namespace(norms)
    return norm / xp.where(norms > 0, norms, xp.ones_like(norms)) * _ROUNDING_MARGIN


def clip_layers(x: Any, layout: ParamLayout, clip_norms: Any) -> Any:
    """Clips each layer of `x [..., d]` to its own bound (FedGLP-ADP, Eq. 13); same dtype.

    :param clip_norms: `[L]` or `[..., L]`, above zero.

    Raises `PrivacyError` as `clip` does.

    >>> layout = ParamLayout(("a.w", "b.w"), ((2,), (1,)))
    >>> clip_layers(np.array([3.0, 4.0, 2.0]), layout, np.array([1.0, 5.0])).round(6).tolist()
    [0.6, 0.8, 2.0]
    """
    xp = array_api.array_namespace(x)
    norms = layer_norms(x, layout)
    bounds = xp.asarray(clip_norms, dtype=xp.float64, device=array_api.device(x))
    if bounds.shape[-1:] != (len(layout.layers),):
        raise PrivacyError(f"{len(layout.layers)} layers need as many clip norms, got the shape {tuple(bounds.shape)}")
    if not bool(xp.all(bounds > 0)):
        raise PrivacyError("each layer's clip norm must be above zero")
    bounds = xp.broadcast_to(bounds, norms.shape)
    factors = xp.astype(clip_factors(norms, bounds), x.dtype)
    clipped = xp.empty_like(x)
    for index, span in enumerate(layout.layers):
        clipped[..., span.start : span.stop] = x[..., span.start : span.stop] * factors[..., index, None]
    _check_bound(xp, layer_norms(clipped, layout), bounds)
    return clipped


def clip_factors(norms: Any, bounds: Any) -> Any:
    """Returns the clip factor, min(1, bound / norm), and 1 for the zero vector. A factor below 1 is made slightly
    smaller, so that float32 rounding stays within the bound.

    :param norms: float64 `[...]`.
    :param bounds: float64 `[...]`, above zero.

    >>> clip_factors(np.array([0.5, 2.0]), np.array([1.0, 1.0])).round(6).tolist()
    [1.0, 0.5]
    """
    xp = array_api.array_namespace(norms, bounds)
    finite = xp.clip(bounds, max=sys.float_info.max)
    shrunk = finite / xp.maximum(norms, finite) * _ROUNDING_MARGIN
    return xp.where(norms > bounds, shrunk, xp.ones_like(norms))


def factors_of(squares: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Returns the factors of float32 vectors, as `clip` uses them, from their sums of squares.

    Raises `PrivacyError` if a sum is not finite.
    """
    factors: np.ndarray = clip_factors(norms_of(squares), bounds).astype(np.float32)
    return factors


def norms_of(squares: np.ndarray) -> np.ndarray:
    """Returns the norms of vectors from their sums of squares. Raises `PrivacyError` if one is not finite."""
    norms: np.ndarray = _finite(np, np.sqrt(squares))
    return norms


def can_clip(norms: Any, bound: float) -> Any:
    """Returns whether vectors of these norms are finite and their clip factor is no denormal float32, too coarse.

    >>> can_clip(np.array([1.0, np.inf]), 1.0).tolist()
    [True, False]
    """
    return norms < bound * 2.0**100


def _sum_of_squares(x: Any, start: int, stop: int) -> Any:
    """Returns the sum of squares over `x[..., start:stop]` in float64, in blocks, because a full float64 copy may not
    fit."""
    if isinstance(x, np.ndarray) and x.ndim == 1 and np.issubdtype(x.dtype, np.floating):
        lefts = range(start, stop, _BLOCK_ENTRIES)
        return np.float64(sum(_sum_in_pieces(x[left : min(left + _BLOCK_ENTRIES, stop)]) for left in lefts))
    xp = array_api.array_namespace(x)
    if not xp.isdtype(x.dtype, "real floating"):
        raise PrivacyError(f"only real floating-point vectors are clipped, got {x.dtype}")
    rows = max(1, math.prod(x.shape[:-1]))
    width = max(1, _BLOCK_ENTRIES // rows)
    total = xp.zeros(x.shape[:-1], dtype=xp.float64, device=array_api.device(x))
    for left in range(start, stop, width):
        block = xp.astype(x[..., left : min(left + width, stop)], xp.float64)
        total = total + xp.sum(block * block, axis=-1)
    return total


def _sum_in_pieces(x: np.ndarray) -> np.float64:
    """Returns the sum of the squares of `x [n]`, bit by bit as NumPy sums an array of them: by halves, at multiples of
    8. It does not build that array, which is twice as large as `x`, because a board has little memory.
    """
    if len(x) <= _PIECE_ENTRIES:
        piece = x.astype(np.float64)
        piece *= piece
        return np.sum(piece)
    half = len(x) // 2
    half -= half % 8
    return _sum_in_pieces(x[:half]) + _sum_in_pieces(x[half:])


def _check_width(x: Any, layout: ParamLayout) -> None:
    if x.shape[-1] != layout.size:
        raise PrivacyError(f"a vector of {x.shape[-1]} entries does not fit a layout of {layout.size}")


def _finite(xp: Any, norms: Any) -> Any:
    if not bool(xp.all(xp.isfinite(norms))):
        raise PrivacyError(
            "a vector to be clipped has a value or a norm that is not finite; training has diverged, "
            "and nothing of it may be released: lower the learning rate"
        )
    return norms


def _check_bound(xp: Any, norms: Any, bounds: Any) -> None:
    if not bool(xp.all(norms <= bounds)):
        excess = float(xp.max(norms / bounds))
        raise PrivacyError(f"after clipping a norm is {excess!r} times its bound; it may not be released")
