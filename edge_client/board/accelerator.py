"""Computes gradients on a board's GPU if that is correct and faster: a trial decides once for each task.

ONNX Runtime has CUDA only if somebody has installed it (docs/boards/jetson-orin.md). A GPU changes only the last bits
of a gradient: clipping and noise stay where they are. The GPU is never required: if it fails, in a trial or in the
middle of a round, the processor computes the gradient, and the round continues.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from hushfleet.at_need import at_need
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.storage.kept import ChosenAccelerator
from hushfleet.errors import GraphRefused
from hushfleet.learning.draws import draw_dropout
from hushfleet.learning.graph_session import GradientGraph, InferenceGraph, Provider
from hushfleet.losses import loss_of
from hushfleet.objectives import CROSS_ENTROPY
from hushfleet.wire.format.spec import TaskSpec

if TYPE_CHECKING:
    from hushfleet.edge_client.board import nominal_time
else:
    nominal_time = at_need("hushfleet.edge_client.board.nominal_time")

PROVIDER = "CUDAExecutionProvider"
OWN_MIB = 800
"""Estimated memory that CUDA, cuBLAS and cuDNN need on a Jetson, where GPU and processor share the memory."""
MAX_WORDS = 400
_TOLERANCE = 1e-3
_BATCHES = 3

_log = logging.getLogger("hushfleet.edge")


class AcceleratedGradient:
    """A `GradientFunction` on the GPU; after the first failure that only the GPU has, on the processor.

    A failure that the processor also has comes from the graph or one record. With the unit `record` it must not change
    another record's gradient, and the processor's gradients differ in their last bits.

    :param on_failure: called at the first failure that only the GPU has, with the reason.
    """

    def __init__(self, cpu: GradientGraph, gpu: GradientGraph, on_failure: Callable[[str], None]) -> None:
        self._cpu, self._on_failure = cpu, on_failure
        self._gpu: GradientGraph | None = gpu

    def __call__(self, *arguments: Any, **named: Any) -> tuple[float, np.ndarray]:
        if self._gpu is None:
            return self._cpu(*arguments, **named)
        try:
            return self._gpu(*arguments, **named)
        except Exception as error:  # out of memory, a driver's fault, ...: ONNX Runtime has a class for each
            found = self._cpu(*arguments, **named)
            self.give_up(f"the GPU failed: {error}")
            return found

    def give_up(self, reason: str) -> None:
        if self._gpu is not None:
            self._gpu = None
            self._on_failure(reason)


class AcceleratorTrial:
    """Chooses for one task, with random data: the choice does not depend on the board's images.

    :param wanted: `device.accelerator`, or `cpu` in a simulation, and after a worker that ended abruptly.
    :param kept: an earlier choice.
    :param cpu: the gradient on the processor.
    :param chosen: the choice, to be kept; None if there was nothing to choose.
    """

    def __init__(
        self,
        graph: bytes,
        cpu: GradientGraph,
        logits_of: InferenceGraph,
        *,
        task: bytes,
        spec: TaskSpec,
        threads: int,
        config: DeviceConfig,
        wanted: str,
        kept: ChosenAccelerator | None,
    ) -> None:
        self._graph, self.cpu, self._logits_of = graph, cpu, logits_of
        self._task, self._spec, self._threads = task, spec, threads
        self._wanted, self._memory_bytes = wanted, config.memory_mib << 20
        self._kept = kept
        self.chosen: ChosenAccelerator | None = None

    def gradient(self) -> GradientGraph | AcceleratedGradient:
        """Returns the gradient function that this task is trained with."""
        if not self._is_open():
            return self.cpu
        kept, gpu = self._kept, None
        if kept is None or (kept.task, kept.runtime) != (self._task, ort.__version__):
            gpu, self.chosen = self._choose()
        elif kept.used == "cuda":
            gpu, self.chosen = self._opened(kept)
        else:
            self.chosen = kept
        _log.info("gradients are computed on %s: %s", self.chosen.used, self.chosen.failed or self.chosen.reason)
        return self.cpu if gpu is None else AcceleratedGradient(self.cpu, gpu, self._failed)

    def _is_open(self) -> bool:
        if self._wanted == "cpu":
            return False
        if PROVIDER in ort.get_available_providers():
            return True
        if self._wanted == "cuda":
            _log.warning("device.accelerator is cuda, and ONNX Runtime %s has no %s", ort.__version__, PROVIDER)
        return False

    def _choose(self) -> tuple[GradientGraph | None, ChosenAccelerator]:
        chosen = ChosenAccelerator(self._task, ort.__version__, "cpu", "")
        gpu = None
        try:
            gpu = self._open()
            self._check(gpu)
            on_cpu, on_gpu = self._seconds(self.cpu), self._seconds(gpu)
            reason = f"in a trial the GPU took {on_gpu / on_cpu:.2g} times as long as the processor"
            faster = on_gpu < on_cpu or self._wanted == "cuda"
            chosen = replace(chosen, chosen="cuda" if faster else "cpu", reason=reason)
        except Exception as error:  # whatever a driver raises, the processor remains
            chosen = replace(chosen, reason=f"the GPU is not used: {error}"[:MAX_WORDS])
        return gpu if chosen.chosen == "cuda" else None, chosen

    def _opened(self, kept: ChosenAccelerator) -> tuple[GradientGraph | None, ChosenAccelerator]:
        try:
            return self._open(), kept
        except Exception as error:
            _log.warning("the GPU is not used now: %s", error)  # memory may be free at the next start
            return None, kept

    def _open(self) -> GradientGraph:
        """Opens the graph on the GPU. Raises `GraphRefused`, also if there is too little memory for it."""
        needed = 12 * self.cpu.layout.size + (OWN_MIB << 20)
        given = min(self._memory_bytes, free_memory_bytes())
        if needed > given:
            raise GraphRefused(f"it takes some {needed >> 20} MiB, and {given >> 20} MiB are free for it")
        limit = self._memory_bytes - (OWN_MIB << 20)
        provider: Provider = (PROVIDER, _options(limit) if PROVIDER.startswith("CUDA") else {})
        objective = self._spec.model.targets.objective(CROSS_ENTROPY)
        return GradientGraph(
            self._graph, self.cpu.layout, objective=objective, threads=self._threads, provider=provider
        )

    def _check(self, gpu: GradientGraph) -> None:
        """Raises `GraphRefused` unless the GPU computes the same as the processor, on random batches."""
        rng, model = np.random.default_rng(0), self._spec.model
        objective = model.targets.objective(CROSS_ENTROPY)
        for count in (1, 2, 8, 8):
            params = self._params(rng)
            x = rng.standard_normal((count, *model.input_shape), np.float32)
            labels = loss_of(objective).random(count, model.outputs, rng)
            masks = draw_dropout(model.dropout, count, rng)
            distillation: dict[str, Any] = {}
            if self.cpu.distills:
                teacher = rng.standard_normal((count, len(model.class_names)), np.float32)
                distillation = {"teacher": teacher, "distill": np.full(count, 0.5, np.float32)}
            loss, expected = self.cpu(params, x, labels, masks, **distillation)
            other, found = gpu(params, x, labels, masks, **distillation)
            apart = float(np.linalg.norm(found - expected)) / max(float(np.linalg.norm(expected)), 1e-12)
            if not (apart <= _TOLERANCE and abs(other - loss) <= _TOLERANCE * max(abs(loss), 1e-6)):
                raise GraphRefused(f"its gradients differ from the processor's by {apart:.2g} of their length")

    def _seconds(self, gradient: GradientGraph) -> float:
        """Measures training with batches of the task's kind; the first one is a warm-up and is not counted."""
        params = self._params(np.random.default_rng(0))
        times = [
            nominal_time.nominal_seconds(self._spec, params, gradient, self._logits_of, clock=time.perf_counter)
            for _ in range(_BATCHES + 1)
        ]
        return float(np.median(times[1:]))

    def _params(self, rng: np.random.Generator) -> np.ndarray:
        return rng.normal(0, 0.05, self.cpu.layout.size).astype(np.float32)

    def _failed(self, reason: str) -> None:
        _log.error("%s; from now on gradients are computed on the processor", reason)
        if self.chosen is not None:
            self.chosen = replace(self.chosen, failed=reason[:MAX_WORDS])


def free_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Returns the memory that new work may use without swapping, as the kernel estimates it; 0 if it is unknown."""
    try:
        (kib,) = [line.split()[1] for line in meminfo.read_text("ascii").splitlines() if "MemAvailable:" in line]
        return int(kib) << 10
    except (OSError, ValueError):
        return 0


def _options(memory_bytes: int) -> dict[str, str]:
    """Returns CUDA's options: TF32 would keep 10 bits of a factor; exhaustive search would run for each batch size."""
    return {
        "gpu_mem_limit": str(memory_bytes),
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": "0",
    }
