"""Gradients and clipped sums of one linear layer by a formula, against single gradients of a graph and of autograd."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from hushfleet.errors import GraphRefused
from hushfleet.learning.linear import LinearClipping, LinearGradient, check_memory
from hushfleet.losses import loss_of
from hushfleet.models import get_model
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.objectives import DISTILLATIONS, Objective
from hushfleet.params import ParamLayout
from hushfleet.privacy.clipping import clip


def layout_of(classes: int, features: int) -> ParamLayout:
    return ParamLayout(("head.weight", "prior"), ((classes, features), (classes,)))


CLASSES, F = Objective(), torch.nn.functional
LOSSES = {CLASSES: F.cross_entropy, Objective("binary"): F.binary_cross_entropy_with_logits}
LOSSES |= {Objective("squared"): F.mse_loss, Objective("huber"): F.huber_loss}


def drawn(
    layout: ParamLayout, batch: int, seed: int, objective: Objective = CLASSES
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    (classes, features), _ = layout.shapes
    rng = np.random.default_rng(seed)
    params = rng.normal(size=layout.size).astype(np.float32)
    x = rng.normal(scale=10 ** rng.uniform(-3, 1), size=(batch, features, 1, 1)).astype(np.float32)
    return params, x, loss_of(objective).random(batch, classes, rng)


def single_gradients(
    layout: ParamLayout, params: np.ndarray, x: np.ndarray, y: np.ndarray, objective: Objective = CLASSES
) -> tuple[list, np.ndarray]:
    """Losses and gradients `[B, d]` one by one, by autograd in float64."""
    losses, rows = [], np.empty((len(y), layout.size))
    for i in range(len(y)):
        vector = torch.tensor(params, dtype=torch.float64, requires_grad=True)
        tensors = layout.unflatten(vector)
        logits = tensors["head.weight"] @ torch.tensor(x[i].ravel(), dtype=torch.float64) + tensors["prior"]
        target = torch.tensor(y[i : i + 1])
        loss = LOSSES[objective](logits[None], target if objective.of_classes else target.double())
        losses.append(loss.item())
        rows[i] = torch.autograd.grad(loss, vector)[0]
    return losses, rows


@given(st.sampled_from(list(LOSSES)), st.integers(2, 7), st.integers(1, 9), st.integers(1, 6), st.integers(0, 99))
def test_a_gradient_is_the_mean_of_single_ones(objective, classes, features, batch, seed) -> None:
    layout = layout_of(classes, features)
    params, x, y = drawn(layout, batch, seed, objective)
    run, out = LinearGradient(layout, objective), np.full(layout.size, np.nan, np.float32)
    losses, rows = single_gradients(layout, params, x, y, objective)
    loss, gradient = run(params, x, y, out=out)
    assert gradient is out
    assert loss == pytest.approx(np.mean(losses), rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(out, rows.mean(0), rtol=1e-4, atol=1e-5 * max(1.0, np.abs(rows).max()))
    weight, bias = layout.unflatten(params).values()
    expected = x.reshape(batch, -1).astype(np.float64) @ weight.T + bias
    np.testing.assert_allclose(run.logits(params, x), expected, rtol=1e-4, atol=1e-5 * max(1.0, np.abs(x).max()))


@given(st.sampled_from(DISTILLATIONS), st.integers(2, 7), st.integers(1, 9), st.integers(1, 6), st.integers(0, 99))
def test_a_teacher_is_followed_as_by_torch(kind, classes, features, batch, seed) -> None:
    """With a teacher, and without one."""
    objective = Objective(kind, temperature=2.0)
    model = get_model("linear", classes=classes, input_shape=(features, 1, 1))
    params, x, y = drawn(model.layout, batch, seed)
    rng = np.random.default_rng(seed)
    taught = (
        rng.standard_normal((batch, objective.teacher_values(classes))).astype(np.float32),
        rng.random(batch).astype(np.float32),
    )
    for given_ in ((None, None), taught):
        loss, gradient = LinearGradient(model.layout, objective)(params, x, y, (), None, *given_)
        expected, of_torch = TorchGradient(model, objective=objective)(params, x, y, (), None, *given_)
        assert loss == pytest.approx(expected, rel=1e-4, abs=1e-5)
        np.testing.assert_allclose(gradient, of_torch, rtol=1e-3, atol=1e-4 * max(1.0, np.abs(of_torch).max()))


def test_no_mean_of_nothing_and_no_masks() -> None:
    run, (params, x, y) = LinearGradient(layout_of(2, 3)), drawn(layout_of(2, 3), 1, 0)
    for wrong in ((params, x[:0], y[:0]), (params, x, y, (np.ones((1, 3), np.float32),))):
        with pytest.raises(ValueError, match="takes no dropout masks, and a mean over no samples"):
            run(*wrong)


def test_a_batch_has_its_memory_before_any_sample_is_read() -> None:
    check_memory(layout_of(10, 1000), batch=2048, memory_bytes=64 << 20)
    with pytest.raises(GraphRefused, match="a batch of 65536 takes 2"):
        check_memory(layout_of(10, 1000), batch=1 << 16, memory_bytes=64 << 20)


@given(
    st.sampled_from(list(LOSSES)),
    *(st.integers(2, 7), st.integers(1, 9), st.integers(0, 6), st.floats(1e-3, 10), st.integers(0, 2)),
    st.integers(0, 99),
)
def test_sums_are_those_of_single_clipped_gradients(
    objective, classes, features, batch, clip_norm, which, seed
) -> None:
    layout = layout_of(classes, features)
    params, x, y = drawn(layout, batch, seed, objective)
    part = [slice(None), layout.slices["head.weight"], layout.slices["prior"]][which]
    losses, rows = single_gradients(layout, params, x, y, objective)
    inside = np.zeros(layout.size, bool)
    inside[part] = True
    rows *= inside
    expected = sum((clip(row, clip_norm) for row in rows), np.zeros(layout.size))
    out = np.full(layout.size, np.nan, np.float32)
    found_losses, norms = LinearClipping(layout, objective)(params, x, y, clip_norm=clip_norm, out=out, part=part)
    np.testing.assert_allclose(found_losses, losses, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(norms, np.linalg.norm(rows, axis=1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-5 * max(1.0, min(clip_norm, norms.max(initial=0))))
    assert not out[~inside].any()


def test_records_are_added_up_in_float64() -> None:
    layout, (params, x, y) = layout_of(3, 4), drawn(layout_of(3, 4), 3000, seed=1)
    whole, one = np.empty(layout.size), np.empty(layout.size)
    LinearClipping(layout)(params, x, y, clip_norm=0.5, out=whole)
    for place in range(len(y)):
        LinearClipping(layout)(params, x[place : place + 1], y[place : place + 1], clip_norm=0.5, out=one)
        whole -= one
    assert np.abs(whole).max() < 1e-10


def test_no_records_sum_to_zeros_whatever_lies_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's einsum multiplies 0 by what lies behind an empty array whose strides are 0, as slopes of a batch of 0
    have: NaN, where NaN lies there."""
    behind = np.full(4, np.nan, np.float32)
    einsum = np.einsum

    def unlucky(subscripts: str, *operands: np.ndarray, **options: type) -> np.ndarray:
        placed = (as_strided(behind, each.shape, each.strides) if not each.size else each for each in operands)
        return einsum(subscripts, *placed, **options)

    monkeypatch.setattr(np, "einsum", unlucky)
    layout = layout_of(7, 1)
    out = np.ones(layout.size, np.float32)
    losses, norms = LinearClipping(layout)(*drawn(layout, 0, seed=0), clip_norm=1.0, out=out)
    assert (losses.size, norms.size) == (0, 0)
    assert not out.any()


@given(st.integers(2, 10), st.integers(1, 40), st.floats(1e-6, 10), st.integers(0, 99))
def test_one_record_never_counts_for_more_than_the_bound(classes, features, clip_norm, seed) -> None:
    layout = layout_of(classes, features)
    params, x, y = drawn(layout, 1, seed)
    out = np.empty(layout.size, np.float32)
    LinearClipping(layout)(params, x, y, clip_norm=clip_norm, out=out)
    assert np.linalg.norm(out.astype(np.float64)) <= clip_norm * (1 + 2.0**-23)  # each entry of `out` is rounded once


def test_a_bound_may_follow_the_norms() -> None:
    layout = layout_of(3, 4)
    params, x, y = drawn(layout, 8, 1)
    clipping, (fixed, asked) = LinearClipping(layout), np.empty((2, layout.size), np.float32)
    _, norms = clipping(params, x, y, clip_norm=lambda norms: float(np.median(norms)), out=asked)
    clipping(params, x, y, clip_norm=float(np.median(norms)), out=fixed)
    assert np.array_equal(fixed, asked)
    clipping(params, x, y, clip_norm=math.inf, out=fixed)
    _, rows = single_gradients(layout, params, x, y)
    np.testing.assert_allclose(fixed, rows.sum(0), rtol=1e-4, atol=1e-5)


def test_out_is_needed() -> None:
    with pytest.raises(ValueError, match="out must be given"):
        LinearClipping(layout_of(2, 1))(np.zeros(4, np.float32), np.zeros((0, 1)), np.zeros(0, np.int64))


@pytest.mark.parametrize(("weight", "loud"), [(3e38, 1e10), (0.0, math.inf), (0.0, 3e38)])
def test_a_gradient_that_cannot_be_clipped_counts_as_none(weight: float, loud: float) -> None:
    """Since its logits or its features are not finite, or since it is too long for a factor in float32."""
    layout, (one, other) = layout_of(3, 4), np.empty((2, 15), np.float32)
    params, x, y = drawn(layout, 5, 0)
    layout.unflatten(params)["head.weight"][:, 0] = weight
    x[:, 0], x[2, 0], kept = 0, loud, np.arange(5) != 2
    with np.errstate(all="ignore"):
        _, norms = LinearClipping(layout)(params, x, y, clip_norm=1e-3, out=one)
    LinearClipping(layout)(params, x[kept], y[kept], clip_norm=1e-3, out=other)
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-9)
    assert np.isfinite(norms).all()


@pytest.mark.parametrize("share", [0.26, 0.51, 0.75])
def test_a_record_keeps_its_bound_where_its_slopes_become_denormal(share: float) -> None:
    """Large inputs, which a task chooses by `std` or by its features, and a model that is nearly sure of the class.

    A slope that is scaled to the given share of the least float32 above zero was rounded up to it, and a record counted
    for a quarter more than its bound.
    """
    layout, factor = layout_of(10, 4), 1.001 * 2.0**-100
    x, y = np.full((1, 4), 3e38, np.float32), np.zeros(1, np.int64)
    params, out = np.zeros((2, layout.size), np.float32)
    params[-10] = -math.log(share * 2.0**-149 / factor)  # the slopes by the other logits are e^-params[-10]
    _, (norm,) = LinearClipping(layout)(params, x, y, clip_norm=math.inf, out=out)
    clip_norm = float(norm) * factor
    LinearClipping(layout)(params, x, y, clip_norm=clip_norm, out=out)
    assert np.linalg.norm(out.astype(np.float64)) <= clip_norm
