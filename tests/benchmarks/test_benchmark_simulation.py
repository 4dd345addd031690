"""`benchmarks/simulation.py`: real, tiny runs of our engine and the plain loop, and what must not go unnoticed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import simulation
from benchmarks.contenders.job import Job
from benchmarks.contenders.network import first_model, multiply_adds_per_sample
from benchmarks.versus import field
from benchmarks.versus.contest import Record, measure
from benchmarks.versus.data import Data, write_job
from benchmarks.versus.field import KEEP_FREED_MEMORY, Contender, Field
from benchmarks.versus.report import Comparison, times
from benchmarks.versus.workloads import WORKLOADS, Workload
from hushfleet.models import get_model

pytestmark = pytest.mark.slow

TINY = Workload("T", "mnist-cnn", "mnist", 4, 60, 3, 20, 2, "adam", 1e-3, turn=2, check_rounds=3)
"""A round: 3 clients x 60 samples x 2 epochs = 360 samples."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("job")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        return write_job(TINY, Data(None, folder), folder, noise_multiplier=0.0, device="cpu")


def test_ours_and_the_plain_loop_run_learn_and_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(field, "cores", lambda: 1)
    monkeypatch.setitem(WORKLOADS, "T", TINY)
    figures, chart, out = tmp_path / "f.json", tmp_path / "c.png", tmp_path / "out"
    words = f"--workloads T --turns 1 --check --ours onnx --json {figures} --plot {chart} --out {out}".split()
    simulation.main([*words, "--peers-python", f"{tmp_path}/none"])

    shown = json.loads(figures.read_text())
    (workload,) = shown["workloads"]
    contenders = {contender["label"]: contender for contender in workload["contenders"]}
    assert list(contenders) == [
        "ours, onnx, 1 process",
        "plain loop, 1 process",
        "pfl, 1 process",
        "Flower, 1 actor",
        "matrix products",
    ]
    for label in ("ours, onnx, 1 process", "plain loop, 1 process"):
        contender = contenders[label]
        assert contender["failure"] is None
        # The warm-up and a turn of two rounds; only the turn counts.
        assert [(answer["round"], answer["samples"]) for answer in contender["rounds"]] == [
            (1, 360),
            (2, 360),
            (3, 360),
        ]
        seconds = [answer["seconds"] for answer in contender["rounds"][1:]]
        assert contender["rates"] == [pytest.approx(720 / sum(seconds))]
        assert contender["accuracy"] > workload["first_accuracy"] + 0.2
        assert 0 < contender["share_of_ceiling"] < 1
    for label in ("pfl, 1 process", "Flower, 1 actor"):
        assert contenders[label]["failure"].startswith("not installed")
    assert contenders["plain loop, 1 process"]["times_plain"] == 1.0
    gflop_s = contenders["matrix products"]["rate"]
    assert workload["ceiling_samples_per_s"] == pytest.approx(gflop_s * 1e9 / (2 * 12_340_224))
    assert str(tmp_path) not in figures.read_text().replace(f"{tmp_path}/none", "")
    assert chart.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "ours, onnx, 1 process" in printed
    assert "not installed" in printed

    _same_data_for_all(out / "T" / "speed")


def _same_data_for_all(folder: Path) -> None:
    """The engine's devices hold what the arrays hold; digits are normalised by MNIST's mean and deviation."""
    devices = folder / "contenders" / "ours--onnx--1-process" / "run" / "devices"
    x, y = np.load(folder / "x.npy"), np.load(folder / "y.npy")
    assert len(y) == 240
    for index in range(4):
        rows = slice(60 * index, 60 * (index + 1))
        with np.load(devices / f"device-{index}" / "train.npz") as held:
            np.testing.assert_array_equal(held["labels"], y[rows])
            np.testing.assert_allclose((held["images"] / 255 - 0.1307) / 0.3081, x[rows], atol=1e-5)


@pytest.mark.parametrize("network", ["mnist-cnn", "cifar10-cnn"])
def test_the_module_computes_what_the_products_network_computes(network: str, tmp_path: Path) -> None:
    model = get_model(network)
    vector = model.init(7)
    np.save(tmp_path / "initial.npy", vector)
    job = Job(network, network, "", 1, 1, 1, 1, 1, "sgd", 0.1, 1.0, 0.0, 1, "cpu", 0, str(tmp_path))
    x = torch.rand(3, *model.input_shape)
    named = {name: torch.from_numpy(view) for name, view in model.layout.unflatten(vector).items()}
    torch.testing.assert_close(first_model(job)(x), model.forward(named, x))


def test_multiply_adds_by_hand() -> None:
    mnist = 24 * 24 * 32 * 25 + 8 * 8 * 64 * 32 * 25 + 1024 * 512 + 512 * 10
    assert multiply_adds_per_sample("mnist-cnn") == 3 * mnist - 24 * 24 * 32 * 25 == 12_340_224
    cifar = 32**2 * 16 * 27 + 16**2 * 32 * 144 + 8**2 * 32 * 288 + 512 * 512 + 512 * 128 + 128 * 10
    assert multiply_adds_per_sample("cifar10-cnn") == 3 * cifar - 32**2 * 16 * 27 == 7_180_032


def test_the_workloads_are_the_issues() -> None:
    def shape(name: str) -> tuple[int | str, ...]:
        w = WORKLOADS[name]
        return w.clients, w.samples, w.cohort, w.batch_size, w.epochs, w.optimizer

    assert shape("W1") == (10, 6000, 10, 16, 1, "adam")
    assert shape("W2") == (100, 600, 10, 64, 4, "adam")
    assert shape("W3") == (1000, 50, 50, 10, 1, "sgd")
    assert [(name[1], shape(name)[2:]) for name in ("C1", "C2", "C3")] == [
        (name[1], shape(name)[2:]) for name in ("W1", "W2", "W3")
    ]


_SPEAKER = """
import json, sys
print(json.dumps({"ready": {}}), flush=True)
done = 0
for line in sys.stdin:
    for _ in range(json.loads(line)["rounds"]):
        done += 1
        if done == %d:
            sys.exit("out of paper")
        print(json.dumps({"round": done, "seconds": 0.5, "samples": %d}), flush=True)
"""


def _speaker(label: str, *, dies_in: int = 0, samples: int = 360) -> Contender:
    return Contender(label, "plain", arguments=("-c", _SPEAKER % (dies_in, samples)))


def test_a_contender_that_fails_or_does_less_is_named_and_the_others_go_on(job: Job) -> None:
    contenders = [
        _speaker("good"),
        _speaker("lazy", samples=359),
        _speaker("dead", dies_in=3),
        Contender("absent", "pfl", missing="not installed: nowhere"),
    ]
    good, lazy, dead, absent = measure(job, contenders, turns=2, turn_rounds=2, on_step=lambda label, what: None)
    assert good.failure is None
    assert good.rates == [720.0, 720.0]
    assert len(good.rounds) == 5
    assert "trained on 359 samples in round 1, not on 360" in lazy.failure
    assert "exit code 1" in dead.failure
    assert "out of paper" in dead.failure
    assert absent.failure == "not installed: nowhere"
    assert [record.rate for record in (good, lazy, dead, absent)] == [720.0, None, None, None]


def test_ratios_pair_the_turns() -> None:
    """A machine that slows down tenfold in the last turn does not change them."""
    plain = Record(Contender("plain loop, 1 process", "plain"), rates=[100.0, 110.0, 10.0])
    ours = Record(Contender("ours", "ours"), rates=[200.0, 330.0, 20.0])
    peer = Record(Contender("pfl", "pfl"), rates=[100.0, 110.0, 10.0])
    broken = Record(Contender("Flower", "flower"), rates=[1000.0], failure="it ended")
    comparison = Comparison(TINY, (ours, plain, peer, broken))
    assert times(ours, comparison.plain) == 2.0
    assert comparison.best_peer is peer
    assert times(broken, plain) is None


def test_the_ceiling_is_the_best_turn() -> None:
    products = Record(Contender("matrix products", "ceiling"), rates=[24.680448, 246.80448, 12.0])
    comparison = Comparison(TINY, (products,))
    # 2 x 12,340,224 operations a sample.
    assert comparison.ceiling == pytest.approx(10_000.0)
    assert comparison.contenders == []


def _field(**changes: object) -> Field:
    plain = {"families": ("plain", "ours"), "ours": ("onnx",), "peers_python": sys.executable, "data_dir": Path()}
    return Field(**(plain | {"device": "cpu", "plain_malloc": False} | changes))


def test_all_get_one_thread_and_the_same_allocator() -> None:
    environments = [contender.environment for contender in _field().contenders("mnist-cnn")]
    assert all(environment == environments[0] for environment in environments)
    assert environments[0]["OMP_NUM_THREADS"] == "1"
    assert environments[0].items() >= KEEP_FREED_MEMORY.items()
    # Older glibc ignores a threshold above HEAP_MAX_SIZE / 2.
    assert int(KEEP_FREED_MEMORY["MALLOC_MMAP_THRESHOLD_"]) <= 32 << 20
    plain = _field(plain_malloc=True).contenders("mnist-cnn")[0].environment
    assert not plain.keys() & KEEP_FREED_MEMORY.keys()


@pytest.mark.parametrize("words", [["--workloads", "W9"], ["--contenders", "ours,them"], ["--ours", "abacus"]])
def test_unknown_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        simulation.main(words)
    assert "choose among" in capsys.readouterr().err
