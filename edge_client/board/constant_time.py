"""Hides how long a board trains: the time at which it announces the end does not reveal how many records it has.

The training time depends on the number of records. Therefore the end is announced at the end of a slot, whose length
depends only on the task and the board: the time of a round with the task's batch size, rounded up to a power of two
seconds. A device that needs longer takes two slots, then four: this reveals the power of two by which it is above the
task's own number. A device near such a limit may reveal it in some rounds and not in others.

A slot never takes more than a part of the round's time, because the update must still arrive.
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
from hushfleet.methods.cost import RoundTerms
from hushfleet.model.evaluation import LogitsOf
from hushfleet.privacy.noise import SecureNoise
from hushfleet.training.local_round import LocalRound, OneClient, train_vector
from hushfleet.wire.format.messages import DeviceStatus
from hushfleet.wire.link.interface import Link

LEAST_SLOT_S = 1.0
ROOM = 1.5
"""A slot is at least this many times the measured work, which excludes release, coding and the store's sync."""
MOST_OF_DEADLINE = 0.5
ANSWER_S = 4.0
"""The work of a round that asks: an answer takes a board about one second, and gets a slot of eight seconds."""


@dataclass
class AnnouncedTraining:
    """Wraps a training: announces its beginning and its end, and hides its duration if that is a secret.

    :param announce: publishes the device's status.
    :param sleep: sleeps for at most so many seconds; may raise `GivenUp`.
    :param clock: monotonic seconds.
    :param is_quiet: whether a training runs whose duration is hidden: the link is not read meanwhile.
    """

    link: Link
    announce: Callable[[DeviceStatus], None]
    sleep: Callable[[float], None]
    clock: Callable[[], float]
    is_quiet: bool = False

    @contextmanager
    def __call__(self, *, nominal_s: float | None, deadline: float, deadline_s: float) -> Iterator[None]:
        """Announces the start and the end of the training in the block.

        With `nominal_s` the block ends at the end of its slot, even if it fails: until then nothing is sent or read.
        A training that is given up reveals nothing about the data, and ends at once.

        :param nominal_s: the work that the task names (`nominal_seconds`); None if the duration is no secret.
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
    """Measures the time of training here with the task's batch size in each batch, from one batch of black images.

    Further work for each record, such as the training of an own model, is counted for the number of records that gives
    such batches at the task's `sample_rate`.

    With the unit `device` a task sets the number of batches only by `local_steps`; without it, one is assumed.
    Raises `GraphRefused` if the graph fails even on black images: this is the task's fault, and may be reported.
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
    if method.training.distillation is not None:  # a device with an own model runs it on each record, once a round
        began = clock()
        answers = samples.logits(at)
        seconds += (clock() - began) / sample_rate
        if not answers.size:
            raise GraphRefused("the graph of inference fails on every black image")
    return seconds


def announced_at(*, began: float, ended: float, nominal_s: float, deadline: float, deadline_s: float) -> float:
    """Returns when the end of a training that ran from `began` to `ended` is announced, on one monotonic clock.

    :param nominal_s: the result of `nominal_seconds`.
    :param deadline: end of the round, which is `deadline_s` after it became known.
    """
    slot = max(LEAST_SLOT_S, 2.0 ** math.ceil(math.log2(ROOM * nominal_s))) if nominal_s > 0 else LEAST_SLOT_S
    while began + slot < ended:
        slot *= 2
    latest = deadline - (1 - MOST_OF_DEADLINE) * deadline_s
    return max(ended, min(began + slot, latest))
