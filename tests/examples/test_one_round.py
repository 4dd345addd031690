"""The page of NumPy and the product compute one round with the same bits: each update, the sum, and epsilon."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.data.samples import Samples
from hushfleet.edge_client.board.config import LimitsSection
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.randomness import SeededRandomness
from hushfleet.edge_client.worker.trainer import DeviceRound, Trainer
from hushfleet.methods import method_of
from hushfleet.params import ParamLayout
from hushfleet.wire.format.update_values import decode_update
from support.fleet import prepared_task

FILE = Path(__file__).parents[2] / "examples" / "one_round.py"
BOARDS = 3
LAYOUT = ParamLayout(("head.weight", "prior"), ((10, 64), (10,)))


@pytest.fixture(scope="module")
def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_round", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["one_round"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def product_task(task: Any) -> PreparedTask:
    """The task of the page, as the product describes it."""
    settings = {
        "optimizer": "sgd",
        "batch_size": task.batch_size,
        "learning_rate": task.learning_rate,
        "local_epochs": 1,
    }
    made = prepared_task(
        method="dp-fedavg",
        settings=settings,
        devices=BOARDS,
        multiplier=task.noise_multiplier,
        unit={"clip_norm": task.clip_norm, "delta": task.delta},
        accounting="strict",
        wire={"step": task.step},
    )
    shape = replace(made.spec.model, layout=LAYOUT, input_shape=(1, 8, 8), class_names=tuple("0123456789"))
    spec = replace(made.spec, task=task.name, model=shape)
    return replace(made, spec=spec, initial=np.zeros(LAYOUT.size, np.float32), method=method_of(spec))


class PageNoise:
    """The page's generator as the product's source of noise: NumPy's own normal values are the shorter code."""

    def __init__(self, seed: int, device_index: int, round: int) -> None:
        secret = np.random.SeedSequence(seed, spawn_key=(sys.modules["one_round"].NOISE_STREAM, device_index, round))
        self._generator = np.random.Generator(np.random.Philox(secret))

    def normal(self, size: int) -> np.ndarray:
        return self._generator.standard_normal(size)

    def words(self, count: int) -> np.ndarray:
        words: np.ndarray = self._generator.bit_generator.random_raw(count)  # type: ignore[attr-defined]
        return words


@pytest.mark.parametrize("learning_rate", [0.01, 1.0], ids=["within the clip norm", "clipped"])
def test_the_page_and_the_product_agree_bit_by_bit(page: ModuleType, tmp_path: Path, learning_rate: float) -> None:
    rng = np.random.default_rng(3)
    task = page.Task("one-round", learning_rate=learning_rate, seed=11)
    prepared = product_task(task)
    published = prepared.initial
    norms, by_page = [], []
    with AggregatorStore(tmp_path / "run", durable=False) as store:
        engine = RoundEngine(store, prepared)
        names = [f"dev-{index}" for index in range(BOARDS)]
        stores = [DeviceStore(tmp_path / name / "store.sqlite", device=name, durable=False) for name in names]
        for name, own in zip(names, stores, strict=True):
            store.add_device(name, public_key=own.identity.public_key, board="test")
        plan = engine.open_round(names)
        for index, (name, own) in enumerate(zip(names, stores, strict=True)):
            x, y = rng.integers(0, 256, (40, 1, 8, 8), np.uint8), rng.integers(0, 10, 40)
            samples = Samples(x, y, (0.0,), (1.0,))
            flat = samples.x.reshape(len(y), 64)

            def gradient(params: Any, x: Any, y: Any, dropout: Any, *, out: Any, **_: Any) -> tuple[float, Any]:
                loss, out[...] = page.loss_and_gradient(task, params, x.reshape(len(y), 64), y)
                return loss, out

            trainer = Trainer(
                device=name,
                store=own,
                spec=prepared.spec,
                method=prepared.method,
                gradient=gradient,
                logits_of=lambda params, x: np.zeros((len(x), 10), np.float32),
                samples=lambda samples=samples: samples,
                randomness=SeededRandomness(task.seed, index, PageNoise),
                limits=LimitsSection(epsilon_server=math.inf),
            )
            entry = DeviceRound(trainer, plan).run(published)
            update = page.board_update(task, name, index, plan.round, published, flat, y)
            order = trainer.randomness.order(plan.round)
            norms.append(np.linalg.norm(page.train(task, published, flat, y, order)))
            counts = [span.stop - span.start for span in LAYOUT.layers]
            sent = decode_update(entry.data, public_key=own.identity.public_key, counts=counts)
            assert np.array_equal(sent.values, update)
            assert sent.header.epsilon_server == page.epsilon(task.noise_multiplier, 1, task.delta)
            assert engine.accept(name, entry.data).code == "accepted"
            by_page.append(update)
            own.close()
        assert engine._sum is not None
        summed = engine._sum._sums.sums  # type: ignore[union-attr]
        assert np.array_equal(summed, page.exact_sum(by_page[::-1]))
    assert (min(norms) > task.clip_norm) == (learning_rate == 1.0)


@pytest.mark.parametrize("rounds", [1, 7, 1000])
@pytest.mark.parametrize("noise_multiplier", [0.3, 2.0, 40.0])
def test_epsilon_is_the_ledgers(page: ModuleType, rounds: int, noise_multiplier: float) -> None:
    from hushfleet.privacy.accountant import Step, epsilon

    for delta in (1e-9, 1e-5, 0.1):
        assert page.epsilon(noise_multiplier, rounds, delta) == epsilon(
            [Step(noise_multiplier, 1.0, rounds)], delta=delta
        )


def test_it_is_one_page(capsys: pytest.CaptureFixture[str], page: ModuleType) -> None:
    assert len(FILE.read_text().splitlines()) <= 200
    page.main()
    accuracy = float(capsys.readouterr().out.split("accuracy ")[1].split()[0])
    assert accuracy > 0.14  # the chance level is 0.10, and its standard error over 1,797 digits 0.007
