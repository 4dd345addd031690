"""The objectives by hand, and against PyTorch's automatic differentiation in float64."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from hushfleet.losses import loss_and_cotangent
from hushfleet.models.losses import distilled_losses
from hushfleet.objectives import Objective
from hushfleet.schema import from_plain, to_plain

PLAIN, DISTILLED = Objective(), Objective("distillation", 3.0)
DECOUPLED = Objective("decoupled-distillation", 2.0, 0.25)
OBJECTIVES = [DISTILLED, DECOUPLED, Objective("distillation"), Objective("decoupled-distillation", 0.7, 8.0, 2.5)]


CONTRASTIVE = [Objective("contrastive", 0.5), Objective("contrastive", 3.0)]


def drawn(batch: int, classes: int, seed: int, objective: Objective = DISTILLED) -> tuple[np.ndarray, ...]:
    rng, spread = np.random.default_rng(seed), 4.0
    logits, teacher = (rng.standard_normal((batch, n)) * spread for n in (classes, objective.teacher_values(classes)))
    return logits, rng.integers(0, classes, batch), teacher, rng.random(batch)


def torch_kl(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """Of probabilities, as written in the papers; `[B]`."""
    return (teacher * (teacher.log() - student.log())).sum(1)


def by_the_papers(objective: Objective, z: torch.Tensor, y: torch.Tensor, t: torch.Tensor, w: torch.Tensor):
    """The formulas on probabilities, without any care for stability."""
    if objective.kind == "distillation":
        kt = objective.temperature
        # pFedSD's own line, a sample at a time.
        divergence = torch.stack(
            [
                kt * kt * F.kl_div(F.log_softmax(s / kt, 0)[None], F.softmax(r / kt, 0)[None], reduction="batchmean")
                for s, r in zip(z, t, strict=True)
            ]
        )
    elif objective.kind == "contrastive":  # MOON's Eq. (3)
        near, far = ((F.cosine_similarity(z, each) / objective.temperature).exp() for each in t.chunk(2, 1))
        divergence = -(near / (near + far)).log()
    else:
        rows = []
        for s, r, label in zip(z, t, y.tolist(), strict=True):
            others = [i for i in range(len(s)) if i != label]
            both = []
            for logits in (r, s):
                p = (logits / objective.target_temperature).softmax(0)
                warm = (logits[others] / objective.temperature).exp()
                both.append((torch.stack([p[label], p[others].sum()])[None], (warm / warm.sum())[None]))
            (b_t, p_t), (b_s, p_s) = both
            rows.append(torch_kl(b_t, b_s)[0] + objective.non_target_weight * torch_kl(p_t, p_s)[0])
        divergence = torch.stack(rows)
    return (1 - w) * F.cross_entropy(z, y, reduction="none") + w * divergence


@pytest.mark.parametrize("objective", [*OBJECTIVES, *CONTRASTIVE], ids=str)
@settings(max_examples=25)
@given(batch=st.integers(1, 6), classes=st.integers(2, 12), seed=st.integers(0, 1 << 30))
def test_losses_and_slopes_are_those_of_the_papers(objective, batch, classes, seed):
    logits, y, teacher, weight = drawn(batch, classes, seed, objective)
    z = torch.from_numpy(logits).requires_grad_()
    arguments = torch.from_numpy(y), torch.from_numpy(teacher), torch.from_numpy(weight)
    expected = by_the_papers(objective, z, *arguments)
    (slopes,) = torch.autograd.grad(expected.sum(), z)
    losses, cotangent = loss_and_cotangent(objective, logits, y, teacher, weight)
    np.testing.assert_allclose(losses, expected.detach(), rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(cotangent, slopes, rtol=1e-8, atol=1e-10)
    ours = distilled_losses(objective, z, *arguments)
    (slopes,) = torch.autograd.grad(ours.sum(), z)
    np.testing.assert_allclose(ours.detach(), losses, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(slopes, cotangent, rtol=1e-8, atol=1e-10)


def test_three_classes_by_hand():
    """Eqs. (6)-(8): label 0, the teacher gives (1/2, 1/3, 1/6), the student (1/4, 1/4, 1/2).

    b: (1/2, 1/2) and (1/4, 3/4), so Eq. (6) is (1/2) ln 2 + (1/2) ln(2/3) = (1/2) ln(4/3).
    p: (2/3, 1/3) and (1/3, 2/3), so Eq. (7) is (2/3) ln 2 - (1/3) ln 2 = (1/3) ln 2 (at KT = 1).
    Slopes of Eq. (6): b - b_teacher = -1/4 for the label, and 1/4 shared as (1/3, 2/3) by the others; of Eq. (7):
    (1/3 - 2/3, 2/3 - 1/3).
    """
    teacher, student = np.log([[1 / 2, 1 / 3, 1 / 6]]), np.log([[1 / 4, 1 / 4, 1 / 2]])
    objective = Objective("decoupled-distillation", 1.0, 0.25)
    losses, slopes = loss_and_cotangent(objective, student, np.array([0]), teacher, np.ones(1))
    assert losses[0] == pytest.approx(0.5 * np.log(4 / 3) + 0.25 * np.log(2) / 3)
    np.testing.assert_allclose(slopes, [[-1 / 4, 1 / 12 - 1 / 12, 1 / 6 + 1 / 12]], atol=1e-15)
    half, _ = loss_and_cotangent(objective, student, np.array([0]), teacher, np.array([0.5]))
    assert half[0] == pytest.approx(0.5 * np.log(4) + 0.5 * losses[0])


def test_the_temperature_by_hand():
    """Logits that differ by T ln 3: at temperature T the student gives (3/4, 1/4), the teacher (1/4, 3/4).

    KL = (3/4) ln 3 - (1/4) ln 3 = (1/2) ln 3, times T^2; slopes T (1/2, -1/2).
    """
    student, teacher = np.array([[2 * np.log(3), 0]]), np.array([[0, 2 * np.log(3)]])
    losses, slopes = loss_and_cotangent(Objective("distillation", 2.0), student, np.array([0]), teacher, np.ones(1))
    assert losses[0] == pytest.approx(2 * np.log(3))
    np.testing.assert_allclose(slopes, [[1, -1]])


@pytest.mark.parametrize("objective", CONTRASTIVE, ids=str)
def test_contrasts_by_hand(objective):
    """A model between both has log 2; logits of zeros, which a linear model starts with, make no NaN."""
    both, y = np.array([[1.0, 0, 0, 1]]), np.zeros(1, np.int64)
    losses, _ = loss_and_cotangent(objective, np.array([[3.0, 3.0]]), y, both, np.ones(1))
    assert losses[0] == pytest.approx(np.log(2))
    losses, _ = loss_and_cotangent(objective, np.array([[2.0, 0.0]]), y, both, np.ones(1))
    assert losses[0] == pytest.approx(np.log(1 + np.exp(-1 / objective.temperature)))
    for logits, teacher, weight in ((np.zeros((1, 2)), both, 1.0), (np.ones((1, 2)), np.zeros((1, 4)), 0.0)):
        losses, slopes = loss_and_cotangent(objective, logits, y, teacher, np.full(1, weight))
        assert np.isfinite([*losses, *slopes.ravel()]).all()
        z = torch.from_numpy(logits.astype(np.float32)).requires_grad_()
        given = torch.from_numpy(y), torch.from_numpy(teacher).float(), torch.full((1,), weight)
        ours = distilled_losses(objective, z, *given)
        np.testing.assert_allclose(ours.detach(), losses, rtol=1e-6)
        np.testing.assert_allclose(torch.autograd.grad(ours.sum(), z)[0], slopes, rtol=1e-5)


@pytest.mark.parametrize("objective", [*OBJECTIVES, *CONTRASTIVE], ids=str)
def test_without_weight_it_is_the_cross_entropy(objective):
    logits, y, teacher, _ = drawn(5, 4, 0, objective)
    losses, slopes = loss_and_cotangent(objective, logits, y, teacher, np.zeros(5))
    expected, expected_slopes = loss_and_cotangent(PLAIN, logits, y, teacher, np.ones(5))
    np.testing.assert_array_equal(losses, expected)
    np.testing.assert_array_equal(slopes, expected_slopes)
    z = torch.from_numpy(logits).requires_grad_()
    by_torch = F.cross_entropy(z, torch.from_numpy(y), reduction="none")
    np.testing.assert_allclose(losses, by_torch.detach())
    np.testing.assert_allclose(slopes, torch.autograd.grad(by_torch.sum(), z)[0], atol=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_a_student_that_agrees_is_left_alone(objective):
    logits, y, _, _ = drawn(5, 4, 1)
    losses, slopes = loss_and_cotangent(objective, logits, y, logits, np.ones(5))
    np.testing.assert_allclose(losses, 0, atol=1e-12)
    np.testing.assert_allclose(slopes, 0, atol=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_the_surest_teachers_make_no_nan(objective):
    """Right or wrong, with logits whose exponentials neither float can hold."""
    teacher = np.array([[2000.0, 0, 0], [0, 2000, 0], [0, 0, -2000], [-2000, -2000, 2000], [0, 0, 0]])
    logits = np.array([[0, 0, 0], [0, -2000, 0], [2000.0, 0, 0], [1, 2, 3], [-2000, 2000, 0]])
    y, weight = np.zeros(5, np.int64), np.full(5, 0.5)
    losses, slopes = loss_and_cotangent(objective, logits, y, teacher, weight)
    assert np.isfinite(losses).all()
    assert np.isfinite(slopes).all()
    assert (losses >= 0).all()
    z = torch.from_numpy(logits.astype(np.float32)).requires_grad_()
    single = [torch.from_numpy(array.astype(np.float32)) for array in (teacher, weight)]
    ours = distilled_losses(objective, z, torch.from_numpy(y), *single)
    np.testing.assert_allclose(ours.detach(), losses, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(torch.autograd.grad(ours.sum(), z)[0], slopes, rtol=1e-4, atol=1e-5)


def test_it_travels_as_plain_data():
    for objective in (PLAIN, *OBJECTIVES):
        assert from_plain(Objective, msgpack.unpackb(msgpack.packb(to_plain(objective)))) == objective


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"kind": "hinge"}, "kind"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"non_target_weight": -0.1}, "non_target_weight"),
        ({"non_target_weight": float("nan")}, "non_target_weight"),
        ({"target_temperature": 0.0}, "target_temperature"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, name):
    with pytest.raises(ValueError, match=name):
        Objective(**settings)
