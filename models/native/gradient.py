"""Computes loss and flat gradient of a described network in compiled C: one thread, fixed order, reused memory."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from hushfleet.errors import BadInput
from hushfleet.learning.batch import Descent
from hushfleet.learning.graph_session import check_array
from hushfleet.learning.linear import LinearClipping
from hushfleet.losses import loss_and_cotangent
from hushfleet.models.model import Model
from hushfleet.models.native.build import find_compiler, load_library, pointer
from hushfleet.models.native.descent import Descender
from hushfleet.models.native.singles_writer import SinglesWriter
from hushfleet.models.native.stages import VectorUnit
from hushfleet.models.native.writer import ProgramWriter
from hushfleet.objectives import CROSS_ENTROPY, Objective, both_or_none
from hushfleet.params import is_linear

FLAGS = ("-ffp-contract=fast",)
ALIGNMENT = 64
LOGITS_BATCH = 32
WHOLE = slice(None)

FLOAT, INT = np.dtype(np.float32), np.dtype(np.int64)


class NativeGradient:
    """`(params, x, y, dropout, out) -> (loss, gradient)` of `model` for a batch's mean loss of `objective`.

    The cross-entropy is compiled; NumPy computes any other loss, between the two halves of the program.
    The same inputs always give the same bits. Only one thread computes at a time.

    :cvar takes_part: a call may request only a part of the gradient, which is faster; see `part` of a call.

    The first build takes seconds; later the program comes from the user's cache.

    :raises BadInput: the model is not described by layers that the kernels know.
    :raises HushfleetError: there is no compiler, or it refuses.
    """

    takes_part = True

    def __init__(self, model: Model, *, objective: Objective = CROSS_ENTROPY) -> None:
        if objective.own:
            raise BadInput(f"model.loss = {objective.own!r}: the compiled kernels know no own loss")
        self.model = model
        self.objective = objective
        self.layout = model.layout
        self._teacher_values = objective.teacher_values(model.classes)
        self._target = _target(find_compiler().defined)
        self._program = _Program(ProgramWriter(model, self._target, objective).text)
        self._is_head = is_linear(self.layout)  # its weight and its bias are two layers, but one of the program
        if self._is_head:
            closed = None if objective.distills else LinearClipping(self.layout, objective)
            self.clipped_sum = closed  # type: ignore[assignment, method-assign]

    def __call__(
        self,
        params: np.ndarray,
        x: np.ndarray,
        y: np.ndarray,
        dropout: Sequence[np.ndarray] = (),
        out: np.ndarray | None = None,
        teacher: np.ndarray | None = None,
        distill: np.ndarray | None = None,
        part: slice = WHOLE,
    ) -> tuple[float, np.ndarray]:
        """Computes the batch's mean loss and its gradient float32 `[d]`; the arrays are the same as in `GradientGraph`.

        :param part: the entries whose gradient is wanted. A layer without such entries is skipped, and gets zeros.
        :raises ValueError: an array has another shape, type or memory order, or a label is no class.
        """
        out = self._check_out(out, params)
        inputs = self._check_batch(params, x, y, dropout)
        layers = self._layers(part)
        distilled = self._distilled(len(x), teacher, distill)
        if distilled is not None or not self.objective.of_classes:
            with self._program.scratch(len(x)) as (library, scratch):
                losses, slopes = self._losses(library, scratch, inputs, y, *(distilled or (None, None)))
                slopes = (slopes / len(x)).astype(np.float32)
                library.gradient_of_slopes(*inputs, pointer(slopes), *layers, pointer(out), scratch)
            self._zero_others(out, layers)
            return float(losses.mean()), out
        loss = ctypes.c_float()
        with self._program.scratch(len(x)) as (library, scratch):
            arrays = *inputs[:2], pointer(y), *inputs[2:]
            wrong = library.gradient(*arrays, *layers, None, None, pointer(out), ctypes.byref(loss), scratch)
        if wrong >= 0:
            raise self._no_class(y, wrong)
        self._zero_others(out, layers)
        return loss.value, out

    def clipped_sum(
        self,
        params: np.ndarray,
        x: np.ndarray,
        y: np.ndarray,
        dropout: Sequence[np.ndarray] = (),
        clip_norm: float | Callable[[np.ndarray], float] = math.inf,
        out: np.ndarray | None = None,
        teacher: np.ndarray | None = None,
        distill: np.ndarray | None = None,
        part: slice = WHOLE,
        summed: slice | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns each sample's loss and gradient norm; writes the sum of gradients clipped to `clip_norm` into `out`.

        No sample's gradient is ever stored as a whole, so this takes little longer than a batch's gradient. The
        first call compiles a separate program, unless it is in the cache.

        :param dropout: this and the other arrays: as for a call; a batch may be empty.
        :param clip_norm: C, positive; the terms of the sum are g_i * min(1, C / |g_i|). A function gets the norms and
            returns C; then there is a second backward pass, through the layers of `summed`.
        :param out: float32 `[d]`, required; or float64, into which the float32 sum is copied.
        :param part: whole layers; g_i is their part of the gradient, and `out` gets zeros everywhere else.
        :param summed: the entries of `part` whose sum is wanted; with a function, other layers get zeros.
        :return: losses float64 `[B]` and norms float64 `[B]`, before clipping.
        :raises ValueError: as a call does.
        """
        if not callable(clip_norm) and not clip_norm > 0:
            raise ValueError(f"clip_norm = {clip_norm!r}: must be positive (inf: no clipping)")
        if out is None:
            raise ValueError("out must be given: it receives the sum")
        if out.dtype == np.float64:
            single = np.empty(out.shape, np.float32)
            found = self.clipped_sum(params, x, y, dropout, clip_norm, single, teacher, distill, part, summed)
            out[...] = single
            return found
        self._check_out(out, params)
        layers = self._layers(part)
        first, end, _ = part.indices(self.layout.size)
        if first < end and self._span(layers) != (first, end):
            raise ValueError(f"part = {part}: must be whole layers, since norms are of these")
        if len(x) == 0:
            out[...] = 0
            return np.zeros(0), np.zeros(0)
        inputs = self._check_batch(params, x, y, dropout)
        distilled = self._distilled(len(x), teacher, distill) or self._no_teacher(len(x))
        norms = np.empty(len(x))
        with self._singles.scratch(len(x)) as (library, scratch):
            losses, slopes = self._losses(library, scratch, inputs, y, *distilled)
            slopes = slopes.astype(np.float32)
            arrays, normed = (*inputs, pointer(slopes)), callable(clip_norm)
            if callable(clip_norm):
                library.singles_of_slopes(*arrays, *layers, 0, ctypes.c_double(), pointer(norms), None, scratch)
                clip_norm = float(clip_norm(norms))
                layers = layers if summed is None else self._layers(summed)
            bound = ctypes.c_double(clip_norm)
            library.singles_of_slopes(*arrays, *layers, normed, bound, pointer(norms), pointer(out), scratch)
        self._zero_others(out, layers)
        return losses, norms

    def squared_sum(self, params: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Returns the sum of the samples' squared gradients, without dropout and teacher: float32 `[d]`.

        As in `clipped_sum`, a linear layer's gradient of one sample is never stored.

        :raises ValueError: as a call does.
        """
        inputs, out = self._check_batch(params, x, y, ()), np.empty(self.layout.size, np.float32)
        with self._singles.scratch(len(x)) as (library, scratch):
            _, slopes = self._losses(library, scratch, inputs, y, *self._no_teacher(len(x)))
            slopes = slopes.astype(np.float32)
            arrays = *inputs, pointer(slopes), 0, len(self.layout.layers)
            library.singles_of_slopes(*arrays, 0, ctypes.c_double(), None, pointer(out), scratch)
        return out

    def descend(self, descents: Sequence[Descent], params: np.ndarray) -> np.ndarray:
        """Moves each row of `params` by all steps of a client's training; returns the sums of the losses of all trained
        samples, float64 `[n]`.

        :param descents: of n clients, which differ in samples and batches alone; one of them at least has a batch.
        :param params: float32 `[n, d]`, in place. They get the same bits as by a call for each step.
        :raises ValueError: as a call does.
        """
        center, rows = descents[0].center, (len(descents), self.layout.size)
        check_array("params", params, FLOAT, rows)
        check_array("center", center, FLOAT, rows[1:])
        if not params.flags.writeable or np.may_share_memory(params, center):
            raise ValueError("params must be writeable memory that is not the memory of center")
        for each in descents:
            values, labels = each.samples.kept, each.samples.labels
            if values.shape[1:] != self.model.input_shape:
                raise ValueError(f"samples must be {self.model.input_shape}, not {values.shape[1:]}")
            check_array("labels", labels, INT, (len(values),))
        with self._program.scratch(max(len(batch) for each in descents for batch in each.batches)) as (_, scratch):
            loss_sums, wrong = self._descender(descents, params, scratch)
        if wrong >= 0:
            trained = ((each.samples.labels, i) for each in descents for batch in each.batches for i in batch)
            raise self._no_class(*next(islice(trained, wrong, None)))
        return loss_sums

    @cached_property
    def _descender(self) -> Descender:
        return Descender(self._program.library, self.layout.size, self._layers)

    @cached_property
    def _singles(self) -> _Program:
        return _Program(SinglesWriter(self.model, self._target).text)

    def _no_teacher(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((batch, self._teacher_values), np.float32), np.zeros(batch, np.float32)

    def _losses(
        self,
        library: ctypes.CDLL,
        scratch: ctypes.c_void_p,
        inputs: tuple[Any, ...],
        y: np.ndarray,
        teacher: np.ndarray | None,
        distill: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns each sample's loss and its derivative by that sample's logits; activations stay in `scratch`."""
        if self.objective.of_classes and (wrong := (y < 0) | (y >= self.model.classes)).any():
            raise self._no_class(y, int(wrong.argmax()))
        logits = np.empty((len(y), self.model.classes), np.float32)
        library.logits(*inputs, 0, pointer(logits), scratch)
        return loss_and_cotangent(self.objective, logits, y, teacher, distill)

    def _layers(self, part: slice) -> tuple[int, int]:
        """Returns the number of the first layer with entries in `part`, and the last such layer's number plus one."""
        first, end, step = part.indices(self.layout.size)
        if step != 1:
            raise ValueError(f"part = {part}: must be a range without gaps")
        spans = self.layout.layers
        if self._is_head and first < end:
            return 0, len(spans)
        wanted = [number for number, span in enumerate(spans) if span.start < end and first < span.stop]
        return (wanted[0], wanted[-1] + 1) if first < end else (len(spans), len(spans))

    def _span(self, layers: tuple[int, int]) -> tuple[int, int]:
        starts = [*(span.start for span in self.layout.layers), self.layout.size]
        return starts[layers[0]], starts[layers[1]]

    def _zero_others(self, out: np.ndarray, layers: tuple[int, int]) -> None:
        first, end = self._span(layers)
        out[:first] = 0
        out[end:] = 0

    def _no_class(self, y: np.ndarray, index: int) -> ValueError:
        return ValueError(f"y[{index}] = {y[index]}: labels must be in 0 .. {self.model.classes - 1}")

    def logits(self, params: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Returns logits float32 `[B, classes]`, no dropout; images float32 `[B, C, H, W]`, `params` float32 `[d]`."""
        return self.logits_of_models([params], x)[0]

    def logits_of_models(self, models: Sequence[np.ndarray], x: np.ndarray) -> np.ndarray:
        """Returns logits float32 `[m, B, classes]` of the same images for each of `models`, the same as `logits` gives.

        The first layers that are equal in all models are computed once.
        """
        batch = self._check_inputs(models[0], x)
        for params in models[1:]:
            check_array("params", params, FLOAT, (self.layout.size,))
        alike, pointers = self.layout.layers_alike(models), [pointer(params) for params in models]
        if self._is_head and alike < len(self.layout.layers):
            alike = 0
        logits = np.empty((len(models), batch, self.model.classes), np.float32)
        with self._program.scratch(min(batch, LOGITS_BATCH)) as (library, scratch):
            for first in range(0, batch, LOGITS_BATCH):
                part = x[first : first + LOGITS_BATCH]
                for number, model in enumerate(pointers):
                    start, out = alike if number else 0, pointer(logits[number, first:])
                    library.logits(model, pointer(part), len(part), None, start, out, scratch)
        return logits

    def _check_out(self, out: np.ndarray | None, params: np.ndarray) -> np.ndarray:
        out = np.empty(self.layout.size, np.float32) if out is None else out
        check_array("out", out, FLOAT, (self.layout.size,))
        if not out.flags.writeable or np.may_share_memory(out, params):
            raise ValueError("out must be writeable memory that is not the memory of params")
        return out

    def _check_batch(
        self, params: np.ndarray, x: np.ndarray, y: np.ndarray, dropout: Sequence[np.ndarray]
    ) -> tuple[Any, ...]:
        """Returns the program's arguments for the batch: params, images, batch, masks."""
        specs = self.model.dropout
        if dropout and len(dropout) != len(specs):
            raise ValueError(f"{self.model.name} takes {len(specs)} dropout masks or none, not {len(dropout)}")
        batch = self._check_inputs(params, x)
        of_classes = self.objective.of_classes
        check_array("y", y, INT if of_classes else FLOAT, (batch,) if of_classes else (batch, self.model.classes))
        for i, mask in enumerate(dropout):
            check_array(f"dropout.{i}", mask, FLOAT, (batch, *specs[i].shape))
        masks = (ctypes.c_void_p * len(dropout))(*(pointer(mask).value for mask in dropout)) if dropout else None
        return pointer(params), pointer(x), batch, masks

    def _distilled(
        self, batch: int, teacher: np.ndarray | None, distill: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray] | None:
        given = both_or_none(teacher, distill, distills=self.objective.distills)
        if given is not None:
            check_array("teacher", given[0], FLOAT, (batch, self._teacher_values))
            check_array("distill", given[1], FLOAT, (batch,))
        return given

    def _check_inputs(self, params: np.ndarray, x: np.ndarray) -> int:
        check_array("params", params, FLOAT, (self.layout.size,))
        batch = len(x)
        if batch == 0:
            raise ValueError("the batch is empty; a mean over no samples has no gradient")
        check_array("x", x, FLOAT, (batch, *self.model.input_shape))
        return batch


class _Program:
    """A compiled program and its scratch memory, which one thread uses at a time."""

    def __init__(self, source: str) -> None:
        self.library = load_library(source, flags=FLAGS)
        self.library.scratch_bytes.restype = ctypes.c_size_t
        self._lock = threading.Lock()
        self._capacity = 0

    @contextmanager
    def scratch(self, batch: int) -> Iterator[tuple[ctypes.CDLL, ctypes.c_void_p]]:
        """Yields memory for the largest batch so far. It starts as zeros; the padding of images stays zero."""
        with self._lock:
            if batch > self._capacity:
                self._memory = np.zeros(self.library.scratch_bytes(batch) + ALIGNMENT, np.uint8)
                address = pointer(self._memory).value or 0
                self._scratch = ctypes.c_void_p(address + -address % ALIGNMENT)
                self._capacity = batch
            yield self.library, self._scratch


def _target(macros: frozenset[str]) -> VectorUnit:
    """Makes the same choice as kernels/vectors.h."""
    if "__AVX512F__" in macros:
        return VectorUnit(lanes=16, registers=32)
    if "__AVX__" in macros:
        return VectorUnit(lanes=8, registers=16)
    return VectorUnit(lanes=4, registers=32 if "__aarch64__" in macros else 16)
