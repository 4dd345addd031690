"""PyTorch's side: a model trained by the loop that anybody would write, and by the device's own loop.

    python -m benchmarks.board.pytorch MODEL CASE...

The plain loop comes first, so that the process's peak is its own.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.board.case import Case
from benchmarks.board.steps import Mark, mark, medians_ms, timed_steps
from benchmarks.board.talk import Answer, peak_mib, serve
from hushfleet.models import Model, get_model


class Plain:
    """Tensors, autograd and `torch.optim.Adam`, without a method, noise or a store.

    :param images: uint8 `[n, C, H, W]`, as the device has them.
    """

    def __init__(self, model: Model, params: np.ndarray, images: np.ndarray, labels: np.ndarray, batch: int) -> None:
        self.model, self.batch = model, batch
        self.params = torch.from_numpy(params)
        self.images, self.labels = torch.from_numpy(images), torch.from_numpy(labels)

    def steps(self) -> Answer:
        marks: list[Mark] = []
        self._round(marks)
        return medians_ms(marks)

    def round(self) -> Answer:
        began, cpu = time.perf_counter(), time.process_time()
        self._round([])
        return {"wall_ms": 1e3 * (time.perf_counter() - began), "cpu_ms": 1e3 * (time.process_time() - cpu)}

    def _round(self, marks: list[Mark]) -> Tensor:
        """The update `[d]` of two epochs."""
        tensors = {
            name: view.clone().requires_grad_() for name, view in self.model.layout.unflatten(self.params).items()
        }
        optimizer = torch.optim.Adam(tensors.values())
        for _ in range(2):
            for rows in torch.randperm(len(self.labels)).split(self.batch):
                marks.append(mark())
                x = (self.images[rows].float() / 255 - 0.5) / 0.25
                dropout = [F.dropout(torch.ones(len(rows), *drop.shape), drop.rate) for drop in self.model.dropout]
                optimizer.zero_grad()
                F.cross_entropy(self.model.forward(tensors, x, dropout), self.labels[rows]).backward()
                optimizer.step()
        with torch.no_grad():
            return torch.cat([tensor.flatten() for tensor in tensors.values()]) - self.params


def _in_our_loop(model: Model, cases: list[Case]) -> Answer:
    """A function that times steps of the device's loop with PyTorch's gradients."""
    from hushfleet.edge_client.board.local_data import LocalData
    from hushfleet.methods import make_method
    from hushfleet.models.torch_gradient import TorchGradient

    def steps(number: int) -> Answer:
        case = cases[number]
        spec = case.spec()
        method = make_method(spec.method, spec.method_config, spec.privacy, spec.model.layout, rounds=spec.rounds)
        gradient = TorchGradient(model, objective=method.objective)
        samples = LocalData(case.config().data, spec.model).samples()
        return timed_steps(spec, case.initial(), gradient, gradient.logits, samples)

    return steps


def main() -> None:
    torch.set_num_threads(1)
    model, cases = get_model(sys.argv[1]), [Case(Path(word)) for word in sys.argv[2:]]
    with np.load(cases[0].folder / "train.npz") as arrays:
        images, labels = arrays["images"], arrays["labels"]
    batch = cases[0].spec().method_config["batch_size"]
    plain = Plain(model, cases[0].initial(), images, labels, batch)
    serve(
        {"mib": peak_mib()},
        {
            "plain steps": plain.steps,
            "plain round": plain.round,
            "peak": lambda: {"mib": peak_mib()},
            "steps": _in_our_loop(model, cases),
        },
    )


if __name__ == "__main__":
    main()
