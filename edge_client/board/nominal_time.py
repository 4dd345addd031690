"""Measures the time of a training that the task alone implies, for announcing the end of every training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from hushfleet.edge_client.board.local_data import zero_samples
from hushfleet.errors import GraphRefused
from hushfleet.learning.batch import GradientFunction
from hushfleet.learning.draws import Inputs
from hushfleet.learning.evaluation import LogitsOf
from hushfleet.learning.own_samples import LoadedSamples
from hushfleet.methods import make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.local_round import LocalRound, OneClient, train_vector
from hushfleet.privacy.noise import SecureNoise
from hushfleet.wire.format.spec import TaskSpec


def nominal_seconds(
    spec: TaskSpec,
    params: np.ndarray,
    gradient: GradientFunction,
    logits_of: LogitsOf,
    *,
    clock: Callable[[], float],
) -> float:
    """Measures the time of training here with the task's batch size in each batch, from one batch of black images.

    Further work for each record, such as the training of a personalized model, is counted for the number of records
    that gives such batches at the task's `sample_rate`.

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
    count, model = method.config.step_size, spec.model
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
    # a device with a personalized model runs it on each record, once a round
    if method.training.distillation is not None:
        began = clock()
        answers = samples.logits(at)
        seconds += method.training.distillation.models * (clock() - began) / sample_rate
        if not answers.size:
            raise GraphRefused("the graph of inference fails on every black image")
    return seconds
