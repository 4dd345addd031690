"""A model for other classes, against softmax itself."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.errors import BadInput
from hushfleet.learning.carry_over import carry_over, with_outputs
from hushfleet.params import ParamLayout

BODY, FEATURES = 6, 4
NAMES = st.lists(st.sampled_from("abcdefgh"), min_size=2, unique=True)


def layout_of(outputs: int) -> ParamLayout:
    return ParamLayout(("conv.weight", "fc.weight", "fc.bias"), ((BODY,), (outputs, FEATURES), (outputs,)))


def probabilities(layout: ParamLayout, vector: np.ndarray, x: np.ndarray) -> np.ndarray:
    tensors = layout.unflatten(vector.astype(np.float64))
    logits = tensors["fc.weight"] @ x + tensors["fc.bias"]
    return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()


@given(names=NAMES, to_names=NAMES, seed=st.integers(0, 99))
def test_classes_that_stay_keep_their_odds_wherever_they_stand(
    names: list[str], to_names: list[str], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    old, new = layout_of(len(names)), layout_of(len(to_names))
    vector, x = rng.normal(size=old.size).astype(np.float32), rng.normal(size=FEATURES)
    made = carry_over(vector, names, layout=new, to_names=to_names, softmax=True)
    assert made.shape == (new.size,)
    np.testing.assert_array_equal(made[:BODY], vector[:BODY])
    before = dict(zip(names, probabilities(old, vector, x), strict=True))
    after = dict(zip(to_names, probabilities(new, made, x), strict=True))
    both = sorted(set(names) & set(to_names))
    for one, other in pairwise(both):
        assert after[one] / after[other] == pytest.approx(before[one] / before[other], rel=1e-4)
    for name in set(to_names) - set(names):  # as likely as the geometric mean of the old classes
        if both:
            mean = np.exp(np.mean(np.log(list(before.values()))))
            assert after[name] / after[both[0]] == pytest.approx(mean / before[both[0]], rel=1e-4)


def test_the_same_classes_give_the_same_vector_and_a_new_number_begins_with_zeros() -> None:
    layout = layout_of(2)
    vector = np.arange(layout.size, dtype=np.float32)
    np.testing.assert_array_equal(carry_over(vector, "ab", layout=layout, to_names="ab", softmax=False), vector)
    grown = layout_of(3).unflatten(carry_over(vector, "ab", layout=layout_of(3), to_names="abc", softmax=False))
    assert not grown["fc.weight"][2].any()
    assert grown["fc.bias"].tolist() == [*vector[-2:], 0.0]


def test_a_linear_model_gets_a_row_and_a_prior_for_a_new_class() -> None:
    """As method `hush` has it: the prior is a layer of its own."""

    def layout(outputs: int) -> ParamLayout:
        return ParamLayout(("head.weight", "prior"), ((outputs, FEATURES), (outputs,)))

    assert with_outputs(layout(2), 3) == layout(3)
    vector = np.arange(layout(2).size, dtype=np.float32)
    grown = layout(3).unflatten(carry_over(vector, "ab", layout=layout(3), to_names="bca", softmax=True))
    assert grown["head.weight"].tolist() == [[4, 5, 6, 7], [2, 3, 4, 5], [0, 1, 2, 3]]
    assert grown["prior"].tolist() == [9, 8.5, 8]


def test_a_vector_of_another_network_is_refused() -> None:
    with pytest.raises(BadInput, match="2 outputs"):
        carry_over(np.zeros(3, np.float32), "ab", layout=layout_of(2), to_names="ab", softmax=True)
    assert with_outputs(layout_of(2), 5) == layout_of(5)
