"""Hides how long a board trains: the moment when it announces the end does not tell how many records it has.

Training takes as long as there are records. The end is therefore announced at the end of a slot, whose length follows
from the task and the board alone: what a round takes with as many records in a batch as the task names, rounded up to
a power of two seconds. A device that needs longer takes two slots, then four: it shows by which power of two it is
above the task's own number, and one of that size may show it in some rounds and not in others.

A slot never takes more than a part of the time that the round gives, since the update must still arrive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hushfleet.config.spec import TaskSpec
from hushfleet.edge_client.board.local_data import zero_samples
from hushfleet.edge_client.declines import GivenUp
from hushfleet.errors import GraphRefused
from hushfleet.gradients.batch import GradientFunction
from hushfleet.gradients.draws import Inputs
from hushfleet.gradients.own_samples import LoadedSamples
from hushfleet.methods import make_method
from hushfleet.methods.state import RoundTerms
from hushfleet.model.evaluation import LogitsOf
from hushfleet.privacy.noise import SecureNoise
from hushfleet.training.local_round import LocalRound, OneClient, train_vector
from hushfleet.wire.format.messages import DeviceStatus
from hushfleet.wire.link.interface import Link

LEAST_SLOT_S = 1.0
ROOM = 1.5
"""A slot is at least so many times the measured work: release, coding and the store's sync are not in it."""
MOST_OF_DEADLINE = 0.5
ANSWER_S = 4.0
"""The work of a round that asks, whose answer takes a board a second or so: a slot of eight."""


@dataclass
class AnnouncedTraining:
    """Wraps a training: announces its beginning and its end, and hides its duration if that is a secret.

    :param announce: publishes the device's status.
    :param sleep: sleeps for at most so many seconds; may raise `GivenUp`.
    :param clock: monotonic seconds.
    :param is_quiet: whether a training runs whose duration is hidden: nothing on the link is looked at.
    """

    link: Link
    announce: Callable[[DeviceStatus], None]
    sleep: Callable[[float], None]
    clock: Callable[[], float]
    is_quiet: bool = False

    @contextmanager
    def __call__(self, *, nominal_s: float | None, deadline: float, deadline_s: float) -> Iterator[None]:
        """Announces that the training of the block begins, and when it has ended.

        With `nominal_s` the block is over at the end of its slot, even where it fails: until then nothing is sent or
        read. A training that is given up tells nothing about the data, and ends at once.

        :param nominal_s: the work that the task names (`nominal_seconds`); None where the duration is no secret.
        :param deadline: end of the round, which is `deadline_s` after it became known.
        """
        self.announce("training")
        if nominal_s is not None:
            self.is_quiet = True
            self.link.pause()
        began = self.clock()
        try:
            try:
                yield
            except (GivenUp, KeyboardInterrupt):
                nominal_s = None
                raise
            finally:
                if nominal_s is not None:
                    end = announced_at(
                        began=began, ended=self.clock(), nominal_s=nominal_s, deadline=deadline, deadline_s=deadline_s
                    )
                    while (left := end - self.clock()) > 0:
                        self.sleep(left)
        finally:
            if self.is_quiet:
                self.is_quiet = False
                self.link.resume()
            self.announce("ready")


def nominal_seconds(
    spec: TaskSpec,
    params: np.ndarray,
    gradient: GradientFunction,
    logits_of: LogitsOf,
    *,
    clock: Callable[[], float],
) -> float:
    """Measures what training takes here with the task's batch size in each batch, by one batch of black images.

    What it takes besides for each record, such as the training of an own model, is counted for as many as give such
    batches at the task's `sample_rate`.

    With the unit `device` a task names a number of batches only by `local_steps`; without it, one is taken.
    Raises `GraphRefused` where the graph fails even on these: that is the task's fault, and may be told.
    """
    config, sample_rate = dict(spec.method_config), spec.privacy.sample_rate
    steps = config.get("local_steps", 0)
    config["local_steps"] = min(1, steps)
    batches = spec.privacy.batches if spec.privacy.unit == "record" else steps or 1
    privacy = replace(spec.privacy, sample_rate=1.0, batches=1)
    method = make_method(spec.method, config, privacy, spec.model.layout, rounds=max(1, spec.training_rounds))
    own_training, method.parts = method.parts.own_training, replace(method.parts, own_training=None)
    count, model = method.config.batch_size, spec.model
    blank = zero_samples(model, model.targets.blank(count, len(model.class_names)))
    samples = LoadedSamples(blank, gradient, logits_of, by_record=method.by_record)
    how: dict[str, Any] = {
        "inputs": Inputs(model.dropout, spec.augment),
        "rng": np.random.default_rng(),
        "noise": SecureNoise(),
    }
    began = clock()
    round = LocalRound(method, method.init_state(), params, RoundTerms(), samples)
    trained = round.train(**how)
    if trained.failures:
        raise GraphRefused(trained.failures[0])
    seconds, at = (clock() - began) * batches, round.context.global_params
    if own_training is not None:
        began = clock()
        train_vector(own_training, round.context, at.copy(), OneClient(round, own_training, **how))
        seconds += (clock() - began) * (steps or 1 / sample_rate)
    if method.training.distillation is not None:  # a device with an own model asks it about each record, once a round
        began = clock()
        answers = samples.logits(at)
        seconds += (clock() - began) / sample_rate
        if not answers.size:
            raise GraphRefused("the graph of inference fails on every black image")
    return seconds


def announced_at(*, began: float, ended: float, nominal_s: float, deadline: float, deadline_s: float) -> float:
    """The moment when the end of a training that ran from `began` to `ended` is announced, on one monotonic clock.

    :param nominal_s: what `nominal_seconds` gives.
    :param deadline: of the round, which is `deadline_s` after it became known.
    """
    slot = max(LEAST_SLOT_S, 2.0 ** math.ceil(math.log2(ROOM * nominal_s))) if nominal_s > 0 else LEAST_SLOT_S
    while began + slot < ended:
        slot *= 2
    latest = deadline - (1 - MOST_OF_DEADLINE) * deadline_s
    return max(ended, min(began + slot, latest))
