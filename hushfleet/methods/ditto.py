"""Ditto: a personal model beside the shared one, held near it.

Li, Hu, Beirami, Smith: "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1:
the shared model is trained as by FedAvg; the device's own model v minimises F_k(v) + (lambda / 2) |v - w^t|^2, starting
from where it was. Only the shared model's update leaves the device, clipped and noised as `[privacy]` says.

Reading: both models train for `local_epochs` with the same optimizer and step size.
Reading: a device's first own model starts from the global one.
Deviation: every device has the same weight. The paper weighs by sample count, which is a function of private data.
Deviation: with privacy unit `record` the own model trains without noise: nothing of it is ever sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hushfleet import array_api
from hushfleet.config.spec import require
from hushfleet.methods.base import Array, DeviceState, Method, TrainingConfig
from hushfleet.methods.proximal import add_pull


@dataclass(frozen=True, kw_only=True)
class DittoConfig(TrainingConfig):
    """:param lambda_: weight of the pull of the own model towards the global one; the paper's lambda."""

    lambda_: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.lambda_ <= 1000, "lambda_", self.lambda_, "in [0, 1000]")


class Ditto(Method):
    name = "ditto"
    source = "Li et al., ICML 2021"
    summary = "FedAvg, and beside it a model that stays on the device, pulled towards the global one"
    config_class = DittoConfig
    config: DittoConfig

    @property
    def companion(self) -> Method:
        return _OwnModel(self.config, replace(self.privacy, unit="device"), self.layout, rounds=self.rounds)


class _OwnModel(Method):
    """How the own model trains; it is never released."""

    config: DittoConfig

    def start(self, state: DeviceState, global_params: Array) -> Array:
        begin = global_params if state.own is None else state.own
        return array_api.array_namespace(begin).asarray(begin, copy=True)

    def local_gradient(self, state: DeviceState, start: Array, params: Array, gradient: Array) -> None:
        """:param start: the global vector."""
        add_pull(gradient, params, start, self.config.lambda_)
