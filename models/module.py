"""Turns your own network, any `torch.nn.Module`, into a pure function over its named parameters.

Its input has the data's own shape: `[B, C, H, W]` for images, `[B, C, T]` for series, `[B, F]` for vectors. Parameters
that require a gradient are trained and sent; others, and buffers, are constants of the graphs. Dropout modules are
replaced by masks that the caller draws. Modules that mix samples, keep averages or draw random numbers are refused.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from hushfleet.errors import BadInput
from hushfleet.models.model import Model
from hushfleet.models.module_checks import (
    PROBED,
    check_ending,
    check_gradients,
    check_outputs,
    check_parts,
    cure,
    format_error,
)
from hushfleet.models.module_masks import DropoutMasks, replacement
from hushfleet.params import ParamLayout
from hushfleet.paths import OFFERED, is_offered
from hushfleet.user_files import from_file

Shape = tuple[int, int, int]
Make = Callable[..., Any]

_WRAPPERS = {"OptimizedModule": ("_orig_mod",), "DataParallel": ("module",), "DistributedDataParallel": ("module",)}
_GROUPS, _GROUP_CHANNELS = 8, 4  # the maximum number of groups, and the minimum number of channels in each
_GIVEN: dict[str, nn.Module | Make] = {}


def offer(made: nn.Module | Make) -> str:
    """Registers a network of a Python program in this process, and returns its name for `model.name`.

    :param made: as in `model_of`.
    """
    name = f"{OFFERED}{getattr(made, '__name__', type(made).__name__)}"
    _GIVEN[name] = made
    return name


def personalized_model(name: str, **what: Any) -> Model:
    """Loads an own network, from a file or from this process's `offer`. Raises `BadInput`.

    :param what: the other arguments of `model_of`.
    """
    if not is_offered(name):
        return _of_file(name, **what)
    if name not in _GIVEN:
        raise BadInput(
            f"model.name = {name!r} is a network of a Python program; go on from there, with "
            "hushfleet.simulate(task, model=network, out=..., resume=True)"
        )
    return model_of(_GIVEN[name], name=name, **what)


def _of_file(name: str, **what: Any) -> Model:
    """:param name: `path/to/file.py:NAME` of a module, or of a class or function that returns one; it is called with
        `classes` and `input_shape` if it takes them. The file is run.

    :raises BadInput: there is none, or `model_of` refuses it.
    """
    path, _, attribute = name.rpartition(":")
    found: Any = from_file(name, key="model.name")
    return model_of(found, name=f"{Path(path).name}:{attribute}", **what)


def model_of(
    made: nn.Module | Make,
    *,
    name: str,
    classes: int,
    input_shape: Shape,
    loss: str | None = None,
    by_record: bool = False,
    vocabulary: int = 0,
) -> Model:
    """Returns the network as a `Model`.

    :param made: a module, which starts from its present values, or a class or function that returns one, which starts
        with PyTorch's random values for the task's seed; called with `classes` and `input_shape` if it takes them.
    :param input_shape: (C, H, W); (C, 1, T) for a series, (F, 1, 1) for a vector.
    :param loss: the loss that its outputs must fit; None: this is not checked.
    :param by_record: whether the unit of privacy is the record: then Opacus checks it, too.
    :param vocabulary: the number of tokens, if the samples are tokens: the network then takes int64. 0: they are not.
    :raises BadInput: it is not such an object, or cannot be trained here; the text says why, and what to do.
    """
    given = {"classes": classes, "input_shape": own_shape(input_shape)}

    def build(seed: int) -> nn.Module:
        module = copy.deepcopy(made) if isinstance(made, nn.Module) else _made(made, name, given, seed)
        return _unwrapped(module, name)

    network = _network(build(0), name, classes, input_shape, loss=loss, by_record=by_record, vocabulary=vocabulary)
    layout = network.layout

    def start(seed: int) -> np.ndarray:
        module = build(seed)
        with torch.no_grad():
            module(_probe(own_shape(input_shape), vocabulary, 1))  # lazy modules learn their shapes
        values = [value.detach().float().flatten() for value in module.parameters() if value.requires_grad]
        return torch.cat(values).numpy()

    return Model(
        name,
        "own network",
        input_shape,
        classes,
        layout,
        network.masks.specs,
        network,
        start=start,
        vocabulary=vocabulary,
    )


def own_shape(input_shape: Shape) -> tuple[int, ...]:
    """Returns a sample's shape for an own network: (F,) for a vector, (C, T) for a series, else (C, H, W)."""
    channels, height, width = input_shape
    if height > 1:
        return input_shape
    return (channels,) if width == 1 else (channels, width)


def with_group_norm(module: nn.Module) -> nn.Module:
    """Returns a copy with GroupNorm in place of each BatchNorm; weights and biases are kept."""
    module = copy.deepcopy(module)
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                channels = child.num_features
                # With one channel per group, it would remove each channel's mean, and the bias before it.
                groups = math.gcd(channels, channels // _GROUP_CHANNELS or 1, _GROUPS)
                norm = nn.GroupNorm(groups, channels, eps=child.eps, affine=child.affine)
                if child.affine:
                    norm.load_state_dict({"weight": child.weight, "bias": child.bias})
                setattr(parent, name, norm)
    return module


@dataclass(eq=False)
class _Network:
    """`(tensors, x, dropout) -> logits`."""

    module: nn.Module
    input_shape: Shape
    masks: DropoutMasks
    vocabulary: int

    def __call__(self, tensors: Mapping[str, Tensor], x: Tensor, dropout: Sequence[Tensor]) -> Tensor:
        x = x.reshape(-1, *own_shape(self.input_shape))
        x = x.long() if self.vocabulary else x
        # PyTorch's other kernels of attention have gradients that are no plain operators.
        with self.masks.given(list(dropout)), sdpa_kernel(SDPBackend.MATH):
            logits: Tensor = functional_call(self.module, dict(tensors), (x,))
        return logits

    @cached_property
    def layout(self) -> ParamLayout:
        found = {name: tuple(value.shape) for name, value in self.module.named_parameters() if value.requires_grad}
        return ParamLayout(tuple(found), tuple(found.values()))

    @cached_property
    def traced(self) -> torch.fx.GraphModule:
        """Everything that it computes, as PyTorch's own operators and constants."""
        from torch.fx.experimental.proxy_tensor import make_fx  # takes long to import

        tensors = {name: torch.zeros(shape) for name, shape in zip(self.layout.names, self.layout.shapes, strict=True)}
        masks = [torch.ones(2, *each.shape) for each in self.masks.specs]
        return make_fx(self)(tensors, torch.zeros(2, *self.input_shape), masks)

    @cached_property
    def layers(self) -> str:
        """Digest of `traced`."""
        return digest_of(self.traced)


def digest_of(traced: torch.fx.GraphModule) -> str:
    """Returns a hex digest of operators and constants."""
    digest = hashlib.sha256(traced.code.encode())
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            digest.update(getattr(traced, node.target).detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def _made(make: Any, name: str, given: dict[str, Any], seed: int) -> nn.Module:
    if not callable(make):
        raise BadInput(f"model.name = {name!r}: must be a torch.nn.Module, or a class or function that gives one")
    taken = {key: value for key, value in given.items() if key in inspect.signature(make).parameters}
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = make(**taken)
    except Exception as error:
        raise BadInput(
            f"model.name = {name!r}: calling it with {taken or 'nothing'} fails: {format_error(error)}. It may take "
            f"classes and input_shape, and nothing else without a default"
        ) from error
    if not isinstance(module, nn.Module):
        raise BadInput(f"model.name = {name!r} gives a {type(module).__name__}, not a torch.nn.Module")
    return module


def _network(
    module: nn.Module,
    name: str,
    classes: int,
    input_shape: Shape,
    *,
    loss: str | None,
    by_record: bool,
    vocabulary: int,
) -> _Network:
    """Makes the network, and checks it with runs on random samples."""
    shape = own_shape(input_shape)
    check_parts(module, name, by_record=by_record)
    masks = DropoutMasks()
    for parent in list(module.modules()):
        if isinstance(parent, nn.AdaptiveAvgPool2d):  # with the channels last it changes strides, which ONNX has not
            parent.register_forward_pre_hook(lambda _, given: (given[0].contiguous(),))
        for child_name, child in list(parent._modules.items()):  # `named_children` omits a child's second name
            if child is not None and (masked := replacement(child, masks)) is not None:
                setattr(parent, child_name, masked)
    probe = partial(_probe, shape, vocabulary)
    check_outputs(module, name, classes, probe, masks)
    check_parts(module, name, by_record=False)  # again, with the parameters of lazy layers
    check_gradients(module, name, probe(PROBED), masks)
    network = _Network(module, input_shape, masks, vocabulary)
    try:
        graph = network.traced.graph
    except Exception as error:
        raise BadInput(
            f"model.name = {name!r}: PyTorch cannot trace it: {format_error(error)}. {cure(error)}"
        ) from error
    if loss is not None:
        check_ending(graph, module, name, loss)
    return network


def _probe(shape: tuple[int, ...], vocabulary: int, count: int) -> Tensor:
    """Returns random samples: Gaussian numbers, or tokens."""
    generator = torch.Generator().manual_seed(0)
    if vocabulary:
        return torch.randint(vocabulary, (count, *shape), generator=generator)
    return torch.randn(count, *shape, generator=generator)


def _unwrapped(module: nn.Module, name: str) -> nn.Module:
    """Returns the network without what compiles or distributes it, or has hooks. Raises `BadInput` for TorchScript."""
    for place, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise BadInput(
                f"model.name = {name!r}: {place or 'it'} is TorchScript, whose operators PyTorch hides; give the "
                "network as it is before torch.jit.script or torch.jit.trace"
            )
    if hasattr(module, "to_standard_module"):  # Opacus
        return _unwrapped(module.to_standard_module(), name)
    for key, child in module._modules.items():
        if child is not None:
            module._modules[key] = _unwrapped(child, name)
    inner = [module._modules[key] for key in _WRAPPERS.get(type(module).__name__, ()) if key in module._modules]
    return inner[0] if inner and inner[0] is not None else module
