"""Implements the optimizers of `hushfleet.learning.optim` for a cohort `[c, d]` of PyTorch tensors, one kernel each.

The array operations there pass over the memory about fifteen times per step, and on an accelerator each pass costs a
launch and a temporary `[c, d]`. PyTorch's fused versions read and write each entry once: they are also about five times
faster on a processor. Results are equal up to the rounding of float32.

Finished clients are removed from the end: `step` receives the first rows, never more than before. These clients have
all taken each step, so one step counter is enough.
"""

from __future__ import annotations

from torch import Tensor, zeros, zeros_like
from torch.optim.adam import adam

from hushfleet.learning.optim import SGD, Adam, Optimizer, make_optimizer
from hushfleet.methods.method import TrainingConfig


class CohortAdam(Adam):
    """`hushfleet.learning.optim.Adam`, fused."""

    def step(self, params: Tensor, gradient: Tensor) -> None:
        """Moves `params [c, d]` in place."""
        if self.first is None:
            self.first, self.second = zeros_like(params), zeros_like(params)
            self._taken = zeros((), device=params.device)
        rows = slice(len(params))
        adam(
            *([params], [gradient], [self.first[rows]], [self.second[rows]], [], [self._taken]),
            fused=True,
            amsgrad=False,
            beta1=self.beta_1,
            beta2=self.beta_2,
            lr=self.learning_rate,
            weight_decay=0.0,
            eps=self.epsilon,
            maximize=False,
        )


class CohortSGD(SGD):
    """`hushfleet.learning.optim.SGD`, with PyTorch's in-place operations."""

    def step(self, params: Tensor, gradient: Tensor) -> None:
        """Moves `params [c, d]` in place."""
        if self.momentum:
            if self.velocity is None:
                self.velocity = zeros_like(params)
            gradient = self.velocity[: len(params)].mul_(self.momentum).add_(gradient)
        params.sub_(gradient, alpha=self.learning_rate)


def make_cohort_optimizer(config: TrainingConfig) -> Optimizer:
    return make_optimizer(config.optimizer, config.learning_rate, config.momentum, sgd=CohortSGD, adam=CohortAdam)
