"""pFedSD by hand: its loss in the objective's form, and what a device without a last model does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hushfleet.data.samples import Samples
from hushfleet.learning.draws import Inputs
from hushfleet.learning.evaluation import Evaluation
from hushfleet.losses import loss_and_cotangent
from hushfleet.methods import make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.objectives import Objective
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import advanced, context_of, privatized, train_round

LAYOUT = ParamLayout(("w",), ((3,),))


class Data:
    def logits(self, params: Any) -> np.ndarray:
        return np.asarray(params)[None].repeat(2, 0)

    def evaluate(self, params: Any) -> Evaluation:
        raise AssertionError("pFedSD measures nothing")


def pfedsd(**config: Any) -> Any:
    return make_method("pfedsd", config, PrivacySpec("device", "strict", math.inf, 0.0, 0.1), LAYOUT, rounds=2)


def logits_of(params: np.ndarray, x: np.ndarray) -> np.ndarray:
    return params[None].repeat(len(x), 0)


def gradient_under(objective: Objective) -> Any:
    """Of a network whose logits are its parameters, whatever the image."""

    def gradient(params, x, y, dropout=(), out=None, teacher=None, distill=None):
        logits = logits_of(params, x).astype(np.float64)
        teacher = np.zeros_like(logits) if teacher is None else teacher
        weight = np.zeros(len(y)) if distill is None else distill
        losses, slopes = loss_and_cotangent(objective, logits, y, teacher, weight)
        out[:] = slopes.mean(0)
        return float(losses.mean()), out

    return gradient


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum()


@pytest.mark.parametrize("weight", [0.0, 1.0, 2.5])
def test_two_rounds_of_one_step_by_hand(weight: float) -> None:
    """d/dz of CE + lambda T^2 KL(p_t || p_s) is (softmax(z) - y) + lambda T (softmax(z/T) - softmax(t/T))."""
    method = pfedsd(distillation_weight=weight, temperature=2.0, optimizer="sgd", learning_rate=0.5)
    samples = Samples(np.zeros((1, 1, 1, 1), np.uint8), np.array([1]), (0.0,), (1.0,))
    start, label = np.array([0.3, -0.2, 0.1], np.float32), np.array([0, 1, 0])
    common = {"terms": RoundTerms(), "logits_of": logits_of, "inputs": Inputs(), "noise": None}
    gradient, state = gradient_under(method.training.objective), method.init_state()
    first = train_round(method, state, start, gradient, samples, rng=np.random.default_rng(0), **common)
    own = start - 0.5 * (softmax(start) - label)
    np.testing.assert_allclose(first.own, own, rtol=1e-6)
    state = method.advance(first.context, update=own - start, trained=first.own, sent=start)
    again = np.array([-0.5, 0.4, 0.0], np.float32)
    second = train_round(method, state, again, gradient, samples, rng=np.random.default_rng(0), **common)
    pull = weight * 2.0 * (softmax(again / 2) - softmax(own / 2))
    np.testing.assert_allclose(second.end, again - 0.5 * (softmax(again) - label + pull), rtol=1e-5)
    np.testing.assert_array_equal(second.context.start, again)


def test_the_teacher_is_the_last_personalized_model() -> None:
    method = pfedsd()
    assert method.training.objective == Objective("distillation", temperature=3.0)
    state = method.init_state()
    assert method.training.teacher(context_of(method, state), Data()) is None
    own = np.array([1, 2, 3], np.float32)
    state = advanced(method, state, update=own, trained=own, sent=own)
    logits, weight = method.training.teacher(context_of(method, state), Data())
    np.testing.assert_array_equal(logits, [own, own])
    assert weight == 0.5


def test_without_noise_nothing_is_clipped() -> None:
    method, update = pfedsd(), np.array([30, 40, 0], np.float32)
    noised = privatized(method, update, RoundTerms(4))
    np.testing.assert_array_equal(noised.values, update)
    assert noised.charge.mechanism == "none"
    assert noised.report == ()
