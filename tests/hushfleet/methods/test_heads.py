"""FedPer, LG-FedAvg and FedRep on the loss a b, whose gradient is (b, a): a is the backbone, b the head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hushfleet.errors import Malformed
from hushfleet.methods import METHODS, Method, TrainingConfig, make_method
from hushfleet.methods.personal import Personal
from hushfleet.methods.task_method import TaskMethod, bind
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import BLACK, Constant, advanced, context_of, privatized, stacked
from support.methods import trained as train

PRIVACY = PrivacySpec("device", accounting="strict", clip_norm=1.0, noise_multiplier=2.0, delta=0.1)
LAYOUT = ParamLayout(("a.weight", "b.weight"), ((1,), (1,)))
FOUR = ParamLayout(("a.weight", "a.bias", "b.weight", "c.weight", "d.weight"), ((2,), (1,), (2,), (3,), (1,)))
ENDS_WITH_BIAS = ParamLayout(("w.weight", "w.bias"), ((2, 3), (5,)))
SETTINGS = {"optimizer": "sgd", "learning_rate": 0.5, "batch_size": 1}


def method_of(name: str, layout: ParamLayout = LAYOUT, **config: Any) -> TaskMethod:
    return make_method(name, {**SETTINGS, **config}, PRIVACY, layout, rounds=3)


def product(params, x, y, dropout=(), out=None):
    out[:] = params[::-1]
    return float(params.prod()), out


def trained(method: TaskMethod, start: list[float]) -> list[float]:
    return train(method, start, product, BLACK).end.tolist()


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
def test_the_last_layers_are_personal(name: str) -> None:
    mask = method_of(name, FOUR).init_state().public.mask
    assert mask.tolist() == [False] * 8 + [True]
    mask = method_of(name, FOUR, head_layers=3).init_state().public.mask
    assert mask.tolist() == [False] * 3 + [True] * 6


def test_lg_fedavg_keeps_the_others() -> None:
    assert method_of("lg-fedavg", FOUR, head_layers=2).init_state().public.mask.tolist() == [True] * 5 + [False] * 4


@pytest.mark.parametrize(("name", "layout"), [*((name, FOUR) for name in sorted(METHODS)), ("hush", ENDS_WITH_BIAS)])
def test_a_board_knows_a_newcomer_without_arrays(name: str, layout: ParamLayout) -> None:
    try:
        method = make_method(name, {}, PRIVACY, layout, rounds=3)
    except Malformed:  # hush needs a bias at the end
        return
    public = method.init_state().public
    assert method.newcomer_digest == public.digest()
    assert method.newcomer_shares == np.count_nonzero(~public.mask)


def test_a_mask_that_names_no_entries_is_refused() -> None:
    class Odd(Personal):
        def mask(self, layout: ParamLayout) -> np.ndarray:
            return np.arange(layout.size) % 2 == 0

    with pytest.raises(Malformed, match="must name its entries in `kept`"):
        bind(Method(Odd()), TrainingConfig(), PRIVACY, LAYOUT)


@pytest.mark.parametrize("name", ["fedper", "fedrep", "lg-fedavg"])
def test_both_parts_must_have_a_layer(name: str) -> None:
    for layers in (0, 4, 9):
        with pytest.raises(Malformed, match="head_layers"):
            method_of(name, FOUR, head_layers=layers)


@pytest.mark.parametrize(("name", "kept"), [("fedper", 1), ("fedrep", 1), ("lg-fedavg", 0)])
def test_the_personal_part_is_not_sent_and_is_there_again(name: str, kept: int) -> None:
    method = method_of(name)
    state = method.init_state()
    np.testing.assert_array_equal(context_of(method, state, np.array([5.0, 6.0], np.float32)).start, [5, 6])
    update = np.array([3.0, 3.0], np.float32)
    sent = privatized(method, update, noise=Constant(1.0)).values
    assert sent[kept] == 0.0
    # clipped to 1 without the personal part, noise 2 * 1
    assert sent[1 - kept] == pytest.approx(3.0, rel=1e-6)
    state = advanced(method, state, update=update, trained=np.array([8.0, 9.0], np.float32), sent=sent)
    again = context_of(method, state, np.array([1.0, 2.0], np.float32)).start.tolist()
    assert again[kept] == [8, 9][kept]
    assert again[1 - kept] == [1, 2][1 - kept]
    assert state.public.participations == 1


def test_fedper_and_lg_fedavg_train_all_at_once() -> None:
    # (4, 1) - (1, 4) / 2
    for name in ("fedper", "lg-fedavg"):
        assert trained(method_of(name), [4.0, 1.0]) == [3.5, -1.0]


def test_fedrep_trains_the_head_and_then_the_backbone() -> None:
    # head: 1 - 4/2 = -1, then -1 - 4/2 = -3; backbone: 4 + 3/2
    assert trained(method_of("fedrep", head_epochs=2, local_epochs=3), [4.0, 1.0]) == [5.5, -3.0]
    # head: -1; backbone: 4 + 1/2, then 4.5 + 1/2
    assert trained(method_of("fedrep", head_epochs=1, local_epochs=3), [4.0, 1.0]) == [5.0, -1.0]


def test_the_backbones_momentum_begins_with_the_backbone() -> None:
    # head: -1, velocity 4, then velocity 4/2 + 4 = 6: -1 - 3 = -4; backbone: 4 + 4/2, nothing carried over
    settings = {"head_epochs": 2, "local_epochs": 3, "momentum": 0.5}
    assert trained(method_of("fedrep", **settings), [4.0, 1.0]) == [6.0, -4.0]


def test_a_backbone_that_never_trains_is_refused() -> None:
    for epochs in (0, 2, 5):
        with pytest.raises(Malformed, match="head_epochs"):
            method_of("fedrep", head_epochs=epochs, local_epochs=2)


@pytest.mark.parametrize("name", ["fedrep", "perfreezeclip"])
def test_what_trains_in_turns_trains_in_whole_epochs(name: str) -> None:
    with pytest.raises(Malformed, match="local_steps"):
        method_of(name, local_steps=5)


def test_clients_at_once_have_the_same_parts() -> None:
    method = method_of("fedrep", FOUR)
    context, order = context_of(method), method.training.order
    for part, one in zip(order.masks(stacked([context] * 3)), order.masks(context), strict=True):
        np.testing.assert_array_equal(part.numpy(), np.stack([one] * 3))
