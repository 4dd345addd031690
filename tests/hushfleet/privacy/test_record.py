"""The privacy unit `record`: DP-SGD in the training loop, against Opacus and against bounds that hold for any data."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from opacus.accountants import RDPAccountant
from opacus.optimizers import DPOptimizer

from hushfleet.data.samples import Samples
from hushfleet.errors import PrivacyError
from hushfleet.learning.draws import Inputs
from hushfleet.learning.optim import make_optimizer
from hushfleet.methods import make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.local import GradientRule, Sgd
from hushfleet.methods.method import Method
from hushfleet.methods.task_method import TaskMethod, bind
from hushfleet.params import ParamLayout
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.privacy.clipping import clipped_sum
from hushfleet.privacy.noise import SeededNoise, add_on_grid
from hushfleet.privacy.record import LEAST_CLIP_NORM, RecordMechanism
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import WITH_RECORDS, taken, train_round
from support.methods import trained as train

CLASSES = 3
NAMES = ("body.weight", "body.bias", "norm.weight", "head.weight", "head.bias")
LAYOUT = ParamLayout(NAMES, ((2, 4), (2,), (2,), (3, 2), (3,)))


def network(params: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Logits `[n, 3]` of two small layers."""
    first, one, scale = params[:8].view(2, 4), params[8:10], params[10:12]
    second, two = params[12:18].view(3, 2), params[18:21]
    return torch.tanh((x.view(len(x), -1) @ first.T + one) * scale) @ second.T + two


def loss_of(params: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(network(params, x), y)


class Gradient:
    """The network's gradient by torch, `times` as large; a teacher is ignored."""

    def __init__(self, times: float = 1.0) -> None:
        self.times = times

    def __call__(self, params, x, y, dropout=(), out=None, **distilled):
        vector = torch.tensor(params, requires_grad=True)
        loss = loss_of(vector, torch.from_numpy(x), torch.from_numpy(y)) * self.times
        out[...] = torch.autograd.grad(loss, vector)[0].numpy()
        return float(loss.detach()), out


class ClipsItself(Gradient):
    """A runtime with clipping of its own."""

    def clipped_sum(self, params, x, y, dropout=(), clip_norm=math.inf, out=None, **distilled):
        out[...], losses, norms, one = 0, [], [], np.empty_like(params)
        for i in range(len(y)):
            losses.append(self(params, x[i : i + 1], y[i : i + 1], out=one)[0])
            norms.append(np.linalg.norm(one.astype(np.float64)))
            out += one * np.float32(min(1.0, clip_norm / norms[-1]))
        return np.array(losses), np.array(norms)


def logits(params: np.ndarray, x: np.ndarray) -> np.ndarray:
    return network(torch.from_numpy(np.asarray(params, np.float32)), torch.from_numpy(x)).numpy()


def samples(count: int, seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, 1, 2, 2), dtype=np.uint8)
    return Samples(images, rng.integers(0, CLASSES, count), (0.5,), (0.25,))


def spec(**changes: Any) -> PrivacySpec:
    usual = PrivacySpec("record", "strict", 0.5, 0.7, 1e-5, sample_rate=0.2, batches=6)
    return replace(usual, **changes)


def method_of(name: str = "dp-fedavg", privacy: PrivacySpec | None = None, **config: Any) -> TaskMethod:
    settings = {"optimizer": "sgd", "learning_rate": 0.3, "batch_size": 5, "local_epochs": 2, **config}
    return make_method(name, taken(name, settings), privacy or spec(), LAYOUT, rounds=4)


def start_of() -> np.ndarray:
    return np.random.default_rng(3).normal(size=LAYOUT.size).astype(np.float32)


def trained(method: TaskMethod, data: Samples, *, gradient: Any = None, **how: Any) -> np.ndarray:
    how |= {"rng": np.random.default_rng(1), "noise": SeededNoise(5, 0, 1), "logits_of": logits}
    return train(method, start_of(), gradient or Gradient(), data, **how).end


@pytest.mark.parametrize(
    ("config", "make"),
    [
        ({"optimizer": "sgd"}, lambda p: torch.optim.SGD(p, 0.3)),
        ({"optimizer": "sgd", "momentum": 0.9}, lambda p: torch.optim.SGD(p, 0.3, momentum=0.9)),
        ({"optimizer": "adam", "learning_rate": 0.01}, lambda p: torch.optim.Adam(p, 0.01)),
    ],
)
def test_training_is_that_of_opacus(config: dict[str, Any], make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same Poisson batches, with the same noise; at this rate some batches are empty."""
    privacy, data, source = spec(sample_rate=0.05, batches=12), samples(30), SeededNoise(5, 0, 1)

    def our_noise(std: float, reference: torch.Tensor, **_: Any) -> torch.Tensor:
        noised = add_on_grid(std * source.normal(len(reference)), reference.numpy(), std)
        return torch.from_numpy(noised - reference.numpy()).to(reference.dtype)

    monkeypatch.setattr("opacus.optimizers.optimizer._generate_noise", our_noise)
    params = torch.tensor(start_of(), requires_grad=True)
    optimizer = DPOptimizer(make([params]), noise_multiplier=0.7, max_grad_norm=0.5, expected_batch_size=5)
    each = torch.func.vmap(torch.func.grad(lambda p, x, y: loss_of(p, x[None], y[None])), (None, 0, 0))
    rng, sizes = np.random.default_rng(1), []
    for _ in range(privacy.batches):
        batch = data.take(np.flatnonzero(rng.random(30) < 0.05))
        sizes.append(len(batch))
        x, y = torch.from_numpy(batch.x), torch.from_numpy(batch.labels)
        params.grad_sample = each(params.detach(), x, y) if len(batch) else torch.zeros(0, LAYOUT.size)
        optimizer.step()
        optimizer.zero_grad()
    assert min(sizes) == 0 < max(sizes)
    got = trained(method_of(privacy=privacy, **config), data)
    np.testing.assert_allclose(got, params.detach(), rtol=2e-5, atol=2e-5)


def test_the_charge_is_opacus_and_known_before_training() -> None:
    charge = method_of().charge(RoundTerms())
    assert (charge.unit, charge.steps, charge.sample_rate, charge.noise_multiplier) == ("record", 6, 0.2, 0.7)
    accountant = RDPAccountant()
    for _ in range(3 * charge.steps):
        accountant.step(noise_multiplier=0.7, sample_rate=0.2)
    steps = [Step(charge.noise_multiplier, charge.sample_rate, 3 * charge.steps)]
    ours = epsilon(steps, delta=1e-5, accountant="rdp")
    assert epsilon(steps, delta=1e-5) < ours
    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)


@pytest.mark.parametrize("count", [10, 200])
def test_steps_do_not_tell_how_many_records_there_are(count: int) -> None:
    steps: list[np.ndarray] = []

    def counted(*settings: Any) -> Any:
        optimizer = make_optimizer(*settings)
        step = optimizer.step
        return SimpleNamespace(step=lambda params, gradient: (steps.append(gradient.copy()), step(params, gradient)))

    trained(method_of(local_epochs=4), samples(count), make_optimizer=counted)
    assert len(steps) == 6


def test_without_records_only_noise_is_learned() -> None:
    """The sum is divided by the nominal size, so noise has the deviation sigma C / B whatever was drawn."""
    update = trained(method_of(), samples(0)) - start_of()
    noise = SeededNoise(5, 0, 1).normal(6 * LAYOUT.size).reshape(6, -1).sum(axis=0)
    unit = 0.3 * 0.7 * 0.5 / 5
    np.testing.assert_allclose(update, -unit * noise, atol=6 * unit * 2**-10)


@pytest.mark.parametrize("name", WITH_RECORDS)
def test_what_every_method_sends_is_bounded_by_the_clipped_gradients(name: str) -> None:
    """Without noise and with huge raw gradients, SGD moves at most by steps * rate * C * n / B, penalties aside."""
    method = method_of(name, spec(noise_multiplier=0.0, clip_norm=1e-6, sample_rate=1.0), learning_rate=0.01)
    done = train_round(
        method,
        method.init_state(),
        start_of(),
        Gradient(times=1e6),
        samples(10),
        terms=RoundTerms(),
        logits_of=logits,
        inputs=Inputs(),
        rng=np.random.default_rng(0),
        noise=SeededNoise(1, 1, 1),
    )
    noised = method.privatize(done.context, done.update, SeededNoise(1, 1, 1))
    assert noised.charge == method.charge(RoundTerms())
    assert noised.charge.unit == "record"
    assert not np.any(noised.noise_stds)
    bound = 6 * method.training.gradients_per_batch * 0.01 * 1e-6 * 10 / 5
    rounding = 6 * np.finfo(np.float32).eps * np.linalg.norm(start_of())
    # a penalty of weight lambda_2 / 2 pulls towards a change as large as the clip norm, in steps of this length
    penalty = 6 * 0.01 * getattr(method.config, "lambda_2", 0.0) / 2
    assert np.linalg.norm(noised.values) <= bound + rounding + penalty


def test_more_gradients_than_are_charged_are_refused() -> None:
    class Greedy(GradientRule):
        def __call__(self, context, params, batch, memory):
            batch.mean(params)
            return (*batch.mean(params), memory)

    usual = method_of()
    greedy = bind(Method(training=Sgd(Greedy())), usual.config, usual.privacy, LAYOUT)
    with pytest.raises(PrivacyError, match="2 gradients of a batch, but 1 are charged"):
        trained(greedy, samples(10))


@pytest.mark.parametrize("bad", [math.nan, -math.inf, 3e38])
@pytest.mark.parametrize("kind", [Gradient, ClipsItself])
def test_a_record_whose_gradient_cannot_be_clipped_counts_as_none(kind: type[Gradient], bad: float) -> None:
    class Diverges(kind):
        def __call__(self, params, x, y, dropout=(), out=None, **distilled):
            loss, gradient = super().__call__(params, x, y, dropout, out, **distilled)
            if y[0] == 1:
                gradient[:] = bad
            return loss, gradient

    privacy, data = spec(sample_rate=1.0), samples(10)
    others = data.take(np.flatnonzero(data.labels != 1))
    assert 0 < len(others) < len(data)
    method = method_of(privacy=privacy)
    with_it, without = trained(method, data, gradient=Diverges()), trained(method, others)
    np.testing.assert_allclose(with_it, without, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bound", [1e-42, 0.9e-30, 1.1e30, math.nan])
def test_a_bound_that_float32_cannot_hold_a_record_to_is_refused(bound: float) -> None:
    """With 1e-42 clipped gradients were above it by a part of themselves, which ended the training: one record decided
    whether a device sent the sum of all others, or noise alone."""
    with pytest.raises(PrivacyError, match="1e-30 to 1e\\+30"):
        method_of().charge(RoundTerms(controls={"clip_norm": bound}))


@pytest.mark.parametrize("size", [3, 1000, 1 << 20])
@pytest.mark.parametrize("norm", [1.001, 2.0**40, 2.0**99])
@pytest.mark.parametrize("even", [True, False])
def test_the_least_bound_is_one_that_float32_holds_to(size: int, norm: float, even: bool) -> None:
    gradient = np.ones(size) if even else np.geomspace(1, 1e-9, size)
    gradient = (gradient * (norm * LEAST_CLIP_NORM / np.linalg.norm(gradient))).astype(np.float32)
    found = clipped_sum([gradient], LEAST_CLIP_NORM, np.empty(size, np.float32)).astype(np.float64)
    assert 0.999 * LEAST_CLIP_NORM <= np.linalg.norm(found) <= LEAST_CLIP_NORM


class OfLabels:
    """Gradients of one parameter, each record's by its label."""

    def __init__(self, gradients: list[float]) -> None:
        self.gradients = np.array(gradients, np.float32)

    def __call__(self, params, x, y, dropout=(), out=None, **distilled):
        out[:] = self.gradients[y].mean()
        return 0.0, out


def test_one_record_moves_a_sum_of_thousands_by_no_more_than_its_bound() -> None:
    """In float32 it moves this one by 1.0625: without it the sum is below 1024, where others are rounded otherwise."""
    step = float(np.spacing(np.float32(1024)))
    others = [1.0] * 1023 + [0.25] + [0.25 + 0.6 * step, -0.25 - 0.4 * step] * 512
    layout, ends = ParamLayout(("w",), ((1,),)), []
    for gradients in ([1.0, *others], [0.0, *others]):
        data = Samples(np.zeros((len(gradients), 1, 1, 1), np.uint8), np.arange(len(gradients)), (0.0,), (1.0,))
        privacy = spec(clip_norm=1.0, noise_multiplier=0.0, sample_rate=1.0, batches=1)
        config = {"optimizer": "sgd", "learning_rate": 1.0, "batch_size": 1}
        method = make_method("dp-fedavg", config, privacy, layout, rounds=1)
        ends.append(train(method, np.zeros(1), OfLabels(gradients), data).end[0])
    assert ends[1] - ends[0] == pytest.approx(1.0, abs=2 * step)


def test_a_runtimes_own_clipping_gives_the_same() -> None:
    one, other = (trained(method_of(), samples(30), gradient=each) for each in (Gradient(), ClipsItself()))
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", WITH_RECORDS)
def test_a_device_without_records_takes_part_with_noise_alone(name: str) -> None:
    """Round by round, since what a method learns from its own last model begins in the second."""
    method = method_of(name)
    state, noise = method.init_state(), SeededNoise(1, 1, 1)
    for _ in range(2):
        done = train_round(
            method,
            state,
            start_of(),
            Gradient(),
            samples(0),
            terms=RoundTerms(),
            logits_of=logits,
            inputs=Inputs(augment="flip-crop"),
            rng=np.random.default_rng(0),
            noise=noise,
        )
        noised = method.privatize(done.context, done.update, noise)
        assert np.isfinite(noised.values).all()
        assert np.any(noised.values)
        state = method.advance(done.context, update=done.update, trained=done.own, sent=noised.values)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("size", [1, 1000, 1 << 15, 100_001])
def test_a_noised_mean_in_blocks_is_that_of_one_draw(kind: Any, size: int) -> None:
    mechanism = RecordMechanism(0.5, 3.0, 0.1, batches=1, gradients_per_batch=1, batch_size=16)
    sums = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    noise = SeededNoise(1, 2, 3).normal(size) * 1.5
    expected = (add_on_grid(noise, sums, 1.5) / 16).astype(np.float32)
    assert np.array_equal(mechanism.noised_mean(kind(sums.copy()), SeededNoise(1, 2, 3)), expected)


def test_several_records_at_once_are_clipped_one_by_one() -> None:
    gradients = np.random.default_rng(0).normal(size=(5, 3, 7)).astype(np.float32)
    gradients[2, 1, 4] = np.nan  # counts as none
    one_by_one = clipped_sum(gradients.swapaxes(0, 1), 1.5, np.empty((5, 7)))
    at_once = clipped_sum([gradients[:, :2], gradients[:, 2:]], 1.5, np.empty((5, 7)))
    np.testing.assert_allclose(at_once, one_by_one, rtol=1e-12)
    assert np.linalg.norm(at_once, axis=-1).max() <= 3 * 1.5
