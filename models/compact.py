"""Defines the compact convolutional networks that papers in this field train on small images."""

from __future__ import annotations

from hushfleet.errors import BadInput
from hushfleet.models.layers import Conv, Dropout, Layer, Layered, Linear, Pool
from hushfleet.models.model import Model

FED_AVG = "after McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017, without padding"
ACDP_PFSD = "ACDP-pFSD: A Personalized Federated Self-Decoupled Distillation Framework"
FED_DPA = "Yang et al., Dynamic Personalized FL with Adaptive Differential Privacy, NeurIPS 2023"


def digits_cnn(classes: int = 10) -> Model:
    """Makes the network for scikit-learn's 8x8 digits; it trains in seconds on any board, so demos and tests use it."""
    layers = (Conv(16, 3, padding=1), Pool(), Conv(16, 3, padding=1), Pool(), Linear(32))
    return _compact("digits-cnn", "Hushfleet", (1, 8, 8), classes, layers)


def mnist_cnn(classes: int = 10) -> Model:
    """Makes two unpadded 5x5 convolutions, each with ReLU and pooling, and two linear layers."""
    layers = (Conv(32, 5), Pool(), Conv(64, 5), Pool(), Linear(512))
    return _compact("mnist-cnn", FED_AVG, (1, 28, 28), classes, layers)


def emnist_cnn(classes: int = 26) -> Model:
    """Makes the network for the 26 letters of EMNIST.

    Reading: the paper says only "a simple 8-layer CNN model". Here these are four padded 3x3 convolutions with ReLU, a
    pooling after every second one, and two linear layers: eight if the poolings count as layers.
    """
    convolutions = (Conv(16, 3, padding=1), Conv(32, 3, padding=1), Pool()) + (Conv(32, 3, padding=1),) * 2 + (Pool(),)
    return _compact("emnist-cnn", ACDP_PFSD, (1, 28, 28), classes, (*convolutions, Linear(128)))


def fashion_mnist_cnn(classes: int = 10) -> Model:
    """Makes the network of FedDPA for grey images of 28 x 28."""
    return _compact("fashion-mnist-cnn", FED_DPA, (1, 28, 28), classes, _TWO_CONVOLUTIONS)


def svhn_cnn(classes: int = 10) -> Model:
    """Makes the network of FedDPA for colour images of 32 x 32."""
    return _compact("svhn-cnn", FED_DPA, (3, 32, 32), classes, _TWO_CONVOLUTIONS)


# Two unpadded 3x3 convolutions, one pooling, two linear layers, dropout after pooling and after fc1.
_TWO_CONVOLUTIONS = (Conv(32, 3), Conv(64, 3), Pool(), Dropout(0.25), Linear(128), Dropout(0.5))


def cifar10_cnn(classes: int = 10) -> Model:
    """Makes three padded 3x3 convolutions, each with ReLU and pooling, and three linear layers."""
    convolutions = (layer for outputs in (16, 32, 32) for layer in (Conv(outputs, 3, padding=1), Pool()))
    return _compact("cifar10-cnn", FED_DPA, (3, 32, 32), classes, (*convolutions, Linear(512), Linear(128)))


def cnn(classes: int = 10, input_shape: tuple[int, int, int] = (1, 40, 98)) -> Model:
    """Makes the network for log-mel spectra, and other images with sides of at least 8: three padded 3x3 convolutions,
    each with ReLU and pooling, and two linear layers."""
    if min(input_shape[1:]) < 8:
        raise BadInput(f"model.name = 'cnn' takes images with sides of at least 8, not {list(input_shape)}")
    return _compact("cnn", "Hushfleet", input_shape, classes, (*(Conv(16, 3, padding=1), Pool()) * 3, Linear(32)))


def _compact(
    name: str, source: str, input_shape: tuple[int, int, int], classes: int, hidden: tuple[Layer, ...]
) -> Model:
    """Makes a network of the hidden layers and one linear layer that gives the logits."""
    network = Layered(input_shape, (*hidden, Linear(classes, relu=False)))
    body = Layered(input_shape, hidden)
    return Model(name, source, input_shape, classes, network.layout, network.dropout, network, hidden=body)
