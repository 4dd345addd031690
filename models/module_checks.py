"""Checks own networks; each error names the layer, the reason, and the remedy.

The network is inspected first, then run on random samples. A network is refused if it cannot be trained, and also if it
would silently train differently from what its owner expects.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from hushfleet.errors import BadInput
from hushfleet.losses import LOSSES
from hushfleet.models.module_masks import DropoutMasks

PROBED = 3  # samples
_TOLERANCE = 1e-4
_NO_GRAPH = "has no ONNX graph of its gradient here. Use "
_INSTEAD: dict[tuple[type[nn.Module], ...], str] = {
    (nn.modules.batchnorm._BatchNorm,): "mixes the samples of a batch and keeps averages of private data. Use "
    "GroupNorm: hushfleet.with_group_norm(network) gives a copy that has it",
    (nn.LSTM,): f"{_NO_GRAPH}torch.nn.GRU, whose export takes more than a minute, or torch.nn.Conv1d over time",
    (nn.modules.conv._ConvTransposeNd,): f"{_NO_GRAPH}torch.nn.Upsample and then torch.nn.Conv2d",
    (nn.Conv3d,): f"{_NO_GRAPH}torch.nn.Conv2d, with the third axis as channels",
    (_InstanceNorm,): "keeps averages of private data. Use track_running_stats=False",
}
"""Modules that are refused, and their replacements."""
_SQUASHED = {
    "_softmax": "softmax",
    "sigmoid": "a sigmoid",
    "hardsigmoid": "a sigmoid",
    "relu": "ReLU",
    "tanh": "tanh",
}
"""The last operator of a network that does not give logits: its name in `torch.fx`, and in error texts."""
_VALUES = (
    "A graph has no values while it is made, which an if, a loop, int(), .item() or .tolist() needs: use torch.where, "
    "or numbers that do not depend on samples and parameters"
)
_CURES = {
    "index out of range in self": 'Its embedding takes whole numbers: data.values = "tokens" and data.vocabulary, the '
    "number of them, say that the data are such; its first size must be at least as large",
    "_local_scalar_dense": _VALUES,
    "asks for the value of a tensor": _VALUES,
}
"""Parts of PyTorch's errors, and what to do."""
_ONLY_MOVES = ("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "clone", "detach", "alias", "t", "transpose")


def check_parts(module: nn.Module, name: str, *, by_record: bool) -> None:
    """Checks the modules before they are run. Raises `BadInput`.

    :param by_record: whether the unit of privacy is the record: then Opacus decides what can be trained.
    """
    why, seen = _asked_opacus(module) if by_record else {}, set(module.modules())
    for where, part in module.named_modules():
        for refused, instead in _INSTEAD.items():
            if isinstance(part, refused) and not (isinstance(part, _InstanceNorm) and not part.track_running_stats):
                opacus = f"Opacus' ModuleValidator refuses ({why[where]}), and which " if where in why else ""
                kind = f"{where or 'it'} is a {type(part).__name__}"
                raise BadInput(f"model.name = {name!r}: {kind}, which {opacus}{instead}")
        for key, value in vars(part).items():
            hidden = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            attribute = f"{where}.{key}".removeprefix(".")
            if not key.startswith("_") and any(isinstance(each, nn.Module) and each not in seen for each in hidden):
                raise BadInput(
                    f"model.name = {name!r}: {attribute} is a {type(value).__name__} of layers, which PyTorch does not "
                    "see, so they would not be trained; use torch.nn.ModuleList, ModuleDict or Sequential"
                )
            if isinstance(value, Tensor) and value.requires_grad:
                raise BadInput(
                    f"model.name = {name!r}: {attribute} is a tensor that PyTorch does not see as a parameter, so it "
                    "would not be trained; use torch.nn.Parameter"
                )
    for where, value in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(value):
            continue  # a lazy layer gets its values when it is run
        if value.device.type != "cpu":
            raise BadInput(
                f"model.name = {name!r}: {where} is on {value.device}; give the network with its values on cpu"
            )
        if isinstance(value, nn.Parameter) and value.dtype != torch.float32:
            raise BadInput(
                f"model.name = {name!r}: {where} is {value.dtype}; parameters must be float32: network.float()"
            )
        if not torch.isfinite(value).all():
            raise BadInput(f"model.name = {name!r}: {where} has values that are NaN or infinite; give it finite ones")


def _asked_opacus(module: nn.Module) -> dict[str, str]:
    """Returns the layers that Opacus refuses, by name, with the first sentence of its reason.

    A GRU, which Opacus refuses only because of its own hooks, can be trained here.
    """
    from opacus.validators import ModuleValidator  # takes long to import

    found = {where: ModuleValidator.validate(part.train()) for where, part in module.named_modules()}
    return {where: str(errors[0]).partition(". ")[0] for where, errors in found.items() if errors}


@torch.no_grad()
def check_outputs(
    module: nn.Module, name: str, classes: int, probe: Callable[[int], Tensor], masks: DropoutMasks
) -> None:
    """Checks that logits have the right shape, and are the same in training and in test, and for each sample alone.

    Raises `BadInput`.

    :param probe: returns random samples.
    :param masks: learns where the network drops what.
    """
    x = probe(PROBED)
    run = partial(_logits, name=name, classes=classes)
    module.eval()
    logits = run(module, x)
    alone = torch.cat([run(module, one) for one in x.split(1)])
    for given, what in ((logits, "random samples"), (run(module, torch.zeros_like(x[:1])), "zeros")):
        if not torch.isfinite(given).all():
            raise BadInput(
                f"model.name = {name!r} gives logits that are NaN or infinite for {what}: look for a division by a "
                "standard deviation, a norm or a logarithm, and add a small number to what it takes"
            )
    kept = {key: value.clone() for key, value in module.named_buffers()}
    module.train()
    first = run(lambda x: masks.learn(module, x, x[:-1]), x)
    changed = [key for key, value in module.named_buffers() if not torch.equal(value, kept[key])]
    if changed:
        raise BadInput(f"model.name = {name!r} changes its buffers in training, and no update carries them: {changed}")
    scale = float(logits.abs().max()) + 1e-12
    for found, why in (
        (first, "computes something else in training than in a test, or draws random numbers: use torch.nn.Dropout"),
        (alone, "gives a sample other logits when other samples are beside it"),
    ):
        if not torch.isfinite(found).all() or float((found - logits).abs().max()) > _TOLERANCE * scale:
            raise BadInput(f"model.name = {name!r} {why}")


def _logits(module: Callable[[Tensor], Any], x: Tensor, *, name: str, classes: int) -> Tensor:
    shown = ", ".join(map(str, x.shape[1:]))
    try:
        logits: Any = module(x)
    except Exception as error:
        sizes = f"The data's samples have shape [{shown}], and a batch any number of them: check what its layers take"
        raise BadInput(
            f"model.name = {name!r}: fails on a batch of shape {list(x.shape)}: {format_error(error)}. "
            f"{cure(error) or sizes}"
        ) from error
    if isinstance(logits, Tensor) and logits.shape == (len(x), classes) and logits.dtype == torch.float32:
        return logits
    given = f"{list(logits.shape)} {logits.dtype}" if isinstance(logits, Tensor) else type(logits).__name__
    hint = ""
    if isinstance(logits, Tensor) and logits.numel() == len(x) * classes and logits.dtype == torch.float32:
        hint = ". squeeze() without an axis takes the batch's too where it is 1: use flatten(1), or name the axis"
    raise BadInput(
        f"model.name = {name!r}: must give logits float32 [B, {classes}] for [B, {shown}], "
        f"one for each class or target, and gives {given} for B = {len(x)}{hint}"
    )


def check_gradients(module: nn.Module, name: str, x: Tensor, masks: DropoutMasks) -> None:
    """Checks that each trained parameter influences the logits. Raises `BadInput` with the layers' names."""
    wanted = {where: value for where, value in module.named_parameters() if value.requires_grad}
    trained = {where: value for where, value in wanted.items() if not is_lazy(value)}
    if not wanted:
        raise BadInput(f"model.name = {name!r} has no parameter that requires a gradient: there is nothing to train")
    with masks.given([]):
        logits = module(x)
    if not logits.requires_grad:
        raise BadInput(
            f"model.name = {name!r}: no gradient comes through its forward: look for torch.no_grad(), detach() or .data"
        )
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    try:
        found = torch.autograd.grad((logits * weights).sum(), list(trained.values()), allow_unused=True)
    except RuntimeError as error:  # an operator without a gradient, such as floor_divide
        raise BadInput(
            f"model.name = {name!r}: PyTorch cannot compute its gradient: {format_error(error)}. Take another operator"
        ) from error
    unused = [where for where, value in zip(trained, found, strict=True) if value is None]
    unused += wanted.keys() - trained.keys()  # parameters of a lazy layer that was never called
    if unused:
        layers = dict.fromkeys(where.rpartition(".")[0] or where for where in unused)
        one = next(iter(layers))
        raise BadInput(
            f"model.name = {name!r}: {', '.join(layers)} has no part in the logits: forward does not call it, or no "
            f"gradient comes back to it ({', '.join(unused)}). Take it out, or freeze it: "
            f"network.{one}.requires_grad_(False)"
        )
    for where, value in zip(trained, found, strict=True):
        if value is not None and not torch.isfinite(value).all():
            raise BadInput(f"model.name = {name!r}: the gradient of {where} is NaN or infinite for random samples")


def check_ending(graph: torch.fx.Graph, module: nn.Module, name: str, loss: str) -> None:
    """Refuses a network that ends in a softmax or sigmoid, because the loss computes it from the logits itself.

    Raises `BadInput`. A regression may end in any operator.

    :param graph: the traced graph of its operators.
    """
    (node,) = next(iter(reversed(graph.nodes))).all_input_nodes
    while _operator(node) in _ONLY_MOVES:
        node = node.args[0]
    operator = _operator(node)
    # The softmax of a log-softmax is the same softmax, so cross-entropy accepts it.
    ends = "LogSoftmax" if operator == "_log_softmax" and not LOSSES[loss].of_classes else _SQUASHED.get(operator)
    if LOSSES[loss].of_numbers or ends is None:
        return
    kind = ends.split()[-1].lower()
    layers = [where for where, part in module.named_modules() if where and kind in type(part).__name__.lower()]
    named = f" ({layers[-1]})" if layers else ""
    raise BadInput(
        f"model.name = {name!r}: it ends in {ends}{named}, and model.loss = {loss!r} takes logits, whose softmax or "
        "sigmoid it computes itself; leave it out"
    )


def _operator(node: Any) -> str:
    """Returns an operator's name, such as `_softmax`; empty if it is not an operator of PyTorch."""
    words = str(node.target).split(".") if isinstance(node, torch.fx.Node) else []  # aten._softmax.default
    return words[1] if len(words) == 3 else ""


def cure(error: Exception) -> str:
    """Returns what to do about an error of PyTorch; empty if that is not known."""
    return next((advice for text, advice in _CURES.items() if text in str(error)), "")


def format_error(error: Exception) -> str:
    """Returns the type and the first line of an error, and the line of the network's code that raised it."""
    lines = str(error).splitlines() or [""]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(frame.filename)]
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    return f"{type(error).__name__}: {lines[0].rstrip('.')}{where}"


def _is_machinery(file: str) -> bool:
    return Path(file).parent == Path(__file__).parent or not {"torch", "functorch"}.isdisjoint(Path(file).parts)
