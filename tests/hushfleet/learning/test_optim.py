"""The flat optimizers against torch.optim."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hushfleet.array_api import BLOCK, blocks
from hushfleet.learning.optim import SGD, Adam, make_optimizer

STEPS = 20
SIZES = [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5]
THEIRS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
FORMS = [("adam", 0.0), ("sgd", 0.0), ("sgd", 0.9)]


def random_gradients(shape: tuple[int, ...]) -> list[np.ndarray]:
    """Of very different sizes, and some of them zero, so that Adam's epsilon and corrections matter."""
    rng = np.random.default_rng(sum(shape))
    scales = 10.0 ** rng.uniform(-6, 1, size=shape)
    gradients = [(rng.standard_normal(shape) * scales).astype(np.float32) for _ in range(STEPS)]
    for gradient in gradients:
        gradient[..., rng.random(shape[-1]) < 0.05] = 0
    return gradients


def torch_walk(
    name: str, start: np.ndarray, gradients: list[np.ndarray], learning_rate: float, momentum: float
) -> list[np.ndarray]:
    """Where torch.optim is after each step, in float64."""
    params = torch.nn.Parameter(torch.from_numpy(start.astype(np.float64)))
    settings = {"momentum": momentum} if momentum else {}
    optimizer = THEIRS[name]([params], lr=learning_rate, **settings)
    walk = []
    for gradient in gradients:
        params.grad = torch.from_numpy(gradient.astype(np.float64))
        optimizer.step()
        walk.append(params.detach().numpy().copy())
    return walk


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "momentum"), FORMS)
def test_a_device_steps_as_torch_does(name: str, momentum: float, size: int) -> None:
    start = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    gradients = random_gradients((size,))
    params, optimizer = start.copy(), make_optimizer(name, 1e-2, momentum)
    for gradient, expected in zip(gradients, torch_walk(name, start, gradients, 1e-2, momentum), strict=True):
        kept = gradient.copy()
        assert optimizer.step(params, gradient) is None
        np.testing.assert_allclose(params, expected, rtol=1e-5, atol=2e-6)
        np.testing.assert_array_equal(gradient, kept)
    assert params.dtype == np.float32
    assert (params != start).any()


@pytest.mark.parametrize("size", [7, BLOCK + 1])
@pytest.mark.parametrize(("name", "momentum"), FORMS)
def test_a_cohort_steps_as_its_devices_do(name: str, momentum: float, size: int) -> None:
    clients = 3
    start = np.random.default_rng(2).standard_normal((clients, size)).astype(np.float32)
    gradients = random_gradients((clients, size))
    cohort, together = torch.from_numpy(start.copy()), make_optimizer(name, 1e-3, momentum)
    alone = [start[client].copy() for client in range(clients)]
    optimizers = [make_optimizer(name, 1e-3, momentum) for _ in range(clients)]
    for gradient, expected in zip(gradients, torch_walk(name, start, gradients, 1e-3, momentum), strict=True):
        together.step(cohort, torch.from_numpy(gradient))
        for client in range(clients):
            optimizers[client].step(alone[client], gradient[client])
        np.testing.assert_allclose(cohort.numpy(), expected, rtol=1e-5, atol=2e-6)
        np.testing.assert_allclose(np.stack(alone), cohort.numpy(), rtol=1e-5, atol=1e-6)


def test_sgd_by_hand() -> None:
    params = np.array([1.0, -2.0], np.float32)
    SGD(0.5).step(params, np.array([2.0, 0.0], np.float32))
    assert params.tolist() == [0.0, -2.0]


def test_momentum_by_hand() -> None:
    # Velocity 2, then 0.5 * 2 + 4 = 5, then 0.5 * 5 = 2.5.
    params, optimizer = np.array([10.0], np.float32), SGD(1.0, 0.5)
    for gradient, expected in ((2, 8), (4, 3), (0, 0.5)):
        optimizer.step(params, np.array([gradient], np.float32))
        assert params.tolist() == [expected]


def test_adam_takes_no_momentum() -> None:
    with pytest.raises(ValueError, match="only sgd"):
        make_optimizer("adam", 0.1, 0.9)


def test_adams_first_step_is_the_learning_rate_against_the_gradients_sign() -> None:
    # After one step the corrected moments are g and g^2: params -= rate * g / (|g| + 1e-8).
    params = np.array([1.0, 1.0, 1.0], np.float32)
    Adam(0.25).step(params, np.array([3.0, -0.001, 0.0], np.float32))
    np.testing.assert_allclose(params, [0.75, 1.25, 1.0], rtol=1e-5)


def test_the_state_starts_afresh_with_each_optimizer() -> None:
    gradient = np.array([1.0], np.float32)
    worn = make_optimizer("adam", 0.1)
    for _ in range(3):
        worn.step(np.zeros(1, np.float32), gradient)
    first, again = np.zeros(1, np.float32), np.zeros(1, np.float32)
    make_optimizer("adam", 0.1).step(first, gradient)
    make_optimizer("adam", 0.1).step(again, gradient)
    assert first == again


@pytest.mark.parametrize("size", SIZES)
def test_blocks_cover_every_entry_once(size: int) -> None:
    for array in (np.zeros((2, size)), torch.zeros(2, size)):
        slices = list(blocks(array))
        assert [place for part in slices for place in range(size)[part]] == list(range(size))
        assert max(part.stop - part.start for part in slices) <= BLOCK
    assert list(blocks(np.zeros((3, 0)))) == []
