"""One private round of federated averaging in plain NumPy, on one page: what a board sends, and what it costs.

It is DP-FedAvg (McMahan et al., ICLR 2018) with local noise, on a softmax classifier. Hushfleet computes the same round
on real boards, with keys, a broker, a ledger and a store around it. `tests/examples/test_one_round.py` runs both and
finds the sum and epsilon equal, bit by bit. With scikit-learn for its scanned digits:

    python examples/one_round.py
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]

NOISE_STREAM, ORDER_STREAM = 0x4E4F4953, 0x4F524452
GRID = 1.5 * 2.0**42
ROUNDING_MARGIN = 1 - 2.0**-22
SUM_SCALE = 2.0**40


@dataclass(frozen=True)
class Task:
    """The task that all boards have before the round.

    :param clip_norm: C, the largest Euclidean norm of an update.
    :param noise_multiplier: sigma, the noise's standard deviation in units of C.
    :param step: the quantisation step, in units of the noise's standard deviation.
    """

    name: str
    classes: int = 10
    inputs: int = 64
    learning_rate: float = 0.1
    batch_size: int = 16
    clip_norm: float = 1.0
    noise_multiplier: float = 2.0
    step: float = 1.0
    delta: float = 1e-5
    seed: int = 0


# 1. A board trains on its own data.


def loss_and_gradient(task: Task, params: Vector, x: Vector, y: NDArray[np.int64]) -> tuple[float, Vector]:
    """Returns the mean cross-entropy and its gradient, float32 `[d]`.

    :param params: weights `[classes, inputs]` and then biases `[classes]`, flat.
    :param x: float32 `[B, inputs]`; `y`: labels int64 `[B]`.
    """
    weight = params[: task.classes * task.inputs].reshape(task.classes, task.inputs)
    logits = np.einsum("bf,cf->bc", x, weight) + params[weight.size :]
    logits -= logits.max(1, keepdims=True)
    shares = np.exp(logits)
    shares /= shares.sum(1, keepdims=True)
    chosen = np.arange(len(y)), y
    loss = float(-np.log(shares[chosen]).mean())
    shares[chosen] -= 1
    shares /= np.float32(len(y))
    return loss, np.concatenate((np.einsum("bc,bf->cf", shares, x).ravel(), shares.sum(0)))


def train(task: Task, published: Vector, x: Vector, y: NDArray[np.int64], rng: np.random.Generator) -> Vector:
    """Returns the change of the model by one epoch of SGD."""
    params = published.copy()
    order = rng.permutation(len(y))
    for first in range(0, len(y), task.batch_size):
        batch = order[first : first + task.batch_size]
        params -= task.learning_rate * loss_and_gradient(task, params, x[batch], y[batch])[1]
    return params - published


# 2. It bounds its influence, and hides it in noise. Both happen before anything leaves the board.


def clip(update: Vector, clip_norm: float) -> Vector:
    """Scales the update down to `clip_norm`, if it is longer. The margin keeps float32 rounding within the bound."""
    values = update.astype(np.float64)
    norm = np.sqrt(np.sum(values * values))
    factor = clip_norm / norm * ROUNDING_MARGIN if norm > clip_norm else 1.0
    return update * np.float32(factor)


def add_noise(clipped: Vector, std: float, generator: np.random.Generator) -> Vector:
    """Adds Gaussian noise, and rounds to a grid of about std / 1024: the last bits of a float then reveal nothing."""
    noised = generator.standard_normal(len(clipped)) * std
    noised += clipped
    noised += std * GRID
    noised -= std * GRID
    return noised.astype(np.float32)


# 3. It rounds coarsely: precision below the noise is worth no bytes.


def quantised(noised: Vector, step: np.float32, key: bytes) -> Vector:
    """Returns the values as the aggregator decodes them: rounded with a dither that both sides know.

    :param key: 16 bytes, from public names, different for each update.
    """
    words = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(-(-len(noised) // 4)).astype("<u8")
    dither = (2 * words.view("<u2")[: len(noised)].astype(np.float32) - 65535) / np.float32(1 << 17)
    return (np.rint(noised / step + dither) - dither) * step


def board_update(task: Task, board: str, index: int, round: int, published: Vector, x: Vector, y: NDArray) -> Vector:
    """Returns the one vector that leaves a board in a round. FOR SIMULATION: a real board's noise has no seed."""
    order = np.random.SeedSequence(task.seed, spawn_key=(ORDER_STREAM, index, round))
    secret = np.random.SeedSequence(task.seed, spawn_key=(NOISE_STREAM, index, round))
    update = train(task, published, x, y, np.random.Generator(np.random.PCG64(order)))
    std = task.clip_norm * task.noise_multiplier
    noised = add_noise(clip(update, task.clip_norm), std, np.random.Generator(np.random.Philox(secret)))
    key = hashlib.sha256(f"{task.name}|{round}|{board}".encode()).digest()[:16]
    return quantised(noised, np.float32(task.step * std), key)


# 4. The aggregator adds whole numbers, so neither the order of the boards nor a restart changes a bit.


def exact_sum(updates: list[Vector]) -> NDArray[np.float64]:
    """Returns the sum `[d]` of what arrived."""
    total = np.zeros(len(updates[0]), np.int64)
    for update in updates:
        total += np.rint(update.astype(np.float64) * SUM_SCALE).astype(np.int64)
    return total / SUM_SCALE


# 5. Each board knows what it has spent.


def epsilon(noise_multiplier: float, rounds: int, delta: float) -> float:
    """Returns epsilon of so many rounds against anyone who sees every update: the exact value, rounded up.

    The rounds compose to one Gaussian mechanism with mean shift mu = sqrt(rounds) / sigma, and delta(epsilon) =
    Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu) (Balle and Wang, 2018). With a = epsilon/mu - mu/2 and
    Mills' ratio R(x) = Phi(-x) / phi(x) it is phi(a) (R(a) - R(a + mu)), in which nothing overflows.
    """
    mu = math.sqrt(math.fsum([rounds / noise_multiplier**2]))
    low, high = -mu / 2, 1.0
    if log_delta(low, mu) <= math.log(delta):
        return 0.0
    while log_delta(high, mu) > math.log(delta):
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if log_delta(middle, mu) > math.log(delta) else (low, middle)
    return max(0.0, mu * (high + mu / 2) + 1e-12 * mu * (abs(high) + mu))


def log_delta(a: float, mu: float) -> float:
    """Returns log delta at epsilon = mu (a + mu/2), rounded up by 1e-13."""
    up, down = 1 + 1e-13, 1 - 1e-13
    if a < 0:
        return math.log(max(math.erfc(a / math.sqrt(2)) / 2 * up - density(a) * mills(a + mu) * down, 5e-324))
    return -a * a / 2 - math.log(2 * math.pi) / 2 + math.log(mills(a) * up - mills(a + mu) * down)


def density(x: float) -> float:
    """Returns phi(x) of the standard normal distribution."""
    return math.exp(-x * x / 2 - math.log(2 * math.pi) / 2)


def mills(x: float) -> float:
    """Returns Phi(-x) / phi(x); for a large x by its asymptotic series."""
    if x < 10:
        return math.erfc(x / math.sqrt(2)) / 2 / density(x)
    total, term = 1.0, 1.0
    for odd in range(1, 25, 2):
        term *= -odd / (x * x)
        total += term
    return total / x


def main() -> None:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x, y = (pixels / 16).astype(np.float32), labels.astype(np.int64)
    task, boards = Task("one-round", learning_rate=1.0, noise_multiplier=1.0), 599
    published = np.zeros(task.classes * task.inputs + task.classes, np.float32)
    own = [slice(index, None, boards) for index in range(boards)]
    sent = [board_update(task, f"dev-{i}", i, 1, published, x[rows], y[rows]) for i, rows in enumerate(own)]
    params = published + (exact_sum(sent) / boards).astype(np.float32)
    weight, bias = params[:-10].reshape(10, 64), params[-10:]
    print(f"loss {loss_and_gradient(task, published, x, y)[0]:.3f} -> {loss_and_gradient(task, params, x, y)[0]:.3f}")
    print(f"accuracy {np.mean((x @ weight.T + bias).argmax(1) == y):.3f} of {boards} boards, chance level 0.100")
    print(f"epsilon {epsilon(task.noise_multiplier, 1, task.delta):.4f} at delta {task.delta:g}, for each board")


if __name__ == "__main__":
    main()
