"""Runs with a loss of one's own: by every way to name it, with several workers, resumed, and what is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import hushfleet as hf
from hushfleet.errors import BadInput

FILE = Path(__file__).parents[2] / "examples" / "losses.py"
LABELS = np.random.default_rng(0).integers(0, 3, 150)
X = (np.random.default_rng(1).normal(size=(150, 4)) + LABELS[:, None]).astype("float32")
TASK = {
    "name": "own",
    "model": {"name": "linear"},
    "method": {"name": "fedavg", "optimizer": "sgd", "learning_rate": 0.2},
    "data": {"devices": 3},
    "round": {"rounds": 2},
}


def focal(logits: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, y, reduction="none")
    return (1 - torch.exp(-losses)) ** 2.0 * losses


def simulated(out: Path, **how: Any) -> hf.Run:
    return hf.simulate(TASK, data=(X, LABELS), out=out, quiet=True, local_only=False, report=False, **how)


def weights(run: hf.Run) -> bytes:
    return b"".join(value.numpy().tobytes() for value in run.model("global").values())


@pytest.mark.slow
def test_all_ways_give_the_same_bits(tmp_path: Path) -> None:
    """On a linear model, which without an own loss has a formula in place of a graph."""
    by_function = simulated(tmp_path / "function", loss=focal, workers=2)
    by_file = simulated(tmp_path / "file", loss=f"{FILE}:focal")
    plain = simulated(tmp_path / "plain")
    assert weights(by_function) == weights(by_file) != weights(plain)
    events = hf.events(
        TASK, data=(X, LABELS), out=tmp_path / "cut", loss=focal, workers=2, local_only=False, report=False
    )
    for event in events:
        if event["event"] == "round_close":
            break
    events.close()  # type: ignore[attr-defined]
    again = simulated(tmp_path / "cut", loss=focal, workers=2, resume=True)
    assert weights(again) == weights(by_file)
    weight, bias = (value.numpy() for value in by_file.model("global").values())
    test = np.load(tmp_path / "file" / "common_test.npz")
    logits = torch.from_numpy(test["images"][:, :, 0, 0].astype(np.float32) @ weight.T + bias)
    expected = F.cross_entropy(logits, torch.from_numpy(test["labels"])).item()
    assert by_file.rounds.loss.iloc[-1] == pytest.approx(expected, rel=1e-4), "the standard loss is reported"


def test_what_does_not_go_with_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="runtime native does not go with this task: the loss is your own"):
        simulated(tmp_path / "native", loss=focal, runtime="native")
    with pytest.raises(BadInput, match="a loss of a Python program; go on from there"):
        hf.simulate(TASK, {"model.loss": "python:gone"}, data=(X, LABELS), out=tmp_path / "gone", quiet=True)
