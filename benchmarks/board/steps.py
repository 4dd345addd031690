"""Local training steps by the device's own loop, each timed, with whatever computes the gradients."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

import numpy as np

from hushfleet.config.spec import TaskSpec
from hushfleet.data.samples import Samples
from hushfleet.methods import make_method
from hushfleet.methods.method import TaskMethod
from hushfleet.methods.state import DeviceState, PublicState, RoundTerms
from hushfleet.model.evaluation import LogitsOf
from hushfleet.privacy.noise import SecureNoise
from hushfleet.training.batch import GradientFunction
from hushfleet.training.draws import Inputs
from hushfleet.training.local_round import train_round

_MASK_GROWS = ("fedglp-adp",)
"""Their steps are timed with half of the parameters personal, as late in training, where both parts have penalties."""


def timed_steps(
    spec: TaskSpec, params: np.ndarray, gradient: GradientFunction, logits_of: LogitsOf, samples: Samples
) -> dict[str, float]:
    """Medians over a round's steps: drawing the batch, gradient, the method's own part, optimizer."""
    method = make_method(spec.method, spec.method_config, spec.privacy, spec.model.layout, rounds=spec.rounds)
    marks: list[Mark] = []
    train_round(
        method,
        _late_state(method, params),
        params,
        gradient,
        samples,
        terms=RoundTerms(),
        logits_of=logits_of,
        inputs=Inputs(spec.model.dropout, spec.augment),
        rng=np.random.default_rng(),
        noise=SecureNoise(),
        on_batch=lambda done, total: marks.append(mark()),
    )
    return medians_ms(marks)


Mark = tuple[float, float]


def mark() -> Mark:
    """Now: seconds on the wall, and of this thread's CPU."""
    return time.perf_counter(), time.thread_time()


def medians_ms(marks: Sequence[Mark]) -> dict[str, float]:
    """Of what lies between neighbours."""
    pairs = list(pairwise(marks))
    wall, cpu = (median(after[clock] - before[clock] for before, after in pairs) for clock in (0, 1))
    return {"wall_ms": 1e3 * wall, "cpu_ms": 1e3 * cpu}


def _late_state(method: TaskMethod, params: np.ndarray) -> DeviceState:
    state = method.init_state()
    if method.name not in _MASK_GROWS:
        return state
    mask = np.random.default_rng(0).random(params.size) < 0.5
    return replace(state, public=PublicState(mask, 1), own=params + np.float32(1e-3))
