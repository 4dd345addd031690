"""Optimizers on flat vectors, in place; the same code for a device's `[d]` and a cohort's `[clients, d]`."""

from __future__ import annotations

import math
from typing import Any, Protocol

from hushfleet import array_api
from hushfleet.array_api import blocks
from hushfleet.learning.entries import Entries

Array = Any
_SETTLED = 10_000  # steps after which Adam's bias corrections are negligible


class Optimizer(Protocol):
    """Moves parameters along gradients; it may keep state between steps."""

    def step(self, params: Array, gradient: Array) -> None:
        """Moves `params [..., d]` in place."""


class SGD:
    """Gradient descent: params -= learning_rate * velocity, with velocity = momentum * velocity + gradient.

    It has PyTorch's form: the velocity begins as the first gradient, without dampening and without Nesterov momentum.
    Without momentum the velocity is the gradient, and no state is kept.
    """

    def __init__(self, learning_rate: float, momentum: float = 0.0) -> None:
        self.learning_rate, self.momentum = learning_rate, momentum
        self.velocity: Array = None

    def step(self, params: Array, gradient: Array) -> None:
        if not self.momentum:
            for part in blocks(params):
                params[..., part] -= self.learning_rate * gradient[..., part]
            return
        if self.velocity is None:
            self.velocity = array_api.array_namespace(params).zeros_like(params)
        for part in blocks(params):
            velocity = self.velocity[..., part]
            velocity *= self.momentum
            velocity += gradient[..., part]
            params[..., part] -= self.learning_rate * velocity


class Adam:
    """Adam (Kingma and Ba, 2015, Algorithm 1) with PyTorch's defaults and placement of epsilon."""

    beta_1, beta_2, epsilon = 0.9, 0.999, 1e-8

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self.steps = 0
        self.first: Array = None
        self.second: Array = None

    def step(self, params: Array, gradient: Array) -> None:
        xp = array_api.array_namespace(params)
        if self.first is None:
            self.first, self.second = xp.zeros_like(params), xp.zeros_like(params)
        self.steps += 1
        step_size = self.learning_rate / (1 - self.beta_1**self.steps)
        root_correction = (1 - self.beta_2**self.steps) ** 0.5
        for part in blocks(params):
            g, first, second = gradient[..., part], self.first[..., part], self.second[..., part]
            first *= self.beta_1
            first += (1 - self.beta_1) * g
            second *= self.beta_2
            second += (1 - self.beta_2) * (g * g)
            scale = xp.sqrt(second)
            scale /= root_correction
            scale += self.epsilon
            params[..., part] -= step_size * first / scale


def adam_reach(learning_rate: float, steps: int) -> float:
    """Returns the largest distance that `steps` steps of Adam can move a parameter, for any gradients.

    By Cauchy and Schwarz |m_t| is at most (1 - b1) / sqrt(1 - b2) sqrt(sum over j < t of (b1^2 / b2)^j) sqrt(v_t). So
    step t is at most the factor of sqrt(v_t), with both bias corrections, times the learning rate: 1 at first, 7.3 at
    the end.

    >>> round(adam_reach(0.1, 1), 3)
    0.1
    """
    beta_1, beta_2 = Adam.beta_1, Adam.beta_2
    ratio, total = beta_1**2 / beta_2, 0.0
    for t in range(1, min(steps, _SETTLED) + 1):
        total += math.sqrt((1 - ratio**t) / (1 - ratio) * (1 - beta_2**t)) / (1 - beta_1**t)
    total += max(0, steps - _SETTLED) * math.sqrt(1 / (1 - ratio))
    return learning_rate * (1 - beta_1) / math.sqrt(1 - beta_2) * total


def decay_weights(config: Any, params: Array, gradient: Array, entries: Entries) -> None:
    """Applies the weight decay of a step, in place, where PyTorch's optimizers do: `adamw` to the parameters, the
    others to the gradient.

    :param config: of the training, with the learning rate of the round.
    :param params: `[..., d]`, of which the step moves `entries`.
    """
    if not config.weight_decay:
        return
    if config.optimizer != "adamw":
        for part in blocks(params):
            gradient[..., part] += config.weight_decay * params[..., part]
        return
    inside, factor = params[..., entries.span], config.learning_rate * config.weight_decay
    for part in blocks(inside):
        lost = factor * inside[..., part]
        inside[..., part] -= lost if entries.fills else lost * entries.rows(params)[..., part]


def make_optimizer(
    name: str, learning_rate: float, momentum: float = 0.0, *, sgd: type[SGD] = SGD, adam: type[Adam] = Adam
) -> Optimizer:
    """Makes an optimizer; `adamw` is Adam, whose decay `decay_weights` applies.

    :param momentum: for `sgd`; must be 0 for `adam`, which has its own (else ValueError).

    >>> type(make_optimizer("adam", 0.1)).__name__
    'Adam'
    """
    if name == "sgd":
        return sgd(learning_rate, momentum)
    if momentum:
        raise ValueError(f"momentum = {momentum!r}: must be 0 with {name}; only sgd takes it")
    return {"adam": adam, "adamw": adam}[name](learning_rate)
