"""The runtimes that compute gradients in the fast engine.

`onnx` are the devices' own graphs: its results are the live engine's, bit for bit. The others are quicker on some
machines and networks, and sum in another order, so a run with them is the same experiment with other rounding. With
`vmap`, a cohort is trained as arrays (`jobs`); `make_gradient` then gives PyTorch's for one client, which tests models.
"""

from __future__ import annotations

from functools import cache
from multiprocessing import parent_process
from typing import TYPE_CHECKING

from hushfleet.atomic_file import write_whole
from hushfleet.errors import HushfleetError
from hushfleet.gradients.batch import GradientFunction
from hushfleet.gradients.draws import samples_trained
from hushfleet.gradients.optim import Optimizer
from hushfleet.gradients.optim import make_optimizer as make_numpy_optimizer
from hushfleet.graphs.session import GradientGraph
from hushfleet.models import get_model, is_offered, is_own, native
from hushfleet.models.cuda import sees_cuda
from hushfleet.objectives import CROSS_ENTROPY, Objective
from hushfleet.params import ParamLayout
from hushfleet.privacy.noise import NoiseSource, SeededNoise

if TYPE_CHECKING:
    from hushfleet.simulator.run_folder import Simulation

ON_DEVICES = "onnx"
NATIVE = "native"
VMAP = "vmap"
TORCH = "torch"
RUNTIMES = (ON_DEVICES, NATIVE, TORCH, VMAP)
LONG = 2e10
"""Samples times parameters of a run that takes `onnx` about twenty seconds on two cores."""


def unavailable(runtime: str, model: str) -> str | None:
    """Why a runtime cannot compute the gradients of `model` here; None if it can."""
    if runtime != NATIVE:
        return None
    return "it is your own network" if is_own(model) else native.unavailable(get_model(model))


def quickest(model: str) -> str:
    """The quickest runtime on this machine's processor: compiled kernels where the network has them.

    For a ResNet, which has none, PyTorch takes two thirds of ONNX Runtime's time (batches of 16 to 64, one thread).
    """
    if unavailable(NATIVE, model) is None:
        return NATIVE
    return TORCH if model.startswith("resnet") else ON_DEVICES


def choose_runtime(simulation: Simulation) -> str:
    """The runtime that `auto` stands for. It is kept in the run folder, so that a resumed run rounds as before.

    A short run takes the devices' own graphs, whose results are the live engine's.
    """
    path = simulation.folder.runtime
    if path.exists():
        return path.read_text()
    spec = simulation.prepared.spec
    runtime = ON_DEVICES
    if _samples_in_all(simulation) * spec.model.layout.size > LONG:
        runtime = VMAP if sees_cuda() else quickest(spec.model.name)
    write_whole(path, runtime.encode(), durable=False)
    return runtime


def _samples_in_all(simulation: Simulation) -> float:
    """Samples that are trained on in the whole run, epochs counted."""
    devices, rules = simulation.fleet.devices, simulation.task.round
    cohort_share = min(rules.cohort_size or len(devices), len(devices)) / len(devices)
    config = simulation.prepared.method.config
    return rules.rounds * cohort_share * sum(samples_trained(len(device.train), config) for device in devices)


def make_gradient(
    runtime: str,
    model: str,
    classes: int,
    layout: ParamLayout,
    graph: bytes,
    objective: Objective = CROSS_ENTROPY,
    *,
    input_shape: tuple[int, int, int] | None = None,
) -> GradientFunction:
    """:param graph: the model's gradient graph under `objective`, ONNX bytes.
    :param input_shape: of a model that takes any, as `get_model`.
    """
    if runtime == ON_DEVICES or (is_offered(model) and parent_process() is not None):  # known to the parent alone
        return GradientGraph(graph, layout, objective=objective)
    network = get_model(model, classes=classes, input_shape=input_shape)
    if runtime == NATIVE:
        from hushfleet.models.native.gradient import NativeGradient

        return NativeGradient(network, objective=objective)
    import torch  # the other workers start without it

    from hushfleet.models.torch_gradient import TorchGradient

    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # float32 is meant
    device = "cuda" if runtime == VMAP and torch.cuda.is_available() else "cpu"
    return TorchGradient(network, device=device, objective=objective)


def make_optimizer(name: str, learning_rate: float, momentum: float = 0.0) -> Optimizer:
    """The quickest implementation here; all of them give the same bits."""
    make = native.make_native_optimizer if _has_compiler() else make_numpy_optimizer
    return make(name, learning_rate, momentum)


def make_noise(seed: int, device_index: int, round: int) -> NoiseSource:
    """Makes `SeededNoise` by the quickest implementation here; all of them give the same bits."""
    return (native.NativeNoise if _has_compiled_noise() else SeededNoise)(seed, device_index, round)


_has_compiler = cache(lambda: native.unavailable() is None)


@cache
def _has_compiled_noise() -> bool:
    try:
        native.NativeNoise(0, 0, 0)
    except HushfleetError:
        return False
    return True
