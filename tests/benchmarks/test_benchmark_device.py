"""`benchmarks/device.py`: a tiny real run of the client beside PyTorch, and what must not go unnoticed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks import device
from benchmarks.board import starting
from benchmarks.board.installed import edge_mib
from benchmarks.board.report import goals
from benchmarks.board.stopwatch import SECTIONS, Stopwatch

pytestmark = pytest.mark.slow


def test_the_client_trains_a_round_beside_pytorch_and_all_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(starting, "IMPORTS", {"python alone": "pass"})
    figures, chart = tmp_path / "f.json", tmp_path / "c.png"
    words = f"--quick --models digits-cnn --methods dp-fedavg --samples 16 --batch 4 --json {figures} --plot {chart}"
    device.main(words.split())

    shown = json.loads(figures.read_text())
    (model,) = shown["models"]
    case = model["methods"]["dp-fedavg"]
    assert set(case["step"]) == {"ours", "PyTorch in our loop", "plain PyTorch"}
    assert all(side["cpu_ms"] > 0 for side in case["step"].values())
    parts = {name: part["cpu_ms"] for name, part in case["round"]["parts"].items()}
    assert set(parts) == set(SECTIONS)
    for section in ("gradients", "optimizer", "noise", "codec", "signature", "store", "ledger"):
        assert parts[section] > 0, section
    assert sum(parts.values()) == pytest.approx(case["round"]["cpu_ms"], rel=0.3)
    assert case["round"]["update_bytes"] > 1000
    # A process's peak only grows, and PyTorch's imports alone are above all of ours.
    assert 20 < case["start"]["mib"] <= case["trained_peak_mib"] <= case["round_peak_mib"]
    assert case["round_peak_mib"] < model["plain PyTorch"]["import_mib"]
    assert case["start"]["start_s"] > 0
    installed = shown["installed_mib"]
    assert {"numpy", "onnxruntime", "cryptography"} < set(installed["edge"])
    assert not {"torch", "onnx", "pydantic"} & set(installed["edge"])
    assert "torch" in installed["torch"]
    assert [goal["name"] for goal in shown["goals"]][-1].startswith("cold start")
    assert str(tmp_path) not in figures.read_text()
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert "Goals" in capsys.readouterr().out


def test_a_part_of_a_round_is_not_counted_twice() -> None:
    watch = Stopwatch()
    inner = watch.timed("inner", lambda: time.sleep(0.02))
    watch.timed("outer", lambda: (time.sleep(0.01), inner()))()
    assert watch.wall_s["inner"] >= 0.02
    assert watch.wall_s["outer"] + watch.wall_s["inner"] < 2 * watch.wall_s["inner"] + 0.02
    assert watch.wall_s["outer"] >= 0.01


def test_a_goal_that_is_missed_says_so() -> None:
    def step(ours: float) -> dict[str, dict[str, float]]:
        return {"ours": {"cpu_ms": ours}, "PyTorch in our loop": {"cpu_ms": 1.0}, "plain PyTorch": {"cpu_ms": 1.0}}

    def case(ours: float, mib: float) -> dict[str, object]:
        start = {"start_s": 1.9, "mib": 1.0}
        return {"step": step(ours), "start": start, "trained_peak_mib": mib, "round_peak_mib": 91.0}

    models = [{"model": "fashion-mnist-cnn", "methods": {"dp-fedavg": case(1.3, 89.0)}}]
    found = {goal.name: goal.met for goal in goals({"models": models})}
    assert found == {
        "fashion-mnist-cnn: MiB resident, training": True,
        "fashion-mnist-cnn: MiB resident, the whole round": False,
        "fashion-mnist-cnn: a step, of PyTorch in our loop": False,
        "fashion-mnist-cnn: a step, of plain PyTorch": False,
        "cold start, s, the quickest": True,
    }


def test_the_closure_of_the_edge_extra_is_real() -> None:
    sizes = edge_mib()
    assert sizes["hushfleet"] > 0.5
    assert sum(sizes.values()) < 300


@pytest.mark.parametrize("words", [["--models", "alexnet"], ["--methods", "dp-fedavg,magic"]])
def test_unknown_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        device.main(words)
    assert "choose among" in capsys.readouterr().err
