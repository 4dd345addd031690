"""A device's seconds from its board's figures, and predicted sizes beside real ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.aggregator.payloads.prepare import PreparedTask, prepare
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.data.samples import Samples
from hushfleet.edge_client.board.config import LimitsSection
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.randomness import SeededRandomness
from hushfleet.edge_client.worker.trainer import DeviceRound, Trainer
from hushfleet.errors import BadInput
from hushfleet.firmware_profiles import load_board
from hushfleet.learning.graph_session import GradientGraph
from hushfleet.privacy.record import RecordMechanism
from hushfleet.simulator.boards import BoardKind, FleetMix
from hushfleet.simulator.schedule import schedule_of
from hushfleet.simulator.world.hub import Roughness
from hushfleet.simulator.world.measure import _samples, measure_costs
from hushfleet.simulator.world.outcomes import fleet_devices
from hushfleet.simulator.world.sizes import Sizes, sizes_of
from hushfleet.simulator.world.times import Costs, device_times
from hushfleet.wire.format.chunks import split
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.interface import publish_packet_bytes

SIZES = Sizes(
    parameters=250_000,
    chunk_bytes=61_440,
    task_blobs=(1000, 80_000, 40_000),
    shared=(250_000, 200_000),
    bits_per_value=4.0,
    header_bytes=500,
    name_bytes=8,
)
COSTS = Costs(batch_s=0.001, sample_s=0.0005, release_s=0.02, start_s=0.4, load_s=0.01, accept_s=0.002, close_s=0.003)


def test_the_seconds_of_a_zero_2_w_behind_a_slow_uplink() -> None:
    board = load_board("raspberry-pi-zero-2-w")
    assert (float(board.relative_cpu_speed), float(board.storage_write_mb_s)) == (0.05, 20)
    bad = {"jitter_ms": 5, "stall_every_s": 30.0, "stall_s": 0.5}
    kind = BoardKind.of(board.name, {"down_mbit_s": 8, "up_mbit_s": 2, "latency_ms": 60, **bad})
    times = device_times(kind, samples=100, batch_size=16, epochs=2, costs=COSTS, sizes=SIZES)
    assert times.latency_s == 0.065
    assert (times.start_s, times.load_s, times.release_s) == (pytest.approx(8), pytest.approx(0.2), pytest.approx(0.4))
    assert times.steps == 14
    # 7 batches and 100 samples an epoch: 7 x 1 ms + 100 x 0.5 ms on the reference, 20 times that here
    assert times.train_s == pytest.approx(2 * 20 * (0.007 + 0.05))
    assert times.up_s_per_byte == pytest.approx(4e-6)
    assert times.rough == Roughness(jitter_s=0.005, stall_every_s=30.0, stall_s=0.5)
    assert (times.idle_w, times.active_w) == (float(board.power_idle_w), float(board.power_active_w))


def test_with_the_unit_record_the_task_says_how_many_batches_of_which_share(short_task: Callable[..., Task]) -> None:
    task = short_task(
        method={"name": "dp-fedavg", "local_steps": 10},
        privacy={"unit": "record", "sample_rate": 0.3},
        round={"rounds": 1},
    )
    prepared, fleet = prepare(task, run_id="seed7"), {"names": ["a", "b"], "samples": [100, 1000]}
    mix = FleetMix.in_turn(("generic-x86",), 2)
    schedule = schedule_of(task, fleet["names"])
    small, large = fleet_devices(prepared, mix, **fleet, costs=COSTS, sizes=SIZES, schedule=schedule)
    assert small.times.steps == large.times.steps == 10
    # each batch takes 3 in 10 of the samples
    assert small.times.train_s == pytest.approx(10 * 0.3 * (0.007 + 0.05))
    assert large.times.train_s == pytest.approx(10 * 0.3 * (0.063 + 0.5))


def test_a_trial_with_the_unit_record_counts_each_pass_over_the_samples(
    short_task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a gradient of a sample takes a second, and nothing else takes any time."""
    drawn, sample = [0], RecordMechanism.sample

    def counted(self: RecordMechanism, count: int, rng: np.random.Generator) -> np.ndarray:
        indices = sample(self, count, rng)
        drawn[0] += len(indices)
        return indices

    def measured(work: Callable[[], Any]) -> tuple[Any, float]:
        before = drawn[0]
        return work(), drawn[0] - before

    monkeypatch.setattr(RecordMechanism, "sample", counted)
    monkeypatch.setattr("hushfleet.simulator.world.measure._measured", measured)
    privacy = {"unit": "record", "sample_rate": 1.0}
    task = short_task(method={"name": "dp-fedavg", "local_steps": 5}, privacy=privacy, round={"rounds": 1})
    costs = measure_costs(prepare(task, run_id="seed7"), machine_speed=1.0)
    assert (costs.sample_s, costs.batch_s, costs.release_s) == (pytest.approx(1), pytest.approx(0), pytest.approx(0))


def test_a_trial_computes_features_of_few_images(
    short_task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Samples] = []

    def counted(samples: Samples, features: object) -> Samples:
        seen.append(samples)
        return samples

    monkeypatch.setattr("hushfleet.simulator.world.measure.inputs_of", counted)
    prepared = prepare(short_task(round={"rounds": 1}), run_id="seed7")
    many = _samples(prepared, 1000)
    assert (len(many), len(seen[0])) == (1000, 64)
    assert len(np.unique(many.kept.reshape(1000, -1), axis=0)) == 64
    assert len(_samples(replace(prepared, dataset=None), 1000)) == 1000


def test_a_scenario_can_slow_the_disk() -> None:
    kind = BoardKind.of("raspberry-pi-zero-2-w")
    given = {"samples": 10, "batch_size": 4, "epochs": 1, "costs": COSTS, "sizes": SIZES}
    assert device_times(kind, **given, write_mb_s=0.5).write_s_per_byte == pytest.approx(2e-6)
    assert device_times(kind, **given, write_mb_s=999).write_s_per_byte == pytest.approx(5e-8)


def test_a_far_link_is_bound_by_what_may_be_unacknowledged() -> None:
    far = BoardKind.of("jetson-orin-nano", {"latency_ms": 499})
    given = {"samples": 10, "batch_size": 4, "epochs": 1, "costs": COSTS, "sizes": SIZES}
    times = device_times(far, **given)
    assert times.latency_s == 0.5
    chunk = SIZES.blob_wire_bytes(61_440, down=True)
    assert 1 / times.up_s_per_byte == pytest.approx(20 * chunk / 1.0)
    assert 1 / times.down_s_per_byte == pytest.approx(100 * chunk / 1.0)
    near = device_times(BoardKind.of("jetson-orin-nano"), **given)
    assert 1 / near.up_s_per_byte == pytest.approx(125e6)


@pytest.mark.parametrize("value", [-0.1, math.inf, math.nan])
def test_costs_are_seconds(value: float) -> None:
    with pytest.raises(BadInput, match=r"costs: accept_s = .*: must be seconds"):
        Costs(**(vars(COSTS) | {"accept_s": value}))


def test_a_blob_in_packets_is_as_long_as_the_links_count_it() -> None:
    topics = Topics("default")
    for size in (1, 61_439, 61_440, 61_441, 200_000):
        frames = [len(frame) for frame in split(bytes(size), 61_440)]
        assert SIZES.blob_wire_bytes(size, down=True) == sum(
            publish_packet_bytes(topics.blob(bytes(32)), length) for length in frames
        )
        assert SIZES.blob_wire_bytes(size, down=False) == sum(
            publish_packet_bytes(topics.chunk("device-0"), length) for length in frames
        )


METHODS = [
    ({"name": "fedglp-adp"}, {"noise_multiplier": 1.0}),
    ({"name": "dp-fedavg"}, {"noise_multiplier": 4.0}),
    ({"name": "fedavg"}, {"noise_multiplier": 0.0}),
]


@pytest.mark.parametrize(("method", "privacy"), METHODS)
def test_updates_are_as_long_as_predicted(
    short_task: Callable[..., Task], tmp_path: Path, method: dict[str, Any], privacy: dict[str, Any]
) -> None:
    task = short_task(round={"rounds": 4}).to_plain()
    task["method"], task["privacy"] = method, privacy
    prepared = prepare(parse_task(task), run_id="seed7")
    sizes = sizes_of(prepared, name_bytes=8)
    for number, data in enumerate(_updates(prepared, tmp_path, rounds=4)):
        predicted = sizes.update_bytes(number)
        # where nothing is noised, the values of a real update are not quite as a Gaussian's
        assert predicted == pytest.approx(len(data), rel=0.02 if privacy["noise_multiplier"] else 0.25), number
    assert len({sizes.update_bytes(number) for number in range(5)}) == (5 if method["name"] == "fedglp-adp" else 1)


def _updates(prepared: PreparedTask, folder: Path, *, rounds: int) -> list[bytes]:
    spec, model = prepared.spec, prepared.spec.model
    found = []
    with (
        AggregatorStore(folder / "aggregator", durable=False) as at_server,
        DeviceStore(folder / "store.sqlite", device="device-0", durable=False) as store,
    ):
        engine = RoundEngine(at_server, prepared)
        at_server.add_device("device-0", public_key=store.identity.public_key)
        trainer = Trainer(
            device="device-0",
            store=store,
            spec=spec,
            method=prepared.method,
            gradient=GradientGraph(prepared.blobs[model.gradient.digest], model.layout),
            logits_of=prepared.inference,
            samples=lambda: prepared.dataset.train.take(np.arange(48)),
            randomness=SeededRandomness(1, 0),
            limits=LimitsSection(math.inf, spec.privacy.delta, accounting=spec.privacy.accounting),
        )
        for _ in range(rounds):
            plan = engine.open_round(["device-0"])
            found.append(DeviceRound(trainer, plan).run(engine.global_params).data)
            assert engine.accept("device-0", found[-1]).code == "accepted"
            engine.close()
    return found


def test_a_trial_tells_what_work_costs(short_task: Callable[..., Task]) -> None:
    """On a busy machine a small batch may seem to cost as much as a large one, and a sample nothing."""
    prepared = prepare(short_task(round={"rounds": 1}), run_id="seed7")
    one = measure_costs(prepared, machine_speed=1.0)
    assert min(one.step_s(16), one.release_s, one.start_s, one.load_s, one.accept_s, one.close_s) > 0
    assert min(one.batch_s, one.sample_s) >= 0


@pytest.mark.parametrize("batch_s", [0.01, 0.0])
def test_two_sizes_of_batches_tell_batch_and_sample_apart(
    short_task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch, batch_s: float
) -> None:
    prepared = prepare(short_task(round={"rounds": 1}), run_id="seed7")
    monkeypatch.setattr(
        "hushfleet.simulator.world.measure._trial", lambda *trial: (batch_s + 0.002 * trial[-1], 1.0, 1.0, 1.0)
    )
    found = measure_costs(prepared, machine_speed=3.0)
    assert (found.batch_s, found.sample_s) == pytest.approx((3 * batch_s, 0.006))
    assert found.step_s(16) == pytest.approx(3 * (batch_s + 0.032))
