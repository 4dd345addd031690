"""A cohort's gradients on CUDA: what one pass launches is recorded once for each shape, and then replayed.

A pass of a compact network is some 150 launches, and the interpreter takes longer to make them than the device to work
them off: 5.0 ms against 0.9 ms for ten clients of `mnist-cnn` with batches of 16 on an H100. The kernels are the same,
and so are the bits. A recording reads and writes memory of its own, so inputs and gradients are copied; that is counted
in `memory.bytes_per_client`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.simulator.engines.fast.vmap.streams import StreamedGradient

log = logging.getLogger("hushfleet.simulator")

EAGER = 3
"""Passes of a shape in one training before it is recorded: ends of epochs have shapes that do not come again."""
MOST = 32
"""Recordings that are kept; the one that was not used for longest goes first."""

Key = tuple[object, ...]


class _Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    losses: Tensor
    out: Tensor


class ReplayedGradient:
    """`clients` of a gradient on CUDA tensors, with the same bits. Recordings last from round to round."""

    def __init__(self, gradient: TorchGradient | StreamedGradient) -> None:
        self.gradient = gradient
        self._seen: Counter[Key] = Counter()
        self._refused: set[Key] = set()
        self._recordings: dict[Key, _Recording] = {}  # what was used last comes last
        self._room: dict[str, Tensor] = {}  # flat, for the inputs and `out` of all recordings
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def held_bytes(self) -> int:
        """Counts the bytes of inputs and gradients, beside what a pass itself takes."""
        return sum(room.nbytes for room in self._room.values())

    def begin(self) -> None:
        """A training begins."""
        self._seen.clear()

    def forget(self) -> None:
        """Gives all memory back."""
        self._recordings.clear()
        self._room.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def clients(
        self,
        params: Tensor,
        x: Tensor,
        y: Tensor,
        dropout: Sequence[Tensor] = (),
        *,
        out: Tensor,
        weights: Tensor | None = None,
        **learned: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Computes what the gradient's `clients` computes."""
        masks = {f"mask {number}": mask for number, mask in enumerate(dropout)}
        inputs = {"params": params, "x": x, "y": y, **masks, **learned}
        if weights is not None:
            inputs["weights"] = weights
        key: Key = tuple((name, each.shape) for name, each in inputs.items())
        recording = self._recordings.pop(key, None)
        if recording is None:
            self._seen[key] += 1
            if self._seen[key] > EAGER and key not in self._refused:
                recording = self._record(key, inputs, out)
            if recording is None:
                return self.gradient.clients(params, x, y, dropout, out, weights=weights, **learned)
        self._recordings[key] = recording
        for name, each in inputs.items():
            recording.inputs[name].copy_(each)
        recording.graph.replay()
        return recording.losses.clone(), out.copy_(recording.out)

    def _record(self, key: Key, inputs: dict[str, Tensor], out: Tensor) -> _Recording | None:
        """None where it cannot be recorded; such a pass is made anew each time."""
        own = {name: self._place(name, each).copy_(each) for name, each in inputs.items()}
        own_out = self._place("out", out)
        named = {name: own[name] for name in ("teacher", "distill", "weights") if name in own}
        masks = [each for name, each in own.items() if name.startswith("mask ")]

        def run() -> Tensor:
            losses, _ = self.gradient.clients(own["params"], own["x"], own["y"], masks, own_out, **named)
            return losses

        while len(self._recordings) >= MOST:
            del self._recordings[next(iter(self._recordings))]
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        try:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run()  # libraries get what they need for this stream
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                losses = run()
        except RuntimeError as error:
            log.warning("a pass of %d clients is not recorded, which costs time only: %s", len(out), error)
            self._refused.add(key)
            self.forget()
            return None
        return _Recording(graph, own, losses, own_out)

    def _place(self, name: str, like: Tensor) -> Tensor:
        """Memory that all recordings share: only one is replayed at a time."""
        room = self._room.get(name)
        if room is None or room.numel() < like.numel() or room.dtype != like.dtype:
            self._recordings.clear()  # they know the memory that goes
            room = self._room[name] = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
        return room[: like.numel()].view(like.shape)
