"""Compact convolutional networks, the ones that the papers in this field train on small images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn import functional as F

from hushfleet.spec import DropoutSpec
from models.model import Model, layout_of

FED_AVG = "after McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017, without padding"
FED_DPA = "Yang et al., Dynamic Personalized FL with Adaptive Differential Privacy, NeurIPS 2023"

Tensors = Mapping[str, Tensor]


def conv(t: Tensors, layer: str, x: Tensor, padding: int = 0) -> Tensor:
    return F.conv2d(x, t[f"{layer}.weight"], t[f"{layer}.bias"], padding=padding)


def linear(t: Tensors, layer: str, x: Tensor) -> Tensor:
    return F.linear(x, t[f"{layer}.weight"], t[f"{layer}.bias"])


def digits_cnn(classes: int = 10) -> Model:
    """For the 8x8 digits of scikit-learn: trains in seconds on any board, so demos and tests use it."""

    def forward(t: Tensors, x: Tensor, dropout: Sequence[Tensor]) -> Tensor:
        x = F.max_pool2d(F.relu(conv(t, "conv1", x, padding=1)), 2)
        x = F.max_pool2d(F.relu(conv(t, "conv2", x, padding=1)), 2)
        x = F.relu(linear(t, "fc1", x.flatten(1)))
        return linear(t, "fc2", x)

    layout = layout_of(conv1=(16, 1, 3, 3), conv2=(16, 16, 3, 3), fc1=(32, 64), fc2=(classes, 32))
    return Model("digits-cnn", "Hushfleet", (1, 8, 8), classes, layout, (), forward)


def mnist_cnn(classes: int = 10) -> Model:
    """Two unpadded 5x5 convolutions, each with ReLU and pooling, and two linear layers."""

    def forward(t: Tensors, x: Tensor, dropout: Sequence[Tensor]) -> Tensor:
        for layer in ("conv1", "conv2"):
            x = F.max_pool2d(F.relu(conv(t, layer, x)), 2)
        x = F.relu(linear(t, "fc1", x.flatten(1)))
        return linear(t, "fc2", x)

    layout = layout_of(conv1=(32, 1, 5, 5), conv2=(64, 32, 5, 5), fc1=(512, 1024), fc2=(classes, 512))
    return Model("mnist-cnn", FED_AVG, (1, 28, 28), classes, layout, (), forward)


def fashion_mnist_cnn(classes: int = 10) -> Model:
    return _two_convolutions("fashion-mnist-cnn", (1, 28, 28), classes)


def svhn_cnn(classes: int = 10) -> Model:
    return _two_convolutions("svhn-cnn", (3, 32, 32), classes)


def _two_convolutions(name: str, input_shape: tuple[int, int, int], classes: int) -> Model:
    """Two unpadded 3x3 convolutions, one 2x2 pooling, two linear layers, dropout after pooling and fc1."""
    channels, height, width = input_shape
    pooled = (64, (height - 4) // 2, (width - 4) // 2)

    def forward(t: Tensors, x: Tensor, dropout: Sequence[Tensor]) -> Tensor:
        x = F.relu(conv(t, "conv1", x))
        x = F.max_pool2d(F.relu(conv(t, "conv2", x)), 2)
        if dropout:
            x = x * dropout[0]
        x = F.relu(linear(t, "fc1", x.flatten(1)))
        if dropout:
            x = x * dropout[1]
        return linear(t, "fc2", x)

    layout = layout_of(
        conv1=(32, channels, 3, 3),
        conv2=(64, 32, 3, 3),
        fc1=(128, pooled[0] * pooled[1] * pooled[2]),
        fc2=(classes, 128),
    )
    dropout = (DropoutSpec(pooled, 0.25), DropoutSpec((128,), 0.5))
    return Model(name, FED_DPA, input_shape, classes, layout, dropout, forward)


def cifar10_cnn(classes: int = 10) -> Model:
    """Three padded 3x3 convolutions, each with ReLU and pooling, and three linear layers."""

    def forward(t: Tensors, x: Tensor, dropout: Sequence[Tensor]) -> Tensor:
        for layer in ("conv1", "conv2", "conv3"):
            x = F.max_pool2d(F.relu(conv(t, layer, x, padding=1)), 2)
        x = F.relu(linear(t, "fc1", x.flatten(1)))
        x = F.relu(linear(t, "fc2", x))
        return linear(t, "fc3", x)

    layout = layout_of(
        conv1=(16, 3, 3, 3),
        conv2=(32, 16, 3, 3),
        conv3=(32, 32, 3, 3),
        fc1=(512, 512),
        fc2=(128, 512),
        fc3=(classes, 128),
    )
    return Model("cifar10-cnn", FED_DPA, (3, 32, 32), classes, layout, (), forward)
