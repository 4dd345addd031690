"""Treats a question round like a training round: the same stages, charge, codec and sums, for a few values."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from hushfleet.errors import Malformed
from hushfleet.methods.method import CLIP_AND_NOISE, Method, TrainingConfig
from hushfleet.methods.task_method import TaskMethod, bind
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import TaskSpec

BOUND = 1.0
"""The largest norm of an answer."""


class RoundRules(NamedTuple):
    """The rules of a round: the task and its method as they are in that round."""

    spec: TaskSpec
    method: TaskMethod


def rules_of(spec: TaskSpec, method: TaskMethod, round: int) -> RoundRules:
    """Returns the task's own rules for a training round; for a question round, one clipped and noised layer.

    A question protects the device, by its own noise, whatever the task's unit and noise are: nothing is trained here,
    so with noise on gradients an answer would have none.

    :param method: of `spec`.

    Raises `Malformed` for a question that the task's model cannot answer.
    """
    question = spec.question
    if question is None or not spec.asks(round):
        return RoundRules(spec, method)
    if question.kind == "evaluation" and not spec.model.chooses_head:
        raise Malformed("an evaluation compares heads on fixed features, and this task trains another model")
    layout = ParamLayout(("answer.values",), ((question.size(len(spec.model.class_names)),),))
    secure = spec.privacy.secure and replace(spec.privacy.secure, bits=question.bits)
    privacy = replace(
        spec.privacy,
        unit="device",
        clip_norm=BOUND,
        noise_multiplier=question.noise_multiplier,
        noise_split=1,
        secure=secure,
    )
    wire = spec.wire if secure else replace(spec.wire, codec="float32")
    asked = replace(spec, privacy=privacy, wire=wire, model=replace(spec.model, layout=layout))
    return RoundRules(asked, bind(Method(stages=CLIP_AND_NOISE), TrainingConfig(), privacy, layout, name="question"))
