"""One graph for every batch size from two traces with plain numbers: the function itself is the oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from hushfleet.models.two_traces import trace_of_any_batch


def traced(function, *shape, batched=0):
    return trace_of_any_batch(function, lambda size: (torch.randn(size, *shape),), batched, {})


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 7), st.integers(1, 7), st.lists(st.integers(0, 4), max_size=5), st.sampled_from([1, 2, 11]))
def test_holds_for_every_batch_whatever_sizes_a_network_has(first, second, steps, size):
    """Sizes of the network may equal those of the two batches."""
    moves = [
        lambda x: x.reshape(x.shape[0] * first, second).tanh().reshape(-1, first, second),
        lambda x: x.permute(1, 0, 2).reshape(first, x.shape[0] * second).T.reshape(x.shape[0], second, -1).mT,
        lambda x: torch.cat([x, x.new_ones(1, first, second).expand(len(x), -1, -1)], 1)[:, :first] * len(x),
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: x - x.sum(0, keepdim=True) / (2 * x.shape[0] + 3),
    ]

    def function(x):
        for step in steps:
            x = moves[step](x)
        return x

    x = torch.randn(size, first, second)
    torch.testing.assert_close(traced(function, first, second)(x), function(x))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x.tanh() if len(x) > 5 else x, "its steps depend on the number of samples"),
        (lambda x: x.tanh() if len(x) > 5 else x.sigmoid(), "its step tanh depends|its step sigmoid depends"),
        (lambda x: x * torch.tensor([float(len(x))]), "depends on the number of samples"),
        (lambda x: x * (1 / len(x)), "the number 0.2 depends on"),
        (lambda x: x[: len(x) // 3], "is not a multiple of the batch"),
        (lambda x: x.reshape(*[1] * len(x), -1, 2), "the rank of a tensor depends"),
    ],
)
def test_what_is_no_multiple_of_the_batch_is_refused(function, said):
    with pytest.raises(ValueError, match=said):
        traced(function, 2)
