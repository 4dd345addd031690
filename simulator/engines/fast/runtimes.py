"""What computes gradients in the fast engine.

`onnx` are the devices' own graphs: its results are the live engine's, bit for bit. The others are quicker on some
machines and networks, and sum in another order, so a run with them is the same experiment with other rounding. With
`vmap`, a cohort is trained as arrays (`jobs`); `make_gradient` then gives PyTorch's for one client.
"""

from __future__ import annotations

from functools import cache

import torch

from hushfleet.graphs.session import GradientGraph
from hushfleet.model.objectives import CROSS_ENTROPY, Objective
from hushfleet.model.params import ParamLayout
from hushfleet.models import get_model, native
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.training.batch import GradientFunction
from hushfleet.training.optim import Optimizer
from hushfleet.training.optim import make_optimizer as make_numpy_optimizer

ON_DEVICES = "onnx"
VMAP = "vmap"
RUNTIMES = (ON_DEVICES, "native", "torch", VMAP)


def unavailable(runtime: str, model: str) -> str | None:
    """Why a runtime cannot compute the gradients of `model` here; None if it can."""
    return native.unavailable(get_model(model)) if runtime == "native" else None


def make_gradient(
    runtime: str,
    model: str,
    classes: int,
    layout: ParamLayout,
    graph: bytes,
    objective: Objective = CROSS_ENTROPY,
) -> GradientFunction:
    """:param graph: the model's gradient graph under `objective`, ONNX bytes."""
    if runtime == ON_DEVICES:
        return GradientGraph(graph, layout)
    if runtime == "native":
        return native.build_gradient(get_model(model, classes=classes), objective=objective)
    torch.set_num_threads(1)
    return TorchGradient(get_model(model, classes=classes), objective=objective)


def make_optimizer(name: str, learning_rate: float, momentum: float = 0.0) -> Optimizer:
    """The quickest implementation here; all of them give the same bits."""
    make = native.make_native_optimizer if _has_compiler() else make_numpy_optimizer
    return make(name, learning_rate, momentum)


_has_compiler = cache(native.native_available)
