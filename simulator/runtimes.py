"""What computes gradients in the fast engine.

`onnx` are the devices' own graphs: its results are the live engine's, bit for bit. The others are quicker on some
machines and networks, and sum in another order, so a run with them is the same experiment with other rounding.
"""

from __future__ import annotations

import torch

from hushfleet.graphs import GradientGraph
from hushfleet.spec import ModelSpec
from hushfleet.training import GradientFunction
from models import get_model
from models.torch_gradient import TorchGradient

RUNTIMES = ("onnx", "torch")


def make_gradient(runtime: str, model: ModelSpec, graph: bytes) -> GradientFunction:
    """:param graph: the model's gradient graph, ONNX bytes."""
    if runtime == "onnx":
        return GradientGraph(graph, model.layout)
    torch.set_num_threads(1)
    return TorchGradient(get_model(model.name, classes=len(model.class_names)))
