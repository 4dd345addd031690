"""Provides compact networks, their gradients in PyTorch, and their export to graphs that ONNX Runtime executes.

A network's file, and with it PyTorch, is imported when the network is requested.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hushfleet.errors import BadInput, format_value
from hushfleet.paths import in_file, is_offered

if TYPE_CHECKING:
    from hushfleet.models.model import Model

__all__ = ["get_model", "is_own", "model_names"]


# Each network's file.
_FILES = {
    **dict.fromkeys(
        ("cifar10-cnn", "cnn", "digits-cnn", "emnist-cnn", "fashion-mnist-cnn", "mnist-cnn", "svhn-cnn"), "compact"
    ),
    "autoencoder": "autoencoder",
    "linear": "linear",
    "resnet8-gn": "resnet",
    "resnet18-gn": "resnet",
    "second-moments": "second_moments",
}


_ANY_SHAPE = ("autoencoder", "cnn", "linear", "second-moments")


def model_names() -> list[str]:
    """Returns all names that `get_model` knows, sorted."""
    return sorted(_FILES)


def is_own(name: str) -> bool:
    """Returns whether this is the name of a network that does not come with Hushfleet."""
    return in_file(name) or is_offered(name)


def get_model(
    name: str,
    *,
    classes: int | None = None,
    input_shape: tuple[int, int, int] | None = None,
    loss: str | None = None,
    by_record: bool = False,
    vocabulary: int = 0,
) -> Model:
    """Returns the network `name`, with the outputs of its own data set, or `classes` outputs. Raises `BadInput`.

    :param input_shape: for networks that take any shape, and for your own; the other networks have a fixed one.
    :param loss: the loss that your own network is checked for (`models.module.model_of`).
    :param by_record: whether it is checked for gradients of single records.
    :param vocabulary: for your own network: the number of tokens, if samples are tokens.
    """
    if is_own(name):
        if classes is None or input_shape is None:
            raise BadInput(f"model.name = {name!r}: a network of your own needs model.share = 'all'")
        from hushfleet.models.module import personalized_model

        what = {"loss": loss, "by_record": by_record, "vocabulary": vocabulary}
        return personalized_model(name, classes=classes, input_shape=input_shape, **what)
    if name not in _FILES:
        raise BadInput(
            f"model.name = {format_value(name)}: must be one of {', '.join(model_names())}, or path/to/file.py:NAME"
        )
    if classes is not None and classes < 1:
        raise BadInput(f"classes = {classes}: a network needs at least one output")
    given: dict[str, Any] = {} if classes is None else {"classes": classes}
    if name in _ANY_SHAPE and input_shape is not None:
        given["input_shape"] = input_shape
    make = getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name.replace("-", "_"))
    model: Model = make(**given)
    return model
