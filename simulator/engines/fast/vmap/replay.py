"""Computes a cohort's gradients on CUDA: the launches of a pass are recorded once for each shape, and then replayed.

A pass of a compact network has about 150 launches, and the interpreter needs more time to make them than the device to
run them: 5.0 ms against 0.9 ms for ten clients of `mnist-cnn` with batches of 16 on an H100. The kernels are the same,
so the bits are the same. A recording has its own memory, so inputs and gradients are copied; this is counted in
`memory.bytes_per_client`.
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
"""Passes of a shape in one training before it is recorded: shapes at the end of epochs may not come again."""
MOST = 32
"""Most recordings that are kept; the least recently used one is dropped first."""

Key = tuple[object, ...]


class _Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    losses: Tensor
    out: Tensor


class ReplayedGradient:
    """Implements `clients` of a gradient on CUDA tensors, with the same bits. Recordings are kept between rounds."""

    def __init__(self, gradient: TorchGradient | StreamedGradient) -> None:
        self.gradient = gradient
        self._seen: Counter[Key] = Counter()
        self._refused: set[Key] = set()
        self._recordings: dict[Key, _Recording] = {}  # the last used recording comes last
        self._room: dict[str, Tensor] = {}  # flat, for the inputs and `out` of all recordings
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def held_bytes(self) -> int:
        """Bytes of inputs and gradients, without the memory of a pass itself."""
        return sum(room.nbytes for room in self._room.values())

    def begin(self) -> None:
        """Starts a training."""
        self._seen.clear()

    def forget(self) -> None:
        """Releases all memory."""
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
        **weighed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Computes the same as the gradient's `clients`."""
        masks = {f"mask {number}": mask for number, mask in enumerate(dropout)}
        given = {name: each for name, each in weighed.items() if each is not None}
        inputs = {"params": params, "x": x, "y": y, **masks, **given}
        key: Key = tuple((name, each.shape) for name, each in inputs.items())
        recording = self._recordings.pop(key, None)
        if recording is None:
            self._seen[key] += 1
            if self._seen[key] > EAGER and key not in self._refused:
                recording = self._record(key, inputs, out)
            if recording is None:
                return self.gradient.clients(params, x, y, dropout, out, **given)
        self._recordings[key] = recording
        for name, each in inputs.items():
            recording.inputs[name].copy_(each)
        recording.graph.replay()
        return recording.losses.clone(), out.copy_(recording.out)

    def _record(self, key: Key, inputs: dict[str, Tensor], out: Tensor) -> _Recording | None:
        """Records a pass; returns None if this is impossible, and then such passes are never recorded."""
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
                run()  # lets libraries allocate their workspace for this stream
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
        """Returns memory that all recordings share, because only one is replayed at a time."""
        room = self._room.get(name)
        if room is None or room.numel() < like.numel() or room.dtype != like.dtype:
            self._recordings.clear()  # they refer to the memory that is replaced
            room = self._room[name] = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
        return room[: like.numel()].view(like.shape)
