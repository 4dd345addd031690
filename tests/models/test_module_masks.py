"""Dropout of every form becomes a mask for each sample; the device draws it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from hushfleet.models.model import Model
from hushfleet.models.module import model_of
from hushfleet.models.module_masks import DropoutMasks, _Watch
from hushfleet.models.torch_gradient import TorchGradient

T, D = 5, 8


class DropPath(nn.Module):
    def __init__(self, drop_prob: float, scale_by_keep: bool = True) -> None:
        super().__init__()
        self.drop_prob, self.scale_by_keep = drop_prob, scale_by_keep

    def forward(self, x):
        if not self.training:
            return x
        kept = x.new_empty(len(x), *[1] * (x.ndim - 1)).bernoulli_(1 - self.drop_prob)
        return x * kept / (1 - self.drop_prob)


class Net(nn.Module):
    """Series -> a part that a test gives -> logits."""

    def __init__(self, part, *, along=lambda part, t: part(t)) -> None:
        super().__init__()
        self.lift, self.part, self.head, self.along = nn.Linear(3, D), part, nn.Linear(D, 4), along

    def forward(self, x):
        return self.head(self.along(self.part, self.lift(x.mT)).mean(1))


def batch_second(part, t):
    return part(t.transpose(0, 1)).transpose(0, 1)


def attended(part, t):
    return part(t, t, t)[0]


LAYER = {"d_model": D, "nhead": 2, "dim_feedforward": 6, "dropout": 0.3}
ENCODER = [((2, T, T), 0.3), ((T, D), 0.3), ((T, 6), 0.3), ((T, D), 0.3)]
FORMS = {
    "dropout": (nn.Dropout(0.2), {}, [((T, D), 0.2)]),
    "channels": (nn.Dropout1d(0.2), {}, [((T, 1), 0.2)]),
    "depth": (DropPath(0.2), {}, [((1, 1), 0.2)]),
    "function": (
        nn.Identity(),
        {"along": lambda part, t: F.dropout(t, p=0.2, training=part.training)},
        [((T, D), 0.2)],
    ),
    "attention": (
        nn.Identity(),
        {"along": lambda part, t: F.scaled_dot_product_attention(t, t, t, None, 0.2 * part.training)},
        [((T, T), 0.2)],
    ),
    "multi-head": (nn.MultiheadAttention(D, 2, dropout=0.1, batch_first=True), {"along": attended}, [((2, T, T), 0.1)]),
    "encoder": (nn.TransformerEncoderLayer(batch_first=True, **LAYER), {}, ENCODER),
    "sequence first": (nn.TransformerEncoderLayer(**LAYER), {"along": batch_second}, ENCODER),
    "none": (nn.Sequential(nn.Dropout(0.0), DropPath(0.0)), {}, []),
}


def made(form: str) -> tuple[nn.Module, Model]:
    part, more, _ = FORMS[form]
    torch.manual_seed(0)
    net = Net(part, **more)
    return net, model_of(net, name="own", classes=4, input_shape=(3, 1, T))


@pytest.mark.parametrize("form", FORMS)
def test_masks_of_a_sample_change_that_sample_alone(form):
    net, model = made(form)
    assert [(drop.shape, drop.rate) for drop in model.dropout] == FORMS[form][2]
    tensors, x = model.layout.unflatten(torch.from_numpy(model.init(0))), torch.randn(4, 3, 1, T)
    masks = [torch.ones(4, *drop.shape) for drop in model.dropout]
    plain = net.eval()(x[:, :, 0])
    torch.testing.assert_close(model.forward(tensors, x), plain)
    torch.testing.assert_close(model.forward(tensors, x, masks), plain)
    for mask in masks:
        mask[2] = 0
        found = model.forward(tensors, x, masks)
        changed = (found - plain).abs().amax(1) > 1e-6
        assert changed.tolist() == [False, False, True, False]
        mask[2] = 1


@pytest.mark.parametrize("form", ["multi-head", "sequence first", "depth"])
def test_single_samples_in_one_pass_as_each_alone(form):
    _, model = made(form)
    rng, gradient, params = np.random.default_rng(0), TorchGradient(model), model.init(1)[None]
    x, y = rng.standard_normal((1, 3, 3, 1, T), np.float32), rng.integers(0, 4, (1, 3))
    masks = [rng.integers(0, 2, (1, 3, *drop.shape)).astype(np.float32) for drop in model.dropout]
    _, together = gradient.records(params, x, y, masks)
    for place in range(3):
        one = slice(place, place + 1)
        _, alone = gradient(params[0], x[0, one], y[0, one], [mask[0, one] for mask in masks])
        np.testing.assert_allclose(together[0, place], alone, rtol=1e-4, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 4), st.sampled_from(["none", "bool", "float", "causal"]), st.sampled_from([1, 2])
)
def test_attention_with_a_mask_of_ones_is_that_of_pytorch(queries, keys, kind, groups):
    generator = torch.Generator().manual_seed(queries + 7 * keys)
    q, k, v = (torch.randn(2, *size, 3, generator=generator) for size in ((2, queries), *((2 // groups, keys),) * 2))
    masks = {"bool": torch.rand(queries, keys, generator=generator) > 0.4, "float": torch.randn(queries, keys)}
    mask = masks.get(kind)
    if kind == "bool":
        mask[:, 0] = True
    more = {"is_causal": kind == "causal", "scale": 0.3 * queries, "enable_gqa": groups > 1}
    expected = F.scaled_dot_product_attention(q, k, v, mask, **more)
    found = _Watch(DropoutMasks())._attended(q, k, v, mask, 0.5, **more)
    torch.testing.assert_close(found, expected)


def test_stochastic_depth_that_changes_the_mean_or_the_batch_is_refused():
    from hushfleet.errors import BadInput

    with pytest.raises(BadInput, match="draws random numbers"):
        model_of(Net(DropPath(0.9, scale_by_keep=False)), name="own", classes=4, input_shape=(3, 1, T))
