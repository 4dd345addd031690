"""The key of exported graphs in the user's cache: everything that decides what is in them.

The network's description, the source of this package's exporting code and the versions of PyTorch and ONNX: so nothing
ever needs to be invalidated by hand.
"""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path
from typing import Any

import numpy
import onnx
import onnxruntime
import torch

from hushfleet.graphs import session
from hushfleet.model.objectives import CROSS_ENTROPY, Objective
from hushfleet.models import checks, losses, model, torch_gradient
from hushfleet.models.model import Model


def content_key(network: Model, objective: Objective = CROSS_ENTROPY) -> str:
    """Hex digest of whatever the exported graphs depend on."""
    digest = hashlib.sha256()
    for module in (torch, onnx, onnxruntime, numpy):
        _add(digest, f"{module.__name__} {module.__version__}")
    for name in ("tracing", "decompositions"):
        _add(digest, Path(__file__).with_name(f"{name}.py").read_text("utf-8"))  # slow to import
    code: Any = inspect.getmodule(network.function)
    for part in (checks, losses, model, torch_gradient, code):
        _add(digest, inspect.getsource(part))
    _add(digest, inspect.getsource(session))
    _add(digest, network.layout.digest)
    _add(digest, repr(objective))
    _add(digest, repr((network.name, network.input_shape, network.classes, network.dropout)))
    _add(digest, repr(getattr(network.function, "layers", None)))  # a function's text is in its module
    return digest.hexdigest()


def _add(digest: hashlib._Hash, text: str) -> None:
    data = text.encode()
    digest.update(len(data).to_bytes(8, "big") + data)
