"""Compact networks, their gradients in PyTorch, and their export to graphs that ONNX Runtime executes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hushfleet.errors import BadInput
from hushfleet.models.compact import cifar10_cnn, digits_cnn, emnist_cnn, fashion_mnist_cnn, mnist_cnn, svhn_cnn
from hushfleet.models.linear import linear
from hushfleet.models.model import Model
from hushfleet.models.module import is_offered, offer, own_model, with_group_norm
from hushfleet.models.resnet import resnet18_gn
from hushfleet.user_files import in_file

__all__ = ["Model", "get_model", "is_own", "model_names", "offer", "with_group_norm"]

_MODELS: dict[str, Callable[..., Model]] = {
    "cifar10-cnn": cifar10_cnn,
    "digits-cnn": digits_cnn,
    "emnist-cnn": emnist_cnn,
    "fashion-mnist-cnn": fashion_mnist_cnn,
    "linear": linear,
    "mnist-cnn": mnist_cnn,
    "resnet18-gn": resnet18_gn,
    "svhn-cnn": svhn_cnn,
}


def model_names() -> list[str]:
    """All names that `get_model` knows, sorted."""
    return sorted(_MODELS)


def is_own(name: str) -> bool:
    """Whether this is the name of a network that does not come with Hushfleet."""
    return in_file(name) or is_offered(name)


def get_model(name: str, *, classes: int | None = None, input_shape: tuple[int, int, int] | None = None) -> Model:
    """The network called `name`, with the outputs of its own data set unless `classes` says. Raises `BadInput`.

    :param input_shape: of `linear`, which takes any, and of your own; the other networks have theirs.
    """
    if is_own(name):
        if classes is None or input_shape is None:
            raise BadInput(f"model.name = {name!r}: your own network goes with model.share = 'all'")
        return own_model(name, classes=classes, input_shape=input_shape)
    if name not in _MODELS:
        raise BadInput(
            f"there is no model {name!r}; choose one of {', '.join(model_names())}, or give path/to/file.py:NAME"
        )
    if classes is not None and classes < 2:
        raise BadInput(f"classes = {classes}: a classifier needs at least 2")
    given: dict[str, Any] = {} if classes is None else {"classes": classes}
    if name == "linear" and input_shape is not None:
        given["input_shape"] = input_shape
    return _MODELS[name](**given)
