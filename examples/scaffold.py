"""SCAFFOLD: each device corrects its steps by the difference of its gradient from the fleet's, optionally with noise.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020, Algorithm 1 with option II. With x the global model, c the server's control, c_i the device's, K steps of the
learning rate l, and s_i the y_i - x that the device sends:

    device   y_i <- y_i - l (g_i(y_i) - c_i + c), K times;    c_i <- c_i - c - s_i / (K l)
    server   x <- x + l_g mean(s_i);    c <- c + |S|/N mean(c_i new - c_i old) = c - |S|/N (c + mean(s_i) / (K l))

The server's c is the vector `control`, which is sent with the global model (docs/methods.md). The change of a device's
own control, c_i new - c_i old = -c - s_i / (K l), follows from c and s_i, which the server has. So nothing is sent
beside the update, and only the update, clipped and noised once, is charged. Both sides compute with the sent update,
not with the raw one: c stays the mean of all c_i, and c_i also contains the noise of s_i, divided by K l.

Reading: K is the same on all devices, so the task sets `local_steps`; and the steps are plain SGD.
Deviation: with clipping or noise, s_i is the clipped and noised y_i - x.
Deviation: an update that arrives too late is in the device's c_i and not in c.

    hushfleet simulate examples/scaffold.toml --method examples/scaffold.py:scaffold
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from hushfleet.array_api import Array
from hushfleet.errors import BadInput
from hushfleet.methods.local import Penalty, Sgd
from hushfleet.methods.method import CLIP_AND_NOISE, Method, TrainingConfig, published
from hushfleet.methods.personal import Personal
from hushfleet.methods.server import ClosedRound, ServerArrays, ServerHalf
from hushfleet.methods.state import PrivateArrays, RoundContext
from hushfleet.schema import require
from hushfleet.wire.format.spec import PrivacySpec


@dataclass(frozen=True, kw_only=True)
class ScaffoldConfig(TrainingConfig):
    """Settings of SCAFFOLD.

    :param server_learning_rate: l_g.
    """

    server_learning_rate: Annotated[float, Meta(gt=0, le=100)] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.local_steps > 0, "local_steps", self.local_steps, "above 0: K, the same on all devices")
        require(self.optimizer == "sgd", "optimizer", self.optimizer, "'sgd', whose steps the control is made of")
        require(self.momentum == 0, "momentum", self.momentum, "0: K steps of SGD are their mean gradient")


@published(
    "scaffold",
    ScaffoldConfig,
    source="Karimireddy et al., ICML 2020",
    summary="steps corrected by control variates; updates are clipped and noised as by DP-FedAvg",
)
def scaffold(config: ScaffoldConfig, privacy: PrivacySpec, rounds: int) -> Method:
    if privacy.unit == "record":
        raise BadInput("scaffold is for privacy.unit = 'device': with 'record' a round has no fixed number of steps K")
    length = config.local_steps * config.learning_rate
    return Method(
        personal=OwnControl(length),
        training=Sgd(penalties=(Correction(),)),
        stages=CLIP_AND_NOISE,
        server=Control(length, config.server_learning_rate),
    )


@dataclass(frozen=True)
class Correction(Penalty):
    """Adds c - c_i to each gradient."""

    def add(self, context: RoundContext, params: Array, gradient: Array) -> None:
        gradient += context.vectors["control"]
        if "control" in context.state.private:
            gradient -= context.state.private["control"]


@dataclass(frozen=True)
class OwnControl(Personal):
    """Keeps c_i on the device, and no part of the model.

    :param length: K l.
    """

    length: float

    def remember(self, context: RoundContext, *, update: Array, trained: Array, sent: Array) -> PrivateArrays:
        before = context.state.private.get("control", 0)
        return {"control": before - context.vectors["control"] - sent / np.float32(self.length)}


@dataclass(frozen=True)
class Control(ServerHalf):
    """Keeps c on the server; each device receives it with the global model.

    :param length: K l.
    :param learning_rate: l_g.
    """

    length: float
    learning_rate: float

    @property
    def vectors(self) -> tuple[str, ...]:
        return ("control",)

    def aggregate(self, state: ServerArrays, global_params: Array, sums: Array, weights: Array) -> Array:
        return super().aggregate(state, global_params, self.learning_rate * sums, weights)

    def advance(self, state: ServerArrays, closed: ClosedRound) -> ServerArrays:
        control = state.get("control", np.zeros_like(closed.before))
        mean = (closed.after - closed.before) / np.float32(self.learning_rate)
        share = np.float32(closed.updates / closed.devices)
        return {"control": control - share * (control + mean / np.float32(self.length))}
