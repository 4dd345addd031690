"""Somebody who sees the broker wants to know how many records a device has, by when its training ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.edge_client.board.config import DeviceConfig, FleetSection, OwnDataSection
from hushfleet.edge_client.board.constant_time import announced_at
from hushfleet.edge_client.board.local_data import LocalData
from hushfleet.edge_client.board.nominal_time import nominal_seconds
from hushfleet.edge_client.fleet import health
from hushfleet.errors import BadInput, GraphRefused, StoreError
from hushfleet.learning.graph_session import GradientGraph, InferenceGraph
from hushfleet.models import get_model
from hushfleet.models.export import export_graphs
from hushfleet.objectives import Objective
from hushfleet.wire.format.health import Health
from hushfleet.wire.format.messages import decode_message
from hushfleet.wire.format.spec import BlobRef, PrivacySpec
from hushfleet.wire.link.interface import Delivery
from support.edge import DEVICE, Bench, Clock, Package, write_samples

RECORD_S, ANSWER_S = 0.1, 0.2  # what a board takes for one record's gradient, and for its logits
NOMINAL = 64  # records, at which a batch has 16

Make = Callable[..., Bench]


@pytest.fixture
def records(package: Package) -> Package:
    privacy = PrivacySpec("record", "strict", 1.0, 1.1, 1e-5, sample_rate=16 / NOMINAL, batches=4)
    return package.with_spec(privacy=privacy, task="records")


def seen_of(
    make: Make,
    package: Package,
    config: DeviceConfig,
    monkeypatch: pytest.MonkeyPatch,
    *,
    count: int,
    constant_time: bool = True,
    rounds: int = 1,
) -> Watch:
    """Watched: the last of so many rounds, up to the offer."""
    folder = Path(config.data.path).parent / f"{count}-{constant_time}"
    folder.mkdir()
    write_samples(folder / "train.npz", count=count)
    config = replace(
        config,
        device=replace(config.device, state_dir=str(folder / "state")),
        data=replace(config.data, path=str(folder / "train.npz")),
        limits=replace(config.limits, constant_time=constant_time),
        fleet=FleetSection("cd" * 32, "mqtts://localhost"),
    )
    bench = make(package, config)
    clock = bench.clock

    def slow(plain: Callable[..., Any], record_s: float) -> Callable[..., Any]:
        def call(self: Any, params: Any, x: Any, *rest: Any, **more: Any) -> Any:
            clock.now += record_s * len(x)
            return plain(self, params, x, *rest, **more)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(GradientGraph, "__call__", slow(GradientGraph.__call__, RECORD_S))
        patch.setattr(InferenceGraph, "__call__", slow(InferenceGraph.__call__, ANSWER_S))
        bench.until(lambda: bool(bench.server.births))
        for round in range(1, rounds + 1):
            bench.server.open_round(round)
            watched = Watch(bench.clock, bench)
            for _ in range(5000):
                if watched.offered is not None:
                    break
                bench.agent.step(0.0)
                watched.look()
                # as long as the agent would sleep; training itself moves the clock
                clock.now += min(0.01, bench.agent._sleep_s(1.0)) or 0.01
            assert watched.offered is not None
            bench.acked(round)
    return watched


class Watch:
    """What is seen at the broker, and when."""

    def __init__(self, clock: Clock, bench: Bench) -> None:
        self._clock, self._bench, self._offers = clock, bench, len(bench.server.offers)
        self.began = self.ended = clock.now
        self.offered: float | None = None
        self.health: list[tuple[float, Health]] = []
        self._spy = bench.hub.link("spy")
        self._spy.subscribe(bench.server.topics.health(DEVICE))
        self._spy.open()

    def look(self) -> None:
        known = len(self._bench.server.births)
        self._bench.server.pump()
        for birth in self._bench.server.births[known:]:
            if birth.state == "ready":
                self.ended = self._clock.now
        if len(self._bench.server.offers) > self._offers and self.offered is None:
            self.offered = self._clock.now
        while (event := self._spy.receive(0.0)) is not None:
            if isinstance(event, Delivery):
                key = self._bench.store.identity.public_key
                told = decode_message(event.payload, federation="test", public_key=key)
                assert isinstance(told, Health)
                self.health.append((self._clock.now, told))


@pytest.fixture
def seen(
    make_bench: Make, records: Package, config: DeviceConfig, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[float, float]]:
    def moments(**settings: Any) -> tuple[float, float]:
        """Seconds from the announced beginning of the training to its announced end, and to the offer."""
        watched = seen_of(make_bench, records, config, monkeypatch, **settings)
        assert watched.offered is not None
        return watched.ended - watched.began, watched.offered - watched.began

    return moments


def test_what_a_board_says_of_itself_tells_nothing(
    make_bench: Make, records: Package, config: DeviceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when it is said, though a busy board would say it later, nor what: heat, memory and disk are left out."""
    monkeypatch.setattr(health, "EVERY_S", 1.0)
    said = []
    for count in (0, NOMINAL):
        watched = seen_of(make_bench, records, config, monkeypatch, count=count)
        first, *later = watched.health
        assert first[0] < watched.ended - 1.0
        assert [at for at, _ in later if at < watched.ended - 0.02] == [], "a second each, and none while it trains"
        assert later
        for _, told in watched.health:
            assert (told.disk_percent, told.memory_percent, told.temperature_c, told.throttled) == (None,) * 4
        said.append(watched.health)
    assert [told for _, told in said[0]] == [told for _, told in said[1]]
    assert [at for at, _ in said[0]] == pytest.approx([at for at, _ in said[1]], abs=0.02)


def test_training_times_tell_the_number_without_a_slot(seen: Callable[..., tuple[float, float]]) -> None:
    """The attack: what is seen grows with the records."""
    few, many = (seen(count=count, constant_time=False) for count in (8, 256))
    assert many[0] > few[0] + 10
    assert many[1] > few[1] + 10


def test_all_up_to_the_tasks_own_number_are_announced_alike(seen: Callable[..., tuple[float, float]]) -> None:
    """Also a device without records, which sends noise; the slot is 16 seconds: 6.4 of work with some room."""
    moments = [seen(count=count) for count in (0, 8, NOMINAL)]
    for ended, offered in moments:
        assert ended == pytest.approx(moments[0][0], abs=0.02)
        assert offered == pytest.approx(moments[0][1], abs=0.02)


@pytest.mark.parametrize(
    ("owner", "hides_records", "hides_device"), [(None, True, False), (True, True, True), (False, False, False)]
)
def test_an_owner_who_says_nothing_hides_the_number_of_records_in_the_field(
    make_bench: Make,
    records: Package,
    package: Package,
    config: DeviceConfig,
    owner: bool | None,
    hides_records: bool,
    hides_device: bool,
) -> None:
    limits = replace(config.limits, constant_time=owner)
    for task, simulation, hides in (
        (records, None, hides_records),
        (package, None, hides_device),
        (records, config.simulation, owner is True),
    ):
        state = config.store_path.parent.with_name(f"{task.spec.task}-{simulation is None}")
        board = replace(
            config, simulation=simulation, limits=limits, device=replace(config.device, state_dir=str(state))
        )
        bench = make_bench(task, board)
        bench.until(lambda: bench.agent.tasks.runtime is not None)  # noqa: B023
        assert bench.agent.tasks.runtime.constant_time == hides
        assert bench.agent.tasks.hides_duration == hides


@pytest.fixture
def distilling(records: Package) -> Package:
    """From the second round on a device's personalized model is asked about each of its records."""
    graph = export_graphs(get_model(records.spec.model.name), objective=Objective("distillation", 3.0)).gradient
    model = replace(records.spec.model, gradient=BlobRef.of(graph))
    taught = records.with_spec(model=model, method="pfedsd")
    return replace(taught, blobs={**taught.blobs, model.gradient.digest: graph})


def test_a_teacher_that_is_asked_about_each_record_is_in_the_slot(
    make_bench: Make, distilling: Package, config: DeviceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients take 6.4 seconds and the teacher 12.8, so a slot is 32. Without them in it, one of 16 would be exceeded
    by the devices with many records alone."""
    watched = [seen_of(make_bench, distilling, config, monkeypatch, count=count, rounds=2) for count in (0, 8, NOMINAL)]
    for each in watched:
        assert each.offered is not None
        assert each.ended - each.began == pytest.approx(32, abs=0.1)
        assert each.offered - each.began == pytest.approx(watched[0].offered - watched[0].began, abs=0.02)


def test_a_model_of_its_own_that_trains_on_each_record_is_in_the_slot(
    make_bench: Make, records: Package, config: DeviceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch of 16 takes 1.6 seconds, the personalized model 6.4 with as many records as the task names: a slot of
    16. With a single batch for the personalized model it would be one of 8, exceeded by the devices with many records
    alone."""
    privacy = replace(records.spec.privacy, batches=1)
    ditto = records.with_spec(method="ditto", privacy=privacy)
    watched = [seen_of(make_bench, ditto, config, monkeypatch, count=count, rounds=2) for count in (0, 8, NOMINAL)]
    for each in watched:
        assert each.offered is not None
        assert each.ended - each.began == pytest.approx(16, abs=0.1)
        assert each.offered - each.began == pytest.approx(watched[0].offered - watched[0].began, abs=0.02)


def test_a_teacher_that_fails_on_black_images_has_no_nominal_time(distilling: Package) -> None:
    """Its answers would seem to take none, whatever they take on a device's own images."""

    def fails(params: np.ndarray, x: np.ndarray) -> np.ndarray:
        raise GraphRefused("black")

    model = distilling.spec.model
    gradient = GradientGraph(distilling.blobs[model.gradient.digest], model.layout)
    with pytest.raises(GraphRefused, match="every black image"):
        nominal_seconds(distilling.spec, distilling.initial, gradient, fails, clock=Clock())


def test_the_announced_end_is_on_a_coarse_grid() -> None:
    at = {"began": 100.0, "deadline": 10_000.0, "deadline_s": 9_900.0}
    assert announced_at(ended=100.0, nominal_s=0.0, **at) == 101.0
    for ended in (100.5, 103.0, 116.0):
        assert announced_at(ended=ended, nominal_s=6.4, **at) == 116.0
    assert announced_at(ended=116.1, nominal_s=6.4, **at) == 132.0
    assert announced_at(ended=150.0, nominal_s=6.4, **at) == 164.0


def test_a_slot_leaves_time_for_the_update() -> None:
    """A round of 20 seconds gives a slot no more than ten; whoever needs longer announces at once."""
    at = {"began": 100.0, "deadline": 120.0, "deadline_s": 20.0, "nominal_s": 100.0}
    assert announced_at(ended=101.0, **at) == 110.0
    assert announced_at(ended=113.0, **at) == 113.0


def test_an_empty_folder_is_as_good_as_any_with_the_unit_record(tmp_path: Path, records: Package) -> None:
    model = records.spec.model
    section = OwnDataSection("folder", str(tmp_path))
    samples = LocalData(section, model, may_be_empty=True).samples()
    assert samples.x.shape == (0, *model.input_shape)
    assert samples.x.dtype == np.float32
    with pytest.raises(BadInput, match="no samples that fit"):
        LocalData(section, model).samples()


def test_a_round_that_fails_on_a_full_disk_is_declined_at_the_end_of_the_slot(
    make_bench: Make, records: Package, config: DeviceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the decline would tell when training had ended."""
    bench = make_bench(records, replace(config, limits=replace(config.limits, constant_time=True)))
    commit = bench.store.commit_coded

    def full(*_: Any) -> Any:
        bench.clock.now += 0.3
        raise StoreError("the disk is full")

    monkeypatch.setattr(bench.store, "commit_coded", full)
    bench.until(lambda: bool(bench.server.births))
    bench.server.open_round(1)
    waits: list[tuple[float, str, int]] = []

    def meanwhile() -> None:
        bench.server.pump()
        waits.append((bench.clock.now, bench.server.births[-1].state, len(bench.server.declines)))

    bench.agent.stop.meanwhile = meanwhile
    bench.until(lambda: bool(bench.server.declines))
    assert waits == [(1000.3, "training", 0)]
    assert bench.clock.now == 1001.0, "a slot of a second"
    assert [decline.code for decline in bench.server.declines] == ["disk"]
    assert bench.server.births[-1].state == "ready"
    monkeypatch.setattr(bench.store, "commit_coded", commit)
    bench.server.open_round(2)
    bench.acked(2)
    assert bench.store.ledger.rounds_charged() == 1


@pytest.mark.parametrize("in_training", [True, False])
def test_a_stop_in_the_slot_does_not_tell_whether_training_had_ended(
    make_bench: Make, records: Package, config: DeviceConfig, monkeypatch: pytest.MonkeyPatch, *, in_training: bool
) -> None:
    bench = make_bench(records, replace(config, limits=replace(config.limits, constant_time=True)))
    bench.until(lambda: bool(bench.server.births))
    bench.server.open_round(1)
    if in_training:
        bench.while_training(bench.agent.stop.set, looks=100)
    else:
        bench.agent.stop.meanwhile = bench.agent.stop.set
    bench.until(bench.agent.stop.is_set)
    bench.agent.close()
    bench.server.pump()
    assert [birth.state for birth in bench.server.births][-3:] == ["training", "ready", "sleeping"]
    assert bench.server.offers == bench.server.declines == []
    assert bench.store.ledger.rounds_charged() == (0 if in_training else 1)


def test_nothing_that_is_said_ends_the_slot(make_bench: Make, records: Package, config: DeviceConfig) -> None:
    """Whoever could end it would learn from later updates whether the round was charged by then."""
    bench = make_bench(records, replace(config, limits=replace(config.limits, constant_time=True)))
    bench.until(lambda: bool(bench.server.births))
    bench.server.open_round(1)
    slots: list[float] = []

    def talk() -> None:
        bench.agent.stop.meanwhile = lambda: None
        slots.append(bench.clock.now)
        bench.server.pump()
        asked = len(bench.server.asks)
        bench.server.epoch += 1  # an aggregator that comes back is asked, and told of the device
        bench.server.announce()
        bench.server.open_round(1, phase="closed")
        bench.hub.cut(DEVICE)
        bench.hub.restore(DEVICE)
        bench.server.pump()
        assert bench.server.births[-1].state == "lost", "which the broker says"
        assert bench.server.offers == bench.server.declines == []
        assert len(bench.server.asks) == asked
        assert bench.store.ledger.rounds_charged() == 1

    bench.agent.stop.meanwhile = talk
    bench.until(lambda: bool(slots) and bench.server.births[-1].state == "ready")
    assert bench.clock.now == slots[0] + 1.0, "the slot was as long as ever"
    bench.server.open_round(2)
    bench.until(lambda: bench.store.ledger.rounds_charged() == 2)
