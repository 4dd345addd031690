"""An attacker who sees every step makes the best guess there is, the likelihood ratio's, and compares his odds with the
printed epsilon. He cannot beat it; and it is no larger than needed, since a number 2 % lower he does beat.

What his guess achieves is computed here in other ways than the accountant computes: in closed form, and for sampled
steps by adding up losses that are rounded down, so that he is never credited with more than he can do.
"""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from scipy import signal, stats  # comes with Opacus

from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.privacy.charge import DEVICE_ADJACENCY, RECORD_ADJACENCY, Charge
from hushfleet.privacy.ledger import Ledger

GRID = 2.0**-12
LOWER = 0.98


def beaten_by(mass: np.ndarray, losses: np.ndarray, bound: float) -> float:
    """P - e^bound Q of the best guess: what exceeds the odds that epsilon = `bound` allows."""
    return float((mass * np.maximum(1 - np.exp(bound - losses), 0)).sum())


def one_step(step: Step) -> tuple[int, np.ndarray]:
    """Losses under P, rounded down to the grid: the first one's number and the masses."""
    s, q = step.noise_multiplier, step.sample_rate
    highest = math.log1p(q * math.expm1((2 * (1 + 8 * s) - 1) / (2 * s * s)))
    lowest = math.log1p(-q) if q < 1 else -(16 * s + 1) / (2 * s * s)
    first = math.floor(lowest / GRID)
    edges = GRID * np.arange(first, math.ceil(highest / GRID) + 1)
    inside = np.maximum((np.exp(edges) - (1 - q)) / q, 1e-300)
    z = s * s * np.log(inside) + 0.5
    z[0] = -np.inf
    distribution = (1 - q) * stats.norm.cdf(z / s) + q * stats.norm.cdf((z - 1) / s)
    return first, np.diff(distribution)


def guesses(history: list[Step]) -> tuple[np.ndarray, np.ndarray]:
    """Losses of all steps together, and their masses, by plain convolution."""
    first, mass = 0, np.ones(1)
    for step in history:
        at, one = one_step(step)
        for _ in range(step.steps):
            first, mass = first + at, signal.fftconvolve(mass, one)
    return np.maximum(mass, 0), GRID * (first + np.arange(len(mass)))


@pytest.mark.parametrize(("multiplier", "rounds", "delta"), [(3.975, 20, 0.1), (1.0, 3, 1e-6), (0.3, 40, 1e-5)])
def test_one_update_a_round(multiplier: float, rounds: int, delta: float) -> None:
    """The best guess of T updates with or without the device is their sum's: N(T, T s^2) against N(0, T s^2)."""
    printed = epsilon([Step(multiplier, 1.0, rounds)], delta=delta)

    def excess(bound: float) -> float:
        at = bound * multiplier**2 + rounds / 2  # where the likelihood ratio of the sum is e^bound
        deviation = multiplier * math.sqrt(rounds)
        return stats.norm.sf(at / deviation - rounds / deviation) - math.exp(bound) * stats.norm.sf(at / deviation)

    assert excess(printed) <= delta
    assert excess(LOWER * printed) > delta


@pytest.mark.parametrize(
    ("history", "delta"),
    [
        ([Step(1.0, 0.1, 16)], 1e-3),
        ([Step(0.5, 0.02, 10)], 1e-5),
        ([Step(1.0, 0.1, 8), Step(1.5, 0.2, 4), Step(4.0, 1.0, 2)], 1e-4),
    ],
)
def test_sampled_steps(history: list[Step], delta: float) -> None:
    printed = epsilon(history, delta=delta)
    mass, losses = guesses(history)
    assert beaten_by(mass, losses, printed) <= delta
    assert beaten_by(mass, losses, LOWER * printed) > delta


def test_a_ledger_of_both_units() -> None:
    """A record that is added may change a device's whole update: noise against it is half of what the ledger has."""
    record = Charge("record", RECORD_ADJACENCY, "gaussian", 0.8, sample_rate=0.05, steps=12)
    device = Charge("device", DEVICE_ADJACENCY, "gaussian", 5.0)
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        ledger = Ledger(connection, device="board-7")
        ledger.create_schema()
        connection.execute("BEGIN")
        ledger.charge(record, task="a", round=1, payload_digest=bytes(32))
        ledger.charge(device, task="b", round=1, payload_digest=bytes(32))
        printed = ledger.epsilon_server(delta=1e-4)
    mass, losses = guesses([Step(0.8, 0.05, 12), Step(2.5, 1.0, 1)])
    assert beaten_by(mass, losses, printed) <= 1e-4
    assert beaten_by(mass, losses, LOWER * printed) > 1e-4
