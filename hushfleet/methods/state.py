"""The state that a device keeps from round to round, and the immutable context that all parts of a method get."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hushfleet import array_api
from hushfleet.array_api import Array, np
from hushfleet.methods.cost import RoundSetting
from hushfleet.methods.public_bytes import digest_of, unpacked_mask
from hushfleet.params import ParamLayout

if TYPE_CHECKING:
    from hushfleet.learning.evaluation import Evaluation

PrivateArrays = dict[str, Array]


@dataclass(frozen=True)
class _Bits:
    """A mask as it is digested and sent; each form is made once for all states with this mask."""

    mask: Array

    @cached_property
    def shared(self) -> Array:
        shared = ~self.mask
        if isinstance(shared, np.ndarray):
            shared.setflags(write=False)
        return shared

    @cached_property
    def keeps_any(self) -> bool:
        return bool(self.mask.any())

    def counts(self, layout: ParamLayout) -> Sequence[int]:
        known = self.__dict__.get("_counts")
        if known is None or known[0] is not layout:
            layers = [int(np.count_nonzero(self.shared[span.start : span.stop])) for span in layout.layers]
            known = self.__dict__["_counts"] = layout, tuple(layers)
        return known[1]

    @cached_property
    def packed(self) -> bytes:
        return np.packbits(np.asarray(self.mask)).tobytes()

    @cached_property
    def compressed(self) -> bytes:
        return zlib.compress(self.packed, 6)


@dataclass(frozen=True)
class PublicState:
    """The state of a device that both the device and the aggregator know; a function of the sent values.

    :param mask: bool `[..., d]`, True where a parameter is personal (kept, not sent).
    :param participations: number of the device's updates so far.
    """

    mask: Array
    participations: int

    @classmethod
    def initial(cls, size: int) -> PublicState:
        """Returns the state of a device that has sent nothing: all parameters, bool `[size]`, are shared."""
        return cls(np.zeros(size, dtype=bool), 0)

    def after(self, mask: Array) -> PublicState:
        """Returns the state after one more update; an unchanged mask is not packed again."""
        return self._counted_once_more if mask is self.mask else PublicState(mask, self.participations + 1)

    def counted(self, participations: int) -> PublicState:
        """Returns the state with the same mask after so many updates."""
        state = PublicState(self.mask, participations)
        state.__dict__["_bits"] = self._bits
        return state

    @property
    def shared(self) -> Array:
        """bool `[..., d]`, True where a parameter is sent; read-only, and one array for all states with this mask."""
        return self._bits.shared

    @property
    def keeps_any(self) -> bool:
        """Whether a parameter is personal."""
        return self._bits.keeps_any

    def counts(self, layout: ParamLayout) -> Sequence[int]:
        """Returns how many parameters of each layer are sent."""
        return self._bits.counts(layout)

    def digest(self) -> bytes:
        """Returns 16 bytes: two sides with the same digest hold the same state."""
        return self._digest

    def to_bytes(self) -> bytes:
        """Encodes the number of participations and the mask."""
        return self._bytes

    @cached_property
    def _counted_once_more(self) -> PublicState:
        return self.counted(self.participations + 1)

    @cached_property
    def _digest(self) -> bytes:
        return digest_of(self._count, self._bits.packed)

    @cached_property
    def _bytes(self) -> bytes:
        return self._count + self._bits.compressed

    @property
    def _count(self) -> bytes:
        return struct.pack("<I", self.participations)

    @cached_property
    def _bits(self) -> _Bits:
        return _Bits(self.mask)

    @classmethod
    def from_bytes(cls, data: bytes, *, size: int, like: PublicState | None = None) -> PublicState:
        """Decodes `to_bytes`. Raises `Malformed`; never allocates more than the mask needs.

        :param like: a state that may have the same mask; then both share it.
        """
        packed, count = unpacked_mask(data, size=size), struct.unpack("<I", data[:4])[0]
        if like is not None and like._bits.packed == packed:
            state = like.counted(count)
        else:
            state = cls(np.unpackbits(np.frombuffer(packed, np.uint8))[:size].astype(bool), count)
            state._bits.__dict__["packed"] = packed
        state.__dict__["_bytes"] = data
        return state


@dataclass(frozen=True)
class DeviceState:
    """Everything that a device keeps from round to round. `own` and `private` never leave it.

    :param own: float32 `[..., d]`, the device's model after its last local training; None before the first.
    :param private: small arrays that the method's parts remember, by name.
    """

    public: PublicState
    own: Array | None = None
    private: PrivateArrays = field(default_factory=dict)


@dataclass(frozen=True)
class RoundContext:
    """A round of one device, as all parts of the method see it. For a cohort, arrays have a leading axis of clients.

    :param state: the device's state at the start of the round.
    :param global_params: float32 `[d]`, the global model at the start of the round.
    :param start: float32 `[..., d]`, the start of local training.
    :param chosen: bool `[..., d]`, entries that stay the device's own in this round by a choice that never leaves it.
    :param measured: accuracy and loss of the personalized model on the own samples after training, if a stage needs
        them.
    :param remembered: the private arrays that the start, and after training the training, keeps for the next round.
    :param vectors: float32 `[d]` each, the vectors that the server half published with the model, by name.
    """

    setting: RoundSetting
    state: DeviceState
    global_params: Array
    start: Array
    chosen: Array | None = None
    measured: Evaluation | None = None
    remembered: PrivateArrays = field(default_factory=dict)
    vectors: Mapping[str, Array] = field(default_factory=dict)

    @property
    def layout(self) -> ParamLayout:
        return self.setting.layout

    @property
    def mask(self) -> Array:
        return self.state.public.mask

    @property
    def personal(self) -> Array:
        """bool `[..., d]`: the device's own entries in this round, by the public mask or by its own choice."""
        return self.mask if self.chosen is None else self.chosen

    @property
    def sent(self) -> Array:
        """bool `[..., d]`: the other entries, of which most devices of a round have the same array; read-only."""
        return self.state.public.shared if self.chosen is None else ~self.chosen

    def shared(self, update: Array) -> Array:
        """Returns `update [..., d]` with zeros where the mask is personal; `update` itself if no entry is."""
        if not self.state.public.keeps_any:
            return update
        xp = array_api.array_namespace(update)
        return xp.where(self.mask, xp.zeros_like(update), update)

    def map(self, function: Callable[[Array], Array]) -> RoundContext:
        """Returns a copy with `function` applied to each array that differs between clients."""
        public = PublicState(function(self.state.public.mask), self.state.public.participations)
        own = None if self.state.own is None else function(self.state.own)
        private = {name: function(array) for name, array in self.state.private.items()}
        chosen = None if self.chosen is None else function(self.chosen)
        return replace(self, state=DeviceState(public, own, private), start=function(self.start), chosen=chosen)


def divided(numerator: Any, norm: Array) -> Array:
    """Returns numerator / norm, and 0 for a norm of 0."""
    xp = array_api.array_namespace(norm)
    return xp.where(norm > 0, numerator / xp.where(norm > 0, norm, xp.ones_like(norm)), xp.zeros_like(norm))
