"""Leaves out, in forecasts of large fleets, work that is the same for all boards or that no result depends on.

It is the only place that knows of it: agents, coordinator and stores are unchanged. FOR SIMULATION ONLY, because
nothing is signed. The bytes of messages and updates keep their sizes.

- Signatures are zeros, and none is checked.
- A message or a task package that many boards get is decoded once.
- A large network is scaled down, and its packets count as those of the whole one (`SmallerNetwork`).
- Of a large fleet some boards are simulated, and each stands for several (`SmallerFleet`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any
from unittest.mock import patch

import numpy as np

from hushfleet.aggregator.config.round_section import RoundSection
from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.aggregator.rounds import coordinator
from hushfleet.aggregator.storage import enrolment
from hushfleet.edge_client import verifier
from hushfleet.methods import method_of
from hushfleet.params import ParamLayout, is_linear
from hushfleet.secure import unmasking_share
from hushfleet.simulator.schedule import Schedule
from hushfleet.simulator.world.outcomes import FleetDevice
from hushfleet.simulator.world.sizes import Sizes, sizes_of
from hushfleet.simulator.world.times import Costs
from hushfleet.wire.format import messages, update_values
from hushfleet.wire.format.identity import SIGNATURE_BYTES, Identity
from hushfleet.wire.format.spec import BlobRef, TaskSpec
from hushfleet.wire.link.interface import publish_packet_bytes

_KEPT = 4096


@contextmanager
def short_cuts() -> Iterator[None]:
    """Takes the short-cuts for as long as the context is open, in this whole process."""
    decode = lru_cache(_KEPT)(_decoded)
    replaced: list[tuple[Any, str, Any]] = [
        (Identity, "sign", lambda self, data: bytes(SIGNATURE_BYTES)),
        (TaskSpec, "from_bytes", staticmethod(lru_cache(16)(TaskSpec.from_bytes))),
        *(
            (module, "verify", lambda key, data, signature: None)
            for module in (messages, update_values, unmasking_share)
        ),
        *((module, "decode_message", decode) for module in (verifier, enrolment, coordinator)),
    ]
    patches = [patch.object(*each) for each in replaced]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in reversed(patches):
            each.stop()


def _decoded(data: bytes, *, federation: str, public_key: bytes | None = None) -> messages.Message:
    return messages.decode_message(data, federation=federation, public_key=public_key)


MOST_PARAMETERS = 10_000


class SmallerNetwork:
    """A task whose network is scaled down, and what its packets stand for: a forecast of millions of parameters.

    Each layer keeps its share of the parameters, so that codecs and methods do the same to it.

    :param prepared: the task. `sizes`: its sizes.
    :param most: the most parameters that the small network may have, about.

    `prepared` is the small task; `scale` is how many of the network's parameters one of its parameters stands for.
    """

    def __init__(self, prepared: PreparedTask, sizes: Sizes, *, most: int = MOST_PARAMETERS) -> None:
        layout = prepared.spec.model.layout
        if layout.size <= most or is_linear(layout):
            self.prepared, self.scale = prepared, 1.0
            return
        share = most / layout.size
        shapes = tuple((max(1, round(size * share)),) for size in layout.sizes)
        small = ParamLayout(layout.names, shapes)
        self.scale = layout.size / small.size
        self.prepared = _with_layout(prepared, small)
        little = sizes_of(self.prepared, name_bytes=sizes.name_bytes)
        down, up = partial(sizes.blob_wire_bytes, down=True), partial(sizes.blob_wire_bytes, down=False)
        refs = [self.prepared.spec_ref, *self.prepared.spec.model.graphs]
        self._blobs = {
            ref.digest: down(size) / down(ref.size) for ref, size in zip(refs, sizes.task_blobs, strict=False)
        }
        self._model = down(sizes.model_bytes) / down(little.model_bytes)
        self._difference = down(sizes.difference_bytes) / max(1, down(little.difference_bytes))
        self._update = up(sizes.update_bytes()) / up(little.update_bytes())

    def weigh(self, topic: str, payload_bytes: int, is_model: Callable[[bytes], bool]) -> int:
        """Returns the bytes of the packets that a small packet stands for.

        :param is_model: whether the blob with this SHA-256 is a whole model; every other one that is no part of the
            task is a difference.
        """
        place, _, rest = topic.rpartition("/")
        factor = 1.0
        if self.scale > 1 and place.endswith("/blob"):
            digest = bytes.fromhex(rest)
            factor = self._blobs.get(digest) or (self._model if is_model(digest) else self._difference)
        elif self.scale > 1 and rest == "chunk":
            factor = self._update
        return round(publish_packet_bytes(topic, payload_bytes) * factor)


MOST_BOARDS, LEAST_COHORT = 200, 20


class SmallerFleet:
    """Boards that stand for all of a large fleet, with its rules and costs for so many.

    Boards are taken evenly from each kind and from those with many and few samples. A cohort keeps its share of the
    fleet, but at least `LEAST_COHORT` boards, because a round waits for the slowest of them.

    `weight` is the number of boards that one of `boards` stands for.
    """

    def __init__(
        self, fleet: Sequence[FleetDevice], rules: RoundSection, costs: Costs, *, most: int = MOST_BOARDS
    ) -> None:
        count = len(fleet)
        few = max(most, math.ceil(LEAST_COHORT * count / (rules.cohort_size or rules.buffer_size or count)))
        self.boards, self.rules, self.costs, self.weight = fleet, rules, costs, 1.0
        if few >= count:
            return
        alike = sorted(fleet, key=lambda device: (device.kind, device.times.train_s))
        chosen = {alike[place * count // few].name for place in range(few)}
        self.boards, self.weight = [device for device in fleet if device.name in chosen], count / few
        names = ("cohort_size", "min_devices", "min_updates", "buffer_size")
        scaled: dict[str, Any] = {name: self._few(getattr(rules, name)) for name in names}
        self.rules = replace(rules, **scaled)
        self.costs = replace(costs, accept_s=costs.accept_s * self.weight)

    def _few(self, boards: int | None) -> int | None:
        return max(1, round(boards / self.weight)) if boards else boards

    def of(self, schedule: Schedule) -> Schedule:
        """Returns what happens to these boards, the broker and the aggregator."""
        names = {device.name for device in self.boards} | {"broker", "aggregator"}
        return replace(schedule, windows=tuple(window for window in schedule.windows if window.target in names))

    def whole(self, boards: int) -> int:
        """Returns how many boards so many stand for."""
        return round(boards * self.weight)


def _with_layout(prepared: PreparedTask, layout: ParamLayout) -> PreparedTask:
    """Returns the task with another layout, and with graphs that nothing can run."""
    model = prepared.spec.model
    stubs = {name: f"a graph that nothing runs: {name}".encode() for name in ("gradient", "inference", "features")}
    refs = {name: BlobRef.of(stub) for name, stub in stubs.items()}
    features = None if model.features is None else replace(model.features, graph=refs["features"])
    changed = replace(model, layout=layout, gradient=refs["gradient"], inference=refs["inference"], features=features)
    spec = replace(prepared.spec, model=changed)
    package = spec.to_bytes()
    blobs = {BlobRef.of(blob).digest: blob for blob in (package, *stubs.values())}
    initial = np.zeros(layout.size, np.float32)
    return replace(
        prepared, spec=spec, spec_ref=BlobRef.of(package), blobs=blobs, initial=initial, method=method_of(spec)
    )
