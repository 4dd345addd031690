"""`benchmarks/device.py`: a tiny real run of the client beside PyTorch, and what must not go unnoticed."""

from __future__ import annotations

import cProfile
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import board, device

pytestmark = pytest.mark.slow


def test_the_client_trains_rounds_beside_pytorch(
    monkeypatch: pytest.MonkeyPatch, figures_of: Callable[..., Any]
) -> None:
    monkeypatch.setattr(device, "IMPORTS", {"python alone": "pass"})
    words = "--quick --models digits-cnn --methods dp-fedavg --runtimes torch --samples 16 --batch 4"
    shown = figures_of(device.main, words)
    (model,) = shown["models"]
    case = model["methods"]["dp-fedavg"]
    assert set(case["step"]) == {"ours", "ours on torch", "plain PyTorch"}
    assert all(side["cpu_ms"] > 0 for side in case["step"].values())
    parts = {name: part["cpu_ms"] for name, part in case["round"]["parts"].items()}
    assert set(parts) == set(board.SECTIONS)
    for section in ("gradients", "optimizer", "noise", "codec", "signature", "store", "ledger"):
        assert parts[section] > 0, section
    assert sum(parts.values()) == pytest.approx(case["round"]["cpu_ms"])
    assert parts["gradients"] > parts["signature"]
    assert case["round"]["update_bytes"] > 1000
    # A process's peak only grows, and PyTorch's imports alone are above all of ours.
    assert 20 < case["start"]["mib"] <= case["trained_peak_mib"] <= case["round_peak_mib"]
    assert case["round_peak_mib"] < model["plain PyTorch"]["import_mib"]
    installed = shown["installed_mib"]
    assert {"numpy", "onnxruntime", "cryptography", "hushfleet"} < set(installed["edge"])
    assert not {"torch", "onnx", "pydantic"} & set(installed["edge"])
    assert 0.5 < installed["edge"]["hushfleet"] < sum(installed["edge"].values()) < 300
    assert "torch" in installed["torch"]
    assert shown["goals"][-1]["name"].startswith("cold start")


def test_the_time_of_what_a_section_calls_is_its_own() -> None:
    from hushfleet.privacy.noise import SecureNoise

    noise, profile = SecureNoise(), cProfile.Profile()
    profile.runcall(lambda: [noise.normal(10_000) for _ in range(20)])
    spent = board.sections(profile)
    assert spent["noise"] > 0.9 * sum(spent.values())
    assert sum(spent.values()) == pytest.approx(sum(each.inlinetime for each in profile.getstats()), rel=0.05)


def test_a_goal_that_is_missed_says_so() -> None:
    step = {"ours": {"cpu_ms": 1.3}, "plain PyTorch": {"cpu_ms": 1.0}}
    case = {"step": step, "start": {"start_s": 1.9}, "trained_peak_mib": 89.0, "round_peak_mib": 91.0}
    models = [{"model": "fashion-mnist-cnn", "methods": {"dp-fedavg": case}}]
    assert [(goal["name"].split(": ")[-1], goal["met"]) for goal in device.goals({"models": models})] == [
        ("a step, of plain PyTorch", False),
        ("MiB resident, training", True),
        ("MiB resident, the whole round", False),
        ("cold start, s, the quickest", True),
    ]
