"""Chooses and makes the runtimes that compute gradients in the fast engine.

`onnx` runs the devices' own graphs: its results equal the live engine's bit for bit. The others are faster on some
machines and networks, and sum in another order, so a run with them is the same experiment with other rounding. With
`vmap`, a cohort is trained as arrays (`jobs`); `make_gradient` then returns PyTorch's gradient of one client for tests.
"""

from __future__ import annotations

from functools import cache
from multiprocessing import parent_process
from typing import TYPE_CHECKING

from hushfleet.atomic_file import write_whole
from hushfleet.errors import HushfleetError
from hushfleet.learning.batch import GradientFunction
from hushfleet.learning.draws import samples_trained
from hushfleet.learning.graph_session import GradientGraph
from hushfleet.learning.optim import Optimizer
from hushfleet.learning.optim import make_optimizer as make_numpy_optimizer
from hushfleet.models import get_model, is_own, native
from hushfleet.models.cuda import computing_device, sees_cuda
from hushfleet.models.native.release import add_scaled
from hushfleet.objectives import CROSS_ENTROPY, Objective
from hushfleet.params import ParamLayout
from hushfleet.paths import is_offered
from hushfleet.privacy.noise import NoiseSource, SeededNoise

if TYPE_CHECKING:
    from hushfleet.aggregator.payloads.exact_sum import AddSmall
    from hushfleet.simulator.run_folder import Simulation

ON_DEVICES = "onnx"
NATIVE = "native"
VMAP = "vmap"
TORCH = "torch"
RUNTIMES = (ON_DEVICES, NATIVE, TORCH, VMAP)
LONG = 2e10
"""Samples times parameters of a run for which `onnx` takes about twenty seconds on two cores."""


def unavailable(runtime: str, model: str, own_loss: str = "") -> str | None:
    """Returns why a runtime cannot compute the gradients of `model` here; None if it can."""
    if runtime != NATIVE:
        return None
    if own_loss:
        return "the loss is your own"
    return "it is your own network" if is_own(model) else native.unavailable(get_model(model))


def quickest(model: str, own_loss: str = "") -> str:
    """Returns the fastest runtime on this machine's processor: compiled kernels if the network has them.

    A ResNet has none: here PyTorch takes two thirds of ONNX Runtime's time (batches of 16 to 64, one thread).
    """
    if unavailable(NATIVE, model, own_loss) is None:
        return NATIVE
    return TORCH if model.startswith("resnet") else ON_DEVICES


def choose_runtime(simulation: Simulation) -> str:
    """Returns the runtime for `auto`. It is kept in the run folder, so that a resumed run has the same rounding.

    A short run uses the devices' own graphs, whose results equal the live engine's.
    """
    path = simulation.folder.runtime
    if path.exists():
        return path.read_text()
    spec = simulation.prepared.spec
    runtime = ON_DEVICES
    if _samples_in_all(simulation) * spec.model.layout.size > LONG:
        runtime = VMAP if sees_cuda() else quickest(spec.model.name, simulation.task.model.own_loss)
    write_whole(path, runtime.encode(), durable=False)
    return runtime


def _samples_in_all(simulation: Simulation) -> float:
    """Returns the number of samples trained in the whole run; each epoch counts."""
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
    vocabulary: int = 0,
) -> GradientFunction:
    """:param graph: the model's gradient graph under `objective`, ONNX bytes.
    :param input_shape: input shape of a model that accepts any, as in `get_model`; likewise `vocabulary`.
    """
    offered = is_offered(model) or is_offered(objective.own)  # only the parent process knows it
    if runtime == ON_DEVICES or (offered and parent_process() is not None):
        return GradientGraph(graph, layout, objective=objective)
    network = get_model(model, classes=classes, input_shape=input_shape, vocabulary=vocabulary)
    if runtime == NATIVE:
        from hushfleet.models.native.gradient import NativeGradient

        return NativeGradient(network, objective=objective)
    import torch  # the other workers start without it

    from hushfleet.models.torch_gradient import TorchGradient

    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # full float32
    device = computing_device() if runtime == VMAP else "cpu"
    return TorchGradient(network, device=device, objective=objective)


def make_optimizer(name: str, learning_rate: float, momentum: float = 0.0) -> Optimizer:
    """Makes the fastest optimizer implementation here; all of them compute the same bits."""
    make = native.make_native_optimizer if _has_compiler() else make_numpy_optimizer
    return make(name, learning_rate, momentum)


def make_noise(seed: int, device_index: int, round: int) -> NoiseSource:
    """Makes `SeededNoise` with the fastest implementation here; all of them compute the same bits."""
    return (native.NativeNoise if _has_compiled_noise() else SeededNoise)(seed, device_index, round)


def compiled_addition() -> AddSmall | None:
    """Returns the compiled addition of an `ExactSum`; None if nothing can be compiled here."""
    return add_scaled if _has_compiled_noise() else None


_has_compiler = cache(lambda: native.unavailable() is None)


@cache
def _has_compiled_noise() -> bool:
    try:
        native.NativeNoise(0, 0, 0)
    except HushfleetError:
        return False
    return True
