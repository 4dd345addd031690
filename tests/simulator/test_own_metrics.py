"""Metrics of one's own: what they see, where their numbers stand, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, recall_score

import hushfleet as hf
from hushfleet.aggregator.results.result import Result
from hushfleet.errors import BadInput
from hushfleet.learning import own_metrics
from hushfleet.learning.own_metrics import measured
from hushfleet.simulator.engines.fast.loaded_run import LoadedRun

EXAMPLE = Path(__file__).parents[2] / "examples" / "metrics.py"
sys.path.insert(0, str(EXAMPLE.parent))
from metrics import balanced_accuracy, calibration_error, per_class_recall  # noqa: E402

NAMES = [f"{EXAMPLE}:{name}" for name in ("balanced_accuracy", "calibration_error", "per_class_recall")]
TASK: dict[str, Any] = {
    "name": "metrics",
    "model": {"name": "digits-cnn"},
    "method": {"name": "dp-fedavg", "learning_rate": 0.005},
    "privacy": {"noise_multiplier": 0.1, "clip_norm": 1.0},
    "data": {"name": "digits", "devices": 3, "limit": 150},
    "round": {"rounds": 2},
}


@pytest.mark.filterwarnings("ignore:y_pred contains classes")
@pytest.mark.parametrize("seed", range(5))
def test_the_examples_are_what_they_say(seed: int) -> None:
    """Against scikit-learn, and plain loops."""
    rng = np.random.default_rng(seed)
    logits, labels = 2 * rng.normal(size=(60, 4)), rng.integers(0, 3, 60)
    said = [int(row.argmax()) for row in logits]
    recalls = {}
    for label in sorted(set(labels.tolist())):
        mine = [one == label for one, there in zip(said, labels, strict=True) if there == label]
        recalls[label] = sum(mine) / len(mine)
    assert per_class_recall(logits, labels) == pytest.approx(recalls)
    assert balanced_accuracy(logits, labels) == pytest.approx(sum(recalls.values()) / len(recalls))
    odds, found = torch.softmax(torch.from_numpy(logits), 1), 0.0
    confidence, answers = odds.max(1)
    for low in torch.arange(15) / 15:
        inside = (confidence > low) & (confidence <= low + 1 / 15)
        if inside.any():
            right = (answers == torch.from_numpy(labels))[inside].double().mean()
            found += float(inside.double().mean() * (confidence[inside].mean() - right).abs())
    assert calibration_error(logits, labels) == pytest.approx(found, abs=1e-9)
    assert balanced_accuracy(logits, labels) == pytest.approx(balanced_accuracy_score(labels, said))
    theirs = recall_score(labels, said, labels=list(recalls), average=None)
    assert list(per_class_recall(logits, labels).values()) == pytest.approx(theirs.tolist())


def test_a_metric_may_return_several_numbers_and_what_is_not_finite_is_none() -> None:
    several = {"one": lambda x, y: np.float32(2), "list": lambda x, y: [1, float("nan")], "dict": lambda x, y: {"a": 3}}
    several["torch"] = lambda x, y: torch.tensor([0.5])
    found = measured(several, np.zeros((2, 2)), np.zeros(2))
    assert found == {"one": 2.0, "list.0": 1.0, "list.1": None, "dict.a": 3.0, "torch.0": 0.5}
    for broken, said in [(lambda x, y: 1 / 0, "ZeroDivisionError"), (lambda x, y: "high", "TypeError")]:
        with pytest.raises(BadInput, match=f"the metric 'mine' fails on 2 samples: {said}"):
            measured({"mine": broken}, np.zeros((2, 2)), np.zeros(2))


def simulate(out: Path, changes: dict[str, Any] | None = None, **options: Any) -> hf.Run:
    return hf.simulate(TASK, changes, out=out, **{"quiet": True, "local_only": False, "workers": 1, **options})


def test_they_are_columns_of_rounds_and_devices(tmp_path: Path) -> None:
    seen: list[tuple[int, ...]] = []

    def mine(logits: np.ndarray, labels: np.ndarray) -> float:
        seen.append(logits.shape)
        return balanced_accuracy(logits, labels)

    run = simulate(tmp_path / "a", metrics={"mine": mine, "recall": per_class_recall})
    loaded = LoadedRun(run.folder, "onnx")
    expected = balanced_accuracy(loaded.inference(_params(run), loaded.common_test.x), loaded.common_test.labels)
    assert run.rounds.mine_global[2] == pytest.approx(expected)
    assert f"recall.{loaded.common_test.labels[0]}_global" in run.rounds
    local = loaded.local_test("device-1")
    own = loaded.inference(_params(run, "device-1"), local.x)
    assert run.devices.mine_own_local["device-1"] == pytest.approx(balanced_accuracy(own, local.labels))
    assert run.rounds.mine_own_local[2] == pytest.approx(run.devices.mine_own_local.mean())
    assert set(seen) == {
        (len(loaded.common_test), 10),
        *((len(loaded.local_test(name)), 10) for name in run.devices.index),
    }
    assert [event["metrics"]["mine"] for event in run.events if event["event"] == "round_close"] == list(
        run.rounds.mine_global
    )
    assert Result.load(run.folder / "result.json") == run.result
    page = run.report().read_text()
    assert "Own metrics" in page
    assert f">{run.devices.mine_own_local['device-1']:.3g}<" in page
    with pytest.raises(BadInput, match=r"model.metrics = 'python:other' is a metric of a Python program"):
        simulate(tmp_path / "b", {"model.metrics": ["python:other"], "name": "x"})


def test_each_seed_has_them(tmp_path: Path) -> None:
    first = simulate(tmp_path / "a", metrics={"mine": balanced_accuracy}, seeds=2, report=False)
    second = hf.open_run(tmp_path / "a" / "seeds" / str(first.seeds.index[1]))
    for run in (first, second):
        row = first.seeds.loc[run.result.seed]
        assert row.mine_own_local == pytest.approx(run.devices.mine_own_local.mean())
        assert row.mine_global == run.rounds.mine_global.iloc[-1]
    assert Result.load(first.folder / "result.json") == first.result


def _params(run: hf.Run, which: str = "global") -> np.ndarray:
    return np.concatenate([tensor.numpy().ravel() for tensor in run.model(which).values()])


def test_files_give_the_same_with_several_workers_and_for_heads(tmp_path: Path) -> None:
    once = simulate(tmp_path / "once", metrics=NAMES)
    twice = simulate(tmp_path / "twice", {"model.metrics": NAMES}, workers=2)
    columns = [name for name in once.rounds if name.startswith(("balanced", "calibration", "per_class"))]
    assert len(columns) > 20
    assert once.rounds[columns].equals(twice.rounds[columns])
    assert once.devices.equals(twice.devices)
    heads = hf.simulate(
        {**TASK, "method": {"name": "hush"}, "model": {"name": "linear", "features": "filters"}},
        out=tmp_path / "hush", metrics=NAMES, quiet=True, local_only=False,
    )  # fmt: skip
    assert heads.devices.balanced_accuracy_own_local.notna().all()


def test_with_other_processes_a_function_is_refused(tmp_path: Path) -> None:
    for options, instead in (
        ({"workers": 2}, "leave workers= out, or put it into a file"),
        ({"workers": hf.Workers(2)}, "leave workers= out, or put it into a file"),
        ({"engine": "live", "workers": 0}, "put it into a file"),
    ):
        with pytest.raises(BadInput, match=f"a metric of a Python program runs in its process alone; {instead}"):
            simulate(tmp_path / "a", metrics=[balanced_accuracy], **options)


@pytest.mark.parametrize("name", ["accuracy", "loss"])
def test_a_name_of_the_runs_own_numbers_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match=f"python:{name}': .* the names accuracy, loss are taken"):
        simulate(tmp_path / "a", metrics={name: balanced_accuracy})
    assert own_metrics.load([f"python:{name}"], taken=("auroc",)) == {name: balanced_accuracy}


def test_in_the_field_the_public_test_set_is_needed_and_a_question_is_named() -> None:
    from hushfleet.aggregator.payloads.prepare import prepare

    data = {"name": "arrays", "class_names": ["a", "b"], "input_shape": [3, 1, 1], "devices": 5}
    field = hf.task({**TASK, "model": {"name": "linear", "metrics": NAMES}, "data": data})
    with pytest.raises(
        BadInput, match=r"boards answer it, noised and charged, where the task asks for an \[evaluation\]"
    ):
        prepare(field)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedala", "fedopt"])
def test_the_live_engine_measures_the_same(tmp_path: Path, method: str) -> None:
    changes = {"model.metrics": NAMES, "method.name": method, "round.rounds": 3}
    fast, live = (
        simulate(tmp_path / engine, changes, **how)
        for engine, how in (
            ("fast", {"runtime": "onnx"}),
            ("live", {"engine": "live", "workers": 0, "own_processes": 1}),
        )
    )
    columns = [name for name in fast.rounds if name.startswith(("accuracy", "loss", "balanced", "calib", "per_class"))]
    assert live.rounds[columns].equals(fast.rounds[columns])
    own = [name for name in fast.devices if name.endswith("_own_local")]
    assert len(own) > 10
    assert live.devices[own].equals(fast.devices[own])
