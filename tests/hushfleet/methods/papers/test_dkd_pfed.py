"""DKD-pFed: its loss and the gradient's scale, against the formula of its public code, in double precision."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hushfleet.losses import loss_and_cotangent
from hushfleet.methods import make_method
from hushfleet.methods.state import DeviceState, PublicState
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import context_of, penalty

LAYOUT = ParamLayout(("w",), ((5,),))
PLAIN = PrivacySpec("device", "strict", math.inf, 0.0, 0.1)


def test_the_loss_is_that_of_the_public_code() -> None:
    """CE + lambda T^2 (KL of label and rest + beta KL of the rest), both at T: the objective times 1 + lambda T^2."""
    weight, heat, beta = 0.7, 2.5, 3.0
    settings = {"distillation_weight": weight, "temperature": heat, "non_target_weight": beta}
    method = make_method("dkd-pfed", settings, PLAIN, LAYOUT, rounds=2)
    rng = np.random.default_rng(0)
    logits, teacher = rng.normal(size=(2, 4, 5)) * 3
    y = np.array([0, 3, 1, 1])
    student, theirs = torch.from_numpy(logits).requires_grad_(), torch.from_numpy(teacher)
    label = F.one_hot(torch.from_numpy(y), 5).bool()
    parts = []
    for each in (theirs, student):
        p = (each / heat).softmax(1)
        rest = (each / heat)[~label].reshape(4, 4).softmax(1)
        parts.append((torch.stack([p[label], 1 - p[label]], 1), rest))
    target, others = ((t * (t.log() - s.log())).sum(1) for t, s in zip(*parts, strict=True))
    expected = F.cross_entropy(student, torch.from_numpy(y), reduction="none")
    expected = expected + weight * heat**2 * (target + beta * others)
    (slopes,) = torch.autograd.grad(expected.sum(), student)

    training = method.training
    assert training.distillation is not None
    share = np.full(4, training.distillation.weight)
    losses, pulls = loss_and_cotangent(training.objective, logits, y, teacher, share)
    taught = DeviceState(PublicState.initial(5), np.zeros(5, np.float32))
    scale = float(penalty(method, context_of(method, taught), np.zeros(5), np.ones(5))[0])
    np.testing.assert_allclose(scale * losses, expected.detach(), rtol=1e-9)
    np.testing.assert_allclose(scale * pulls, slopes, rtol=1e-8, atol=1e-10)
    untaught = context_of(method, method.init_state())
    assert penalty(method, untaught, np.zeros(5), np.ones(5))[0] == 1  # without a teacher, the cross-entropy alone


def test_with_the_unit_record_the_clip_norm_alone_is_the_scale() -> None:
    record = replace(PLAIN, unit="record", clip_norm=1.0, noise_multiplier=1.0, sample_rate=0.1, batches=2, delta=1e-5)
    method = make_method("dkd-pfed", {}, record, LAYOUT, rounds=2)
    assert method.training.penalties == ()
    assert method.training.distillation is not None
    assert method.training.distillation.weight == pytest.approx(4 / 5)
