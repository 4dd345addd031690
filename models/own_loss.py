"""Finds your own loss, and checks it: a function of logits `[B, C]` and targets that returns each sample's loss `[B]`.

It is traced with the network's gradient, so boards get it as a part of the graph. A loss sees the logits and the target
of one sample, so the unit `record` protects with it as with any other loss.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hushfleet.errors import BadInput
from hushfleet.losses import loss_of
from hushfleet.models.module import digest_of
from hushfleet.models.module_checks import format_error
from hushfleet.objectives import Objective
from hushfleet.paths import OFFERED, is_offered
from hushfleet.user_files import from_file

OwnLoss = Callable[[Tensor, Tensor], Tensor]
_GIVEN: dict[str, OwnLoss] = {}
_PROBED = 5  # samples
_TOLERANCE = 1e-5


def offer(loss: OwnLoss) -> str:
    """Registers a loss of a Python program in this process, and returns its name for `model.loss`."""
    name = f"{OFFERED}{getattr(loss, '__name__', type(loss).__name__)}"
    _GIVEN[name] = loss
    return name


def own_loss(name: str) -> OwnLoss:
    """Returns the loss of a file, `path/to/file.py:NAME`, or of this process's `offer`. Raises `BadInput`."""
    if name in _GIVEN:
        return _GIVEN[name]
    if is_offered(name):
        raise BadInput(
            f"model.loss = {name!r} is a loss of a Python program; go on from there, with "
            "hushfleet.simulate(task, loss=function, out=..., resume=True)"
        )
    return _of_file(name)


@cache
def _of_file(name: str) -> OwnLoss:
    found: Any = from_file(name, key="model.loss")
    if not callable(found):
        raise BadInput(f"model.loss = {name!r}: must be a function of logits and targets")
    return found


def checked_digest(objective: Objective, outputs: int) -> str:
    """Runs a task's own loss on random samples; returns a digest of everything that it computes.

    :param outputs: the number of the network's outputs.
    :raises BadInput: it is not a function of each sample alone; the text says why, and what to do.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # takes long to import

    name, rng = objective.own, np.random.default_rng(0)
    _of_file.cache_clear()  # the file may have changed
    loss = own_loss(name)
    y = torch.from_numpy(loss_of(objective).random(_PROBED, outputs, rng))
    logits = torch.from_numpy(3 * rng.standard_normal((_PROBED, outputs), np.float32)).requires_grad_()
    losses = _run(loss, name, logits, y)
    alone = torch.cat([_run(loss, name, *one) for one in zip(logits.split(1), y.split(1), strict=True)])
    at_zero = torch.zeros_like(logits).requires_grad_()
    for point, found in ((logits, losses), (at_zero, _run(loss, name, at_zero, y))):
        slopes = torch.autograd.grad(found.sum(), point, allow_unused=True)[0] if found.requires_grad else None
        if slopes is None:
            raise BadInput(f"model.loss = {name!r}: no gradient comes back to the logits: look for detach() or argmax")
        if not (torch.isfinite(found).all() and torch.isfinite(slopes).all()):
            raise BadInput(
                f"model.loss = {name!r}: values or gradients are NaN or infinite for random logits, or zeros: "
                "take log_softmax or logsigmoid in place of a logarithm, and add a small number to what a root takes"
            )
    if not torch.equal(_run(loss, name, logits, y), losses):
        raise BadInput(f"model.loss = {name!r}: draws random numbers")
    if not torch.allclose(alone, losses, _TOLERANCE, _TOLERANCE):
        raise BadInput(f"model.loss = {name!r}: gives a sample another loss when other samples are beside it")
    try:
        return digest_of(make_fx(loss)(logits.detach(), y))
    except Exception as error:
        raise BadInput(
            f"model.loss = {name!r}: cannot be traced: {_in_file(loss, error)}. A branch on values of tensors is "
            "torch.where, and a loop over samples an operation on all of them"
        ) from error


def _run(loss: OwnLoss, name: str, logits: Tensor, y: Tensor) -> Tensor:
    """Returns the losses, after a check of their form."""
    try:
        found: Any = loss(logits, y)
    except Exception as error:
        raise BadInput(
            f"model.loss = {name!r}: fails on logits {list(logits.shape)} and targets {list(y.shape)} {y.dtype}: "
            f"{_in_file(loss, error)}"
        ) from error
    if isinstance(found, Tensor) and found.shape == (len(y),) and found.dtype == logits.dtype:
        return found
    given = f"{list(found.shape)} {found.dtype}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
    mean = isinstance(found, Tensor) and found.ndim == 0
    hint = ". Leave out the mean, which is taken later: reduction='none'" if mean else ""
    raise BadInput(
        f"model.loss = {name!r}: must give one loss for each sample, {logits.dtype} [{len(y)}] for logits "
        f"{list(logits.shape)}, and gives {given}{hint}"
    )


def _in_file(loss: OwnLoss, error: Exception) -> str:
    """Returns the error, with the last line of the loss's own file that led to it."""
    file = getattr(getattr(loss, "__code__", None), "co_filename", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return format_error(error) + (f", at {file}, line {lines[-1]}" if lines else "")
