"""The personal part of a model: the entries that are never sent, and the start of local training.

The public mask is a function of what was sent, so that both sides compute it alike and no bytes are spent on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hushfleet.array_api import Array
from hushfleet.errors import Malformed
from hushfleet.gradients.own_samples import OwnSamples
from hushfleet.methods.state import DeviceState, PrivateArrays, PublicState, RoundContext
from hushfleet.params import ParamLayout


@dataclass(frozen=True)
class Personal:
    """The base of choices of personal entries; itself all are shared, and training begins with the global model."""

    of_classes: ClassVar[bool] = False
    """Whether it is defined for classes alone."""
    begins_alike: ClassVar[bool] = True
    """Whether all devices begin with the global model's own entries. Derived classes do not inherit it."""

    @property
    def same_for_all(self) -> bool:
        """Whether all devices send the same entries, whatever they hold: then their noises add up on each."""
        return True

    def mask(self, layout: ParamLayout) -> np.ndarray:
        """bool `[d]`, True where an entry is the own of a device that has not trained yet."""
        return np.zeros(layout.size, dtype=bool)

    def next_mask(self, public: PublicState, sent: Array, layout: ParamLayout) -> Array:
        """The mask after an update. A pure function of what was sent.

        :param sent: `[d]`, exactly what the aggregator decodes.
        """
        return public.mask

    def choose(
        self, state: DeviceState, global_params: Array, samples: OwnSamples, layout: ParamLayout
    ) -> Array | None:
        """Entries that the device keeps in this round by its own data, bool `[d]`; nobody else learns which.

        With the unit `record` the samples may not be looked at here.
        """
        return None

    def start(
        self, state: DeviceState, global_params: Array, chosen: Array | None, samples: OwnSamples, layout: ParamLayout
    ) -> Array:
        """The vector that local training begins with, `[d]`, to be read only: `global_params` itself where nothing
        is personal, since a board has no room for two."""
        personal = state.public.mask if chosen is None else chosen
        if state.own is None or not personal.any():
            return global_params
        return np.where(personal, state.own, global_params)

    def remember(self, context: RoundContext, *, update: Array, trained: Array, sent: Array) -> PrivateArrays:
        """Private arrays for the next round."""
        return {}

    def by_record(self) -> Personal:
        """The choice that replaces it when the training is noised."""
        return self


@dataclass(frozen=True)
class Head(Personal):
    """The last layers are the device's own for good; the others, the backbone, are shared."""

    layers: int = 1

    def mask(self, layout: ParamLayout) -> np.ndarray:
        """The entries of the head. Raises `Malformed` if nothing would be left for the backbone."""
        if self.layers >= len(layout.layers):
            raise Malformed(
                f"method.head_layers = {self.layers}: must be below the network's {len(layout.layers)} layers"
            )
        return np.arange(layout.size) >= layout.layers[len(layout.layers) - self.layers].start


@dataclass(frozen=True)
class Backbone(Head):
    """All but the last layers are the device's own, which is the reverse of `Head`."""

    def mask(self, layout: ParamLayout) -> np.ndarray:
        return ~super().mask(layout)
