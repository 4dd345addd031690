"""FedOpt's server half against Algorithm 2 of its paper, entry by entry, and in the engines."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hushfleet as hf
from hushfleet.aggregator.rounds.server_half import server_state_from_bytes
from hushfleet.aggregator.storage.checkpoints import Checkpoints
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.methods import make_method
from hushfleet.methods.server import ClosedRound
from hushfleet.params import ParamLayout
from hushfleet.simulator.engines.fast.loaded_run import LoadedRun
from hushfleet.simulator.run_folder import RunFolder
from hushfleet.wire.format.spec import PrivacySpec

PRIVACY = PrivacySpec("device", accounting="strict", clip_norm=1.0, noise_multiplier=0.0, delta=0.1)


def step(optimizer: str, x: float, m: float, v: float, delta: float, *, eta: float, b1: float, b2: float, tau: float):
    """A round of Algorithm 2 for one entry."""
    m = b1 * m + (1 - b1) * delta
    if optimizer == "adagrad":
        v = v + delta**2
    elif optimizer == "yogi":
        v = v - (1 - b2) * delta**2 * math.copysign(1, v - delta**2) * (v != delta**2)
    else:
        v = b2 * v + (1 - b2) * delta**2
    return x + eta * m / (math.sqrt(v) + tau), m, v


@pytest.mark.parametrize("optimizer", ["adam", "yogi", "adagrad"])
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
@given(size=st.integers(1, 5), seed=st.integers(0, 10_000), b1=st.sampled_from([0.0, 0.9]), tau=st.floats(1e-3, 1))
@settings(max_examples=20, deadline=None)
def test_it_moves_as_algorithm_2(optimizer: str, kind: Any, size: int, seed: int, b1: float, tau: float) -> None:
    rng, how = np.random.default_rng(seed), {"eta": 0.3, "b1": b1, "b2": 0.8, "tau": tau}
    named = {"server_learning_rate": 0.3, "beta_1": b1, "beta_2": 0.8, "tau": tau}
    layout = ParamLayout(("w",), ((size,),))
    server = make_method("fedopt", {"server_optimizer": optimizer, **named}, PRIVACY, layout, rounds=1).server
    state, model = server.initial(0), rng.normal(size=size)
    slow = [(float(x), 0.0, tau**2) for x in model]
    for round in range(1, 5):
        weights = rng.integers(0, 3, size).astype(float)
        sums = weights * rng.normal(size=size) * 10.0 ** rng.integers(-3, 2)
        mean = (sums / np.where(weights > 0, weights, 1)).astype(np.float32)
        after = np.asarray(server.aggregate(state, *map(kind, (model, sums, weights))))
        state = server.advance(state, ClosedRound(round, model, after, (), None, None, mean=mean))
        slow = [step(optimizer, *one, float(delta), **how) for one, delta in zip(slow, mean, strict=True)]
        model = after
        np.testing.assert_allclose(model, [x for x, _, _ in slow], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state["v"], [v for _, _, v in slow], rtol=1e-4, atol=1e-7)


TASK: dict[str, Any] = {
    "name": "opt",
    "model": {"name": "linear", "features": "filters"},
    "method": {"name": "fedopt", "optimizer": "sgd", "learning_rate": 1.0, "local_steps": 2, "batch_size": 1024},
    "privacy": {"noise_multiplier": 0.1, "clip_norm": 1.0},
    "data": {"name": "digits", "devices": 4, "limit": 300},
    "round": {"rounds": 3, "cohort_size": 3, "min_updates": 2},
}
RAW = {"wire.codec": "float32", "wire.downlink": "full", "privacy.noise_multiplier": 0, "round.cohort_size": 4}


def simulated(out: Path, changes: dict[str, Any]) -> tuple[RunFolder, LoadedRun, dict[str, np.ndarray]]:
    run = hf.simulate(TASK, changes, out=out, local_only=False, quiet=True, runtime="onnx", workers=1)
    folder = RunFolder(run.folder)
    with AggregatorStore(folder.aggregator, durable=False) as store:
        return folder, LoadedRun(folder.path, "onnx"), server_state_from_bytes(store.get("server_state") or b"")


@pytest.mark.parametrize("changes", [{}, {"privacy.accounting": "secure"}])
def test_the_engine_gives_the_mean_that_came_before_the_server_moves(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The moments that are kept are those of which the model was made: with one round, m / (1 - beta_1) is the mean."""
    how = {**RAW, **changes, "round.rounds": 1}
    if "privacy.accounting" in changes:
        how |= {"privacy.noise_multiplier": 0.1, "wire.codec": "quantized"}
    folder, run, state = simulated(tmp_path / "a", how)
    layout = run.spec.model.layout
    before, after = (Checkpoints(folder.aggregator, layout).read(round) for round in (0, 1))
    moved = 0.01 * state["m"] / (np.sqrt(state["v"]) + np.float32(1e-3))
    np.testing.assert_allclose(after - before, moved, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(state["v"], 0.99 * 1e-6 + 0.01 * (state["m"] / 0.1) ** 2, rtol=1e-4)
    assert 0.05 < np.linalg.norm(state["m"] / 0.1) <= 10, "the mean of clipped updates"
