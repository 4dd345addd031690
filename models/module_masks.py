"""Replaces a network's dropout by masks that the caller draws, one for each sample.

These are dropout: modules such as `nn.Dropout`; stochastic depth (`DropPath` of timm and transformers,
`StochasticDepth` of torchvision); the functions such as `F.dropout`; and the dropout of attention's weights.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hushfleet.wire.format.spec import DropoutSpec

ENTRIES, CHANNELS, SAMPLES = range(3)
"""What a mask keeps or drops: single entries, whole channels, or all of a sample."""
_FUNCTIONS = {F.dropout: ENTRIES, F.dropout1d: CHANNELS, F.dropout2d: CHANNELS, F.dropout3d: CHANNELS}
_CHANNELWISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_DEPTH = ("DropPath", "StochasticDepth")  # each library has its own class


class _Use(NamedTuple):
    """One use of dropout in a run."""

    shape: tuple[int, ...]
    rate: float
    drops: int

    def spec(self, axis: int, rows: int) -> DropoutSpec:
        """:param axis: the axis that grows with the batch, by `rows` for each sample."""
        rest = self.shape[:axis] + self.shape[axis + 1 :]
        kept = {ENTRIES: len(rest), CHANNELS: 1, SAMPLES: 0}[self.drops]
        shape = (rows,) * (rows > 1) + rest[:kept] + (1,) * (len(rest) - kept)
        return DropoutSpec(shape or (1,), self.rate)


@dataclass
class DropoutMasks:
    """The masks that a network takes, and those of the current call.

    :param places: of each mask, the axis of the batch, and how many rows of it belong to a sample.
    :param by_function: whether a function would draw one of them, so that calls are watched.
    """

    specs: tuple[DropoutSpec, ...] = ()
    places: tuple[tuple[int, int], ...] = ()
    by_function: bool = False
    _is_watched: bool = False
    _given: list[Tensor] = field(default_factory=list)
    _uses: list[_Use] | None = None

    def applied(self, x: Tensor, rate: float, drops: int) -> Tensor:
        """Returns `x` times its mask, or `x` if this call has none."""
        if self._uses is not None:
            self._uses.append(_Use(tuple(x.shape), rate, drops))
        if not self._given:
            return x
        axis, rows = self.places[len(self.places) - len(self._given)]
        mask = self._given.pop(0)
        if rows > 1:
            mask = mask.reshape(-1, *mask.shape[2:])
        return x * (mask.movedim(0, axis) if axis else mask)

    @contextlib.contextmanager
    def given(self, masks: list[Tensor]) -> Iterator[None]:
        """Within it, the network takes these masks; with none, nothing is dropped."""
        self._given = masks
        with _Watch(self) if self.by_function or self._is_watched else contextlib.nullcontext():
            yield

    def learn(self, module: nn.Module, few: Tensor, many: Tensor) -> Tensor:
        """Runs the network in training on two batches of different sizes, and learns where it drops what.

        :return: the outputs for `few`. Raises `ValueError` if a dropped tensor belongs to no sample.
        """
        found, outputs, self._is_watched = [], None, True
        for batch in (few, many):
            self._uses = []
            with self.given([]):
                result = module(batch)
            outputs = result if outputs is None else outputs
            found.append(self._uses)
        self._uses, self._is_watched = None, False
        for one, two in zip(*found, strict=True):
            axes = [axis for axis, sizes in enumerate(zip(one.shape, two.shape, strict=True)) if len(set(sizes)) > 1]
            if len(axes) != 1 or one.shape[axes[0]] % len(few):
                raise ValueError(f"it drops entries of a tensor {list(one.shape)} in which no axis is the batch's")
            self.places += ((axes[0], one.shape[axes[0]] // len(few)),)
            self.specs += (one.spec(*self.places[-1]),)
        assert outputs is not None
        return outputs


class MaskedDropout(nn.Module):
    """Replaces a dropout module; `p` and `drop_prob` are its rate, which other modules read."""

    def __init__(self, rate: float, drops: int, masks: DropoutMasks) -> None:
        super().__init__()
        self.p = self.drop_prob = rate
        self.drops, self.masks = drops, masks

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x` times its mask."""
        return self.masks.applied(x, self.p, self.drops)


def replacement(module: nn.Module, masks: DropoutMasks) -> MaskedDropout | None:
    """Returns what replaces a dropout module; None for other modules."""
    is_depth = type(module).__name__ in _DEPTH
    if not is_depth and not isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
        return None
    rate = float(getattr(module, "p", None) or getattr(module, "drop_prob", None) or 0)
    mean_is_kept = getattr(module, "scale_by_keep", True) and getattr(module, "mode", "row") == "row"
    if rate == 0 or (is_depth and not mean_is_kept):
        return None
    drops = SAMPLES if is_depth else CHANNELS if isinstance(module, _CHANNELWISE) else ENTRIES
    return MaskedDropout(rate, drops, masks)


class _Watch(TorchFunctionMode):
    """Gives the masks to the functions that would draw random numbers."""

    def __init__(self, masks: DropoutMasks) -> None:
        super().__init__()
        self.masks = masks

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.tolist:  # while a gradient is traced, it ends the process
            raise TypeError("tolist() asks for the value of a tensor")
        if function in _FUNCTIONS:
            return self._dropped(_FUNCTIONS[function], *args, **kwargs)
        if function is F.scaled_dot_product_attention and (kwargs.get("dropout_p") or args[4:5] > (0,)):
            return self._attended(*args, **kwargs)
        if function is F.multi_head_attention_forward:
            with self:
                return _MULTI_HEAD(*args, **kwargs)
        return function(*args, **kwargs)

    def _dropped(self, drops: int, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return self._applied(x, p, drops) if training and p > 0 else x

    def _applied(self, x: Tensor, rate: float, drops: int) -> Tensor:
        self.masks.by_function = True
        return self.masks.applied(x, rate, drops)

    def _attended(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Computes what PyTorch's documentation of `scaled_dot_product_attention` says."""
        if enable_gqa:
            k, v = (each.repeat_interleave(q.shape[-3] // each.shape[-3], -3) for each in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self._applied(scores.softmax(-1), dropout_p, ENTRIES) @ v


# Its own body asks for a watch again, and would never end.
_body: Any = F.multi_head_attention_forward
_MULTI_HEAD = types.FunctionType(
    _body.__code__, {**vars(F), "has_torch_function": lambda _: False}, argdefs=_body.__defaults__
)
