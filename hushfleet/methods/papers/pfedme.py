"""pFedMe: a device's personalized model is pulled to its copy of the shared one, which takes steps towards it.

Dinh, Tran, Nguyen: "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1, and its public
code, CharlieDinh/pFedMe. A device takes R steps on its copy w_i of the global model, each with a batch D:

    theta = argmin l(theta; D) + lambda/2 |theta - w_i|^2, by K steps of gradient descent
    w_i <- w_i - eta lambda (w_i - theta)
    server   w <- (1 - beta) w + beta mean(w_i)

theta is the personalized model. Only the change of w_i leaves the device, clipped and noised as `[privacy]` says.

Reading: R is the number of batches, of `local_epochs` or `local_steps`.
Reading: theta begins a round at w_i, and each further batch at the last theta, as in the public code.
Reading: eta lambda (w_i - theta) is a step of the optimizer of w_i along the gradient of the Moreau envelope; the
paper's is plain SGD, the default here. The K steps on theta are always plain.
Deviation: there is no weight decay. The public code has 0.001 in the steps on theta; the paper does not say.
Deviation: with the unit `record` the K gradients of a batch are noised, and charged together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from hushfleet.array_api import Array
from hushfleet.methods.local import GradientRule, Sgd
from hushfleet.methods.method import CLIP_AND_NOISE, LearningRate, Method, TrainingConfig, published
from hushfleet.methods.server import ScaledMean
from hushfleet.wire.format.spec import PrivacySpec

if TYPE_CHECKING:
    from hushfleet.learning.batch import Batch
    from hushfleet.methods.state import PrivateArrays, RoundContext


@dataclass(frozen=True, kw_only=True)
class PFedMeConfig(TrainingConfig):
    """Settings of pFedMe; the defaults are the paper's for MNIST.

    :param lambda_: the paper's lambda.
    :param own_steps: K.
    :param own_learning_rate: of the K steps.
    :param server_learning_rate: beta.
    """

    optimizer: Literal["adam", "adamw", "sgd"] = "sgd"
    learning_rate: LearningRate = 0.005
    lambda_: Annotated[float, Meta(gt=0, le=1000)] = 15.0
    own_steps: Annotated[int, Meta(ge=1, le=1000)] = 5
    own_learning_rate: LearningRate = 0.05
    server_learning_rate: Annotated[float, Meta(gt=0, le=100)] = 1.0


@published(
    "pfedme",
    PFedMeConfig,
    source="Dinh et al., NeurIPS 2020",
    summary="a personalized model with a pull to the shared one, which takes steps towards it",
)
def pfedme(config: PFedMeConfig, privacy: PrivacySpec, rounds: int) -> Method:
    envelope = MoreauEnvelope(weight=config.lambda_, steps=config.own_steps, learning_rate=config.own_learning_rate)
    return Method(training=Sgd(envelope), stages=CLIP_AND_NOISE, server=ScaledMean(config.server_learning_rate))


@dataclass(frozen=True, kw_only=True)
class MoreauEnvelope(GradientRule):
    """lambda (w_i - theta), after some steps on theta.

    :param weight: lambda.
    :param steps: K.
    :param learning_rate: of the steps.
    """

    weight: float
    steps: int
    learning_rate: float

    @property
    def gradients(self) -> int:
        return self.steps

    def __call__(
        self, context: RoundContext, params: Array, batch: Batch, memory: PrivateArrays
    ) -> tuple[Any, Array, PrivateArrays]:
        """Returns the loss at the first theta, the gradient at w_i, and theta `[..., d]`."""
        theta, first = memory.get("theta", params), None
        for _ in range(self.steps):
            loss, gradient = batch.mean(theta)
            first = loss if first is None else first
            theta = theta - self.learning_rate * (gradient + self.weight * (theta - params))
        return first, self.weight * (params - theta), {"theta": theta}

    def own_model(self, params: Array, memory: PrivateArrays) -> Array:
        return memory.get("theta", params)
