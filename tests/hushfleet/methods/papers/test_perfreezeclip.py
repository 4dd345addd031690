"""PerFreezeClip: thresholds and clipped means by hand, freezing on the loss a b, whose gradient is (b, a)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from hushfleet.data.samples import Samples
from hushfleet.errors import Malformed
from hushfleet.learning.entries import BoundOf, Entries, mean_of_clipped
from hushfleet.methods import make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.task_method import TaskMethod
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import context_of, privatized
from support.methods import trained as train

LAYOUT = ParamLayout(("a.weight", "b.weight"), ((1,), (2,)))  # the head is the last two entries
PAIR = ParamLayout(("a.weight", "b.weight"), ((1,), (1,)))
SETTINGS = {"optimizer": "sgd", "learning_rate": 0.5, "batch_size": 2}


def method_of(
    *, layout: ParamLayout = LAYOUT, unit: str = "device", clip_norm: float = np.inf, **config: Any
) -> TaskMethod:
    spec = PrivacySpec(unit, accounting="as-published", clip_norm=clip_norm, noise_multiplier=0.0, delta=0.1)
    return make_method("perfreezeclip", {**SETTINGS, **config}, spec, layout, rounds=3)


class Given:
    """A batch whose samples have the gradients that a test says; every loss is 1."""

    def __init__(self, xp: Any = np) -> None:
        self.memory: dict[str, Any] = {}
        self.xp = xp

    def now(self, each: Any, sizes: Any, pass_number: int = 0) -> Given:
        self.given, self.sizes = self.xp.asarray(each, dtype=self.xp.float32), sizes
        self.part = pass_number
        self.entries = Entries(span=slice(1, 3) if pass_number == 0 else slice(1))
        return self

    def clipped(self, params: Any, bound_of: float | BoundOf, normed: Entries) -> tuple[Any, Any]:
        out = self.xp.zeros_like(params)
        losses = self.xp.ones(self.given.shape[:-2])
        return losses, mean_of_clipped(self.given, self.sizes, bound_of, normed, out)

    def asked(self, method: TaskMethod, params: Any) -> tuple[Any, Any]:
        """The rule's loss and gradient, with what it remembered of the batches before."""
        loss, gradient, self.memory = method.training.gradient(context_of(method), params, self, self.memory)
        return loss, gradient

    def mean(self, params: Any) -> tuple[Any, Any]:
        return 1.0, self.given.mean(axis=-2)


def step(method: TaskMethod, batch: Given) -> np.ndarray:
    return batch.asked(method, np.zeros(3, np.float32))[1].copy()


HEAD, BACKBONE = slice(1, 3), slice(1)
PARTS = (HEAD, HEAD, BACKBONE, BACKBONE)


@pytest.mark.parametrize(
    ("norms", "seen_of", "histories"),
    [
        ("whole", [slice(3)] * 4, [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)]),
        ("part", PARTS, [(0,), (0, 1), (2,), (2, 3)]),
        ("mixed", PARTS, [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)]),
    ],
)
def test_thresholds_follow_the_norms_that_the_reading_says(norms: str, seen_of: Any, histories: Any) -> None:
    """Against Eqs. (5)-(8) sample by sample, on two batches of the head and two of the backbone."""
    rng, method, batch = np.random.default_rng(3), method_of(norms=norms, max_norm=14.0), Given()
    batches, means = rng.normal(scale=7, size=(4, 5, 3)).astype(np.float32), []
    for turn, moves in enumerate(PARTS):
        lengths = [np.linalg.norm(sample[seen_of[turn]]) for sample in batches[turn]]
        means.append(np.mean(lengths))
        threshold = min(np.percentile([means[i] for i in histories[turn]], 90), 14.0)
        assert max(lengths) > threshold  # or the test would see no clipping
        expected = np.mean(
            [g / max(1, length / threshold) for g, length in zip(batches[turn], lengths, strict=True)], axis=0
        )
        gradient = step(method, batch.now(batches[turn], 5, pass_number=turn // 2))
        np.testing.assert_allclose(gradient[moves], expected[moves], rtol=1e-5)


def test_psi_bounds_the_threshold_and_is_it_for_clipping_by_value() -> None:
    each = [[0, 3, 4], [0, 0, 1]]
    for settings in ({"max_norm": 2.0}, {"max_norm": 2.0, "clipping": "value"}):
        gradient = step(method_of(norms="part", **settings), Given().now(each, 2))
        np.testing.assert_allclose(gradient[1:], [0.6, 1.3], rtol=1e-6)  # 2/5 (3, 4) + (0, 1), halved
    # adap_clip has 3, by value nothing is above 35
    gradient = step(method_of(clipping="value"), Given().now(each, 2))
    np.testing.assert_allclose(gradient[1:], [1.5, 2.5], rtol=1e-6)


def test_gradients_of_zero_have_a_mean_of_zero() -> None:
    np.testing.assert_array_equal(step(method_of(), Given().now(np.zeros((2, 3)), 2)), 0)


def test_clients_at_once_are_clipped_as_one_by_one() -> None:
    """Three batches; the second client's last has one sample less, a row of zeros."""
    rng = np.random.default_rng(2)
    each = rng.normal(size=(3, 2, 4, 3)).astype(np.float32) * 10
    each[2, 1, 3] = 0
    sizes = [[4, 4], [4, 4], [4, 3]]
    method, together, alone = method_of(max_norm=18.0), Given(torch), [Given(), Given()]
    params = torch.zeros(2, 3)
    for turn, number in enumerate((0, 0, 1)):
        batch = together.now(each[turn], torch.tensor(sizes[turn]), number)
        losses, gradients = batch.asked(method, params)
        trains = slice(1, 3) if number == 0 else slice(1)
        for client in range(2):
            count = sizes[turn][client]
            one = step(method, alone[client].now(each[turn, client, :count], count, number))
            np.testing.assert_allclose(gradients[client, trains].numpy(), one[trains], rtol=1e-5)
        assert losses.shape == (2,)


def product(params, x, y, dropout=(), out=None):
    out[:] = params[::-1]
    return float(params.prod()), out


def trained(start: list[float], **config: Any) -> list[float]:
    samples = Samples(np.zeros((2, 1, 1, 1), np.uint8), np.zeros(2, np.int64), (0.0,), (1.0,))
    return train(method_of(layout=PAIR, **config), start, product, samples).end.tolist()


def test_the_head_trains_first_and_the_backbone_after_tau() -> None:
    for clipping in ("value", "none"):
        # head: 1 - 4/2 = -1, then -3; backbone: 4 + 3/2, then 5.5 + 3/2
        assert trained([4.0, 1.0], freeze_ratio=0.6, local_epochs=4, clipping=clipping) == [7.0, -3.0]
        assert trained([4.0, 1.0], freeze_ratio=0.9, local_epochs=2, clipping=clipping) == [4.5, -1.0]
    # each sample's (1, 4) is cut to (3, 12)/5: 1 - 6/5; what is frozen counts for the norm alone
    half = {"freeze_ratio": 0.9, "local_epochs": 2, "clipping": "value"}
    norm = float(np.hypot(1, 4))
    head = 1 - 2 / norm
    assert trained([4.0, 1.0], max_norm=1.0, **half) == pytest.approx([4 - head / 2 / np.hypot(head, 4), head])
    # of the part alone 4 is cut to 1: 1 - 1/2 = 1/2; backbone: 4 - 1/4
    assert trained([4.0, 1.0], max_norm=1.0, norms="part", **half) == [3.75, 0.5]


@pytest.mark.parametrize(("tau", "epochs"), [(0.9, 10), (0.95, 10), (0.7, 10), (0.5, 10), (0.9, 2), (0.07, 100)])
def test_epochs_count_from_one_and_those_below_tau_train_the_head(tau: float, epochs: int) -> None:
    below = [e for e in range(1, epochs + 1) if Fraction(str(tau)) * epochs > e]
    assert method_of(freeze_ratio=tau, local_epochs=epochs).training.order.epochs == len(below) < epochs


def test_a_history_for_life_goes_on_where_the_last_round_ended() -> None:
    """Two rounds of a device against one training with the histories of both."""
    method = method_of(layout=PAIR, freeze_ratio=0.6, local_epochs=4, history="life", norms="part", max_norm=1e9)
    samples = Samples(np.zeros((2, 1, 1, 1), np.uint8), np.zeros(2, np.int64), (0.0,), (1.0,))
    first = train(method, [4.0, 1.0], product, samples)
    state = method.advance(first.context, update=first.update, trained=first.own, sent=first.update)
    assert state.private["norm_history_0"].tolist() == [4.0, 4.0]  # of the head (1), whose gradient is the backbone
    assert len(state.private["norm_history_1"]) == 2
    second = train(method, [0.5, 0.0], product, samples, state=state)
    seen = second.context.remembered["norm_history_0"]
    assert seen[:2].tolist() == [4.0, 4.0]
    assert len(seen) == 4
    anew = method_of(layout=PAIR, freeze_ratio=0.6, local_epochs=4, norms="part", max_norm=1e9)
    assert train(anew, [4.0, 1.0], product, samples).context.remembered == {}
    record = method_of(unit="record", clip_norm=5.0, history="life")
    assert record.training.gradient.lasting == ()  # nothing that raw gradients have left


def test_only_the_backbone_is_sent() -> None:
    method = method_of()
    noised = privatized(method, np.ones(3, np.float32))
    assert noised.values.tolist() == [1, 0, 0]


def test_with_noise_on_records_the_threshold_is_fixed() -> None:
    for expected, settings in ((35.0, {"max_norm": 35.0}), (5.0, {"clip_norm": 5.0}), (50.0, {"clipping": "none"})):
        method = method_of(**{"unit": "record", "clip_norm": 50.0, **settings})
        assert method.record_mechanism(RoundTerms()).clip_norm == expected
    assert method_of(clip_norm=50.0).cost(RoundTerms()).bound == 50.0  # the update's, not a sample's
    batch = Given().now([[1, 2, 3], [3, 2, 1]], 2)
    batch.clipped = None  # raw gradients are not asked for
    np.testing.assert_array_equal(step(method_of(unit="record", clip_norm=5.0), batch), [2, 2, 2])


def test_a_part_that_would_never_train_is_refused() -> None:
    with pytest.raises(Malformed, match="local_epochs"):
        method_of(local_epochs=1)
    with pytest.raises(Malformed, match="freeze_ratio"):
        method_of(freeze_ratio=0.1, local_epochs=10)
