"""A network cut in two: its last layers are the head, the others the backbone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hushfleet.config.spec import PrivacySpec, require
from hushfleet.errors import Malformed
from hushfleet.methods.base import Array, DeviceState, Method, PublicState, TrainingConfig
from hushfleet.model.params import ParamLayout


@dataclass(frozen=True, kw_only=True)
class HeadConfig(TrainingConfig):
    """:param head_layers: how many layers at the end are the head; the others are the backbone."""

    head_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.head_layers >= 1, "head_layers", self.head_layers, "1 or more")


@dataclass(frozen=True, kw_only=True)
class HeadFirstConfig(HeadConfig):
    """Local training in whole epochs, since those say which part trains."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.local_steps == 0, "local_steps", self.local_steps, "0: head and backbone train in whole epochs")


class HeadMethod(Method):
    """Base of methods whose personal part is the head, or the backbone, for good."""

    config_class = HeadConfig
    config: HeadConfig
    personal: ClassVar[str] = "head"

    def __init__(self, config: Any, privacy: PrivacySpec, layout: ParamLayout, *, rounds: int) -> None:
        super().__init__(config, privacy, layout, rounds=rounds)
        self.head_start = head_start(layout, config.head_layers)

    def init_state(self) -> DeviceState:
        mask = np.arange(self.layout.size) >= self.head_start
        return DeviceState(PublicState(mask if self.personal == "head" else ~mask, 0))


class HeadFirst(HeadMethod):
    """Base of methods that train the head for `head_epochs`, then the backbone, each alone."""

    @property
    def head_epochs(self) -> int:
        raise TypeError(f"{type(self).__name__} does not say for how many epochs its head trains")

    def passes(self, state: DeviceState) -> Sequence[Array | None]:
        return (state.public.mask, ~state.public.mask)

    def active_passes(self, epoch: int, passes: int) -> Sequence[int]:
        return (0,) if epoch < self.head_epochs else (1,)


def head_start(layout: ParamLayout, head_layers: int) -> int:
    """Where the head begins in the flat vector. Raises `Malformed` where nothing would be left for the backbone."""
    layers = layout.layers
    if head_layers >= len(layers):
        raise Malformed(f"method.head_layers = {head_layers}: must be below the network's {len(layers)} layers")
    return layers[len(layers) - head_layers].start
