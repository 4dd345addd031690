"""`benchmarks/aggregator.py` with tiny cohorts: every cell is real, only its process is this one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import aggregator as benchmark
from benchmarks.contenders import aggregation, bursts
from benchmarks.contenders.aggregation import WORKS, Inputs, Job
from benchmarks.contenders.bursts import in_turns

pytestmark = pytest.mark.slow

MODEL = "digits-cnn"
real_run = benchmark._run


def run_here(row: benchmark.Row, model: str, cohort: int, box_s: float, options: argparse.Namespace) -> dict[str, Any]:
    in_a_process_of_its_own = row is benchmark.FLOWER or (row.work, cohort, model) == ("add", 6, MODEL)
    if in_a_process_of_its_own:
        return real_run(row, model, cohort, box_s, options)
    return WORKS[row.work](Inputs(Job(row.work, model, row.codec, cohort, box_s)))


def test_every_row_is_measured_shown_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "_run", run_here)
    monkeypatch.setattr(benchmark, "memory_copy_gb_s", lambda: 1.0)
    monkeypatch.setattr(aggregation, "cores", lambda: 2)
    monkeypatch.setattr(bursts, "COPY_BYTES", 1 << 20)
    figures, plot = tmp_path / "f.json", tmp_path / "p.png"
    words = f"--model {MODEL} --cohorts 6,20 --box-s 0.05 --json {figures} --plot {plot} --peers-python {tmp_path}/none"
    benchmark.main(words.split())

    shown = json.loads(figures.read_text())
    rows = {(cell["row"], cell["cohort"]): cell for cell in shown["cells"] if cell["model"] == MODEL}
    assert set(rows) == {(row.label, cohort) for row in benchmark.ROWS for cohort in (6, 20)}
    for (label, cohort), cell in rows.items():
        if label == benchmark.FLOWER.label:
            assert cell["missing"] == "no such interpreter"
            continue
        assert 0 < cell["updates"] <= cohort
        assert cell["updates_per_s"] > 0
        assert cell["of_copy"] > 0
        assert cell["peak_mib"] >= cell["grown_mib"] >= 0
        assert ("of_decoder" in cell) == label.startswith("decode")
    assert rows["worker processes, quantized", 20]["workers"] == 1
    assert [goal["text"].split(":")[0] for goal in shown["goals"]] == [
        "add, float32",
        "decode and add, float32",
        "decode and add, quantized",
        "decode and add, one-bit",
        "decode and add, float16",
        "1 worker processes on 2 cores",
        "memory of 20 updates",
    ]
    assert str(tmp_path) not in figures.read_text()
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "no such interpreter" in capsys.readouterr().out


def test_flower_is_not_run_where_it_would_take_too_much_memory() -> None:
    options = argparse.Namespace(most_gib=0.001, peers_python="none", box_s=1.0)
    (cell,) = real_run(benchmark.FLOWER, "fashion-mnist-cnn", 1000, 1.0, options).items()
    assert cell == ("missing", "would hold 13 GiB")


def test_bursts_take_all_updates_once_and_stop_when_time_is_up() -> None:
    class Copy:
        def gb_s(self) -> float:
            return 2.0

    taken: list[int] = []

    def work(first: int, count: int) -> float:
        taken.extend(range(first, first + count))
        return 0.001 * count

    pairs = in_turns(work, updates=500, value_bytes=10**6, box_s=60.0, copy=Copy())  # type: ignore[arg-type]
    assert taken == list(range(500))
    figures = pairs.figures()
    assert (figures["updates"], figures["copy_gb_s"]) == (500, 2.0)
    assert figures["updates_per_s"] == pytest.approx(1000)
    assert figures["float32_gb_s"] == pytest.approx(1.0)
    assert figures["of_copy"] == pytest.approx(0.5)
    assert in_turns(work, updates=500, value_bytes=1, box_s=-1.0, copy=Copy()).updates == 0  # type: ignore[arg-type]
