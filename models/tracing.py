"""Traces a network's gradient and inference to ONNX graphs with an open batch size, which are not checked yet.

The gradient is traced with `torch.func`, decomposed to forward operators and exported like any network. The imports
take seconds, so this file is imported only if a graph is not in the cache.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from hushfleet.models.checks import random_batch, random_teacher
from hushfleet.models.decompositions import gradient_decompositions, onnx_translations
from hushfleet.models.losses import distilled_losses, mean_loss
from hushfleet.models.model import Model
from hushfleet.models.onnx_nodes import without_traces
from hushfleet.models.two_traces import SIZES, trace_of_any_batch
from hushfleet.objectives import CROSS_ENTROPY, Objective

OPSET = 18
_BATCH = SIZES[0]  # odd, so that no constant of the network equals it


def export_gradient(model: Model, objective: Objective = CROSS_ENTROPY) -> bytes:
    """Returns the unchecked graph `(param.*, x, y, dropout.*) -> (loss, grad.*)`.

    If the objective distils, `teacher` and `distill` are its last inputs.
    """
    names, masks = model.layout.names, len(model.dropout)

    def loss_and_grads(*args: Tensor) -> tuple[Tensor, ...]:
        def loss(tensors: tuple[Tensor, ...]) -> Tensor:
            logits = model.forward(dict(zip(names, tensors, strict=True)), x, dropout)
            if objective.distills:
                return distilled_losses(objective, logits, y, *distilled).mean()
            return mean_loss(objective, logits, y)

        (x, y), dropout, distilled = args[len(names) : first_mask], args[first_mask:after], args[after:]
        grads, value = torch.func.grad_and_value(loss)(args[: len(names)])
        return value, *grads

    inputs = [f"param.{name}" for name in names] + ["x", "y"] + [f"dropout.{i}" for i in range(masks)]
    first_mask, after = len(names) + 2, len(inputs)
    inputs += ["teacher", "distill"] if objective.distills else []
    return _export(model, loss_and_grads, inputs, ["loss", *(f"grad.{name}" for name in names)], objective)


def export_inference(model: Model) -> bytes:
    """Returns the unchecked graph `(param.*, x) -> logits`."""
    names = model.layout.names

    def logits(*args: Tensor) -> tuple[Tensor]:
        return (model.forward(dict(zip(names, args[:-1], strict=True)), args[-1]),)

    return _export(model, logits, [f"param.{name}" for name in names] + ["x"], ["logits"])


class _Wrap(torch.nn.Module):
    """A function as a module, because `torch.export` takes only modules."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def _export(
    model: Model, function: Any, inputs: list[str], outputs: list[str], objective: Objective = CROSS_ENTROPY
) -> bytes:
    table = gradient_decompositions()

    def example(batch: int) -> tuple[Tensor, ...]:
        return _example(model, inputs, objective, batch)

    def symbolic() -> torch.fx.GraphModule:
        fakes = _with_open_batch(example(_BATCH), inputs)
        traced = make_fx(function, decomposition_table=table, tracing_mode="symbolic")(*fakes)
        if fakes[inputs.index("x")].shape[0].node.maybe_as_int() is not None:
            raise ValueError("PyTorch has fixed the batch size")
        return traced

    def twice() -> torch.fx.GraphModule:
        return trace_of_any_batch(function, example, inputs.index("x"), table)

    with quiet(), torch.random.fork_rng(devices=[]):
        try:
            exported = _to_onnx(symbolic(), example(_BATCH), inputs, outputs)
        except Exception:  # most often because it fixes the batch size, which PyTorch tells in many ways
            exported = _to_onnx(twice(), example(_BATCH), inputs, outputs)
    return _stripped(exported).SerializeToString(deterministic=True)


def _to_onnx(
    traced: torch.fx.GraphModule, args: tuple[Tensor, ...], inputs: list[str], outputs: list[str]
) -> onnx.ModelProto:
    batch = torch.export.Dim("batch", min=1, max=1 << 16)
    shapes = {"args": tuple(None if name.startswith("param.") else {0: batch} for name in inputs)}
    exported = torch.onnx.export(
        torch.export.export(_Wrap(traced), args, dynamic_shapes=shapes, strict=False),
        args,
        dynamo=True,
        external_data=False,
        opset_version=OPSET,
        input_names=inputs,
        output_names=outputs,
        custom_translation_table=onnx_translations(),
    )
    assert exported is not None  # not None with `dynamo=True` and without a file
    return exported.model_proto


def _example(model: Model, inputs: list[str], objective: Objective, batch: int) -> tuple[Tensor, ...]:
    """Returns example inputs for the trace."""
    params = {f"param.{k}": v for k, v in model.layout.unflatten(torch.from_numpy(model.init(0))).items()}
    x, y, masks = random_batch(model, batch, np.random.default_rng(0), objective)
    values = params | {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}
    values |= {f"dropout.{i}": torch.from_numpy(mask) for i, mask in enumerate(masks)}
    teacher, distill = random_teacher(model, batch, np.random.default_rng(0), objective)
    values |= {"teacher": torch.from_numpy(teacher), "distill": torch.from_numpy(distill)}
    return tuple(values[name] for name in inputs)


def _with_open_batch(args: Sequence[Tensor], inputs: Sequence[str]) -> tuple[Tensor, ...]:
    """Returns fake tensors whose only symbolic size is the batch.

    By default, the tracer makes every size of every parameter symbolic, and needs two minutes to prove relations
    between them for a ResNet-18; with these tensors it needs three seconds.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)  # constants
    fakes = []
    for name, arg in zip(inputs, args, strict=True):
        sizes = [DimDynamic.STATIC] * arg.ndim
        if not name.startswith("param."):
            sizes[0] = DimDynamic.DUCK  # equal example sizes become one symbol: the batch
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes, constraint_sizes=[None] * arg.ndim)
        fakes.append(mode.from_tensor(arg, symbolic_context=context, source=ConstantSource(name.replace(".", "_"))))
    return tuple(fakes)


def _stripped(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Removes the parts that a device does not need, and gives the batch one name."""
    without_traces(proto)
    del proto.functions[:]
    batch = next(value for value in proto.graph.input if value.name == "x").type.tensor_type.shape.dim[0].dim_param
    for value in [*proto.graph.input, *proto.graph.output]:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == batch:
                dim.dim_param = "batch"
    return proto


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides PyTorch's progress and warnings on stdout, stderr and the log; errors are still raised."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
