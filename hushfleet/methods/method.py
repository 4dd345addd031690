"""A method is a value that lists its parts; bound to a task, it is what devices and the aggregator run.

A round on the device:  begin (choose, start) -> local training -> measured -> release (stages) -> codec -> advance
A round on the server:  controls -> every update is added to exact sums, with its weight -> aggregate -> advance;
                        `advance_public` for each device
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from hushfleet.array_api import Array
from hushfleet.config.schema import require
from hushfleet.config.spec import PrivacySpec
from hushfleet.methods.local import Sgd
from hushfleet.methods.personal import Everything
from hushfleet.methods.server import Mean
from hushfleet.methods.stages import (
    ClipLayers,
    ClipWhole,
    Cost,
    Gaussian,
    OneStep,
    Release,
    Report,
    Stage,
    Transform,
    check_stages,
    costs,
    released,
)
from hushfleet.methods.state import (
    DeviceState,
    PrivateArrays,
    PublicState,
    RoundContext,
    RoundSetting,
    RoundTerms,
)
from hushfleet.model.objectives import Objective
from hushfleet.model.params import ParamLayout
from hushfleet.privacy.mechanism import Charge
from hushfleet.privacy.noise import NoiseSource
from hushfleet.privacy.record import RecordMechanism
from hushfleet.training.optim import adam_reach

Setting = TypeVar("Setting", int, float)


def within(accepted: str, default: Setting) -> Setting:
    """A setting of a configuration, with what is accepted: an interval like "[0, 1)"."""
    return field(default=default, metadata={"accepted": accepted})


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Local training, common to all methods.

    :param optimizer: `adam` (beta 0.9, 0.999, epsilon 1e-8; state starts afresh each round) or `sgd`.
    :param momentum: of `sgd`.
    :param batch_size: samples a step; the last batch of an epoch may be smaller. With privacy unit `record` batches
        are Poisson samples, and this is what their sums are divided by.
    :param local_epochs: how often a device goes through its samples in a round.
    :param local_steps: how many batches it trains on in a round instead, drawn as in epochs; 0: whole epochs.
    """

    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: float = within("(0, 100)", 1e-3)
    momentum: float = within("[0, 1)", 0.0)
    batch_size: int = within("[1, 65536]", 16)
    local_epochs: int = within("[1, 1000]", 1)
    local_steps: int = within("[0, 1000000]", 0)

    def __post_init__(self) -> None:
        for each in fields(self):
            check_range(each, getattr(self, each.name))
        require(self.momentum == 0 or self.optimizer == "sgd", "momentum", self.momentum, "0 unless optimizer = 'sgd'")


def check_range(setting: Field[Any], value: Any) -> None:
    """Raises ValueError where it is not `within` what is accepted."""
    accepted = setting.metadata.get("accepted")
    require(accepted is None or _is_within(value, accepted), setting.name, value, f"in {accepted}")


def _is_within(value: float, accepted: str) -> bool:
    low, high = map(float, accepted[1:-1].split(","))
    return (low <= value if accepted[0] == "[" else low < value) and (
        value <= high if accepted[-1] == "]" else value < high
    )


@dataclass(frozen=True)
class Method:
    """The parts of a method.

    :param personal: which entries are the device's own, and where its training begins.
    :param training: of the shared model.
    :param stages: what is done to the update before it leaves, in this order.
    :param server: the server half.
    :param own_training: of a second model, which stays on the device and is its own; None: the shared one is.
    :param takes_empty: whether a device without samples takes part, with noise alone.
    """

    personal: Everything = Everything()
    training: Sgd = Sgd()
    stages: tuple[Stage, ...] = ()
    server: Mean = Mean()
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
        """Whether a round may begin with, or look at, the own model of the device's last round."""
        begins = self.own_training is not None or type(self.personal) is not Everything
        return begins or self.training.distillation is not None

    @property
    def evaluates(self) -> bool:
        """Whether a device tests its trained model on its own samples, for a report."""
        return any(isinstance(stage, Report) and stage.evaluates for stage in self.stages)

    @property
    def of_classes(self) -> bool:
        """Whether it is defined for targets that are classes alone."""
        return self.personal.of_classes or self.training.objective.distills

    @property
    def max_preference(self) -> float | None:
        """Up to how many times the round's noise a device may choose to add; None: it has no choice."""
        return None if self.gaussian is None else self.gaussian.max_preference

    def by_record(self) -> Method:
        """The same method with the unit `record`: noise moves into the training, clipping and reports drop out.

        What is left of the list transforms what was trained on noised gradients. A second model trains without noise,
        since nothing of it is ever sent.
        """
        transforms = (stage.by_record() for stage in self.stages if isinstance(stage, Transform))
        return replace(
            self,
            personal=self.personal.by_record(),
            training=self.training.by_record(),
            stages=tuple(stage for stage in transforms if stage is not None),
            takes_empty=True,
        )


Parts = Callable[[Any, PrivacySpec, int], Method]


class Steps(NamedTuple):
    """The rounds of a task, its clip norm, and how many leading directions of features travel."""

    rounds: int
    clip_norm: float
    directions: int


@dataclass(frozen=True)
class Published:
    """A method with a name, as task files and packages know it.

    :param source: authors, venue, year.
    :param config: its settings in a task file, with their ranges in `__post_init__`.
    :param parts: lists the parts, from the configuration, what the task says of privacy, and the number of rounds.
    :param steps: by `devices`, `epsilon`, `delta` and perhaps `rounds`, for a task that leaves them out; None: the
        method has no rule.
    """

    name: str
    source: str
    summary: str
    config: type[TrainingConfig]
    parts: Parts
    steps: Callable[..., Steps] | None = None


def published(
    name: str,
    config: type[TrainingConfig],
    *,
    source: str,
    summary: str,
    steps: Callable[..., Steps] | None = None,
) -> Callable[[Parts], Published]:
    """Makes a function that lists a method's parts a `Published`."""
    return lambda parts: Published(name, source, summary, config, parts, steps)


class TaskMethod:
    """A method bound to a task.

    :param method: its parts, as the paper's file lists them; with the unit `record` they are rewritten here.
    :param rounds: the length of the task.
    """

    def __init__(
        self, method: Method, config: TrainingConfig, privacy: PrivacySpec, layout: ParamLayout, *, name: str = "method"
    ) -> None:
        self.by_record = privacy.unit == "record"
        # A device's own preference is the noise's, wherever the noise is.
        self.max_preference = method.max_preference
        self.parts = method.by_record() if self.by_record else method
        if self.by_record and privacy.secure is not None:  # the one batch's noise is the sum's (`check_sums`)
            step = OneStep(config.learning_rate / config.batch_size, config.batch_size)
            self.parts = replace(self.parts, stages=(step,))
        self.config, self.privacy, self.layout, self.name = config, privacy, layout, name
        mask = self.parts.personal.mask(layout)
        mask.setflags(write=False)  # of all newcomers
        self._newcomer = PublicState(mask, 0)

    @property
    def server(self) -> Mean:
        return self.parts.server

    @property
    def training(self) -> Sgd:
        return self.parts.training

    @property
    def objective(self) -> Objective:
        """The loss whose gradient the task's graph computes."""
        return self.parts.training.objective

    # what both sides know

    @property
    def published_size(self) -> int:
        """How many values every device is given: the global model, and the server half's vectors after it."""
        return self.layout.size * (1 + len(self.server.vectors))

    def split(self, published: Array) -> tuple[Array, dict[str, Array]]:
        """The global model `[d]`, and the vectors `[d]` by name, of what is published; a model alone has them at 0."""
        names, size = self.server.vectors, self.layout.size
        if not names:
            return published, {}
        model = published[:size]
        if published.shape[0] == size:
            return model, {name: np.zeros_like(model) for name in names}
        return model, {name: published[size * at : size * (at + 1)] for at, name in enumerate(names, start=1)}

    def setting(self, terms: RoundTerms) -> RoundSetting:
        return RoundSetting(self.layout, self.privacy, terms)

    def sigma(self, terms: RoundTerms) -> float:
        """The round's noise multiplier, where the method adds noise at all; else 0."""
        noised = self.by_record or any(
            isinstance(stage, Gaussian) or (isinstance(stage, Transform) and stage.adds_noise)
            for stage in self.parts.stages
        )
        return self.setting(terms).sigma(self.max_preference) if noised else 0.0

    def cost(self, terms: RoundTerms) -> Cost:
        """What the stages cost, folded; with the unit `record` there is no bound and no noise in them, but for a secure
        sum."""
        return costs(self.parts.stages, self.setting(terms))[-1]

    def charge(self, terms: RoundTerms) -> Charge:
        """What a round costs the device; known before any training."""
        cost = self.cost(terms)
        return replace(self.record_mechanism(terms).charge(), raw=cost.raw) if self.by_record else cost.charge()

    def record_mechanism(self, terms: RoundTerms) -> RecordMechanism:
        """The noise of one round's gradients, for the unit `record`."""
        setting, rule = self.setting(terms), self.training.gradient
        return RecordMechanism(
            clip_norm=min(setting.clip_norm, rule.record_bound),
            noise_multiplier=setting.sigma(self.max_preference),
            sample_rate=self.privacy.sample_rate,
            batches=self.privacy.batches,
            gradients_per_batch=self.training.gradients_per_batch,
            batch_size=self.config.batch_size,
            noise_split=setting.noise_split if self.privacy.secure is not None else 0,
        )

    def multiplier_release(self, terms: RoundTerms, *, participants: int) -> float:
        """Noise multiplier of one round against whoever sees only the aggregate.

        No more than the device's own is promised where the aggregate is no plain sum; with the unit `record`, since
        another device's noise is not known to hide its records; and under `strict` where a coordinate may have one
        sender only.
        """
        alone = not self.parts.personal.same_for_all and self.privacy.accounting == "strict"
        if self.by_record or self.server.weighs or alone:
            return self.charge(terms).noise_multiplier
        return self.cost(terms).multiplier_release(participants)

    @property
    def reach(self) -> float:
        """The most that a value of an update can be without noise of its own, whatever the data were; inf: no bound.

        With Adam no value moves by more than some learning rates a step, and with the unit `record` the task says how
        many steps there are. By SGD it moves as far as the gradients say, and of those a batch has any number.
        """
        grows = any(not stage.shrinks for stage in self.parts.stages if isinstance(stage, Transform))
        if not self.by_record or grows or self.config.optimizer != "adam":
            return math.inf
        return adam_reach(self.config.learning_rate, self.privacy.batches)

    def init_state(self) -> DeviceState:
        """Of a device that has not trained. Nothing of its data: the aggregator computes the same."""
        private: PrivateArrays = {}
        for stage in self.parts.stages:
            if isinstance(stage, ClipLayers):
                private |= stage.bounds.initial(self.layout)
        return DeviceState(self._newcomer, private=private)

    def advance_public(self, public: PublicState, sent: Array) -> PublicState:
        """The public state after an update, on both sides."""
        return public.after(self.parts.personal.next_mask(public, sent, self.layout))

    # the device half; a round begins and ends in `hushfleet.training.local_round.LocalRound`

    @property
    def own_is_raw(self) -> bool:
        """Whether the own model is trained without the noise that the shared one has: no part of that may see it."""
        return self.by_record and self.parts.own_training is not None

    def release(self, context: RoundContext, update: Array, noise: NoiseSource) -> Release:
        """What leaves of `update = trained - start`, once."""
        return released(self.parts.stages, context, update, noise, self.charge(context.setting.terms))

    def advance(self, context: RoundContext, *, update: Array, trained: Array, sent: Array) -> DeviceState:
        """The state for the next round.

        :param trained: the device's own model `[..., d]`.
        :param sent: `[..., d]`, exactly what the aggregator decodes.
        """
        parts = [stage for stage in self.parts.stages if isinstance(stage, (Transform, ClipLayers))]
        parts.sort(key=lambda part: isinstance(part, ClipLayers))  # last: nobody writes what bounds remember but they
        private, seen = dict(context.remembered), context.start + update if self.own_is_raw else trained
        for part in (self.parts.personal, *parts):
            private |= part.remember(context, update=update, trained=seen, sent=sent)
        return DeviceState(self.advance_public(context.state.public, sent), trained, private)


CLIP_AND_NOISE: tuple[Stage, ...] = (ClipWhole(), Gaussian())
"""DP-FedAvg's treatment of an update."""
