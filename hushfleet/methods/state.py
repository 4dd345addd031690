"""The state that a device keeps from round to round, and the immutable context that all parts of a method get."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from hushfleet import array_api
from hushfleet.array_api import Array
from hushfleet.config.spec import PrivacySpec
from hushfleet.errors import PrivacyError
from hushfleet.methods.public_bytes import digest_of, unpacked_mask
from hushfleet.model.evaluation import Evaluation
from hushfleet.params import ParamLayout

PrivateArrays = dict[str, Array]


@dataclass(frozen=True)
class _Bits:
    """A mask as it is digested and sent; each form is made once for all states with this mask."""

    mask: Array

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
        following = PublicState(mask, self.participations + 1)
        if mask is self.mask:
            following.__dict__["_bits"] = self._bits
        return following

    def digest(self) -> bytes:
        """Returns 16 bytes: two sides with the same digest hold the same state."""
        return self._digest

    def to_bytes(self) -> bytes:
        """Encodes the number of participations and the mask."""
        return self._bytes

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
    def from_bytes(cls, data: bytes, *, size: int) -> PublicState:
        """Decodes `to_bytes`. Raises `Malformed`; never allocates more than the mask needs."""
        bits = np.unpackbits(np.frombuffer(unpacked_mask(data, size=size), np.uint8))
        return cls(bits[:size].astype(bool), struct.unpack("<I", data[:4])[0])


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
class RoundTerms:
    """The terms of a round for one device.

    :param noise_split: number of devices among which the round's noise is divided.
    :param controls: numbers that the server chose for this round and published with the plan, by name.
    :param preference: this device's privacy preference: its noise is this many times the standard noise (APDP-FL).
    """

    noise_split: int = 1
    controls: Mapping[str, float] = field(default_factory=dict)
    preference: float = 1.0


@dataclass(frozen=True)
class RoundSetting:
    """The public facts of a device's round: everything that its cost depends on."""

    layout: ParamLayout
    privacy: PrivacySpec
    terms: RoundTerms

    @property
    def clip_norm(self) -> float:
        """C of the round: the server's choice, or the task's."""
        return self.terms.controls.get("clip_norm", self.privacy.clip_norm)

    @property
    def noise_split(self) -> int:
        """The number of devices that divide the noise. Under `strict` it is 1, because the server sees each update.

        With `secure` the task sets the number of honest devices in a sum, for any participants.
        """
        if self.privacy.secure is not None:
            return self.privacy.secure.honest_devices
        return self.terms.noise_split if self.privacy.as_published else 1

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier of the round: the server's choice, or the task's."""
        return self.terms.controls.get("noise_multiplier", self.privacy.noise_multiplier)

    def preferred_multiplier(self, max_preference: float | None) -> float:
        """Returns the round's noise multiplier times the device's own preference. Raises `PrivacyError`.

        :param max_preference: the largest preference that the method allows; None: preferences are ignored.
        """
        if max_preference is None:
            return self.noise_multiplier
        if self.terms.preference > max_preference:
            raise PrivacyError(
                f"this device wants {self.terms.preference:g} times the standard noise, and the task allows "
                f"{max_preference:g} times (method.max_preference)"
            )
        return self.terms.preference * self.noise_multiplier


@dataclass(frozen=True)
class RoundContext:
    """A round of one device, as all parts of the method see it. For a cohort, arrays have a leading axis of clients.

    :param state: the device's state at the start of the round.
    :param global_params: float32 `[d]`, the global model at the start of the round.
    :param start: float32 `[..., d]`, the start of local training.
    :param chosen: bool `[..., d]`, entries that stay the device's own in this round by a choice that never leaves it.
    :param measured: accuracy and loss of the own model on the own samples after training, if a stage needs them.
    :param remembered: after training, the private arrays that the training keeps for the next round.
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

    def shared(self, update: Array) -> Array:
        """Returns `update [..., d]` with zeros where the mask is personal; `update` itself if no entry is."""
        xp = array_api.array_namespace(update)
        if not bool(xp.any(self.mask)):
            return update
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


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Returns bool `[n]`, True for the `count` largest of `values [n]`; ties go to the lower index."""
    chosen = np.zeros(len(values), dtype=bool)
    if count > 0:
        least = np.sort(values)[len(values) - count]  # argsort would take four times as long and twice the memory
        (equal,) = np.nonzero(values == least)
        chosen |= values > least
        chosen[equal[: count - np.count_nonzero(chosen)]] = True
    return chosen


def kept_count(share: float, total: int) -> int:
    """Returns `ceil(share * total)`; a product within 1e-9 above a whole number counts as this number."""
    return math.ceil(share * total - 1e-9)
