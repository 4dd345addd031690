"""The fast engine, without coded bytes, signatures and databases, ends in what the field's own store gives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.aggregator.results.events import EventLog
from hushfleet.aggregator.rounds.kinds import RoundKind
from hushfleet.aggregator.storage.store import AggregatorStore, ChargeRow
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import BadInput, HushfleetError, StoreError
from hushfleet.methods import METHODS
from hushfleet.methods.local_round import LocalRound, Trained
from hushfleet.methods.state import PublicState
from hushfleet.simulator.cohort_store import CohortStore
from hushfleet.simulator.engines.fast import alike, chunks, engine
from hushfleet.simulator.engines.fast.device import NotKept, store_of
from hushfleet.simulator.engines.fast.partial_sum import PartialSum
from hushfleet.simulator.engines.fast.sums import key_of
from hushfleet.simulator.engines.fast.vmap import jobs
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.results import assemble, read_metrics
from hushfleet.simulator.run_folder import Simulation, begin
from hushfleet.wire.format.codec import Coding
from hushfleet.wire.format.codecs import codec_of, codecs
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.update import UpdateHeader
from hushfleet.wire.format.update_values import encode_update
from support.kill import CALL, KillPoints

DEVICES, ROUNDS = 4, 3
KEY = Identity.from_bytes(bytes(32))

# Beside each method as it is: other forms on the wire, sums, aggregates, and noise in the training.
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"method": {"name": name}} for name in sorted(METHODS)},
    "fedavg": {"method": {"name": "fedavg"}, "privacy": {"noise_multiplier": 0.0}},
    "optimizer": {
        "method": {
            "name": "dp-fedavg",
            "optimizer": "adamw",
            "weight_decay": 0.1,
            "schedule": "cosine",
            "warmup_rounds": 1,
            "batch_size": 8,
            "accumulate": 2,
        }
    },
    "own loss": {"model": {"loss": str(Path(__file__).parents[4] / "examples" / "losses.py:focal")}},
    "one-bit": {"wire": {"codec": "one-bit"}},
    "float16": {"wire": {"codec": "float16"}, "privacy": {"noise_multiplier": 0.0}},
    "no noise": {"method": {"name": "dp-fedavg"}, "privacy": {"noise_multiplier": 0.0}},
    "median": {"method": {"name": "dp-fedavg"}, "round": {"aggregation": "median"}},
    "secure aggregation": {"method": {"name": "dp-fedavg"}, "privacy": {"accounting": "secure"}},
}


@pytest.fixture
def tiny(short_task: Callable[..., Any], tmp_path: Path) -> Callable[..., Simulation]:
    def make(name: str, **sections: dict[str, Any]) -> Simulation:
        usual: dict[str, dict[str, Any]] = {
            "method": {"name": "fedglp-adp", "learning_rate": 0.005, "local_epochs": 1},
            "data": {"devices": DEVICES, "limit": 120, "min_samples": 10},
            "round": {"rounds": ROUNDS, "cohort_size": DEVICES - 1, "min_updates": 2},
        }
        if sections.get("method", {}).get("name") in ("perfreezeclip", "fedrep"):
            sections["method"] |= {"local_epochs": 3}
        asked = {key: {**usual.get(key, {}), **sections.get(key, {})} for key in usual | sections}
        return begin(short_task(**asked), tmp_path / name, data_dir=None)

    return make


@pytest.fixture
def as_in_the_field(monkeypatch: pytest.MonkeyPatch) -> Callable[[Simulation], Simulation]:
    """Runs a simulation whose devices have the board's database and coded, signed updates; in this process."""

    def run(simulation: Simulation, *, runtime: str = "onnx") -> Simulation:
        @cache
        def opened(path: Path, device: str, seed: int, index: int) -> DeviceStore:
            store = DeviceStore(path, device=device, durable=False, identity=key_of(seed, index))
            return stores.enter_context(store)

        def database(chunk: chunks.ClientChunk, client: chunks.Client) -> DeviceStore:
            path = chunk.run.folder.device(client.device).store
            return opened(path, client.device, chunk.seed, client.index)

        with monkeypatch.context() as patch, ExitStack() as stores:
            patch.setattr(chunks, "device_of", database)
            patch.setattr(RoundKind, "adds_up", False)
            return played(simulation, runtime=runtime)

    return run


def played(simulation: Simulation, *, workers: int = 1, runtime: str = "onnx") -> Simulation:
    with Workers(workers) as pool, EventLog(simulation.folder.events) as events:
        engine.run_rounds(simulation, pool, events, runtime=runtime)
    return simulation


def left(simulation: Simulation, audit: Any) -> dict[str, Any]:
    """All that a run leaves, but for its bytes and times."""
    task, devices = simulation.prepared.spec.task, {}
    for name in simulation.took_part:
        with store_of(simulation.folder, name) as store:
            state = store.load_state(task)
            residual = store.load_residual(task, size=simulation.prepared.spec.model.layout.size)
            charges = [(entry.task, entry.round, entry.charge) for entry in store.ledger.entries()]
        assert state is not None
        own = None if isinstance(state.own, NotKept) else state.own
        arrays = {"own": own, "residual": residual, **state.private}
        metrics = read_metrics(simulation, name)
        for line in metrics.values():
            del line["train_s"]
        values = {key: None if array is None else np.asarray(array).tobytes() for key, array in arrays.items()}
        devices[name] = {"public": state.public.to_bytes(), "values": values, "charges": charges}
        devices[f"{name}'s metrics"] = metrics
    with AggregatorStore(simulation.folder.aggregator) as kept:
        charged: list[ChargeRow] = kept.charges()
        rows = [
            {**(row.metrics or {}), "uplink_bytes": 0, "wall_s": 0.0} for row in kept.rounds()
        ]  # fmt: skip
    return {"models": audit.models(simulation), "devices": devices, "charged": charged, "rounds": rows}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_nothing_but_bytes_and_times_differs(
    setting: str, tiny: Callable[..., Simulation], audit: Any, as_in_the_field: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "MOST_SHOWN", 0)
    sections = SETTINGS[setting]
    field, fast = as_in_the_field(tiny("field", **sections)), played(tiny("fast", **sections))
    assert len(fast.took_part) >= DEVICES - 1
    expected = left(field, audit)
    if not fast.prepared.method.parts.reads_own:  # of the first devices alone, see below
        for name in fast.took_part:
            expected["devices"][name]["values"]["own"] = None
    assert left(fast, audit) == expected
    assert len(set(expected["models"].values())) == 1 + ROUNDS, "each round has changed the model"
    sent = [[event["bytes"] for event in audit.events(run, "update")] for run in (field, fast)]
    for found, expected in zip(sent[1], sent[0], strict=True):
        assert found == pytest.approx(expected, rel=0.02), "one of four is counted whole"
    uplink = assemble(fast, engine="fast").uplink_bytes
    assert uplink == pytest.approx(assemble(field, engine="fast").uplink_bytes, rel=0.01)


@pytest.mark.slow
def test_personalized_models_of_the_first_devices_are_kept(
    tiny: Callable[..., Simulation], audit: Any, as_in_the_field: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: dict[str, Any] = {"method": {"name": "dp-fedavg"}}
    field, fast = as_in_the_field(tiny("field", **plain)), played(tiny("fast", **plain), workers=2)
    assert left(fast, audit) == left(field, audit)
    monkeypatch.setattr(chunks, "MOST_SHOWN", 1)
    some = left(played(tiny("some", **plain)), audit)["devices"]
    assert [some[name]["values"]["own"] is not None for name in fast.took_part] == [True, *[False] * (DEVICES - 1)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaffold", "feddyn", "apfl"])
def test_what_devices_and_the_server_remember_is_the_same_with_workers_and_gone_on_with(
    name: str, tiny: Callable[..., Simulation], audit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: dict[str, Any] = {"method": {"name": name}}
    calm, train, began = left(played(tiny("calm", **plain)), audit), LocalRound.train, list[int]()
    assert left(played(tiny("workers", **plain), workers=2), audit) == calm

    def stops(self: LocalRound, **how: Any) -> Trained:
        began.append(1)
        if len(began) == DEVICES + 1:
            raise RuntimeError("in the second round")
        return train(self, **how)

    monkeypatch.setattr(LocalRound, "train", stops)
    stopped = tiny("stopped", **plain)
    with pytest.raises(RuntimeError, match="in the second round"):
        played(stopped)
    assert left(played(stopped), audit) == calm


def test_who_reads_an_personalized_model_that_was_not_kept_is_told() -> None:
    whole = np.ones(2)
    for read in (np.asarray, lambda own: own.shape, lambda own: np.where(whole, own, 1.0), lambda own: whole - own):
        with pytest.raises(HushfleetError, match="run it with --engine live"):
            read(NotKept())


@pytest.mark.slow
def test_where_training_diverges_it_is_the_same_and_what_is_not_kept_is_not_tested(
    tiny: Callable[..., Simulation], audit: Any, as_in_the_field: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise alone is sent then, and the device has the personalized model that it had before."""

    plainly = LocalRound.train

    def diverges(self: LocalRound, **how: Any) -> Trained:
        trained = plainly(self, **how)
        return trained._replace(end=trained.end * np.nan) if self.state.public.participations == 1 else trained

    monkeypatch.setattr(LocalRound, "train", diverges)
    plain: dict[str, Any] = {"method": {"name": "dp-fedavg"}}
    field, fast = as_in_the_field(tiny("field", **plain)), played(tiny("fast", **plain))
    assert left(fast, audit) == left(field, audit)
    monkeypatch.setattr(chunks, "MOST_SHOWN", 0)
    bare = played(tiny("not kept", **plain))
    assert left(bare, audit)["models"] == left(field, audit)["models"]
    assert {"accuracy_own_common" in line for name in bare.took_part for line in read_metrics(bare, name).values()} == {
        True, False,
    }  # fmt: skip


TRAINED_AT_ONCE: dict[str, dict[str, Any]] = {
    "fedglp-adp": {},
    "dp-fedavg": {"method": {"name": "dp-fedavg"}},
    "fedper": {"method": {"name": "fedper"}},
    "ditto": {"method": {"name": "ditto"}},
    **{name: {"method": {"name": name}} for name in ("apfl", "pfedme", "scaffold", "feddyn")},
    "fedala": {"method": {"name": "fedala"}},
    "fedopt": {"method": {"name": "fedopt"}},
    "apdp-fl": {"method": {"name": "apdp-fl"}, "privacy": {"preference_std": 0.3}},
    "float32": {"method": {"name": "dp-fedavg"}, "wire": {"codec": "float32"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", TRAINED_AT_ONCE)
def test_a_cohort_trained_at_once_is_the_same_too(
    setting: str, tiny: Callable[..., Simulation], audit: Any, as_in_the_field: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Released together, or one by one where methods keep what depends on the sent values. Once, one device's values
    are such that its own code releases them."""
    sections, release, refused = TRAINED_AT_ONCE[setting], jobs.release, list[bool]()

    def released(ends: Any, *arguments: Any, **named: Any) -> Any:
        if len(refused) == DEVICES - 1:
            ends = ends.clone()
            ends[-1, 0] = float("nan")
        found = release(ends, *arguments, **named)
        refused.extend(found.refused.tolist())
        return found

    monkeypatch.setattr(jobs, "release", released)
    monkeypatch.setattr(jobs, "RELEASED_ON", ("cpu", "cuda"))
    field, fast = (
        as_in_the_field(tiny("field", **sections), runtime="vmap"),
        played(tiny("fast", **sections), runtime="vmap"),
    )
    assert left(fast, audit) == left(field, audit)
    trained = 0 if setting in ("fedglp-adp", "scaffold", "feddyn", "fedala") else ROUNDS * (DEVICES - 1)
    assert (len(refused), sum(refused)) == (trained, trained > 0)


ALIKE: dict[str, dict[str, Any]] = {
    "dp-fedavg": {"method": {"name": "dp-fedavg"}},
    "momentum": {"method": {"name": "dp-fedavg", "optimizer": "sgd", "momentum": 0.9}},
    "fedper": {"method": {"name": "fedper"}, "wire": {"codec": "float32"}},
    "fedrep": {"method": {"name": "fedrep"}},
    "hush": {"method": {"name": "hush", "learning_rate": 1.0}, "model": {"name": "linear"}},
    "fedala": {"method": {"name": "fedala"}},
    "own noise": {"method": {"name": "apdp-fl"}, "privacy": {"preference_std": 0.3}},
    "spent": {"method": {"name": "dp-fedavg"}, "privacy": {"budget": 25.0}},
    "diverges": {"method": {"name": "dp-fedavg", "optimizer": "sgd", "learning_rate": 99.0, "batch_size": 1}},
}


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("setting", ALIKE)
def test_clients_together_are_the_same_as_one_by_one(
    setting: str, tiny: Callable[..., Simulation], audit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, rows = list[bool](), alike.AlikeClients.rows

    def noted(self: alike.AlikeClients, *arguments: Any) -> Any:
        together.append((found := rows(self, *arguments)) is not None)
        return found

    monkeypatch.setattr(alike.AlikeClients, "rows", noted)
    monkeypatch.setattr(alike, "_GROUP_BYTES", 4 * 4 * 4890)
    found = played(tiny("together", **ALIKE[setting]), runtime="native")
    monkeypatch.setattr(alike, "clients_of", lambda *_: None)
    expected = played(tiny("one by one", **ALIKE[setting]), runtime="native")
    assert left(found, audit) == left(expected, audit)
    updates = [[{**event, "at": 0} for event in audit.events(run, "update")] for run in (found, expected)]
    assert updates[0] == updates[1]
    stores = [CohortStore.read(run.folder.cohort).records for run in (found, expected)]
    for ours, theirs in zip(*stores, strict=True):
        assert ours.digests == theirs.digests
    assert bool(together) == (setting != "fedala"), "whose start is learned"
    assert any(together) or setting in ("fedala", "own noise", "diverges")
    assert all(together) == (setting not in ("own noise", "diverges", "spent"))


@pytest.mark.slow
@pytest.mark.needs("compiler")
def test_clients_together_do_not_depend_on_workers(tiny: Callable[..., Simulation], audit: Any) -> None:
    hush = ALIKE["hush"] | {"data": {"devices": 11, "limit": 200, "min_samples": 2}, "round": {"cohort_size": 10}}
    one, two = (played(tiny(f"{count}", **hush), workers=count, runtime="native") for count in (1, 2))
    assert left(one, audit) == left(two, audit)
    assert [event["bytes"] for event in audit.events(one, "update")] == [
        event["bytes"] for event in audit.events(two, "update")
    ]


WATCHED = ["simulator/engines/fast", "simulator/cohort_store.py", "edge_client", "aggregator/rounds"]
WATCHED.append("aggregator/results/device_metrics.py")
NAMED = {
    "the values are added": (CALL, ("PartialSum.add",)),
    "an array is written": ("pwritev", ("StateSlots.write",)),
    "the metrics are written": (CALL, ("write_metrics",)),
    "the round is kept": (CALL, ("CohortStore._append",)),
    "the aggregator takes the updates": (CALL, ("RoundEngine.accept_many",)),
    "the round is closed": (CALL, ("RoundEngine.close",)),
}


@pytest.mark.slow
def test_killed_anywhere_it_goes_on_to_the_same_models(
    tiny: Callable[..., Simulation], audit: Any, tmp_path: Path
) -> None:
    calm = left(played(tiny("calm")), audit)
    points, result = (
        KillPoints(WATCHED, NAMED),
        tmp_path / "said",
    )
    labels = points.labels(lambda: played(tiny("counted")) and None, result)
    for number, (point, what) in enumerate(points.chosen(labels, spread=8).items()):
        simulation = tiny(f"run-{number}")
        points.kill(lambda simulation=simulation: played(simulation), point, result)  # type: ignore[misc]
        assert left(played(simulation), audit) == calm, f"killed at {point} of {len(labels)}: {what}"


def test_a_run_of_the_live_engine_is_not_gone_on_with(tiny: Callable[..., Simulation], as_in_the_field: Any) -> None:
    simulation = as_in_the_field(tiny("run"))
    with pytest.raises(BadInput, match="begun by --engine live"):
        played(simulation)


@pytest.mark.parametrize("form", ["quantized", "one-bit", "float16", "float32"])
def test_a_sample_tells_the_size_of_a_large_update(form: str) -> None:
    counts = [300_000, 7, 50_000]
    steps = [0.5, 1.0, 2.0]  # as far from the noise in each layer
    values = (np.random.default_rng(3).normal(size=sum(counts)) * np.repeat(steps, counts)).astype(np.float32)
    told = header(form, counts, steps if codec_of(form).step_of else [])
    whole = len(encode_update(told, values, counts=counts, identity=KEY).data)
    partial = PartialSum(len(values), lambda values: 1.0)
    partial.encode(told, values, counts=counts, identity=KEY)
    assert partial.add(PublicState.initial(len(values)), None).size == pytest.approx(whole, rel=0.003)


def header(codec: str, counts: list[int], steps: list[float], *, round: int = 1, device: str = "dev") -> UpdateHeader:
    zeros, ones = (0.0,) * len(counts), (1.0,) * len(counts)
    return UpdateHeader(
        task="t-1", round=round, device=device, codec=codec, value_count=sum(counts), steps=tuple(steps),
        noise_stds=zeros, clip_norms=ones, public_digest=bytes(16), rounds_charged=1, epsilon_server=1.0,
        multiplier_server=1.0, noise_split=1,
    )  # fmt: skip


@given(
    form=st.sampled_from([codec.name for codec in codecs()]),
    counts=st.lists(st.sampled_from([0, 1, 2, 5, 300, 70_000]), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_values_are_seen_as_decoded(form: str, counts: list[int], seed: int) -> None:
    rng, size = np.random.default_rng(seed), sum(counts)
    values = rng.normal(size=size).astype(np.float32)
    codec, sent = codec_of(form), np.empty(size, np.float32)
    steps = [] if codec.step_of is None else (10.0 ** rng.uniform(-4, 1, len(counts))).tolist()
    coding = Coding(counts, steps, bytes(15) + b"k")
    coded = codec.encode(values, coding, sent)
    assert codec.seen(values, coding).tobytes() == codec.decode(coded, coding, None).tobytes() == sent.tobytes()


@pytest.mark.slow
def test_a_damaged_store_is_told(tiny: Callable[..., Simulation], audit: Any) -> None:
    simulation = played(tiny("run"))
    expected, path = left(simulation, audit), simulation.folder.cohort
    whole = path.read_bytes()
    for wrong in (b"\xff" + whole[1:], whole[:3], whole[:-4], whole[:-4] + b"wxyz", whole + b"more"):
        path.write_bytes(wrong)
        with pytest.raises(StoreError, match="is damaged"):
            CohortStore(path)._read(until=None, keep=True)
    path.write_bytes(whole + whole[-50:])  # torn
    CohortStore.open(path, closed=ROUNDS)
    assert path.read_bytes() == whole
    assert left(simulation, audit) == expected
