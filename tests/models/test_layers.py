"""Networks described by layers, against the same networks written by hand in PyTorch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from hushfleet.models import export, get_model
from hushfleet.models.layers import Conv, Dropout, Layered, Linear, Pool
from hushfleet.models.model import Model


def test_shapes_and_names_by_hand():
    network = Layered(
        (3, 9, 8), (Conv(4, 3, padding=1), Pool(), Conv(6, 2), Dropout(0.25), Linear(5), Linear(2, False))
    )
    assert [place.name for place in network.places] == ["conv1", "", "conv2", "", "fc1", "fc2"]
    assert [place.output_shape for place in network.places] == [(4, 9, 8), (4, 4, 4), (6, 3, 3), (6, 3, 3), (5,), (2,)]
    assert network.layout.to_wire() == [
        ["conv1.weight", [4, 3, 3, 3]],
        ["conv1.bias", [4]],
        ["conv2.weight", [6, 4, 2, 2]],
        ["conv2.bias", [6]],
        ["fc1.weight", [5, 54]],
        ["fc1.bias", [5]],
        ["fc2.weight", [2, 5]],
        ["fc2.bias", [2]],
    ]
    assert [(spec.shape, spec.rate) for spec in network.dropout] == [((6, 3, 3), 0.25)]


def cifar_by_hand(t, x):
    for layer in ("conv1", "conv2", "conv3"):
        x = F.max_pool2d(F.relu(F.conv2d(x, t[f"{layer}.weight"], t[f"{layer}.bias"], padding=1)), 2)
    for layer in ("fc1", "fc2"):
        x = F.relu(F.linear(x.flatten(1), t[f"{layer}.weight"], t[f"{layer}.bias"]))
    return F.linear(x, t["fc3.weight"], t["fc3.bias"])


def mnist_by_hand(t, x):
    for layer in ("conv1", "conv2"):
        x = F.max_pool2d(F.relu(F.conv2d(x, t[f"{layer}.weight"], t[f"{layer}.bias"])), 2)
    return F.linear(F.relu(F.linear(x.flatten(1), t["fc1.weight"], t["fc1.bias"])), t["fc2.weight"], t["fc2.bias"])


@pytest.mark.parametrize(("name", "by_hand"), [("cifar10-cnn", cifar_by_hand), ("mnist-cnn", mnist_by_hand)])
def test_a_description_computes_what_the_same_calls_compute(name, by_hand):
    model = get_model(name)
    tensors = model.layout.unflatten(torch.from_numpy(model.init(0)))
    x = torch.randn(2, *model.input_shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.forward(tensors, x), by_hand(tensors, x))


def test_the_graphs_key_follows_the_description():
    """Pooling before or after the last convolution: the same name, layout and dropout, but another network."""
    keys = set()
    for layers in ((Conv(16, 1), Pool(), Linear(2, relu=False)), (Pool(), Conv(16, 1), Linear(2, relu=False))):
        network = Layered((1, 4, 4), layers)
        model = Model("same", "this test", (1, 4, 4), 2, network.layout, network.dropout, network)
        keys.add(export.content_key(model))
        keys.add(export.content_key(dataclasses.replace(model)))
    assert len(keys) == 2
