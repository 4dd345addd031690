from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hushfleet.models import get_model
from hushfleet.models.checks import random_batch
from hushfleet.models.torch_gradient import TorchGradient


@pytest.fixture(params=["digits-cnn", "fashion-mnist-cnn"])
def gradient(request):
    return TorchGradient(get_model(request.param))


def batch_of(gradient, size, seed=0):
    return random_batch(gradient.model, size, np.random.default_rng(seed))


def assert_near(value, expected, tolerance=1e-5):
    """Relative to the largest entry: small entries of a gradient are differences of large terms."""
    assert value.shape == expected.shape
    assert np.abs(value - expected).max() <= tolerance * np.abs(expected).max()


def test_gradient_is_what_backward_computes(gradient):
    model, (x, y, masks) = gradient.model, batch_of(gradient, 5)
    params = model.init(0)
    leaf = torch.from_numpy(params).clone().requires_grad_()
    logits = model.forward(model.layout.unflatten(leaf), torch.from_numpy(x), [*map(torch.from_numpy, masks)])
    expected_loss = F.cross_entropy(logits, torch.from_numpy(y))
    expected_loss.backward()
    loss, grad = gradient(params, x, y, masks)
    assert loss == pytest.approx(expected_loss.item(), rel=1e-6)
    assert grad.dtype == np.float32
    assert_near(grad, leaf.grad.numpy())


def test_gradient_is_the_slope_of_the_loss():
    """Central differences in float64, along random directions."""
    gradient = TorchGradient(get_model("digits-cnn"))
    x, y, _ = batch_of(gradient, 6)
    rng = np.random.default_rng(1)
    params = torch.from_numpy(gradient.model.init(0)).double()
    inputs = torch.from_numpy(x).double(), torch.from_numpy(y)
    _, grad = gradient(params, *inputs)
    for _ in range(5):
        direction = torch.from_numpy(rng.standard_normal(len(params)))
        step = 1e-6
        above, _ = gradient(params + step * direction, *inputs)
        below, _ = gradient(params - step * direction, *inputs)
        assert (above - below) / (2 * step) == pytest.approx(float(grad @ direction), rel=1e-5, abs=1e-8)


def test_out_receives_the_gradient_and_nothing_else_changes(gradient):
    x, y, masks = batch_of(gradient, 3)
    params = gradient.model.init(0)
    before = params.copy()
    params.flags.writeable = False
    out = np.full_like(params, np.nan)
    _, grad = gradient(params, x, y, masks, out=out)
    assert grad is out
    assert np.isfinite(out).all()
    assert np.array_equal(params, before)
    assert np.array_equal(out, gradient(params, x, y, masks)[1])
    with pytest.raises(ValueError, match="out has shape"):
        gradient(params, x, y, masks, out=np.empty(3, np.float32))


def test_tensors_in_tensors_out(gradient):
    x, y, masks = batch_of(gradient, 3)
    params = gradient.model.init(0)
    tensors = [torch.from_numpy(a) for a in (params, x, y)]
    loss, grad = gradient(*tensors, [torch.from_numpy(m) for m in masks])
    assert isinstance(grad, torch.Tensor)
    assert not grad.requires_grad
    expected_loss, expected = gradient(params, x, y, masks)
    assert loss == expected_loss
    assert np.array_equal(grad.numpy(), expected)


def test_many_clients_at_once_equal_one_after_the_other(gradient):
    model = gradient.model
    params = np.stack([model.init(seed) for seed in range(3)])
    batches = [batch_of(gradient, 4, seed) for seed in range(3)]
    x, y = np.stack([b[0] for b in batches]), np.stack([b[1] for b in batches])
    masks = [np.stack(parts) for parts in zip(*(b[2] for b in batches), strict=True)]
    losses, grads = gradient.clients(params, x, y, masks)
    assert losses.shape == (3,)
    for i in range(3):
        loss, grad = gradient(params[i], x[i], y[i], [m[i] for m in masks])
        assert losses[i] == pytest.approx(loss, rel=1e-5)
        assert_near(grads[i], grad)


def test_records_of_many_clients_equal_one_after_the_other(gradient):
    model = gradient.model
    params = np.stack([model.init(seed) for seed in range(2)])
    batches = [batch_of(gradient, 3, seed) for seed in range(2)]
    x, y = np.stack([b[0] for b in batches]), np.stack([b[1] for b in batches])
    masks = [np.stack(parts) for parts in zip(*(b[2] for b in batches), strict=True)]
    room = np.empty((2, 4, model.layout.size), np.float32)
    losses, grads = gradient.records(params, x, y, masks, room[:, 1:])
    assert losses.shape == (2, 3)
    assert grads.base is room
    for i, j in np.ndindex(2, 3):
        loss, grad = gradient(params[i], x[i, j : j + 1], y[i, j : j + 1], [m[i, j : j + 1] for m in masks])
        assert losses[i, j] == pytest.approx(loss, rel=1e-5)
        assert_near(grads[i, j], grad)


def test_samples_without_weight_are_not_there(gradient):
    """Batches of 4, 1 and 3 in a table of width 4: what pads them does not count, whatever it is."""
    model, sizes = gradient.model, (4, 1, 3)
    params = np.stack([model.init(seed) for seed in range(3)])
    batches = [batch_of(gradient, 4, seed) for seed in range(3)]
    x, y = np.stack([b[0] for b in batches]), np.stack([b[1] for b in batches])
    masks = [np.stack(parts) for parts in zip(*(b[2] for b in batches), strict=True)]
    weights = np.array([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]], np.float32)
    out = np.empty_like(params)
    losses, grads = gradient.clients(params, x, y, masks, out, weights=weights)
    assert grads is out
    for i, size in enumerate(sizes):
        loss, grad = gradient(params[i], x[i, :size], y[i, :size], [m[i, :size] for m in masks])
        assert losses[i] == pytest.approx(loss, rel=1e-5)
        assert_near(grads[i], grad)


def test_weights_count_relative_to_one_another():
    gradient = TorchGradient(get_model("digits-cnn"))
    params, (x, y, _) = gradient.model.init(0), batch_of(gradient, 3)
    single_losses, single_grads = zip(*(gradient(params, x[i : i + 1], y[i : i + 1]) for i in range(3)), strict=True)
    weights = np.array([[6, 0, 2]], np.float32)  # a loss of 3/4 of the first and 1/4 of the last
    losses, grads = gradient.clients(params[None], x[None], y[None], weights=weights)
    assert losses[0] == pytest.approx(0.75 * single_losses[0] + 0.25 * single_losses[2], rel=1e-5)
    assert_near(grads[0], 0.75 * single_grads[0] + 0.25 * single_grads[2])


def test_the_batch_gradient_is_the_mean_of_its_samples(gradient):
    x, y, masks = batch_of(gradient, 5)
    params = gradient.model.init(0)
    each = [gradient(params, x[i : i + 1], y[i : i + 1], [m[i : i + 1] for m in masks]) for i in range(5)]
    loss, grad = gradient(params, x, y, masks)
    assert np.mean([single for single, _ in each]) == pytest.approx(loss, rel=1e-6)
    assert_near(np.mean([single for _, single in each], axis=0), grad)


def test_logits_ignore_dropout(gradient):
    x, _, _ = batch_of(gradient, 4)
    model, params = gradient.model, gradient.model.init(0)
    logits = gradient.logits(params, x)
    expected = model.forward(model.layout.unflatten(torch.from_numpy(params)), torch.from_numpy(x))
    assert np.array_equal(logits, expected.numpy())


def test_the_small_network_learns_the_digits():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = ((images - 4.88) / 6.02).astype(np.float32).reshape(-1, 1, 8, 8)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(x))
    train, test = order[:1437], order[1437:]
    gradient = TorchGradient(get_model("digits-cnn"))
    params = gradient.model.init(0)
    for _ in range(6):
        for indices in np.array_split(rng.permutation(train), 90):
            _, grad = gradient(params, x[indices], labels[indices])
            params -= np.float32(0.1) * grad
    accuracy = (gradient.logits(params, x[test]).argmax(1) == labels[test]).mean()
    assert accuracy > 0.94
