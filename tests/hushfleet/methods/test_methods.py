"""The methods against numbers computed by hand or by slow, obvious code, in NumPy and in PyTorch."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.errors import Malformed, PrivacyError
from hushfleet.learning.evaluation import Evaluation
from hushfleet.methods import METHODS, make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.method import Method
from hushfleet.methods.personal import Personal
from hushfleet.methods.state import DeviceState, PublicState
from hushfleet.methods.task_method import TaskMethod
from hushfleet.params import ParamLayout
from hushfleet.privacy.noise import SeededNoise
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import Constant, Fisher, advanced, context_of, penalty, privatized, stacked

LAYOUT = ParamLayout(("a.weight", "a.bias", "b.weight"), ((2, 2), (2,), (4,)))  # layers of 6 and 4
GRID = 2.0**-10  # to how many standard deviations of its noise a value is rounded


def privacy(**changes: object) -> PrivacySpec:
    usual = PrivacySpec("device", accounting="as-published", clip_norm=1.0, noise_multiplier=2.0, delta=0.1)
    return replace(usual, **changes)


def fedglp(*, rounds: int = 4, spec: PrivacySpec | None = None, **config: object):
    return make_method("fedglp-adp", config, spec or privacy(), LAYOUT, rounds=rounds)


def test_dp_fedavg_clips_the_whole_vector_and_splits_the_noise() -> None:
    method = make_method("dp-fedavg", {}, privacy(), LAYOUT, rounds=1)
    update = np.zeros(10, np.float32)
    update[[0, 9]] = 3.0, 4.0  # norm 5, clipped to 1
    noised = privatized(method, update, RoundTerms(4), Constant(1.0))
    # noise: sigma C / sqrt(n) = 2 * 1 / 2 = 1 on every coordinate
    np.testing.assert_allclose(noised.values[[0, 9]], [0.6 + 1, 0.8 + 1], atol=GRID)
    np.testing.assert_allclose(noised.values[1:9], 1.0, rtol=1e-6)
    np.testing.assert_allclose(noised.noise_stds, [1.0, 1.0])
    assert noised.charge.noise_multiplier == 1.0


def test_strict_accounting_does_not_split_the_noise() -> None:
    method = make_method("dp-fedavg", {}, privacy(accounting="strict"), LAYOUT, rounds=1)
    noised = privatized(method, np.ones(10, np.float32), RoundTerms(4), Constant())
    np.testing.assert_allclose(noised.noise_stds, 2.0)
    assert noised.charge.noise_multiplier == 2.0
    assert method.multiplier_release(RoundTerms(4), participants=9) == 6.0  # nine full noises add up


@pytest.mark.parametrize("accounting", ["strict", "as-published"])
def test_noise_that_later_updates_contain_hides_no_other_device(accounting: str) -> None:
    claims = {}
    for name in METHODS:
        try:
            method = make_method(name, {}, privacy(accounting=accounting), LAYOUT, rounds=1)
        except (PrivacyError, Malformed):
            continue
        if method.parts.remembers_sent:
            charge = method.charge(RoundTerms(4)).noise_multiplier
            claims[name] = method.multiplier_release(RoundTerms(4), participants=9) / charge
    assert claims == {"scaffold": 1.0, "feddyn": 1.0}


def test_a_class_that_remembers_counts_as_remembering_what_was_sent_unless_it_says_so() -> None:
    class Silent(Personal):
        def remember(self, context, *, update, trained, sent):
            return {}

    class Heir(Silent):
        remembers_sent = False  # of a hook that it does not write

    class Says(Silent):
        remembers_sent = False

        def remember(self, context, *, update, trained, sent):
            return {}

    found = [Method(personal()).remembers_sent for personal in (Personal, Silent, Heir, Says)]
    assert found == [False, True, True, False]


def test_fedavg_sends_the_update_as_it_is_and_is_charged_as_unprotected() -> None:
    method = make_method("fedavg", {}, privacy(), LAYOUT, rounds=1)
    update = np.arange(10, dtype=np.float32)
    noised = privatized(method, update, RoundTerms(3), Constant(9.0))
    np.testing.assert_array_equal(noised.values, update)
    assert noised.charge.mechanism == "none"


def test_aggregate_divides_by_senders_and_keeps_what_nobody_sent() -> None:
    method = fedglp()
    global_params = np.ones(10, np.float32)
    sums = np.array([0, 1, 2, 3, 4, 5, 0, 7, 8, 9], np.float64)
    counts = sums.astype(np.int32)
    new = method.server.aggregate({}, global_params, sums, counts)
    np.testing.assert_allclose(new, [1, 2, 2, 2, 2, 2, 1, 2, 2, 2], rtol=1e-6)
    assert new.dtype == np.float32


def clip_weights(method: TaskMethod, state: DeviceState) -> np.ndarray:
    """tw of FedGLP-ADP: each layer's part of the squared clip norm."""
    return method.parts.stages[0].bounds.bounds(state.private, None, LAYOUT) ** 2


def test_first_clip_weights_are_the_layers_shares_of_parameters() -> None:
    method = fedglp()
    np.testing.assert_allclose(clip_weights(method, method.init_state()), [0.6, 0.4], rtol=1e-12)


def test_fedglp_release_by_hand() -> None:
    """Eqs. (13) to (16) with two layers, one personal coordinate, C = 1, sigma = 2, n = 4."""
    method = fedglp()
    mask = np.zeros(10, bool)
    mask[0] = True
    state = DeviceState(PublicState(mask, 1), np.zeros(10, np.float32), method.init_state().private)
    update = np.zeros(10, np.float32)
    update[0], update[1], update[6] = 100.0, 3.0, 0.1
    noised = privatized(method, update, RoundTerms(4), Constant(1.0), state=state)
    bounds = [math.sqrt(0.6), math.sqrt(0.4)]
    stds = [math.sqrt(2) * 2 * bound / 2 for bound in bounds]  # sqrt(L) sigma C_l / sqrt(n)
    np.testing.assert_allclose(noised.noise_stds, stds, rtol=1e-12)
    assert noised.values[0] == 0.0  # personal: neither value nor noise
    np.testing.assert_allclose(noised.values[1], bounds[0] + stds[0], atol=GRID * stds[0])
    np.testing.assert_allclose(noised.values[6], 0.1 + stds[1], atol=GRID * stds[1])
    assert noised.charge.noise_multiplier == 1.0  # sigma / sqrt(n): the layers add up to the plain mechanism


def test_the_trend_moves_the_log_odds_by_gamma() -> None:
    method = fedglp(gamma=0.5)
    state = method.init_state()
    zeros = np.zeros(10, np.float32)

    def after(state: DeviceState, first: float, second: float) -> DeviceState:
        update = zeros.copy()
        update[0], update[6] = first, second
        return advanced(method, state, update=update, trained=zeros, sent=zeros)

    one = after(state, 1.0, 1.0)
    np.testing.assert_array_equal(one.private["log_odds"], state.private["log_odds"])  # no trend yet
    two = after(one, 2.0, 0.5)
    np.testing.assert_allclose(two.private["log_odds"] - one.private["log_odds"], [0.5, -0.5])
    sigmoid = 1 / (1 + np.exp(-two.private["log_odds"]))
    np.testing.assert_allclose(clip_weights(method, two), sigmoid / sigmoid.sum(), rtol=1e-12)


@pytest.mark.parametrize(("log_odds", "apart"), [((-900, -800), 40), ((900, -900), -40), ((-900, -900.5), -0.5)])
def test_after_any_number_of_rounds_each_layer_has_a_bound(log_odds: tuple[float, float], apart: float) -> None:
    method = fedglp()
    state = method.init_state()
    weights = clip_weights(method, replace(state, private={"log_odds": np.array(log_odds, float)}))
    assert weights.sum() == pytest.approx(1)
    assert np.log(weights[1] / weights[0]) == pytest.approx(apart)


def test_strict_trend_reads_the_sent_values_only() -> None:
    method = fedglp(spec=privacy(accounting="strict"))
    zeros = np.zeros(10, np.float32)
    sent = np.ones(10, np.float32)
    state = method.init_state()
    first = advanced(method, state, update=zeros, trained=zeros, sent=sent)
    quiet = advanced(method, first, update=zeros, trained=zeros, sent=2 * sent)
    loud = advanced(method, first, update=100 * sent, trained=zeros, sent=2 * sent)
    np.testing.assert_array_equal(quiet.private["log_odds"], loud.private["log_odds"])
    np.testing.assert_array_equal(quiet.private["norms"], loud.private["norms"])


def test_beta_of_the_papers_table_3() -> None:
    # epsilon 2, 4, 6, 16 -> multipliers of facts; Table 3 prints 0.45, 0.34, (0.3), 0.25
    for sigma, printed in ((3.975, 0.45), (2.549, 0.34), (1.965, 0.30), (1.062, 0.25)):
        method = fedglp(spec=privacy(noise_multiplier=sigma))
        assert round(method.parts.personal.beta, 2) == printed
    assert fedglp(glp=False).parts.personal.beta == 0.0
    assert fedglp(dynamic_beta=False).parts.personal.beta == 0.3


def test_the_mask_takes_the_largest_values_of_each_layer_with_ties_by_index() -> None:
    method = fedglp(rounds=2, dynamic_beta=False, beta_0=1.0)
    sent = np.array([1, -5, 1, 1, 0, 4, 0.5, 0.5, -0.5, 0.25], np.float32)
    public = method.advance_public(PublicState.initial(10), sent)  # half of each layer: 3 of 6, 2 of 4
    np.testing.assert_array_equal(np.flatnonzero(public.mask), [0, 1, 5, 6, 7])
    again = method.advance_public(public, np.where(public.mask, 0, sent).astype(np.float32))
    assert again.mask.all()
    assert again.participations == 2


@given(seed=st.integers(0, 2**32 - 1), rounds=st.integers(1, 6), beta=st.floats(0, 1))
@settings(max_examples=60)
def test_the_mask_grows_evenly_and_never_shrinks(seed: int, rounds: int, beta: float) -> None:
    method = fedglp(rounds=rounds, dynamic_beta=False, beta_0=beta)
    rng, public = np.random.default_rng(seed), PublicState.initial(10)
    for taken in range(1, rounds + 3):
        sent = np.where(public.mask, 0, rng.normal(size=10)).astype(np.float32)
        grown = method.advance_public(public, sent)
        assert (grown.mask | ~public.mask).all()
        for layer in LAYOUT.layers:
            wanted = int(beta * layer.size * min(taken / rounds, 1.0))
            assert grown.mask[layer.start : layer.stop].sum() == wanted
            new = grown.mask & ~public.mask
            inside = slice(layer.start, layer.stop)
            kept = np.abs(sent[inside][~grown.mask[inside]])
            taken_values = np.abs(sent[inside][new[inside]])
            if len(kept) and len(taken_values):
                assert taken_values.min() >= kept.max()
        public = grown


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_penalty_gradients_are_those_of_eqs_9_and_10(seed: int) -> None:
    """Against automatic differentiation of the penalties as printed, in float64."""
    rng = np.random.default_rng(seed)
    method = fedglp(lambda_1=0.7, lambda_2=0.3)
    mask = rng.random(10) < 0.4
    start, params = rng.normal(size=10), rng.normal(size=10) * 2
    gradient = penalty(method, context_of(method, DeviceState(PublicState(mask, 1), start), start=start), params)

    w = torch.tensor(params, requires_grad=True)
    moved, m = w - torch.tensor(start), torch.tensor(mask)
    zero = torch.zeros((), dtype=torch.float64)
    personal = (0.7 / 2) * torch.linalg.vector_norm(moved[m]) if mask.any() else zero
    shared = (0.3 / 2) * (torch.linalg.vector_norm(moved[~m]) - 1.0).abs() if (~mask).any() else zero
    (expected,) = torch.autograd.grad(personal + shared, w)
    np.testing.assert_allclose(gradient, expected.numpy(), rtol=1e-9, atol=1e-12)


def test_penalty_gradient_is_zero_where_nothing_has_moved() -> None:
    method, start = fedglp(), np.ones(10, np.float32)
    np.testing.assert_array_equal(penalty(method, context_of(method, global_params=start), start.copy()), 0)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_clients_at_once_are_pulled_as_one_by_one(name: str) -> None:
    """The same lines on `[d]` in NumPy and on `[clients, d]` in PyTorch, over three rounds."""
    clients, rounds = 3, 3
    method = make_method(name, {}, privacy(), LAYOUT, rounds=rounds)
    rng = np.random.default_rng(5)
    global_params = rng.normal(size=10).astype(np.float32)
    states = [method.init_state() for _ in range(clients)]
    for round in range(rounds):
        moves = rng.normal(size=(clients, 10)).astype(np.float32)
        fisher = [Fisher(rng.random(10).astype(np.float32)) for _ in range(clients)]
        contexts = [
            context_of(method, state, global_params, RoundTerms(clients), samples=fisher[i], measured=Evaluation(1, 0))
            for i, state in enumerate(states)
        ]
        together = stacked(contexts)
        gradients = penalty(method, together, together.start + torch.from_numpy(moves))
        for i, context in enumerate(contexts):
            alone = penalty(method, context, context.start + moves[i])
            np.testing.assert_allclose(gradients[i].numpy(), alone, rtol=1e-5, atol=1e-7)
            noised = method.privatize(context, moves[i], SeededNoise(1, i, round))
            trained = context.start + moves[i]
            states[i] = method.advance(context, update=moves[i], trained=trained, sent=noised.values)


@pytest.mark.parametrize("stays", [True, False])
def test_a_state_after_an_update_is_the_one_that_its_bytes_make(stays: bool) -> None:
    """Nothing that was made of the mask before may stand for another one, or for another number of updates."""
    mask = np.arange(21) % 3 == 0
    state = PublicState(mask, 4)
    assert len({state.digest(), state.to_bytes()}) == 2  # made now, before the next state
    following = state.after(mask if stays else ~mask)
    alone = PublicState(np.array(following.mask), 5)
    assert (following.digest(), following.to_bytes()) == (alone.digest(), alone.to_bytes())
    assert following.digest() != state.digest()


def test_nobody_can_change_the_newcomers_mask() -> None:
    """It is one for all devices of a process."""
    mask = fedglp().init_state().public.mask
    with pytest.raises(ValueError, match="read-only"):
        mask[0] = True


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 200), taken=st.integers(0, 2**31))
@settings(max_examples=50)
def test_public_state_survives_its_bytes_and_refuses_others(seed: int, size: int, taken: int) -> None:
    mask = np.random.default_rng(seed).random(size) < 0.5
    state = PublicState(mask, taken)
    back = PublicState.from_bytes(state.to_bytes(), size=size)
    np.testing.assert_array_equal(back.mask, mask)
    assert back.participations == taken
    assert back.digest() == state.digest()
    assert PublicState(~mask, taken).digest() != state.digest()
    with pytest.raises(Malformed):
        PublicState.from_bytes(state.to_bytes(), size=size + 8)
    with pytest.raises(Malformed):
        PublicState.from_bytes(state.to_bytes()[:-1], size=size)
    with pytest.raises(Malformed):
        PublicState.from_bytes(state.to_bytes() + b"x", size=size)


def test_configuration_errors_name_key_value_and_range() -> None:
    with pytest.raises(Malformed, match=r"gamma = -1: must be in \[0, 100\]"):
        fedglp(gamma=-1)
    with pytest.raises(Malformed, match="unknown field 'gama'"):
        fedglp(gama=1)
    with pytest.raises(Malformed, match="optimizer"):
        fedglp(optimizer="lion")


@pytest.mark.parametrize("seed", range(10))
def test_glp_takes_the_largest_and_of_equal_ones_the_first(seed):
    """Against a stable sort, on coarse values, so that most are equal to others."""
    rng = np.random.default_rng(seed)
    layout = ParamLayout(("a.weight", "b.weight"), tuple((int(size),) for size in rng.integers(1, 40, 2)))
    privacy = PrivacySpec("device", "strict", clip_norm=0.5, noise_multiplier=1.0, delta=1e-5)
    config = {"beta_0": float(rng.random()), "dynamic_beta": False}
    method = make_method("fedglp-adp", config, privacy, layout, rounds=4)
    public = method.init_state().public
    for taken in range(1, 6):
        sent = np.where(public.mask, 0, np.round(2 * rng.standard_normal(layout.size))).astype(np.float32)
        expected = public.mask.copy()
        for layer in layout.layers:
            place = slice(layer.start, layer.stop)
            target = int(method.parts.personal.beta * layer.size * min(taken / 4, 1.0))
            order = np.argsort(-np.where(public.mask[place], -1.0, np.abs(sent[place])), kind="stable")
            expected[place][order[: target - np.count_nonzero(public.mask[place])]] = True
        public = method.advance_public(public, sent)
        np.testing.assert_array_equal(public.mask, expected)
