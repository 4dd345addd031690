"""Cells of `benchmarks/other_methods.py` are tasks at the epsilon that they name, and the figure shows them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import other_methods
from benchmarks.other_methods import MethodRun, cells
from benchmarks.private_gain import EPSILONS, draw
from hushfleet.aggregator.config.task import parse_task

EXPECTED = {
    ("dp-fedavg", "sum"): "secure",
    ("dp-fedavg-head", "sum"): "secure",
    ("fedglp-adp", "sum"): "as-published",
    ("dp-fedavg", "local"): "strict",
    ("dp-fedavg-head", "local"): "strict",
    ("fedglp-adp", "local"): "strict",
}


def test_every_cell_is_a_task_at_its_epsilon() -> None:
    every = list(cells())
    assert len(set(every)) == len(every)
    for cell in every:
        task = parse_task(cell.plain(), where="cell")
        assert (task.privacy.epsilon, task.privacy.delta, task.privacy.unit) == (cell.epsilon, 1e-5, "device")
        if cell.epsilon:
            assert task.privacy.accounting == EXPECTED[cell.method, cell.noise]
        assert task.data.limit == cell.devices * cell.images


def test_the_figure_has_a_curve_for_each_method(tmp_path: Path) -> None:
    one = {"common": 0.5, "own": 0.5}
    points = [{"epsilon": epsilon, "shared": one, "local": one, "std": 0.01} for epsilon in EPSILONS]
    who = {"data": "digits", "classes": 10, "devices": 100, "images": 12, "alpha": None, "honest": 1.0}
    lines = [
        {"cell": asdict(MethodRun("digits", 100, 12, method, noise, epsilon, 0)), "global": 0.4}
        for method, noise in EXPECTED
        for epsilon in (2.0, None)
    ]
    fleet = {**who, "alone": one, "points": points}
    draw([fleet, {**fleet, "data": "fashion-mnist", "images": 20}], lines, tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text()
    for name in (
        "hush, secure aggregation",
        "DP-FedAvg, CNN, each adds all the noise",
        "FedGLP-ADP, CNN, if its masks could be",
    ):
        assert name in text


def test_finished_cells_are_not_run_again_and_all_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figures_of: Callable[..., Any]
) -> None:
    two = list(cells())[:2]
    monkeypatch.setattr(other_methods, "cells", lambda: iter(two))
    monkeypatch.setattr(other_methods, "measure", lambda cell, data_dir: {"global": 0.5})
    kept = tmp_path / "kept.jsonl"
    kept.write_text(json.dumps({"cell": asdict(two[0]), "global": 0.25}) + "\n")
    found = figures_of(other_methods.main, f"--kept {kept}")
    assert [each["global"] for each in found["cells"]] == [0.25, 0.5]
    assert [json.loads(line) for line in kept.read_text().splitlines()] == found["cells"]
