"""Defines `Method`, a value that lists the parts of a method. The author of a method writes such a value.

`hushfleet.methods.task_method` binds it to a task, for the code that runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from hushfleet.errors import BadInput
from hushfleet.methods.local import Sgd
from hushfleet.methods.personal import Personal
from hushfleet.methods.server import ServerHalf
from hushfleet.methods.stages import (
    ClipWhole,
    Gaussian,
    NumberReport,
    Stage,
    Transform,
    check_stages,
)
from hushfleet.schema import Checked
from hushfleet.wire.format.spec import PrivacySpec

LearningRate = Annotated[float, Meta(gt=0, lt=100)]
Momentum = Annotated[float, Meta(ge=0, lt=1)]
BatchSize = Annotated[int, Meta(ge=1, le=65536)]
Epochs = Annotated[int, Meta(ge=1, le=1000)]
Weight = Annotated[float, Meta(ge=0, le=1000)]
Temperature = Annotated[float, Meta(ge=0.001, le=1000)]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Checked):
    """Local training, common to all methods.

    :param optimizer: `adam` (beta 0.9, 0.999, epsilon 1e-8), `adamw`, or `sgd`; its state is reset each round.
    :param learning_rate: of the optimizer, and the largest of a schedule.
    :param momentum: of `sgd`.
    :param weight_decay: of the optimizer, as in PyTorch: `sgd` and `adam` add this multiple of the parameters to their
        gradient, and `adamw` takes the learning rate times this multiple from the parameters before a step.
    :param schedule: of the learning rate from round to round, as in PyTorch with a step a round: `constant`; `cosine`,
        which falls to nearly 0 in the last round; or `step`.
    :param warmup_rounds: before the schedule, round r of these has r / (warmup_rounds + 1) of the learning rate.
    :param step_rounds: of `step`: after each so many rounds the learning rate is multiplied by `step_factor`.
    :param step_factor: of `step`.
    :param batch_size: samples per step; the last batch of an epoch may be smaller. With privacy unit `record` batches
        are Poisson samples, and this is the divisor of their sums.
    :param accumulate: a step takes the mean gradient of so many batches, computed one after the other: the steps of
        batches that are so many times larger, with the memory of one.
    :param local_epochs: number of passes over the device's samples in a round.
    :param local_steps: number of steps in a round instead, drawn as in epochs; 0: whole epochs.
    """

    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    learning_rate: LearningRate = 1e-3
    momentum: Momentum = 0.0
    weight_decay: Annotated[float, Meta(ge=0, lt=100)] = 0.0
    schedule: Literal["constant", "cosine", "step"] = "constant"
    warmup_rounds: Annotated[int, Meta(ge=0, le=1000000)] = 0
    step_rounds: Annotated[int, Meta(ge=0, le=1000000)] = 0
    step_factor: Annotated[float, Meta(gt=0, le=1)] = 0.1
    batch_size: BatchSize = 16
    accumulate: Annotated[int, Meta(ge=1, le=1024)] = 1
    local_epochs: Epochs = 1
    local_steps: Annotated[int, Meta(ge=0, le=1000000)] = 0

    @property
    def step_size(self) -> int:
        """The number of samples of an optimizer step."""
        return self.batch_size * self.accumulate

    @property
    def is_plain(self) -> bool:
        """Whether a step moves by the same multiple of its gradient in each round."""
        varies = self.schedule != "constant" or self.warmup_rounds
        return self.optimizer == "sgd" and not (self.momentum or self.weight_decay or varies)

    def rate_in(self, round: int, rounds: int) -> float:
        """Returns the learning rate of round 1, 2, ... of `rounds`; a function of these numbers and the task alone."""
        past = round - self.warmup_rounds - 1
        if past < 0:
            return self.learning_rate * round / (self.warmup_rounds + 1)
        if self.schedule == "cosine":
            return self.learning_rate * (1 + math.cos(math.pi * past / max(1, rounds - self.warmup_rounds))) / 2
        return self.learning_rate * self.step_factor ** (past // self.step_rounds if self.schedule == "step" else 0)

    rules = {
        "method.momentum-needs-sgd": (
            lambda config: config.momentum and config.optimizer != "sgd",
            "momentum = {momentum!r}: must be 0 unless optimizer = 'sgd'",
        ),
        "method.adamw-needs-decay": (
            lambda config: config.optimizer == "adamw" and not config.weight_decay,
            "optimizer = 'adamw' needs weight_decay, for example 0.01, PyTorch's default; without it take 'adam'",
        ),
        "method.step-rounds-need-step": (
            lambda config: (config.step_rounds > 0) != (config.schedule == "step"),
            "step_rounds = {step_rounds}: must be above 0 with schedule = 'step', and 0 with others; here it is "
            "{schedule!r}",
        ),
    }


def _given(config: TrainingConfig, *names: str) -> dict[str, str]:
    """Returns the settings of these names that differ from their defaults, in words; empty if none does."""
    values = [(name, getattr(config, name)) for name in names]
    given = [f"{name} = {value!r}" for name, value in values if value != getattr(TrainingConfig, name)]
    return {"given": " and ".join(given)} if given else {}


@dataclass(frozen=True, kw_only=True)
class PlainSgdConfig(TrainingConfig):
    """Local training whose formulas are those of plain SGD."""

    optimizer: Literal["sgd"] = "sgd"
    learning_rate: LearningRate = 0.05
    momentum: Annotated[float, Meta(ge=0, le=0, description="0: steps are plain gradients")] = 0.0

    rules = {
        **TrainingConfig.rules,
        "method.steps-are-plain": (
            lambda config: _given(config, "weight_decay", "schedule", "warmup_rounds"),
            "{given}: must be left out, because the method's formulas are those of plain steps of one length",
        ),
    }


@dataclass(frozen=True, kw_only=True)
class CountedStepsConfig(PlainSgdConfig):
    """Local training with a number of steps that the server's formulas use: it may not depend on a device's samples."""

    local_steps: Annotated[int, Meta(ge=1, le=1000000, description="1 to 1000000, the same on all devices")] = 10

    rules = {
        **PlainSgdConfig.rules,
        "method.steps-are-counted": (
            lambda config: config.local_epochs != 1,
            "local_epochs = {local_epochs}: must be left out: each device takes local_steps = {local_steps} steps, "
            "because the server counts them, and it does not know how many samples a device has",
        ),
    }


@dataclass(frozen=True)
class Method:
    """The parts of a method.

    :param personal: which entries are the device's own, and where its training begins.
    :param training: of the shared model.
    :param stages: the processing of the update before it leaves, in this order.
    :param server: the server half.
    :param own_training: of a second model, which stays on the device as its personalized model; None: the personalized
        model is the trained shared one.
    :param takes_empty: whether a device without samples takes part, with noise alone.
    """

    personal: Personal = Personal()
    training: Sgd = Sgd()
    stages: tuple[Stage, ...] = ()
    server: ServerHalf = ServerHalf()
    own_training: Sgd | None = None
    takes_empty: bool = False

    def __post_init__(self) -> None:
        check_stages(self.stages)

    @property
    def gaussian(self) -> Gaussian | None:
        """The noise on the update, if there is any."""
        return next((stage for stage in self.stages if isinstance(stage, Gaussian)), None)

    @property
    def reads_own(self) -> bool:
        """Whether a round may start from, or use, the device's personalized model of its last round."""
        personal = type(self.personal)
        begins = any(getattr(personal, hook) is not getattr(Personal, hook) for hook in _KEEPING)
        keeps = vars(personal).get("reads_own", begins)
        return keeps or self.own_training is not None or self.training.distillation is not None

    @property
    def remembers_sent(self) -> bool:
        """Whether a device may keep a function of what it has sent, its noise included."""
        owner = next(each for each in type(self.personal).__mro__ if "remember" in vars(each))
        return bool(vars(owner).get("remembers_sent", True))

    @property
    def evaluates(self) -> bool:
        """Whether a device tests its trained model on its own samples, for a report."""
        return any(isinstance(stage, NumberReport) and stage.evaluates for stage in self.stages)

    @property
    def of_classes(self) -> bool:
        """Whether the method is defined only for targets that are classes."""
        return self.personal.of_classes or self.training.objective.distills

    @property
    def max_preference(self) -> float | None:
        """The largest multiple of the round's noise that a device may choose to add; None: it has no choice."""
        return None if self.gaussian is None else self.gaussian.max_preference

    def by_record(self) -> Method:
        """Returns this method for the unit `record`: noise moves into the training; clipping and reports are removed.

        The remaining stages transform an update that was trained on noised gradients. A second model trains without
        noise, because no part of it is ever sent.
        """
        transforms = (stage.by_record() for stage in self.stages if isinstance(stage, Transform))
        return replace(
            self,
            personal=self.personal.by_record(),
            training=self.training.by_record(),
            stages=tuple(stage for stage in transforms if stage is not None),
            takes_empty=True,
        )


_KEEPING = ("kept", "next_mask", "choose", "start", "begin")
"""The hooks by which a round begins with entries of the device's own."""
Parts = Callable[[Any, PrivacySpec, int], Method]


class Steps(NamedTuple):
    """The rounds of a task, its clip norm, and the number of leading principal components of the features in use."""

    rounds: int
    clip_norm: float
    directions: int


@dataclass(frozen=True)
class Published:
    """A method with a name, which task files and packages use.

    :param source: authors, venue, year.
    :param config: its settings in a task file.
    :param parts: lists the parts, from the configuration, the task's privacy settings and the number of rounds.
    :param steps: computes `Steps` from `devices`, `epsilon`, `delta` and perhaps `rounds`, for a task that leaves them
        out; None: the method has no rule.
    :param features: the features that a `linear` model takes if the task names none; None: the samples themselves.
    :param epoch: rises with each change of the method's results; published cells of an older one have to be run again.
    """

    name: str
    source: str
    summary: str
    config: type[TrainingConfig]
    parts: Parts
    steps: Callable[..., Steps] | None = None
    features: str | None = None
    epoch: int = 0


def published(
    name: str,
    config: type[TrainingConfig],
    *,
    source: str,
    summary: str,
    steps: Callable[..., Steps] | None = None,
    features: str | None = None,
    epoch: int = 0,
) -> Callable[[Parts], Published]:
    """Returns a decorator that turns a function that lists a method's parts into a `Published`.

    Raises `BadInput` for a configuration class whose own fields are no dataclass fields, and so no settings.
    """
    if "__dataclass_fields__" not in vars(config):
        raise BadInput(
            f"{config.__name__} is no dataclass, so its fields are no settings of {name!r}: write "
            f"@dataclass(frozen=True, kw_only=True) above class {config.__name__}(TrainingConfig)"
        )
    return lambda parts: Published(name, source, summary, config, parts, steps, features, epoch)


CLIP_AND_NOISE: tuple[Stage, ...] = (ClipWhole(), Gaussian())
"""DP-FedAvg's treatment of an update."""


def __getattr__(name: str) -> Any:
    if name == "within":
        raise BadInput(
            'within("[0, 1)", 0.9) is no longer there: write Annotated[float, Meta(ge=0, lt=1)] = 0.9, with Annotated '
            "of typing and Meta of msgspec (docs/methods.md)"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
