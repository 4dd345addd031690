"""APDP-FL: the server lowers the noise during training, and each device scales it by its own preference.

Guo, Wang, Wang, Yang, Liu, Li: "APDP-FL: Personalized Federated Learning Based on Adaptive Differential Privacy",
Symmetry 17(12), 2023 (2025). Section 4, Algorithms 1 and 2.

After each round a score of up to 100 is computed from the length of the model's step, the model's loss and accuracy on
the server's validation set, and the round number; above 50, sigma becomes p sigma. Device i adds noise to its gradients
with sigma_i = (R_i / L) sigma. The server sees only noised updates and its own, public, validation images, so the score
costs no privacy. The ledger of each device counts the noise that it added, and its budget stops it (section 4.2 counts
one standard device and stops all). A task's `privacy.epsilon` is the cost of all rounds at the first sigma; if sigma
falls, the cost is higher.

DP-FL of the paper's tables is `decay = 1` without preferences; DP-FedProx is the same with `mu` above 0.

Reading: the score of the step's length is 2 (1 - g_t / g_max), at most 1: "the opposite of the ratio plus 1", "limited
to no more than 100 %". Signs and brackets of the formula are missing in the available copy. `step_score = "plain"` is
1 - g_t / g_max, the words without the 2; `"clamped"` is 2 (1 - 2 g_t / g_max) between 0 and 1, which has a place for
each symbol that is printed. g_max is the largest step so far, as in the formula; the text once mentions
a mean.
Reading: the third weight is 25 in the formula and 35 in the text; only 25 makes the weights add up to 100.
Reading: the accuracy's condition sums four accuracies and divides by five; the missing one of round t - 2 is added,
because the text says "the last five times". Before five rounds this part is 0.
Reading: without a validation set the parts of loss and accuracy are 0, and only the other two parts lower the noise.
Reading: L is 1, so a preference is R_i / L. The paper gives no details of the "normal distributions" of R_i; a
simulation draws them around 1 (`privacy.preference_std`).
Reading: eta, the server's learning rate, is not printed; 1 gives the mean of the sent values.

With privacy unit `record`, Algorithm 2: gradients of subsets of d records are clipped to C (line 7), added up, noised
by 2 C N(0, sigma_i^2) and divided by r (line 10).
Reading: d is not printed; a subset is one record, which makes it DP-SGD (`hushfleet.privacy.record`). With
`subset_size` = d > 1, "each batch b" as the text has it, line 10 sums the clipped mean gradient of its batch over all r
records x.
Proof: adding or removing a record moves the sum by at most C, so noise of 2 C sigma_i is a Gaussian mechanism of
multiplier 2 sigma_i (replacing a record moves it by 2 C: multiplier sigma_i, as in Theorem 1). A task for the paper's
sigma therefore sets `noise_multiplier` = 2 sigma, and this is charged. With d > 1 a record may reverse the gradient of
its batch, which counts d times: it moves the sum by 2 C d, so sigma_i / d is charged, far less than in Theorem 1.
Deviation: with d > 1 each record draws its batch by itself, so that one record moves no other; a batch has about d.
Reading: r, "the sample size", is `batch_size`, for any share of the data that `privacy.sample_rate` puts into a batch.
Algorithm 2 as printed takes one step per iteration on all the data: sample_rate = 1, local_steps = E, batch_size =
the records of a device.
Reading: "q" of section 6 is the noise reduction p of section 4; the sampling parameter q of Theorem 1 and delta are not
printed. No setting of Theorem 1 with q = 0.01, 0.05 or 0.1, delta = 1e-5, 1/600 or 0.01, and 1 or 10 clients gives the
six printed numbers of rounds (63, 76; 72, 80; 88, 96).
Deviation: batches are Poisson samples and their number is the same for all devices, so that the charge is known.

With the privacy unit `device`, schedule and preferences apply to DP-FedAvg's noised update, unlike in the paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from hushfleet.array_api import Array, np
from hushfleet.methods.local import GradientRule, Pull, Sgd
from hushfleet.methods.method import Method, TrainingConfig, Weight, published
from hushfleet.methods.server import ClosedRound, ServerArrays, ServerHalf
from hushfleet.methods.stages import ClipWhole, Gaussian
from hushfleet.schema import Share
from hushfleet.wire.format.spec import PrivacySpec

STEP_WEIGHT, LOSS_WEIGHT, ACCURACY_WEIGHT, ROUND_WEIGHT = 35.0, 20.0, 25.0, 20.0
PASS_MARK = 50.0
StepScore = Literal["doubled", "plain", "clamped"]
_STEP_SCORES = {"doubled": (2, 1), "plain": (1, 1), "clamped": (2, 2)}
"""a and b of a score a (1 - b g_t / g_max)."""
_ACCURACIES = 5


@dataclass(frozen=True, kw_only=True)
class APDPFLConfig(TrainingConfig):
    """Settings of APDP-FL.

    :param decay: p, the factor of sigma after a round with a score above 50; 1 keeps sigma.
    :param server_learning_rate: eta of Algorithm 1, line 10.
    :param mu: weight of a proximal term, for the paper's DP-FedProx.
    :param step_score: how the length of a step counts in the score: `doubled`, at most 1, `plain`, or `clamped`.
    :param subset_size: d of Algorithm 2: number of records that are clipped together.
    :param max_preference: a device may add up to this many times the standard noise; the aggregator refuses more,
        because the larger the declared noise is, the farther an update may move the model.
    """

    max_preference: Annotated[float, Meta(ge=1, le=1000)] = 5.0
    decay: Share = 0.9
    server_learning_rate: Annotated[float, Meta(gt=0, le=100)] = 1.0
    mu: Weight = 0.0
    step_score: StepScore = "doubled"
    subset_size: Annotated[int, Meta(ge=1, le=100000)] = 1


@published(
    "apdp-fl",
    APDPFLConfig,
    source="Guo et al., Symmetry 17(12), 2025",
    summary="noise that falls as training goes on, and that each device scales by its own preference",
)
def apdp_fl(config: APDPFLConfig, privacy: PrivacySpec, rounds: int) -> Method:
    return Method(
        training=Sgd(GradientRule(subset=config.subset_size), penalties=(Pull(config.mu),)),
        stages=(ClipWhole(), Gaussian(max_preference=config.max_preference)),
        server=FallingNoise(
            privacy.noise_multiplier, config.decay, config.server_learning_rate, rounds, config.step_score
        ),
    )


@dataclass(frozen=True)
class FallingNoise(ServerHalf):
    """The mean, times a learning rate; sigma is multiplied by `decay` after each round with a score above 50."""

    noise_multiplier: float
    decay: float
    learning_rate: float
    rounds: int
    step_score: StepScore = "doubled"

    @property
    def lowers_noise(self) -> bool:
        return self.decay < 1

    def aggregate(self, state: ServerArrays, global_params: Array, sums: Array, weights: Array) -> Array:
        return super().aggregate(state, global_params, self.learning_rate * sums, weights)

    def initial(self, seed: int) -> ServerArrays:
        return {
            "noise_multiplier": np.array(self.noise_multiplier),
            "longest_step": np.array(0.0),
            "loss": np.array(math.nan),
            "accuracies": np.full(_ACCURACIES, math.nan),  # the newest last
        }

    def controls(self, state: ServerArrays, round: int) -> dict[str, float]:
        return {"noise_multiplier": float(state["noise_multiplier"])}

    def advance(self, state: ServerArrays, closed: ClosedRound) -> ServerArrays:
        step = float(np.linalg.norm(closed.after.astype(np.float64) - closed.before))
        longest = max(step, float(state["longest_step"]))
        loss = math.nan if closed.loss is None else closed.loss
        accuracy = math.nan if closed.accuracy is None else closed.accuracy
        accuracies = np.append(state["accuracies"][1:], accuracy)
        score = score_of(
            step / longest if longest > 0 else 0.0,
            loss_rose=loss > float(state["loss"]),
            accuracy_fell=bool(accuracies.mean() > accuracy),
            progress=closed.round / self.rounds,
            step_score=self.step_score,
        )
        sigma = float(state["noise_multiplier"])
        return {
            "noise_multiplier": np.array(self.decay * sigma if score > PASS_MARK else sigma),
            "longest_step": np.array(longest),
            "loss": np.array(loss),
            "accuracies": accuracies,
        }


def score_of(
    step: float, *, loss_rose: bool, accuracy_fell: bool, progress: float, step_score: StepScore = "doubled"
) -> float:
    """Returns the score of a round, section 4.1, 0 to 100.

    :param step: length of the global model's step divided by the longest one so far.
    :param progress: t / T.
    """
    whole, fall = _STEP_SCORES[step_score]
    return (
        STEP_WEIGHT * min(max(whole * (1 - fall * step), 0.0), 1.0)
        + LOSS_WEIGHT * loss_rose
        + ACCURACY_WEIGHT * accuracy_fell
        + ROUND_WEIGHT * min(2 * progress, 1.0)
    )
