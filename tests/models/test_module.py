"""Own networks: any `torch.nn.Module` becomes a `Model`: its own values, masks for dropout, a checked export."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hushfleet.errors import BadInput
from hushfleet.models import get_model
from hushfleet.models.checks import random_batch
from hushfleet.models.export import content_key, export_graphs
from hushfleet.models.module import model_of, offer, with_group_norm
from hushfleet.models.torch_gradient import TorchGradient

SERIES, IMAGE, VECTOR = (3, 1, 16), (3, 8, 8), (7, 1, 1)


class Tied(nn.Module):
    """One weight used twice, a frozen layer, and a constant buffer."""

    def __init__(self, classes=4):
        super().__init__()
        self.mixed = nn.Linear(7, 7)
        self.again = self.mixed
        self.fixed = nn.Linear(7, 7).requires_grad_(False)
        self.register_buffer("moved", torch.arange(7.0))
        self.head = nn.Linear(7, classes)

    def forward(self, x):
        return self.head(self.fixed(torch.tanh(self.again(torch.tanh(self.mixed(x + self.moved))))))


class Separable(nn.Module):
    """What small networks on series are made of: strides, depthwise convolutions, normalisation, pooling, dropout."""

    def __init__(self, classes, input_shape):
        super().__init__()
        channels, _ = input_shape
        self.body = nn.Sequential(
            *(nn.Conv1d(channels, 8, 5, padding=2), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool1d(2), nn.Dropout(0.3)),
            *(nn.Conv1d(8, 8, 3, stride=2, padding=1, groups=8), nn.SiLU(), nn.AvgPool1d(2), nn.Dropout1d(0.5)),
        )
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


def normalised_mobile():
    return with_group_norm(
        nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 16, 3, groups=4, stride=2)),
            *(nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(4)),
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(("made", "shape"), [(Tied, VECTOR), (Separable, SERIES), (normalised_mobile, IMAGE)])
def test_exports_to_graphs_that_agree_with_it(tmp_path, made, shape):
    """`export_graphs` compares them, with and without masks, and a device's limits are held."""
    export_graphs(model_of(made, name="own", classes=4, input_shape=shape), cache_dir=tmp_path)


def test_gradient_is_that_of_the_module_itself():
    module = Separable(4, (3, 16)).eval()
    model = model_of(module, name="own", classes=4, input_shape=SERIES)
    x, y = torch.randn(5, *SERIES), torch.tensor([0, 1, 2, 3, 0])
    loss = nn.functional.cross_entropy(module(x[:, :, 0]), y)
    loss.backward()
    expected = torch.cat([value.grad.flatten() for value in module.parameters()]).numpy()
    found = TorchGradient(model)(model.init(0), x.numpy(), y.numpy())
    assert found[0] == pytest.approx(loss.item(), rel=1e-6)
    np.testing.assert_allclose(found[1], expected, rtol=1e-5, atol=1e-7)


def test_many_clients_at_once_as_one_after_the_other():
    model = model_of(Separable, name="own", classes=4, input_shape=SERIES)
    rng = np.random.default_rng(0)
    params = np.stack([model.init(seed) for seed in (1, 2)])
    x, y = rng.standard_normal((2, 6, *SERIES), np.float32), rng.integers(0, 4, (2, 6))
    masks = [
        ((rng.random((2, 6, *drop.shape)) >= drop.rate) / (1 - drop.rate)).astype(np.float32) for drop in model.dropout
    ]
    gradient = TorchGradient(model)
    _, together = gradient.clients(params, x, y, masks)
    for client in (0, 1):
        _, alone = gradient(params[client], x[client], y[client], [mask[client] for mask in masks])
        np.testing.assert_allclose(together[client], alone, rtol=1e-4, atol=1e-6)


def test_dropout_is_a_mask_of_its_shape_in_the_order_of_its_use():
    model = model_of(Separable, name="own", classes=4, input_shape=SERIES)
    assert [(drop.shape, drop.rate) for drop in model.dropout] == [((8, 8), 0.3), ((8, 1), 0.5)]
    tensors = model.layout.unflatten(torch.from_numpy(model.init(0)))
    dropped = model.forward(tensors, torch.randn(2, *SERIES), [torch.ones(2, 8, 8), torch.zeros(2, 8, 1)])
    torch.testing.assert_close(dropped, tensors["head.bias"].expand(2, 4))


def test_a_dropout_of_two_names_is_two_masks():
    once = nn.Dropout(0.5)
    network = Own(lambda self, x: self.second(self.head(self.first(self.body(x)))), first=once, second=once)
    model = model_of(network, name="own", classes=4, input_shape=VECTOR)
    assert [drop.shape for drop in model.dropout] == [(5,), (4,)]


def test_layout_is_what_is_trained_and_a_shared_weight_is_there_once():
    model = model_of(Tied, name="own", classes=4, input_shape=VECTOR)
    assert model.layout.names == ("mixed.weight", "mixed.bias", "head.weight", "head.bias")


def test_an_instance_begins_with_its_values_and_a_class_as_the_seed_draws_it():
    module = Tied()
    assert np.array_equal(
        model_of(module, name="own", classes=4, input_shape=VECTOR).init(3)[:49],
        module.mixed.weight.detach().numpy().ravel(),
    )
    model = model_of(Tied, name="own", classes=4, input_shape=VECTOR)
    before = torch.random.get_rng_state()
    assert np.array_equal(model.init(3), model.init(3))
    assert not np.array_equal(model.init(3), model.init(4))
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_module_that_was_given_stays_as_it_was():
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(7, 4)).train()
    model_of(module, name="own", classes=4, input_shape=VECTOR)
    assert isinstance(module[0], nn.Dropout)
    assert module.training


def test_graphs_are_kept_by_what_a_network_computes():
    def key(made):
        return content_key(model_of(made, name="own", classes=4, input_shape=VECTOR))

    plain = nn.Sequential(nn.Linear(7, 4))
    assert key(plain) == key(nn.Sequential(nn.Linear(7, 4)))
    assert key(plain) != key(nn.Sequential(nn.Linear(7, 4), nn.Tanh()))
    tied = Tied()
    first = key(tied)
    tied.moved += 1
    assert key(tied) != first


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(7, 4)

    def forward(self, x):
        return self.head(x - x.mean(0))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(7, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1 if self.training else 0
        return self.head(x)


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(7, 4)

    def forward(self, x):
        return self.head(x + torch.randn_like(x) * self.training)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (nn.Sequential(nn.Linear(7, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), "1 is a BatchNorm1d.*with_group_norm"),
        (nn.LSTM(7, 4), "it is a LSTM.*Use torch.nn.GRU"),
        (nn.Sequential(nn.ConvTranspose2d(1, 2, 2)), "0 is a ConvTranspose2d.*Use torch.nn.Upsample"),
        (nn.Linear(7, 5), r"logits float32 \[B, 4\] for \[B, 7\].*gives \[3, 5\]"),
        (
            nn.Linear(6, 4),
            r"fails on a batch of shape \[3, 7\]: RuntimeError.*have shape \[7\].*: check what its layers",
        ),
        (Mixing, "other logits when other samples are beside it"),
        (Counting, "changes its buffers in training"),
        (Hidden, "draws random numbers: use torch.nn.Dropout"),
        (nn.Linear(7, 4).double(), "weight is torch.float64; parameters must be float32"),
        (nn.Linear(7, 4).requires_grad_(False), "nothing to train"),
        (lambda size: nn.Linear(size, 4), "calling it with nothing fails.*size"),
        (lambda: 3, "gives a int, not a torch.nn.Module"),
        (3, "must be a torch.nn.Module"),
    ],
)
def test_refuses_in_words(made, said):
    with pytest.raises(BadInput, match=said):
        model_of(made, name="own", classes=4, input_shape=VECTOR)


class Own(nn.Module):
    """Two layers, and a `forward` that a test gives."""

    def __init__(self, forward, **more):
        super().__init__()
        self.body, self.head, self.called = nn.Linear(7, 5), nn.Linear(5, 4), forward
        for name, part in more.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.called(self, x)


def broken(value):
    module = nn.Sequential(nn.Linear(7, 4))
    module[0].weight.data[1, 2] = value
    return module


def plain(self, x):
    return self.head(self.body(x))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (Own(plain, old_head=nn.Linear(4, 4)), r"old_head has no part.*old_head.bias.*network.old_head.requires_grad_"),
        (Own(plain, old=nn.LazyLinear(4)), "old has no part in the logits"),
        (Own(lambda self, x: self.head(self.body(x).detach())), "body has no part in the logits"),
        (Own(lambda self, x: plain(self, x).squeeze().reshape(-1, 4)[0]), r"gives \[4\] torch.float32 for B = 3"),
        (
            Own(lambda self, x: plain(self, x).squeeze()),
            r"gives \[4\] .* for B = 1. squeeze\(\) without",
        ),
        (Own(lambda self, x: self.head(self.body(x) // 2)), "cannot compute its gradient: .*floor_divide"),
        (Own(torch.no_grad()(plain)), "no gradient comes through its forward"),
        (Own(plain, more=[nn.Linear(4, 4)]), "more is a list of layers, which PyTorch does not see.*ModuleList"),
        (Own(plain, more={"a": nn.Linear(4, 4)}), "more is a dict of layers"),
        (Own(plain, scale=torch.ones(4, requires_grad=True)), "scale is a tensor.*use torch.nn.Parameter"),
        (broken(float("nan")), "0.weight has values that are NaN or infinite"),
        (broken(float("inf")), "0.weight has values that are NaN or infinite"),
        (nn.Linear(7, 4, device="meta"), "weight is on meta"),
        (
            Own(lambda self, x: plain(self, x / x.std(1, keepdim=True))),
            "NaN or infinite for zeros: look for",
        ),
        (Own(lambda self, x: plain(self, x).log()), "NaN or infinite for random samples"),
        (Own(lambda self, x: plain(self, x.view(3, 7))), "a batch any number of them"),
        (
            Own(lambda self, x: plain(self, x) if self.body.bias.sum() > -99 else -plain(self, x)),
            r"cannot trace it.* at test_module.py:\d+: .*if self.body.bias.sum.*use torch.where",
        ),
        (Own(lambda self, x: plain(self, F.embedding(x.long(), torch.ones(2, 7)).mean(1))), r'values = "tokens"'),
        (Own(lambda self, x: plain(self, x) * self.head.bias.tolist()[0]), r"bias.tolist\(\)\[0\].*use torch.where"),
        (torch.jit.script(nn.Linear(7, 4)), "it is TorchScript.*before torch.jit.script"),
        (nn.Sequential(torch.jit.script(nn.Linear(7, 4))), "0 is TorchScript"),
        (Own(lambda self, x: plain(self, x) * F.dropout(torch.ones(4), 0.5)), r"tensor \[4\] in which no axis"),
    ],
)
def test_refuses_what_would_fail_later_or_learn_in_silence(made, said):
    with pytest.raises(BadInput, match=said):
        model_of(made, name="own", classes=4, input_shape=VECTOR)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            nn.Sequential(nn.Linear(7, 4), nn.Softmax(dim=1)),
            r"it ends in softmax \(1\), and model.loss = 'c",
        ),
        (Own(lambda self, x: plain(self, x).softmax(1)), "it ends in softmax, and"),
        (nn.Sequential(nn.Linear(7, 4), nn.Sigmoid()), r"it ends in a sigmoid \(1\)"),
        (nn.Sequential(nn.Linear(7, 4), nn.ReLU(), nn.Flatten()), r"it ends in ReLU \(1\)"),
    ],
)
def test_what_a_network_ends_in_are_logits(made, said):
    """Cross-entropy of a softmax learns little, and in silence. A regression may end in what it likes."""
    with pytest.raises(BadInput, match=said):
        model_of(made, name="own", classes=4, input_shape=VECTOR, loss="cross-entropy")
    with pytest.raises(BadInput, match="takes logits"):
        model_of(made, name="own", classes=4, input_shape=VECTOR, loss="binary")
    assert model_of(made, name="own", classes=4, input_shape=VECTOR, loss="squared").layout.size


def test_a_log_softmax_is_taken_for_classes_alone() -> None:
    made = nn.Sequential(nn.Linear(7, 4), nn.LogSoftmax(dim=1))
    with pytest.raises(BadInput, match=r"it ends in LogSoftmax \(1\)"):
        model_of(made, name="own", classes=4, input_shape=VECTOR, loss="binary")
    assert model_of(made, name="own", classes=4, input_shape=VECTOR, loss="cross-entropy").layout.size


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (
            nn.BatchNorm1d(7),
            "0 is a BatchNorm1d, which Opacus' ModuleValidator refuses.*with_group_norm",
        ),
        (
            nn.InstanceNorm1d(7, affine=True, track_running_stats=True),
            "Opacus.*running stats.*_stats=False",
        ),
    ],
)
def test_with_records_as_the_unit_opacus_is_asked(layer, said):
    network = nn.Sequential(layer, nn.Linear(7, 4))
    with pytest.raises(BadInput, match=said):
        model_of(network, name="own", classes=4, input_shape=VECTOR, by_record=True)
    with pytest.raises(BadInput, match="0 is a"):
        model_of(network, name="own", classes=4, input_shape=VECTOR)


def test_a_file_is_run_and_tells_devices_its_name_alone(tmp_path):
    file = tmp_path / "nets.py"
    file.write_text(
        "from torch import nn\ndef net(classes, input_shape):\n    return nn.Linear(*input_shape, classes)\n"
    )
    model = get_model(f"{file}:net", classes=4, input_shape=VECTOR)
    assert (model.name, model.layout.size) == ("nets.py:net", 32)
    for name, said in (("other", "has no 'other'"), ("net.no", "has no 'net.no'")):
        with pytest.raises(BadInput, match=said):
            get_model(f"{file}:{name}", classes=4, input_shape=VECTOR)
    with pytest.raises(BadInput, match="cannot read"):
        get_model(f"{tmp_path}/none.py:net", classes=4, input_shape=VECTOR)
    file.write_text("1 / 0")
    with pytest.raises(BadInput, match="cannot be imported: ZeroDivisionError"):
        get_model(f"{file}:net", classes=4, input_shape=VECTOR)


def test_an_offered_network_is_known_to_this_process_alone():
    name = offer(nn.Linear(7, 4))
    assert get_model(name, classes=4, input_shape=VECTOR).layout.size == 32
    with pytest.raises(BadInput, match="of a Python program"):
        get_model("python:Never", classes=4, input_shape=VECTOR)


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda net: nn.Sequential(torch.compile(net))])
def test_what_compiles_or_distributes_a_network_is_taken_off(wrap):
    net = nn.Linear(7, 4)
    model = model_of(wrap(net), name="own", classes=4, input_shape=VECTOR)
    assert np.array_equal(model.init(0), torch.cat([net.weight.flatten(), net.bias]).detach().numpy())
    assert not any("mod" in name for name in model.layout.names)


def test_a_network_of_tokens_is_checked_with_tokens():
    def net():
        return nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(21, 4))

    model = model_of(net, name="own", classes=4, input_shape=VECTOR, vocabulary=9)
    x = random_batch(model, 50, np.random.default_rng(0))[0]
    assert set(np.unique(x)) == set(range(9))
    loss, grad = TorchGradient(model)(model.init(0), x, np.zeros(50, np.int64))
    assert np.isfinite(loss)
    assert np.abs(grad).max() > 0
    with pytest.raises(BadInput, match=r"its first size must be at least as large"):
        model_of(net, name="own", classes=4, input_shape=VECTOR, vocabulary=90)
