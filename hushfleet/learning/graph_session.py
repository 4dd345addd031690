"""Runs networks as ONNX graphs: plain ONNX Runtime computes loss, gradient and logits, and PyTorch is not needed.

Nothing is copied: ONNX Runtime reads the parameters from the caller's flat vector and writes the gradient
to the caller's buffer, through bindings to the addresses of their tensors. With one thread and fixed kernels,
every result depends only on its inputs, bit by bit; a provider other than the processor's does not guarantee this.

Graph inputs: `param.<name>` for each tensor of the layout, `x` float32 [B, C, H, W], `y` int64 [B] (float32
[B, outputs] if targets are not classes), and
`dropout.<i>` float32 [B, *shape], each entry 0 or 1/(1 - rate). A gradient of a distillation objective also
takes `teacher` float32 [B, classes] and `distill` float32 [B]. Outputs: `loss` and `grad.<name>`, or `logits`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from hushfleet.errors import GraphRefused
from hushfleet.objectives import CROSS_ENTROPY, Objective, both_or_none
from hushfleet.params import ParamLayout

ort.disable_telemetry_events()  # `hushfleet` disables it too, but too late if ONNX Runtime was imported before

Provider = tuple[str, Mapping[str, str]]
"""ONNX Runtime's name of an execution provider, and its options."""

_TYPES: dict[str, np.dtype[Any]] = {"tensor(float)": np.dtype(np.float32), "tensor(int64)": np.dtype(np.int64)}


def open_session(
    graph: bytes, *, threads: int = 1, fold: bool = True, provider: Provider | None = None
) -> ort.InferenceSession:
    """Opens a session that takes little memory and gives the same results each time. Raises `GraphRefused`.

    :param fold: whether values that depend only on constants are computed once and kept.
    :param provider: executes all operators that it can; the processor executes the others, or all of them with None.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # The format is given because ONNX Runtime would otherwise guess it, and read some protobufs as its own
    # format, so that the checks of the protobuf would not apply.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    # Measured: planning memory ahead for a batch size costs 10 MiB and has no advantage; without the arena the peak
    # stays the same, and steps take 1.5 times as long because of page faults.
    options.enable_mem_pattern = False
    try:
        left_out = [] if fold else ["ConstantFolding"]
        providers = ["CPUExecutionProvider"] if provider is None else [provider, "CPUExecutionProvider"]
        session = ort.InferenceSession(graph, options, providers, disabled_optimizers=left_out, enable_fallback=0)
    except Exception as error:  # the binding raises its own class for every kind of failure
        raise GraphRefused(f"ONNX Runtime cannot load the graph: {error}") from error
    if provider is not None and provider[0] not in session.get_providers():  # its libraries do not load
        raise GraphRefused(f"ONNX Runtime cannot use its {provider[0]} here")
    session._model_bytes = b""  # the file's bytes are kept to try other providers, but there are none
    return session


def that_gives_back() -> ort.RunOptions:
    """Returns options of a run that returns the session's free memory to the system when it ends."""
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


class _BoundGraph:
    """A session whose inputs and outputs are bound to the memory of NumPy arrays."""

    def __init__(
        self,
        graph: bytes,
        layout: ParamLayout,
        *,
        outputs: Mapping[str, tuple[int, ...] | None],
        threads: int,
        provider: Provider | None = None,
    ) -> None:
        """:param outputs: the names and shapes that the graph must have; None if a shape is not fixed."""
        self.layout = layout
        self.session = open_session(graph, threads=threads, provider=provider)
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.params = [f"param.{name}" for name in layout.names]
        found = {value.name: value for value in self.session.get_outputs()}
        if set(found) != set(outputs):
            raise GraphRefused(f"the graph has outputs {sorted(found)}, expected {sorted(outputs)}")
        for name, shape in zip(self.params, layout.shapes, strict=True):
            if name not in self.inputs:
                raise GraphRefused(f"the graph has no input {name!r}, which the layout demands")
            _require_float(self.inputs[name], shape)
        for name, expected in outputs.items():
            _require_float(found[name], expected)
        self.batched = [name for name in self.inputs if name not in self.params]
        for name in self.batched:
            if self.inputs[name].type not in _TYPES:
                raise GraphRefused(f"the graph's input {name!r} is a {self.inputs[name].type}")

    def bind(self, params: np.ndarray, batched: dict[str, np.ndarray]) -> ort.IOBinding:
        """Returns a binding with all inputs; the arrays must exist until the run has ended."""
        check_array("params", params, np.dtype(np.float32), (self.layout.size,))
        if set(batched) != set(self.batched):
            raise GraphRefused(f"the graph takes {sorted(self.batched)} besides parameters, not {sorted(batched)}")
        batch = len(batched["x"])
        if batch == 0:
            raise ValueError("the batch is empty; a mean over no samples has no gradient")
        binding = self.session.io_binding()
        for name, view in zip(self.params, self.layout.unflatten(params).values(), strict=True):
            _bind(binding.bind_input, name, view)
        for name, array in batched.items():
            given = self.inputs[name]
            check_array(name, array, _TYPES[given.type], (batch, *given.shape[1:]))
            _bind(binding.bind_input, name, array)
        return binding

    def run(self, binding: ort.IOBinding, options: ort.RunOptions | None = None) -> None:
        try:
            self.session.run_with_iobinding(binding, options)
        except Exception as error:  # the binding raises its own class for every kind of failure
            raise GraphRefused(f"ONNX Runtime cannot execute the graph on this batch: {error}") from error


def check_array(name: str, array: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `array` can be passed to ONNX Runtime by its address alone."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != shape:
        found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ValueError(f"{name} must be a NumPy array {dtype} {shape}, not {found}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} must be contiguous; pass np.ascontiguousarray({name})")


def _require_float(value: ort.NodeArg, shape: tuple[int, ...] | None) -> None:
    if value.type != "tensor(float)" or (shape is not None and tuple(value.shape) != shape):
        found = f"{value.type} {value.shape}"
        raise GraphRefused(f"the graph does not fit the layout: {value.name!r} is a {found}, not float {shape}")


class GradientGraph:
    """`(params, x, y, dropout, out) -> (loss, gradient)` with ONNX Runtime.

    :param graph: an ONNX file that `check_graph` accepted.
    :param objective: the objective of the gradient, without a teacher.
    :raises GraphRefused: the graph does not load, or does not fit `layout` or the objective's targets.
    """

    def __init__(
        self,
        graph: bytes,
        layout: ParamLayout,
        *,
        objective: Objective = CROSS_ENTROPY,
        threads: int = 1,
        provider: Provider | None = None,
    ) -> None:
        shapes = zip(layout.names, layout.shapes, strict=True)
        outputs = {"loss": (), **{f"grad.{name}": shape for name, shape in shapes}}
        self._graph = _BoundGraph(graph, layout, outputs=outputs, threads=threads, provider=provider)
        self.layout = layout
        y = self._graph.inputs.get("y")
        if y is not None and (y.type == "tensor(int64)") != objective.of_classes:
            raise GraphRefused(
                f"the graph's input 'y' is a {y.type}, which does not fit the targets of the loss {objective.kind!r}"
            )
        self.masks = sorted(
            (name for name in self._graph.batched if name.startswith("dropout.")),
            key=lambda name: int(name.removeprefix("dropout.")),
        )
        self.distills = "teacher" in self._graph.batched

    def __call__(
        self,
        params: np.ndarray,
        x: np.ndarray,
        y: np.ndarray,
        dropout: Sequence[np.ndarray] = (),
        out: np.ndarray | None = None,
        teacher: np.ndarray | None = None,
        distill: np.ndarray | None = None,
    ) -> tuple[float, np.ndarray]:
        """Computes the batch's mean loss and its gradient float32 `[d]`.

        :param params: float32 `[d]`.
        :param x: float32 `[B, C, H, W]`; `y`: int64 `[B]`, or float32 `[B, outputs]`.
        :param dropout: one mask `[B, *shape]` for each input `dropout.<i>`; empty: nothing is dropped.
        :param out: the memory for the gradient; a new vector if not given.
        :param teacher: its values float32 `[B, ...]`, and `distill`: the distillation's weight for each sample,
            float32 `[B]`; both None: the loss without a teacher. Only for a graph that distils.
        :raises ValueError: an array has a shape, type or memory order that the graph does not accept.
        """
        if dropout and len(dropout) != len(self.masks):
            raise ValueError(f"the graph takes {len(self.masks)} dropout masks or none, not {len(dropout)}")
        if not dropout:
            shapes = [self._graph.inputs[name].shape[1:] for name in self.masks]
            dropout = [np.ones((len(x), *shape), np.float32) for shape in shapes]
        out = np.empty(self.layout.size, np.float32) if out is None else out
        check_array("out", out, np.dtype(np.float32), (self.layout.size,))
        if not out.flags.writeable or np.may_share_memory(out, params):
            raise ValueError("out must be writeable memory that is not the memory of params")
        masks = dict(zip(self.masks, dropout, strict=True))
        batched = {"x": x, "y": y, **masks}
        given = both_or_none(teacher, distill, distills=self.distills)
        if self.distills:
            shape = (len(x), *self._graph.inputs["teacher"].shape[1:])
            nothing = np.zeros(shape, np.float32), np.zeros(len(x), np.float32)
            batched["teacher"], batched["distill"] = given or nothing
        return self._run(params, batched, out), out

    def give_back(self) -> None:
        """Returns the memory of past batches to the system, by a run on one sample. The next batch takes it again."""
        inputs = (self._graph.inputs[name] for name in self._graph.batched)
        one = {each.name: np.zeros((1, *each.shape[1:]), _TYPES[each.type]) for each in inputs}
        self._run(
            np.zeros(self.layout.size, np.float32), one, np.empty(self.layout.size, np.float32), that_gives_back()
        )

    def _run(
        self,
        params: np.ndarray,
        batched: dict[str, np.ndarray],
        out: np.ndarray,
        options: ort.RunOptions | None = None,
    ) -> float:
        binding = self._graph.bind(params, batched)
        loss = np.empty((), np.float32)
        _bind(binding.bind_output, "loss", loss)
        for name, view in self.layout.unflatten(out).items():
            _bind(binding.bind_output, f"grad.{name}", view)
        self._graph.run(binding, options)
        return float(loss)


class InferenceGraph:
    """`(params, x) -> logits` with ONNX Runtime."""

    def __init__(self, graph: bytes, layout: ParamLayout, *, threads: int = 1) -> None:
        self._graph = _BoundGraph(graph, layout, outputs={"logits": None}, threads=threads)

    def __call__(self, params: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Returns logits float32 `[B, classes]` for images float32 `[B, C, H, W]` with `params` float32 `[d]`."""
        binding = self._graph.bind(params, {"x": x})
        binding.bind_output("logits")
        self._graph.run(binding)
        logits: np.ndarray = binding.get_outputs()[0].numpy()
        return logits


def _bind(bind: Callable[..., None], name: str, array: np.ndarray) -> None:
    bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
