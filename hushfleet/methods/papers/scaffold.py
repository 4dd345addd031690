"""SCAFFOLD: each device corrects its steps by the difference of its gradient from the fleet's.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020, Algorithm 1 with option II. With x the global model, c the server's control, c_i the device's, K steps of the
learning rate l, and s_i the y_i - x that the device sends:

    device   y_i <- y_i - l (g_i(y_i) - c_i + c), K times;    c_i <- c_i - c - s_i / (K l)
    server   x <- x + l_g mean(s_i);    c <- c + |S|/N mean(c_i new - c_i old) = c - |S|/N (c + mean(s_i) / (K l))

Privacy: the change of a device's control, c_i new - c_i old = -c - s_i / (K l), follows from c and s_i, which the
server has. So the update alone is sent, clipped, noised and charged once; c goes to the devices with the global model.
Later updates contain the noise of s_i, so it hides no other device: secure aggregation refuses the method.

Reading: K is the same on all devices; it may not depend on their samples, because the server computes with it.
Reading: both sides compute controls from what was sent: c is the mean of all c_i, and c_i has the noise of s_i / (K l).
Deviation: with clipping or noise, s_i is the clipped and noised y_i - x. With the unit `record` the gradients are.
Deviation: an update that arrives too late is in the device's c_i and not in c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from hushfleet.array_api import Array, np
from hushfleet.methods.local import Penalty, Sgd
from hushfleet.methods.method import CLIP_AND_NOISE, CountedStepsConfig, Method, published
from hushfleet.methods.personal import Personal
from hushfleet.methods.server import ClosedRound, ScaledMean, ServerArrays
from hushfleet.methods.state import PrivateArrays, RoundContext
from hushfleet.wire.format.spec import PrivacySpec


@dataclass(frozen=True, kw_only=True)
class ScaffoldConfig(CountedStepsConfig):
    """Settings of SCAFFOLD.

    :param server_learning_rate: l_g.
    """

    server_learning_rate: Annotated[float, Meta(gt=0, le=100)] = 1.0


@published(
    "scaffold",
    ScaffoldConfig,
    source="Karimireddy et al., ICML 2020",
    summary="each step is corrected by the difference of the device's gradient from the fleet's",
)
def scaffold(config: ScaffoldConfig, privacy: PrivacySpec, rounds: int) -> Method:
    steps = privacy.batches if privacy.unit == "record" else config.local_steps
    length = steps * config.learning_rate
    training, server = Sgd(penalties=(Correction(),)), Control(config.server_learning_rate, length)
    return Method(OwnControl(length), training, CLIP_AND_NOISE, server)


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
class Control(ScaledMean):
    """Keeps c on the server; each device receives it with the global model.

    :param length: K l.
    """

    length: float = 1.0

    @property
    def vectors(self) -> tuple[str, ...]:
        return ("control",)

    def advance(self, state: ServerArrays, closed: ClosedRound) -> ServerArrays:
        control = state.get("control", np.zeros_like(closed.before))
        share = np.float32(closed.updates / closed.devices)
        return {"control": control - share * (control + closed.mean / np.float32(self.length))}
