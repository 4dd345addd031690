"""Binds a method to a task, by the unit of privacy. Devices and the aggregator use the same object.

A round on the device:  `LocalRound` (choose, start, train, measure) -> `privatize` (stages) -> codec -> `advance`
A round on the server:  controls -> every update is added to exact sums, with its weight -> aggregate -> advance;
                        `advance_public` for each device

The server's part is `server` (`hushfleet.methods.server`); the device's begins in `hushfleet.methods.local_round`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hushfleet.array_api import Array, np
from hushfleet.errors import Malformed
from hushfleet.methods.cost import Cost, RoundSetting, RoundTerms
from hushfleet.methods.local import Sgd
from hushfleet.methods.method import Method, TrainingConfig
from hushfleet.methods.personal import Personal
from hushfleet.methods.public_bytes import newcomer_digest
from hushfleet.methods.server import ServerHalf
from hushfleet.methods.stages import ClipLayers, Gaussian, OneStep, Transform, costs
from hushfleet.objectives import Objective
from hushfleet.params import ParamLayout
from hushfleet.privacy.charge import Charge
from hushfleet.wire.format.spec import PrivacySpec

if TYPE_CHECKING:
    from hushfleet.methods.privatize import NoisedUpdate, Release
    from hushfleet.methods.state import DeviceState, PrivateArrays, PublicState, RoundContext
    from hushfleet.privacy.noise import NoiseSource
    from hushfleet.privacy.record import RecordMechanism

_MOST_TERMS = 1000  # of the rounds and devices whose costs are kept: devices may have noise of their own


class TaskMethod:
    """A method bound to a task with the unit `device`: if there is noise, it is on the update.

    :param method: its parts, as the paper's file lists them.
    :param rounds: number of rounds that train.
    """

    by_record = False
    """Whether each gradient is noised instead, for the unit `record`."""

    def __init__(
        self,
        method: Method,
        config: TrainingConfig,
        privacy: PrivacySpec,
        layout: ParamLayout,
        *,
        name: str = "method",
        rounds: int = 1,
    ) -> None:
        self.max_preference = method.max_preference
        self.parts, self.rounds = method, rounds
        self.config, self.privacy, self.layout, self.name = config, privacy, layout, name
        self._known: dict[RoundTerms, tuple[list[Cost], Charge]] = {}
        method.personal.check(layout)
        if type(method.personal).mask is not Personal.mask:
            raise Malformed(f"{type(method.personal).__name__} defines `mask`: it must name its entries in `kept`")

    @cached_property
    def _newcomer(self) -> PublicState:
        """The public state of a device that has not trained. All new devices share its mask."""
        from hushfleet.methods.state import PublicState

        mask = self.parts.personal.mask(self.layout)
        mask.setflags(write=False)
        return PublicState(mask, 0)

    @cached_property
    def server(self) -> ServerHalf:
        """The server half."""
        return self.parts.server.of_layout(self.layout)

    @property
    def training(self) -> Sgd:
        """The training of the shared model."""
        return self.parts.training

    @property
    def objective(self) -> Objective:
        """The loss whose gradient the task's graph computes."""
        return self.parts.training.objective

    @property
    def published_size(self) -> int:
        """The number of published values: the global model, and the server half's vectors after it."""
        return self.layout.size * (1 + len(self.server.vectors))

    def split(self, published: Array) -> tuple[Array, dict[str, Array]]:
        """Splits the published values into the global model `[d]` and vectors `[d]` by name, zeros if only the model is
        there."""
        names, size = self.server.vectors, self.layout.size
        if not names:
            return published, {}
        model = published[:size]
        if published.shape[0] == size:
            return model, {name: np.zeros_like(model) for name in names}
        return model, {name: published[size * at : size * (at + 1)] for at, name in enumerate(names, start=1)}

    def config_in(self, round: int) -> TrainingConfig:
        """Returns the configuration of a round's training, with the learning rate of this round.

        :param round: its number among the rounds that train, from 1 on.
        """
        rate = self.config.rate_in(round, self.rounds)
        return self.config if rate == self.config.learning_rate else replace(self.config, learning_rate=rate)

    # what a round costs

    def setting(self, terms: RoundTerms) -> RoundSetting:
        """Returns the public facts of a round."""
        return RoundSetting(self.layout, self.privacy, terms)

    @property
    def adds_noise(self) -> bool:
        """Whether devices add noise at all."""
        stages = self.parts.stages
        return any(isinstance(each, Gaussian) or (isinstance(each, Transform) and each.adds_noise) for each in stages)

    def noise_multiplier(self, terms: RoundTerms) -> float:
        """Returns the device's noise multiplier, 0 without noise. Raises `PrivacyError` for a refused preference."""
        return self.setting(terms).preferred_multiplier(self.max_preference) if self.adds_noise else 0.0

    def cost(self, terms: RoundTerms) -> Cost:
        """Returns the total cost of the stages."""
        return self._costs_and_charge(terms)[0][-1]

    def charge(self, terms: RoundTerms) -> Charge:
        """Returns the charge of a round for the device, known before any training."""
        return self._costs_and_charge(terms)[1]

    def _costs_and_charge(self, terms: RoundTerms) -> tuple[list[Cost], Charge]:
        """Returns the costs after each stage, and the charge; they are computed once for all devices with the same
        terms, because nothing else is in them."""
        found = self._known.get(terms)
        if found is None:
            if len(self._known) >= _MOST_TERMS:
                self._known.clear()
            priced = costs(self.parts.stages, self.setting(terms))
            found = self._known[terms] = priced, self._charge(terms, priced[-1])
        return found

    def _charge(self, terms: RoundTerms, cost: Cost) -> Charge:
        return cost.charge()

    def record_mechanism(self, terms: RoundTerms) -> RecordMechanism | None:
        """Returns the mechanism that noises one round's gradients; None: gradients get no noise."""
        return None

    def multiplier_release(self, terms: RoundTerms, *, participants: int) -> float:
        """Returns the noise multiplier of one round against anyone who sees only the aggregate.

        It is only the device's own multiplier if the aggregate is no plain sum, if later updates contain the noise of
        this one, which then hides no other device, and under `strict` if a coordinate may have only one sender.
        """
        alone = not self.parts.personal.same_for_all and self.privacy.is_strict
        if self.server.weighs or alone or self.parts.remembers_sent:
            return self.charge(terms).noise_multiplier
        return self.cost(terms).multiplier_release(participants)

    @property
    def reach(self) -> float:
        """The largest size of an update's value without its own noise, for any data; inf: no bound."""
        return math.inf

    # what is carried from round to round

    @cached_property
    def newcomer_digest(self) -> bytes:
        """The digest of the public state of a device that has not trained."""
        return newcomer_digest(self.layout.size, self.parts.personal.kept(self.layout))

    @property
    def newcomer_shares(self) -> int:
        """The number of entries that such a device sends."""
        return self.layout.size - sum(int(span.stop - span.start) for span in self.parts.personal.kept(self.layout))

    def init_state(self) -> DeviceState:
        """Returns the state of a device that has not trained. The aggregator computes the same state."""
        from hushfleet.methods.state import DeviceState

        private: PrivateArrays = {}
        for stage in self.parts.stages:
            if isinstance(stage, ClipLayers):
                private |= stage.bounds.initial(self.layout)
        return DeviceState(self._newcomer, private=private)

    def advance_public(self, public: PublicState, sent: Array) -> PublicState:
        """Returns the public state after an update, on both sides."""
        return public.after(self.parts.personal.next_mask(public, sent, self.layout))

    # the device half, after the training

    @property
    def personalized_model_has_no_noise(self) -> bool:
        """Whether the personalized model is trained without the shared model's noise: then the training of the shared
        model may not see it."""
        return self.by_record and self.parts.own_training is not None

    def privatize(
        self, context: RoundContext, update: Array, noise: NoiseSource, release: Release | None = None
    ) -> NoisedUpdate:
        """Returns the part of `update = trained - start` that leaves the device; called once.

        :param release: see `hushfleet.methods.privatize.privatized`.
        """
        from hushfleet.methods.privatize import clip_and_noise, privatized

        priced, charge = self._costs_and_charge(context.setting.terms)
        return privatized(self.parts.stages, context, update, noise, charge, release or clip_and_noise, priced)

    def advance(self, context: RoundContext, *, update: Array, trained: Array, sent: Array) -> DeviceState:
        """Returns the state for the next round.

        :param trained: the device's personalized model `[..., d]`.
        :param sent: `[..., d]`, exactly what the aggregator decodes; zeros in secure aggregation.
        """
        from hushfleet.methods.state import DeviceState

        parts = [stage for stage in self.parts.stages if isinstance(stage, (Transform, ClipLayers))]
        parts.sort(key=lambda part: isinstance(part, ClipLayers))  # last: no other part overwrites the bounds' memory
        private, seen = (
            dict(context.remembered),
            context.start + update if self.personalized_model_has_no_noise else trained,
        )
        for part in (self.parts.personal, *parts):
            private |= part.remember(context, update=update, trained=seen, sent=sent)
        return DeviceState(self.advance_public(context.state.public, sent), trained, private)


class RecordMethod(TaskMethod):
    """A method bound to a task with the unit `record`: its parts are rewritten, and noise is on each gradient.

    In secure aggregation the noise of the only batch is the sum's noise (`check_sums`); only one step on it is
    released.
    """

    by_record = True

    def __init__(
        self, method: Method, config: TrainingConfig, privacy: PrivacySpec, layout: ParamLayout, **more: Any
    ) -> None:
        super().__init__(method.by_record(), config, privacy, layout, **more)
        self.max_preference = method.max_preference  # a device's preference scales the noise in any place
        if privacy.secure is not None:
            step = OneStep(config.learning_rate / config.batch_size, config.batch_size)
            self.parts = replace(self.parts, stages=(step,))

    @property
    def adds_noise(self) -> bool:
        """Always True: each gradient has noise."""
        return True

    def _charge(self, terms: RoundTerms, cost: Cost) -> Charge:
        """Returns the charge of the gradients. The stages have no bound and no noise, except for secure aggregation."""
        return replace(self.record_mechanism(terms).charge(), raw=cost.raw)

    def record_mechanism(self, terms: RoundTerms) -> RecordMechanism:
        """Returns the mechanism that noises one round's gradients."""
        from hushfleet.privacy.record import RecordMechanism

        setting, rule = self.setting(terms), self.training.gradient
        return RecordMechanism(
            clip_norm=min(setting.clip_norm, rule.record_bound),
            noise_multiplier=setting.preferred_multiplier(self.max_preference),
            sample_rate=self.privacy.sample_rate,
            batches=self.privacy.batches,
            gradients_per_batch=self.training.gradients_per_batch,
            batch_size=self.config.batch_size,
            noise_split=setting.noise_split if self.privacy.secure is not None else 0,
            subset=rule.subset,
        )

    def multiplier_release(self, terms: RoundTerms, *, participants: int) -> float:
        """Returns the device's own multiplier, because no proof shows that another device's noise hides its records."""
        return self.charge(terms).noise_multiplier

    @property
    def reach(self) -> float:
        """The largest size of an update's value without its own noise; inf: no bound.

        With Adam no value moves by more than a few learning rates per step, and the task sets the number of steps. With
        SGD it moves in proportion to the gradients, and a batch may have any number of them.
        """
        grows = any(not stage.shrinks for stage in self.parts.stages if isinstance(stage, Transform))
        if grows or self.config.optimizer != "adam":
            return math.inf
        from hushfleet.learning.optim import adam_reach

        return adam_reach(self.config.learning_rate, self.privacy.batches)


def bind(method: Method, config: TrainingConfig, privacy: PrivacySpec, layout: ParamLayout, **more: Any) -> TaskMethod:
    """Binds a method to a task, by its unit of privacy; `more`: name and rounds of `TaskMethod`."""
    kind = RecordMethod if privacy.unit == "record" else TaskMethod
    return kind(method, config, privacy, layout, **more)
