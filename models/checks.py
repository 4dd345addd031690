"""Verifies that exported graphs compute the same as PyTorch, before any device has to trust them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hushfleet.errors import GraphRefused
from hushfleet.learning.evaluation import EVALUATION_BATCH
from hushfleet.learning.graph_safety import check_graph
from hushfleet.learning.graph_session import GradientGraph, InferenceGraph
from hushfleet.learning.graph_shapes import check_cost
from hushfleet.learning.linear import LinearGradient
from hushfleet.losses import loss_of
from hushfleet.models.model import Model
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.objectives import CROSS_ENTROPY, Objective
from hushfleet.params import is_linear

CHECKED_BATCHES = (1, 7, 16)
MAX_RELATIVE_ERROR = 1e-4
NO_GRADIENT = 1e-2  # share of the largest entry: a bias before a normalisation has a gradient of rounding errors only

# Rounding changes an activation by about 3e-7 of its layer's root mean square; this is well above it.
KINK_MARGIN = 2e-6
CANDIDATES_PER_SAMPLE = 20

Masks = tuple[np.ndarray, ...]


def check_against_torch(
    model: Model, *, gradient: bytes, inference: bytes, objective: Objective = CROSS_ENTROPY
) -> float:
    """Runs graphs and PyTorch on random batches of 1, 7 and 16, without dropout, with masks of ones and random masks.

    If the objective distils, it runs them with a random teacher and random weights, and without.

    :return: the worst error of any tensor, relative to the tensor's largest entry.
    :raises GraphRefused: that error is above 1e-4 (the text names the tensor, the batch and the error), or
        a device would refuse the graph.
    """
    for graph, batch in ((gradient, max(CHECKED_BATCHES)), (inference, EVALUATION_BATCH)):
        check_cost(check_graph(graph), batch=batch)
    rng = np.random.default_rng(0)
    reference = TorchGradient(model, objective=objective)
    runs: list[Callable[..., tuple[float, np.ndarray]]] = [GradientGraph(gradient, model.layout, objective=objective)]
    if is_linear(model.layout) and not (
        model.dropout or objective.own
    ):  # by its parameters' names: boards use the formula
        runs.append(LinearGradient(model.layout, objective))
    run_inference = InferenceGraph(inference, model.layout)
    params, worst = model.init(1), 0.0
    if model.starts_at_zero or model.start is not None:  # at the start a wrong gradient may look right
        params = params + 0.1 * rng.standard_normal(model.layout.size, np.float32)
    for size in CHECKED_BATCHES:
        x, y, masks = stable_batch(reference, params, size, rng)
        ones = tuple(np.ones_like(mask) for mask in masks)
        cases: list[tuple[Any, Any]] = [(dropout, ()) for dropout in (((), ones, masks) if masks else ((),))]
        if objective.distills:
            cases += [(masks, random_teacher(model, size, rng, objective))]
        for dropout, distilled in cases:
            expected_loss, expected = reference(params, x, y, dropout, None, *distilled)
            views = model.layout.unflatten(expected)
            least = NO_GRADIENT * float(np.abs(expected).max())
            for run in runs:
                loss, grad = run(params, x, y, dropout, None, *distilled)
                worst = max(worst, _compare("loss", np.array(loss), np.array(expected_loss), size))
                for name, value in model.layout.unflatten(grad).items():
                    worst = max(worst, _compare(f"grad.{name}", value, views[name], size, least=least))
        worst = max(worst, _compare("logits", run_inference(params, x), reference.logits(params, x), size))
    return worst


def random_batch(
    model: Model, size: int, rng: np.random.Generator, objective: Objective = CROSS_ENTROPY
) -> tuple[np.ndarray, np.ndarray, Masks]:
    """Returns random images `[B, C, H, W]`, targets `[B]` or `[B, classes]`, and dropout masks `[B, *shape]`."""
    shape = size, *model.input_shape
    if model.vocabulary:
        x = rng.integers(model.vocabulary, size=shape).astype(np.float32)
    else:
        x = rng.standard_normal(shape, np.float32)
    y = loss_of(objective).random(size, model.classes, rng)
    masks = tuple(
        ((rng.random((size, *drop.shape)) >= drop.rate) / (1 - drop.rate)).astype(np.float32) for drop in model.dropout
    )
    return x, y, masks


def random_teacher(
    model: Model, size: int, rng: np.random.Generator, objective: Objective = CROSS_ENTROPY
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a teacher's values float32 `[B, ...]`, some confident, and distillation weights float32 `[B]`."""
    values = objective.teacher_values(model.classes)
    return 4 * rng.standard_normal((size, values), np.float32), rng.random(size, np.float32)


def stable_batch(
    reference: TorchGradient, params: np.ndarray, size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, Masks]:
    """Returns a random batch of samples at which the gradient does not depend on a rounding error.

    At a kink of ReLU or of max-pooling the gradient jumps. A deep network has millions of activations for
    one batch, a few of them closer to a kink than float32 resolves; there two correct implementations differ
    by 1e-2. So samples are chosen by the distance of PyTorch's own activations from a kink; the graph under
    test does not influence the choice.
    """
    chosen: list[tuple[np.ndarray, np.ndarray, Masks]] = []
    for _ in range(size * CANDIDATES_PER_SAMPLE):
        sample = random_batch(reference.model, 1, rng, reference.objective)
        if _is_stable(reference, params, sample):
            chosen.append(sample)
        if len(chosen) == size:
            xs, ys, masks = zip(*chosen, strict=True)
            joined = tuple(np.concatenate(parts) for parts in zip(*masks, strict=True))
            return np.concatenate(xs), np.concatenate(ys), joined
    raise GraphRefused(
        f"{reference.model.name}: only {len(chosen)} of {size * CANDIDATES_PER_SAMPLE} random samples keep "
        f"every activation clear of kinks by more than rounding; float32 is too coarse for this network"
    )


def _is_stable(reference: TorchGradient, params: np.ndarray, sample: tuple[np.ndarray, np.ndarray, Masks]) -> bool:
    x, _, masks = sample
    tensors = reference.layout.unflatten(torch.from_numpy(params))
    with torch.no_grad(), _KinkWatch() as watch:
        for dropout in ((), masks) if masks else ((),):
            reference.model.forward(tensors, torch.from_numpy(x), [torch.from_numpy(m) for m in dropout])
    return not watch.close


class _KinkWatch(TorchDispatchMode):
    """Records whether any input of a ReLU or a max-pooling is within the margin of another result."""

    def __init__(self) -> None:
        super().__init__()
        self.close = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.relu.default:
            self._note(args[0].abs(), args[0])
        elif function is torch.ops.aten.max_pool2d_with_indices.default:
            best, indices = result
            others = args[0].flatten(2).scatter(2, indices.flatten(2), -torch.inf).view_as(args[0])
            second = function(others, *args[1:], **(kwargs or {}))[0]
            # A window of zeros has ties, but its zeros come from a ReLU, which passes no gradient.
            self._note(torch.where(best == 0, torch.inf, best - second), args[0])
        return result

    def _note(self, distances: Tensor, values: Tensor) -> None:
        root_mean_square = values.square().mean().sqrt()
        self.close |= bool((distances < KINK_MARGIN * root_mean_square).any())


def relative_error(value: np.ndarray, expected: np.ndarray, least: float = 0.0) -> float:
    """Returns the largest difference, relative to the largest expected entry or `least`; inf if it is not finite."""
    scale = max(float(np.max(np.abs(expected))), least, float(np.finfo(np.float32).tiny))
    error = float(np.max(np.abs(value - expected))) / scale
    return error if np.isfinite(error) else float("inf")


def _compare(name: str, value: np.ndarray, expected: np.ndarray, batch: int, least: float = 0.0) -> float:
    error = relative_error(value, expected, least)
    if error > MAX_RELATIVE_ERROR:
        raise GraphRefused(
            f"the exported graph disagrees with PyTorch in {name!r} on a batch of {batch}: relative error "
            f"{error:.2e}, above {MAX_RELATIVE_ERROR:.0e}; the network uses an operator that does not export"
        )
    return error
