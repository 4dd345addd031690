"""The device on which a run computes: named, told to its processes, and refused with those that are there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import hushfleet as hf
from hushfleet.errors import BadInput
from hushfleet.models import cuda
from hushfleet.models.cuda import CHOSEN, computing_device, computing_on, sees_cuda
from hushfleet.simulator.options import RunOptions


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with two; the calls that would choose one."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.mark.parametrize(
    ("name", "device", "calls"), [("", "cuda", []), ("cuda", "cuda", []), ("cuda:1", "cuda", [1]), ("cpu", "cpu", [])]
)
def test_the_named_device_is_the_current_one(
    name: str, device: str, calls: list[int], two_devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda index: cuda.nullcontext())
    monkeypatch.delenv(CHOSEN, raising=False)
    with computing_on(name):
        assert (computing_device(), two_devices, os.environ[CHOSEN]) == (device, calls, name)
        assert sees_cuda() == (name != "cpu")
    assert CHOSEN not in os.environ


@pytest.mark.parametrize(("name", "here"), [("cuda:2", "cpu, cuda:0, cuda:1"), ("gpu", "cpu, cuda:0, cuda:1")])
def test_another_is_refused_with_those_that_are_there(name: str, here: str, two_devices: list[int]) -> None:
    with pytest.raises(BadInput, match=f"--device '{name}': this machine has {here}$"), computing_on(name):
        pass


def test_a_runtime_or_device_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task: dict[str, Any] = {
        "name": "t",
        "model": {"name": "linear", "features": "filters"},
        "method": {"name": "fedavg"},
        "data": {"name": "digits", "devices": 2, "limit": 100},
        "round": {"rounds": 1},
    }
    how: dict[str, Any] = {"quiet": True, "local_only": False, "workers": 1}
    for options, said in [
        ({"device": "cuda:1", "runtime": "onnx"}, "--device cuda:1 does nothing with --runtime onnx"),
        ({"device": "cuda:1", "engine": "ray"}, "--device does nothing with --engine ray: it is for --engine fast"),
        ({"runtime": "jax"}, "--runtime = 'jax': must be one of 'auto', 'onnx', 'native', 'torch', 'vmap'|runtime"),
    ]:
        with pytest.raises(BadInput, match=said):
            RunOptions(**options)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadInput, match=r"--device 'cuda:0': this machine has cpu$"):
        hf.simulate(task, out=tmp_path / "a", device="cuda:0", **how)
    for runtime in ("torch", "vmap"):
        run = hf.simulate(task, out=tmp_path / runtime, device="cpu", runtime=runtime, **how)
        assert run.result.rerun is not None
        assert run.result.rerun.runtime == runtime
