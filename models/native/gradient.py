"""Loss and flat gradient of a described network by its compiled program: one thread, fixed order, reused memory."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hushfleet.graphs import check_array
from hushfleet.objectives import CROSS_ENTROPY, Objective
from models.model import Model
from models.native.build import find_compiler, load_library
from models.native.program import write_program
from models.native.stages import Target

FLAGS = ("-ffp-contract=fast",)
ALIGNMENT = 64
LOGITS_BATCH = 32

FLOAT, INT = np.dtype(np.float32), np.dtype(np.int64)


class NativeGradient:
    """`(params, x, y, dropout, out) -> (loss, gradient)` of `model` under a batch's mean loss by `objective`.

    The cross-entropy is compiled; a loss with a teacher is NumPy's, between the two halves of the program.
    The same inputs give the same bits, whatever was computed before. Threads take turns.

    :raises BadInput: the model is no description that the kernels know.
    :raises HushfleetError: there is no compiler, or it refuses.
    """

    def __init__(
        self, model: Model, *, objective: Objective = CROSS_ENTROPY, cache_dir: Path | None = None
    ) -> None:
        self.model = model
        self.objective = objective
        self.layout = model.layout
        source = write_program(model, _target(find_compiler().defined), objective)
        self._library = load_library(source, flags=FLAGS, cache_dir=cache_dir)
        self._library.scratch_bytes.restype = ctypes.c_size_t
        self._library.logits.restype = None
        if objective.distills:
            self._library.gradient_logits.restype = self._library.gradient_of_slopes.restype = None
        self._lock = threading.Lock()
        self._capacity = 0
        self._reserve(1)

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
        """The batch's mean loss and its gradient float32 `[d]`.

        :param params: float32 `[d]`.
        :param x: float32 `[B, C, H, W]`; `y`: int64 `[B]`.
        :param dropout: one mask float32 `[B, *shape]` for each of the model's; none at all: nothing is dropped.
        :param out: where the gradient is written; a new vector if not given.
        :param teacher: logits float32 `[B, classes]`, and `distill`: the distillation's weight for each sample,
            float32 `[B]`; none at all: the loss is the cross-entropy. Only for an objective that distils.
        :raises ValueError: an array has another shape, type or memory order, or a label is no class.
        """
        specs = self.model.dropout
        if dropout and len(dropout) != len(specs):
            raise ValueError(f"{self.model.name} takes {len(specs)} dropout masks or none, not {len(dropout)}")
        out = np.empty(self.layout.size, np.float32) if out is None else out
        check_array("out", out, FLOAT, (self.layout.size,))
        if not out.flags.writeable or np.may_share_memory(out, params):
            raise ValueError("out must be writeable memory that is not the memory of params")
        batch = self._check_inputs(params, x)
        check_array("y", y, INT, (batch,))
        for i, mask in enumerate(dropout):
            check_array(f"dropout.{i}", mask, FLOAT, (batch, *specs[i].shape))
        masks = (ctypes.c_void_p * len(dropout))(*map(_address, dropout)) if dropout else None
        if self.objective.require_taught(teacher, distill):
            check_array("teacher", teacher, FLOAT, (batch, self.model.classes))
            check_array("distill", distill, FLOAT, (batch,))
            return self._distilled(params, x, y, masks, out, teacher, distill), out
        loss = ctypes.c_float()
        with self._lock:
            self._reserve(batch)
            arrays = _pointer(params), _pointer(x), _pointer(y), batch, masks, _pointer(out)
            wrong = self._library.gradient(*arrays, ctypes.byref(loss), self._scratch)
        if wrong >= 0:
            raise self._no_class(y, wrong)
        return loss.value, out

    def _distilled(
        self,
        params: np.ndarray,
        x: np.ndarray,
        y: np.ndarray,
        masks: ctypes.Array[ctypes.c_void_p] | None,
        out: np.ndarray,
        teacher: np.ndarray,
        distill: np.ndarray,
    ) -> float:
        wrong = (y < 0) | (y >= self.model.classes)
        if wrong.any():
            raise self._no_class(y, int(wrong.argmax()))
        logits = np.empty_like(teacher)
        with self._lock:
            self._reserve(len(x))
            inputs = _pointer(params), _pointer(x), len(x), masks
            self._library.gradient_logits(*inputs, _pointer(logits), self._scratch)
            losses, slopes = self.objective.loss_and_cotangent(logits, y, teacher, distill)
            slopes = (slopes / len(x)).astype(np.float32)
            self._library.gradient_of_slopes(*inputs, _pointer(slopes), _pointer(out), self._scratch)
        return float(losses.mean())

    def _no_class(self, y: np.ndarray, index: int) -> ValueError:
        return ValueError(f"y[{index}] = {y[index]}: labels must be in 0 .. {self.model.classes - 1}")

    def logits(self, params: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Logits float32 `[B, classes]` of images float32 `[B, C, H, W]` at `params` float32 `[d]`, without dropout."""
        batch = self._check_inputs(params, x)
        logits = np.empty((batch, self.model.classes), np.float32)
        with self._lock:
            self._reserve(min(batch, LOGITS_BATCH))
            for first in range(0, batch, LOGITS_BATCH):
                part = x[first : first + LOGITS_BATCH]
                self._library.logits(
                    _pointer(params), _pointer(part), len(part), _pointer(logits[first:]), self._scratch
                )
        return logits

    def _check_inputs(self, params: np.ndarray, x: np.ndarray) -> int:
        check_array("params", params, FLOAT, (self.layout.size,))
        batch = len(x)
        if batch == 0:
            raise ValueError("the batch is empty; a mean over no samples has no gradient")
        check_array("x", x, FLOAT, (batch, *self.model.input_shape))
        return batch

    def _reserve(self, batch: int) -> None:
        """Scratch memory for the largest batch so far. It begins as zeros, which the frames of images stay."""
        if batch > self._capacity:
            size = self._library.scratch_bytes(batch)
            self._memory = np.zeros(size + ALIGNMENT, np.uint8)
            address = _address(self._memory)
            self._scratch = ctypes.c_void_p(address + -address % ALIGNMENT)
            self._capacity = batch


def _target(macros: frozenset[str]) -> Target:
    """The same choice as in kernels/vectors.h."""
    if "__AVX512F__" in macros:
        return Target(lanes=16, registers=32)
    if "__AVX__" in macros:
        return Target(lanes=8, registers=16)
    return Target(lanes=4, registers=32 if "__aarch64__" in macros else 16)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(_address(array))
