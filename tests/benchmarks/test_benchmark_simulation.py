"""`benchmarks/simulation.py`: real, tiny runs of our engine and the plain loop, and what must not go unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import simulation
from benchmarks.frameworks.workload import WORKLOADS, TrainingJob, Workload, network_of
from benchmarks.processes import ROOT
from benchmarks.simulation import KEEP_FREED_MEMORY, Framework, compared, measure, write_job
from hushfleet.models import get_model

pytestmark = pytest.mark.slow

TINY = Workload("T", 4, 60, 3, 20, 2, "adam", 1e-3, turn=2, noise_multiplier=0.0)
"""A round: 3 clients x 60 samples x 2 epochs = 360 samples."""


@pytest.fixture
def job(tmp_path: Path) -> TrainingJob:
    return write_job(TINY, None, tmp_path / "job")[0]


def test_ours_and_the_plain_loop_train_learn_and_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figures_of: Callable[..., Any]
) -> None:
    monkeypatch.setattr(simulation, "cores", lambda: 1)
    monkeypatch.setitem(WORKLOADS, "W1", replace(TINY, name="W1"))
    absent = "--peers-python none-such --blazefl-python none-such"
    words = f"--workloads W1 --turns 2 --check --runtimes onnx {absent} --before {ROOT}"
    (comparison,) = figures_of(simulation.main, words)["workloads"]
    rows = {row["label"]: row for row in comparison["frameworks"]}
    labels = ("ours, onnx", "before, onnx", "plain loop", "pfl")
    ours, before, plain, pfl = (rows.pop(f"{label}, 1 process") for label in labels)
    flower, blazefl = rows.pop("Flower, 1 actor"), rows.pop("BlazeFL, 1 thread")
    assert not rows
    assert ours["accuracy"] == before["accuracy"], "the same seed and the same code"
    for row in (ours, before, plain):
        assert row["failure"] is None
        # The warm-up and two turns of two rounds; only the turns count.
        assert [answer["samples"] for answer in row["rounds"]] == [360] * 5
        seconds = [answer["seconds"] for answer in row["rounds"][1:]]
        assert row["rates"] == [pytest.approx(720 / sum(pair)) for pair in (seconds[:2], seconds[2:])]
        assert row["accuracy"] > comparison["first_accuracy"] + 0.2
        assert min(row["processor_us"]) > 0
    assert plain["times_plain"] == 1.0
    for row in (pfl, flower, blazefl):
        assert row["rate"] is None
        assert "none-such" in row["failure"]


def test_the_engines_devices_hold_what_the_arrays_hold(job: TrainingJob, tmp_path: Path) -> None:
    """Digits are normalised by MNIST's mean and deviation."""
    from benchmarks.frameworks.ours import task_of
    from hushfleet.simulator.run_folder import begin

    begin(task_of(TINY), tmp_path / "run", data_dir=job.folder / "digits").write_samples()
    assert len(job.array("y")) == 240
    for index, (x, y) in enumerate(job.clients()):
        with np.load(tmp_path / "run" / "devices" / f"device-{index}" / "train.npz") as held:
            np.testing.assert_array_equal(held["labels"], y)
            np.testing.assert_allclose((held["images"] / 255 - 0.1307) / 0.3081, x, atol=1e-5)


@pytest.mark.parametrize("network", ["mnist-cnn", "svhn-cnn"])
def test_the_module_computes_what_the_products_network_computes(network: str) -> None:
    model = get_model(network)
    vector, x = model.init(7), torch.rand(3, *model.input_shape)
    named = {name: torch.from_numpy(view) for name, view in model.layout.unflatten(vector).items()}
    torch.testing.assert_close(network_of(vector, replace(TINY, network=network)).eval()(x), model.forward(named, x))


@pytest.mark.parametrize(("method", "secure"), [("hush", False), ("fedper", False), ("dp-fedavg", True)])
def test_both_sides_learn_the_same_by_each_method(
    method: str, secure: bool, monkeypatch: pytest.MonkeyPatch, figures_of: Callable[..., Any]
) -> None:
    """Without noise their accuracies differ by the order of the batches alone."""
    monkeypatch.setattr(simulation, "cores", lambda: 1)
    tiny = Workload("W1", 4, 60, 4, 256, 2, "sgd", 16.0 if method == "hush" else 0.1, method=method, secure=secure)
    monkeypatch.setitem(WORKLOADS, "W1", tiny)
    words = "--workloads W1 --turns 1 --check --runtimes onnx --frameworks ours,plain"
    (comparison,) = figures_of(simulation.main, words)["workloads"]
    ours, plain = comparison["frameworks"]
    assert (ours["failure"], plain["failure"]) == (None, None)
    assert ours["accuracy"] == pytest.approx(plain["accuracy"], abs=0.05)


def test_the_workloads_are_those_of_the_goal() -> None:
    shapes = {n: (w.clients, w.samples, w.cohort, w.batch_size, w.epochs, w.optimizer) for n, w in WORKLOADS.items()}
    assert shapes == {
        "W1": (10, 6000, 10, 16, 1, "adam"),
        "W2": (100, 600, 10, 64, 4, "adam"),
        "W3": (1000, 50, 50, 10, 1, "sgd"),
        "W4": (1000, 20, 1000, 2048, 5, "sgd"),
        "W5": (100, 100, 10, 10, 1, "sgd"),
        "W6": (50, 50, 50, 10, 1, "sgd"),
    }


SPEAKER = """
import json, os, sys
if {environment}: assert os.environ["OMP_NUM_THREADS"] == "1" and "MALLOC_TOP_PAD_" in os.environ
print(json.dumps({{}}), flush=True)
for done, line in enumerate(sys.stdin):
    if done == {dies_in}:
        sys.exit("out of paper")
    print(json.dumps({{"seconds": 0.5, "samples": {samples}}}), flush=True)
"""


def _speaker(label: str, *, dies_in: int = -1, samples: int = 360) -> Framework:
    code = SPEAKER.format(environment=True, dies_in=dies_in, samples=samples)
    return Framework(label, "plain", ("-c", code))


def test_a_framework_that_fails_or_does_less_is_named_and_the_others_go_on(job: TrainingJob) -> None:
    speakers = [_speaker("good"), _speaker("lazy", samples=359), _speaker("dead", dies_in=3)]
    absent = Framework("absent", "pfl", ("-c", "import none_such"))
    rows = compared(measure(job, [*speakers, absent], turns=2, check=False))["frameworks"]
    good, lazy, dead, missing = rows
    assert good["failure"] is None
    assert good["rates"] == [720.0, 720.0]
    assert len(good["rounds"]) == 5
    assert "trained on 359 samples in a round, not on 360" in lazy["failure"]
    assert "exit code 1" in dead["failure"]
    assert "out of paper" in dead["failure"]
    assert "No module named 'none_such'" in missing["failure"]
    assert [row["rate"] for row in rows] == [720.0, None, None, None]


def test_ratios_pair_the_turns() -> None:
    """A machine that slows down tenfold in the last turn does not change them."""

    def row(label: str, family: str, *rates: float, failure: str | None = None) -> dict[str, Any]:
        processor_us = [1e6 / rate for rate in rates]
        return {
            "label": label, "family": family, "rates": list(rates), "processor_us": processor_us, "failure": failure
        }  # fmt: skip

    plain = row("plain loop, 1 process", "plain", 100.0, 110.0, 10.0)
    ours, peer = row("ours", "ours", 200.0, 330.0, 20.0), row("pfl", "pfl", 100.0, 110.0, 10.0)
    found = compared([ours, plain, peer, row("Flower", "flower", 1000.0, failure="it ended")])
    assert found["best_peer"] == "pfl"
    assert ours["times_plain"] == ours["times_best_peer"] == ours["times_processor"] == 2.0


def test_older_glibc_takes_the_allocators_settings() -> None:
    assert int(KEEP_FREED_MEMORY["MALLOC_MMAP_THRESHOLD_"]) <= 32 << 20


@pytest.mark.parametrize("words", [["--workloads", "W9"], ["--frameworks", "ours,them"], ["--runtimes", "abacus"]])
def test_unknown_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        simulation.main(words)
    assert "choose among" in capsys.readouterr().err
