"""When a device announces the end of its training, so that the moment does not tell how many records it has.

Training takes as long as there are records. The end is therefore announced at the end of a slot, whose length follows
from the task and the board alone: what a round takes with as many records in a batch as the task names, rounded up to
a power of two seconds. A device that needs longer takes two slots, then four: it shows by which power of two it is
above the task's own number, and one of that size may show it in some rounds and not in others.

A slot never takes more than a part of the time that the round gives, since the update must still arrive.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from hushfleet.config.spec import TaskSpec
from hushfleet.edge_client.board.local_data import blank_samples
from hushfleet.errors import GraphRefused
from hushfleet.methods import make_method
from hushfleet.methods.state import RoundTerms
from hushfleet.model.evaluation import LogitsOf
from hushfleet.privacy.noise import SecureNoise
from hushfleet.training.batch import GradientFunction
from hushfleet.training.draws import Inputs
from hushfleet.training.local_round import train_locally, train_round
from hushfleet.training.own_samples import LoadedSamples

LEAST_SLOT_S = 1.0
ROOM = 1.5
"""A slot is at least so many times the measured work: release, coding and the store's sync are not in it."""
MOST_OF_DEADLINE = 0.5


def nominal_seconds(
    spec: TaskSpec,
    params: np.ndarray,
    gradient: GradientFunction,
    logits_of: LogitsOf,
    *,
    clock: Callable[[], float],
) -> float:
    """What training takes here with the task's batch size in each batch, by one batch of black images.

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
    method = make_method(spec.method, config, privacy, spec.model.layout, rounds=spec.rounds)
    own_training, method.parts = method.parts.own_training, replace(method.parts, own_training=None)
    count, model = method.config.batch_size, spec.model
    blank = blank_samples(model, model.targets.blank(count, len(model.class_names)))
    how: dict[str, Any] = {
        "inputs": Inputs(model.dropout, spec.augment),
        "rng": np.random.default_rng(),
        "noise": SecureNoise(),
    }
    began = clock()
    trained = train_round(
        method, method.init_state(), params, gradient, blank, terms=RoundTerms(), logits_of=logits_of, **how
    )
    if trained.failures:
        raise GraphRefused(trained.failures[0])
    seconds, at = (clock() - began) * batches, trained.context.global_params
    if own_training is not None:
        began = clock()
        train_locally(method, own_training, trained.context, at, gradient, blank, **how)
        seconds += (clock() - began) * (steps or 1 / sample_rate)
    if method.training.distillation is not None:  # a device with an own model asks it about each record, once a round
        began = clock()
        answers = LoadedSamples(blank, gradient, logits_of, by_record=method.by_record).logits(at)
        seconds += (clock() - began) / sample_rate
        if not answers.size:
            raise GraphRefused("the graph of inference fails on every black image")
    return seconds


def announced_at(*, began: float, ended: float, nominal_s: float, deadline: float, deadline_s: float) -> float:
    """When the end of a training that ran from `began` to `ended` is announced; moments of one monotonic clock.

    :param nominal_s: as `nominal_seconds` gives it.
    :param deadline: of the round, which is `deadline_s` after it became known.
    """
    slot = max(LEAST_SLOT_S, 2.0 ** math.ceil(math.log2(ROOM * nominal_s))) if nominal_s > 0 else LEAST_SLOT_S
    while began + slot < ended:
        slot *= 2
    latest = deadline - (1 - MOST_OF_DEADLINE) * deadline_s
    return max(ended, min(began + slot, latest))
