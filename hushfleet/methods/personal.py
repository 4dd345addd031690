"""The personal part of a model: the entries that are never sent, and the start of local training.

The public mask is a function of the sent values, so both sides compute the same mask, and it need not be sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hushfleet.array_api import Array, np
from hushfleet.errors import Malformed
from hushfleet.params import ParamLayout

if TYPE_CHECKING:
    from hushfleet.learning.own_samples import OwnSamples
    from hushfleet.methods.state import DeviceState, PrivateArrays, PublicState, RoundContext


@dataclass(frozen=True)
class Personal:
    """The base class for choosing personal entries; in the base all are shared, and training starts from the global
    model."""

    of_classes: ClassVar[bool] = False
    """Whether it is defined only for classes."""
    begins_alike: ClassVar[bool] = True
    """Whether all devices start from the global model's entries. Derived classes must set it themselves."""
    reads_own: ClassVar[bool] = False
    """Whether a round may use the personalized model of the last one. Its hooks say so for a class that does not."""
    remembers_sent: ClassVar[bool] = False
    """Whether `remember` uses what was sent; it counts as used if the class that overrides `remember` does not say."""

    @property
    def same_for_all(self) -> bool:
        """Whether all devices send the same entries for any data: then their noise adds up on each entry."""
        return True

    def check(self, layout: ParamLayout) -> None:
        """Raises `Malformed` for a network that it cannot divide."""

    def kept(self, layout: ParamLayout) -> tuple[slice, ...]:
        """Returns the personal entries of a device that has not trained yet, as spans of the vector, in rising order.

        A board's guardian knows a newcomer by them, and loads no arrays.
        """
        return ()

    def mask(self, layout: ParamLayout) -> np.ndarray:
        """Returns the same entries as bool `[d]`, True for personal ones."""
        mask = np.zeros(layout.size, dtype=bool)
        for span in self.kept(layout):
            mask[span] = True
        return mask

    def next_mask(self, public: PublicState, sent: Array, layout: ParamLayout) -> Array:
        """Returns the mask after an update. It is a pure function of the sent values.

        :param sent: `[d]`, exactly what the aggregator decodes.
        """
        return public.mask

    def choose(
        self, state: DeviceState, global_params: Array, samples: OwnSamples, layout: ParamLayout
    ) -> Array | None:
        """Returns the entries that the device keeps in this round because of its own data, bool `[d]`. Nobody else
        learns which. With the unit `record` the samples may not be used here.
        """
        return None

    def start(
        self, state: DeviceState, global_params: Array, chosen: Array | None, samples: OwnSamples, layout: ParamLayout
    ) -> Array:
        """Returns the vector that local training starts from, `[d]`, read-only. If nothing is personal, it is
        `global_params` itself, because a board has no memory for two vectors."""
        personal = state.public.mask if chosen is None else chosen
        if state.own is None or not personal.any():
            return global_params
        return np.where(personal, state.own, global_params)

    def begin(
        self, state: DeviceState, global_params: Array, chosen: Array | None, samples: OwnSamples, layout: ParamLayout
    ) -> tuple[Array, PrivateArrays]:
        """Returns `start`, and private arrays that the device keeps for its next round; for a start that is learned
        from the device's own samples."""
        return self.start(state, global_params, chosen, samples, layout), {}

    def remember(self, context: RoundContext, *, update: Array, trained: Array, sent: Array) -> PrivateArrays:
        """Returns private arrays for the next round."""
        return {}

    def by_record(self) -> Personal:
        """Returns the choice that replaces it when the training is noised."""
        return self


@dataclass(frozen=True)
class Head(Personal):
    """The last layers always stay the device's own; the others, the backbone, are shared."""

    layers: int = 1

    def check(self, layout: ParamLayout) -> None:
        """Raises `Malformed` if no layer would be left for the backbone."""
        if self.layers >= len(layout.layers):
            raise Malformed(
                f"method.head_layers = {self.layers}: must be below the network's {len(layout.layers)} layers"
            )

    def kept(self, layout: ParamLayout) -> tuple[slice, ...]:
        """Returns the entries of the head."""
        self.check(layout)
        return (slice(layout.layers[len(layout.layers) - self.layers].start, layout.size),)


@dataclass(frozen=True)
class Backbone(Head):
    """All layers except the last ones are the device's own, which is the reverse of `Head`."""

    def kept(self, layout: ParamLayout) -> tuple[slice, ...]:
        (head,) = super().kept(layout)
        return (slice(0, head.start),)
