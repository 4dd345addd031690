"""DP-FedSim against Eqs. (5) to (17) worked out by hand, and what it may claim about privacy."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hushfleet.data.samples import Samples
from hushfleet.errors import Malformed
from hushfleet.methods import make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.papers.dp_fedsim import LARGEST_STRETCH
from hushfleet.methods.papers.fisher import MOVED, normalised
from hushfleet.methods.server import ClosedRound
from hushfleet.methods.state import DeviceState, PublicState
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import Constant, Fisher, advanced, context_of, privatized, trained

LAYOUT = ParamLayout(("a.weight", "a.bias", "b.weight"), ((2, 2), (2,), (4,)))  # layers of 6 and 4
LAYERS = [slice(0, 6), slice(6, 10)]
ZEROS = np.zeros(10, np.float32)


def privacy(**changes: object) -> PrivacySpec:
    usual = PrivacySpec("device", accounting="as-published", clip_norm=0.5, noise_multiplier=2.0, delta=0.1)
    return replace(usual, **changes)


def fedsim(*, spec: PrivacySpec | None = None, **config: object):
    return make_method("dp-fedsim", config, spec or privacy(), LAYOUT, rounds=4)


def vector(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_both_normalisations_by_hand() -> None:
    fisher = vector(1, 2, 3, 4, 5, 5, 7, 7, 7, 7)
    np.testing.assert_allclose(normalised(fisher, LAYERS, "min-max"), [0, 0.25, 0.5, 0.75, 1, 1, 0, 0, 0, 0])
    np.testing.assert_allclose(normalised(fisher, LAYERS, "sum")[:6], np.array([1, 2, 3, 4, 5, 5]) / 20)
    np.testing.assert_array_equal(normalised(ZEROS, LAYERS, "sum"), 0)


def test_the_start_keeps_own_values_where_the_fisher_value_reaches_the_threshold() -> None:
    own, theirs = vector(*range(10)), vector(*[-1] * 10)
    state = DeviceState(PublicState.initial(10), own)
    data = Fisher(vector(0, 1, 2, 3, 4, 5, 0, 0, 0, 9))
    method = fedsim()
    start = context_of(method, state, theirs, samples=data).start
    assert data.asked_at is own  # Eq. (5) at the device's personalized model
    # shares of layer a: 0, 0.2, 0.4, 0.6, 0.8, 1; a value equal to the threshold is kept
    np.testing.assert_array_equal(start, [-1, -1, 2, 3, 4, 5, -1, -1, -1, 9])
    printed = fedsim(normalisation="sum")  # Eq. (6): of layer a not one reaches 0.4, 5 of 15
    np.testing.assert_array_equal(context_of(printed, state, theirs, samples=data).start, [-1] * 9 + [9])


def test_a_device_that_has_no_model_starts_with_the_global_one() -> None:
    method, theirs = fedsim(), vector(*range(10))
    data = Fisher(vector(*range(10)))
    np.testing.assert_array_equal(context_of(method, None, theirs, samples=data).start, theirs)
    assert data.asked_at is None


@pytest.mark.parametrize("newcomer", [False, True])
def test_masks_in_each_epoch_are_algorithm_1(newcomer: bool) -> None:
    """Before the second and third of three epochs, values of low Fisher value are the global ones again."""
    own, theirs, rate = np.linspace(-1, 1, 10, dtype=np.float32), np.full(10, 0.5, np.float32), 0.1
    data = Samples(np.arange(1, 8, dtype=np.uint8).reshape(7, 1, 1, 1), np.arange(7) % 2, (0.0,), (1.0,))
    weights = np.linspace(0.5, 2, 10, dtype=np.float32)

    def gradient(params, x, y, dropout=(), out=None, **_):
        out[...] = (params - weights * y.mean()) * (1 + x.mean())
        return 0.0, out

    method = fedsim(masks="epoch", optimizer="sgd", learning_rate=rate, batch_size=2, local_epochs=3)
    state = None if newcomer else DeviceState(PublicState.initial(10), own)
    done = trained(method, theirs, gradient, data, state=state, rng=np.random.default_rng(3))
    kept = np.zeros(10, bool) if newcomer else done.context.chosen
    assert newcomer or 0 < kept.sum() < 10
    params, rng, out = np.where(kept, own, theirs), np.random.default_rng(3), np.empty(10, np.float32)
    for epoch in range(3):
        if epoch and not newcomer:
            params = np.where(kept, params, theirs)
        order = rng.permutation(7)
        for first in range(0, 7, 2):
            batch = data.take(order[first : first + 2])
            params = params - np.float32(rate) * gradient(params, batch.x, batch.labels, out=out)[1]
    np.testing.assert_allclose(done.end, params, rtol=1e-5)


def thresholds(method, update: np.ndarray) -> np.ndarray:
    return method.parts.stages[0].thresholds(context_of(method), update)


def test_thresholds_follow_each_layers_spread() -> None:
    # layer a: mean 1, standard deviation sqrt(6/6) = 1, T = 0.5 (1 + 1); layer b: all 2, T = 0.5
    update = vector(2, 2, 2, 0, 0, 0, 2, 2, 2, 2)
    np.testing.assert_allclose(thresholds(fedsim(), update), [1.0, 0.5], rtol=1e-6)
    np.testing.assert_allclose(thresholds(fedsim(max_stretch=1.5), update), [0.75, 0.5], rtol=1e-6)
    np.testing.assert_array_equal(thresholds(fedsim(), ZEROS), 0.5)
    balanced = vector(1, -1, 1, -1, 1, -1, 0, 0, 0, 0)  # no mean: Eq. (9) has no bound of its own
    np.testing.assert_allclose(thresholds(fedsim(), balanced), [500.0, 0.5])


def test_a_device_keeps_how_far_its_thresholds_went() -> None:
    """T_s / b before the cap, the largest of all rounds; nothing of it is sent."""
    method, state = fedsim(max_stretch=1.5), None
    for update in (vector(3, 3, 3, 0, 0, 0, 2, 2, 2, 2), vector(2, 2, 2, 0, 0, 0, 2, 2, 2, 0), ZEROS):
        context = context_of(method, state, samples=Fisher(ZEROS))
        state = method.advance(context, update=update, trained=ZEROS, sent=ZEROS)
    # layer a: mean = standard deviation in both, so 2; layer b of the second: mean 1.5, deviation sqrt(3) / 2
    np.testing.assert_allclose(state.private[LARGEST_STRETCH], [2.0], rtol=1e-6)


def test_as_published_release_by_hand() -> None:
    update = vector(2, 2, 2, 0, 0, 0, 2, 2, 2, 2)  # norms sqrt(12) and 4
    noised = privatized(fedsim(), update, RoundTerms(4), Constant(1.0))
    noise = 0.5 * 2.0 / math.sqrt(4)  # b sigma / sqrt(N), Eq. (13)
    np.testing.assert_allclose(noised.values[:3], 2 / math.sqrt(12) + noise, atol=noise * 2**-10)
    np.testing.assert_allclose(noised.values[6:], 2 * 0.5 / 4 + noise, atol=noise * 2**-10)
    np.testing.assert_allclose(noised.noise_stds, noise)
    np.testing.assert_allclose(noised.clip_norms, 500.0)  # the cap, whatever T_s was


@pytest.mark.parametrize("accounting", ["as-published", "strict"])
def test_the_charge_covers_the_largest_release(accounting: str) -> None:
    """The multiplier that is charged is noise over the norm of the worst update that passes the clipping."""
    method = fedsim(spec=privacy(accounting=accounting), max_stretch=30.0, strict_stretch=3.0)
    terms, rng = RoundTerms(4), np.random.default_rng(0)
    noised = privatized(method, ZEROS, terms, Constant(1.0))
    quiet = privatized(method, ZEROS, terms, Constant()).values
    worst = 0.0
    for _ in range(300):
        update = (1e4 * rng.normal(size=10)).astype(np.float32)
        update[:6] -= update[:6].mean()
        update[6:] -= update[6:].mean()
        sent = privatized(method, update, terms, Constant()).values
        worst = max(worst, float(np.linalg.norm((sent - quiet).astype(np.float64))))
    rounding = 2**-10 * 10**0.5 * noised.noise_stds.max()  # what leaves is on the noise's grid
    assert noised.noise_stds.min() >= noised.charge.noise_multiplier * (worst - rounding)
    # and no less is charged for
    assert worst + rounding > 0.99 * noised.noise_stds.min() / noised.charge.noise_multiplier
    assert worst - rounding <= method.cost(terms).bound


def test_strict_promises_sigma_to_the_server_and_as_published_what_is_left_of_it() -> None:
    strict = fedsim(spec=privacy(accounting="strict"))
    assert strict.charge(RoundTerms(4)).noise_multiplier == 2.0
    assert strict.charge(RoundTerms(4)).noise_split == 1
    published = fedsim(max_stretch=10.0)
    assert published.charge(RoundTerms(4)).noise_multiplier == pytest.approx(2 / (10 * math.sqrt(2) * math.sqrt(4)))
    fixed = fedsim(agc=False)
    assert fixed.charge(RoundTerms(4)).noise_multiplier == 1.0


def test_weights_promise_nothing_beyond_a_devices_own_noise() -> None:
    for accounting in ("as-published", "strict"):
        spec = privacy(accounting=accounting)
        weighed, plain = fedsim(spec=spec, agc=False), fedsim(spec=spec, agc=False, msa=False)
        own = weighed.charge(RoundTerms(4)).noise_multiplier
        assert weighed.multiplier_release(RoundTerms(4), participants=9) == own
        assert plain.multiplier_release(RoundTerms(4), participants=9) == pytest.approx(3 * own)


def test_without_agc_the_whole_update_is_clipped() -> None:
    method = fedsim(agc=False)
    update = vector(3, 0, 0, 0, 0, 0, 0, 0, 0, 4)
    noised = privatized(method, update, RoundTerms(4), Constant())
    np.testing.assert_allclose(noised.values[[0, 9]], [0.3, 0.4], atol=0.5 * 2**-10)
    np.testing.assert_allclose(noised.noise_stds, 0.5)
    assert method.cost(RoundTerms(4)).bound == 0.5


def test_similarity_is_the_mean_cosine_of_the_layers_models() -> None:
    theirs = vector(3, 0, 0, 0, 0, 0, 1, 0, 0, 0)
    sent = vector(0, 4, 0, 0, 0, 0, 0, 1, 0, 0)  # models (3, 4) and (1, 1) against (3, 0) and (1, 0)
    assert fedsim().server.weight({}, theirs, sent, LAYOUT) == pytest.approx((3 / 5 + 1 / math.sqrt(2)) / 2, rel=1e-6)
    assert fedsim().server.weight({}, theirs, ZEROS, LAYOUT) == pytest.approx(1.0)
    assert fedsim().server.weight({}, theirs, -2 * theirs, LAYOUT) == 1e-3  # the other way: not negative
    assert fedsim().server.weight({}, ZEROS, sent, LAYOUT) == 1e-3  # a model of zeros resembles nothing
    assert fedsim(msa=False).server.weight({}, theirs, -2 * theirs, LAYOUT) == 1.0


def test_similarity_of_directions_is_that_with_the_last_step_of_the_global_model() -> None:
    server, before = fedsim(similarity="directions").server, vector(*range(10))
    sent = vector(3, 0, 0, 0, 0, 4, 0, 0, 0, 2)
    assert server.weight(server.initial(0), before, sent, LAYOUT) == 1.0  # there is no step yet
    step = vector(1, 0, 0, 0, 0, 0, 0, 0, 1, 1)
    state = server.advance({}, ClosedRound(1, before, before + step, (), None, None))
    assert server.weight(state, before, sent, LAYOUT) == pytest.approx((3 / 5 + 1 / math.sqrt(2)) / 2, rel=1e-6)
    assert server.weight(state, before, -sent, LAYOUT) == 1e-3
    assert fedsim().server.advance({}, ClosedRound(1, before, before + step, (), None, None)) == {}


def test_with_the_unit_record_no_fisher_values_of_raw_data_are_asked() -> None:
    spec = privacy(unit="record", sample_rate=0.1, batches=3)
    method, own, theirs = fedsim(spec=spec), vector(*range(10)), vector(*[-1] * 10)
    moved = vector(0, 0, 0, 0, 0, -3, 1, 2, 3, 4)
    state = advanced(method, method.init_state(), update=moved, trained=own, sent=moved)
    data = Fisher(ZEROS)
    context = context_of(method, state, theirs, samples=data)
    assert data.asked_at is None
    # squares of layer b: 1, 4, 9, 16, so 0, 0.2, 0.53, 1
    np.testing.assert_array_equal(context.start, [-1] * 5 + [5, -1, -1, 8, 9])
    noised = method.privatize(context, moved, Constant(1.0))
    np.testing.assert_array_equal(noised.values, moved)
    assert noised.charge.unit == "record"
    assert method.record_mechanism(RoundTerms(4)).clip_norm == 0.5
    after = method.advance(context, update=moved, trained=own, sent=moved)
    assert list(after.private) == [MOVED]


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(Malformed, match="max_stretch"):
        fedsim(max_stretch=0.5)
    with pytest.raises(Malformed, match="normalisation"):
        fedsim(normalisation="max")
