"""A small fleet with real identities, a real method and real update blobs; no network, no training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.aggregator.config.round_section import RoundSection
from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.learning.evaluation import Evaluation
from hushfleet.methods import make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.state import DeviceState, RoundContext
from hushfleet.models.model import Model, layout_of
from hushfleet.privacy.noise import SeededNoise
from hushfleet.wire.format.codecs import steps_for
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.spec import BlobRef, ModelSpec, TaskSpec
from hushfleet.wire.format.update import UpdateHeader
from hushfleet.wire.format.update_values import EncodedUpdate, encode_update

LAYOUT = layout_of(hidden=(12, 16), out=(4, 12))  # 204 and 52 parameters
CLIP_NORM = 0.5


def tiny_model() -> Model:
    def forward(tensors: Any, x: Any, dropout: Any) -> Any:
        hidden = (x.flatten(1) @ tensors["hidden.weight"].T + tensors["hidden.bias"]).relu()
        return hidden @ tensors["out.weight"].T + tensors["out.bias"]

    return Model("tiny", "these tests", (1, 4, 4), 4, LAYOUT, (), forward)


def prepared_task(
    *,
    method: str = "fedglp-adp",
    settings: dict[str, Any] | None = None,
    devices: int = 3,
    multiplier: float = 2.0,
    unit: dict[str, Any] | None = None,
    accounting: str = "as-published",
    wire: dict[str, Any] | None = None,
    evaluate: Callable[[np.ndarray], Evaluation] | None = None,
    seed: int = 5,
    schedule: dict[str, Any] | None = None,
    **rules: Any,
) -> PreparedTask:
    task = parse_task(
        {
            "name": "tiny",
            "seed": seed,
            "model": {"name": "digits-cnn"},
            "method": {"name": method, **(settings or {})},
            "privacy": {
                "clip_norm": CLIP_NORM,
                "noise_multiplier": multiplier,
                "accounting": accounting,
                "delta": 0.01,
                **(unit or {}),
            },
            # a test may wait for more devices than it has
            "data": {"name": "digits", "devices": max(devices, rules.get("min_devices", 1))},
            "round": {"rounds": 3} | rules,
            "wire": wire or {},
            "schedule": schedule or {},
        }
    )
    model = tiny_model()
    graph = b"a graph that no test runs"
    spec = TaskSpec(
        task="tiny-0001",
        rounds=task.round.rounds,
        method=method,
        method_config=settings or {},
        privacy=task.privacy_spec(),
        wire=task.wire.spec(),
        model=ModelSpec(
            name=model.name,
            layout=LAYOUT,
            input_shape=model.input_shape,
            class_names=("a", "b", "c", "d"),
            mean=(0.0,),
            std=(1.0,),
            dropout=(),
            gradient=BlobRef.of(graph),
            inference=BlobRef.of(graph),
        ),
        memory_mib=64,
    )
    package = spec.to_bytes()
    return PreparedTask(
        task=task,
        model=model,
        spec=spec,
        spec_ref=BlobRef.of(package),
        blobs={BlobRef.of(blob).digest: blob for blob in (package, graph)},
        initial=model.init(seed),
        method=make_method(method, settings or {}, spec.privacy, LAYOUT, rounds=spec.rounds),
        dataset=None,
        features=None,
        inference=None,  # type: ignore[arg-type]  # nothing here computes logits
        evaluate_global=evaluate,
    )


@dataclass
class Signed:
    """An update as a device would store it, and what it was made of."""

    header: UpdateHeader
    values: np.ndarray
    counts: list[int]
    encoded: EncodedUpdate

    @property
    def data(self) -> bytes:
        return self.encoded.data


_FOUND = Evaluation(0.5, 1.0)


class Devices:
    """The device halves: identities and states, and updates that no training went into."""

    def __init__(self, prepared: PreparedTask, count: int) -> None:
        self.prepared = prepared
        self.names = [f"dev-{index}" for index in range(count)]
        self.identities = {name: Identity.from_bytes(bytes([index + 1]) * 32) for index, name in enumerate(self.names)}
        self.states: dict[str, DeviceState] = {name: prepared.method.init_state() for name in self.names}
        self.charged = dict.fromkeys(self.names, 0)
        self.measured: dict[str, Evaluation] = {}  # what a device would find of its personalized model

    def enrol(self, store: AggregatorStore) -> None:
        for name in self.names:
            store.add_device(name, public_key=self.identities[name].public_key, board="test")

    def update(
        self, name: str, plan: RoundPlan, *, seed: int | None = None, advance: bool = True, preference: float = 1.0
    ) -> Signed:
        """What `hushfleet.edge_client.worker.trainer` makes of a round, with a random vector for the trained change."""
        prepared, state, index = self.prepared, self.states[name], self.names.index(name)
        seed = 100 * plan.round + index if seed is None else seed
        change = np.random.default_rng(seed).normal(0, 0.1, LAYOUT.size).astype(np.float32)
        change = np.clip(change, -prepared.method.reach, prepared.method.reach)
        setting = prepared.method.setting(RoundTerms(plan.noise_split, plan.controls, preference=preference))
        context = RoundContext(setting, state, 0 * change, 0 * change, measured=self.measured.get(name, _FOUND))
        context = replace(context, vectors=dict.fromkeys(prepared.method.server.vectors, 0 * change))
        noised = prepared.method.privatize(context, change, SeededNoise(seed, index, plan.round))
        shared = ~state.public.mask
        counts = [int(shared[span.start : span.stop].sum()) for span in LAYOUT.layers]
        wire = prepared.spec.wire
        stds = [float(std) for std in noised.noise_stds]
        header = UpdateHeader(
            task=plan.task,
            round=plan.round,
            device=name,
            codec=wire.codec,
            value_count=sum(counts),
            steps=steps_for(wire, noise_stds=stds, layer_rms=[2e-3] * len(stds)),
            noise_stds=tuple(noised.noise_stds),
            clip_norms=tuple(noised.clip_norms),
            public_digest=state.public.digest(),
            rounds_charged=self.charged[name] + 1,
            epsilon_server=0.0,
            multiplier_server=noised.charge.noise_multiplier,
            noise_split=noised.charge.noise_split,
            report=noised.report,
        )
        made = self.sign(name, header, noised.values[shared], counts)
        if advance:
            sent = np.zeros(LAYOUT.size, np.float32)
            sent[shared] = made.encoded.sent
            self.states[name] = prepared.method.advance(context, update=change, trained=change, sent=sent)
            self.charged[name] += 1
        return made

    def sign(
        self,
        name: str,
        header: UpdateHeader,
        values: np.ndarray,
        counts: list[int],
        *,
        public: bytes | None = None,
        **changes: Any,
    ) -> Signed:
        header = replace(header, **changes)
        encoded = encode_update(header, values, counts=counts, identity=self.identities[name], public=public)
        return Signed(header, values, counts, encoded)


class Fleet:
    """A store, an engine on it, and enrolled devices."""

    def __init__(
        self, folder: Path, *, devices: int = 3, durable: bool = False, sums_on: str = "cpu", **settings: Any
    ) -> None:
        self.folder = folder
        self.sums_on = sums_on
        self.durable = durable
        self.prepared = prepared_task(devices=devices, **settings)
        self.rules = {name: value for name, value in settings.items() if name in RoundSection.__dataclass_fields__}
        self.devices = Devices(self.prepared, devices)
        self.now, self.wall_from = 1000.0, 0.0  # the clock on the wall shows the sum
        self.store = AggregatorStore(folder, durable=durable)
        self.devices.enrol(self.store)
        self.engine = self._engine()

    @property
    def names(self) -> list[str]:
        return self.devices.names

    def _engine(self) -> RoundEngine:
        clocks = {"clock": self.wall, "monotonic": lambda: self.now}
        return RoundEngine(self.store, self.prepared, device=self.sums_on, **clocks)

    def wall(self) -> float:
        return self.wall_from + self.now

    def restart(self) -> RoundEngine:
        """As after a crash: a new store object and a new engine on the same folder."""
        self.store.close()
        self.store = AggregatorStore(self.folder, durable=self.durable)
        self.engine = self._engine()
        return self.engine

    def open(self, present: list[str] | None = None) -> RoundPlan:
        return self.engine.open_round(self.names if present is None else present)

    def update(self, name: str, **options: Any) -> Signed:
        plan = self.engine.plan
        if plan is None:
            pytest.fail("no round is open")
        return self.devices.update(name, plan, **options)

    def run_round(self) -> Any:
        self.open()
        for name in self.names:
            verdict = self.engine.accept(name, self.update(name).data)
            if verdict.code != "accepted":
                pytest.fail(f"{name}: {verdict}")
        return self.engine.close()
