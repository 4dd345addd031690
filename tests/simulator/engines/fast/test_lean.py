"""A run without coded bytes, signatures and databases: the same models, states and charges, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.aggregator.observe.events import EventLog
from hushfleet.aggregator.storage.store import AggregatorStore, ChargeRow
from hushfleet.errors import BadInput, HushfleetError, LedgerError, Malformed, StoreError, StoreFull
from hushfleet.methods import METHODS
from hushfleet.methods.state import DeviceState
from hushfleet.simulator.engines.fast import jobs
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.fast.lean import LeanStore, NotKept, store_of
from hushfleet.simulator.engines.fast.uncoded import UncodedUpdates
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.options import RunOptions
from hushfleet.simulator.results import assemble, read_metrics
from hushfleet.simulator.run_folder import Simulation, begin
from hushfleet.training.local_round import Trained, train_round
from hushfleet.wire.format.codec import Coding
from hushfleet.wire.format.forms import CODECS, codec_of
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.update import UpdateHeader
from support.kill import CALL, KillPoints

DEVICES, ROUNDS = 4, 3
KEY = Identity.from_bytes(bytes(32))

# Beside each method as it is: other forms on the wire, sums, aggregates, and noise in the training.
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"method": {"name": name}} for name in sorted(METHODS)},
    "one-bit": {"wire": {"codec": "one-bit"}},
    "float16": {"wire": {"codec": "float16"}, "privacy": {"noise_multiplier": 0.0}},
    "no noise": {"method": {"name": "dp-fedavg"}, "privacy": {"noise_multiplier": 0.0}},
    "median": {"method": {"name": "dp-fedavg"}, "round": {"aggregation": "median"}},
    "secure sum": {"method": {"name": "dp-fedavg"}, "privacy": {"accounting": "secure"}},
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


def played(simulation: Simulation, *, lean: bool, workers: int = 1, runtime: str = "onnx") -> Simulation:
    with Workers(workers) as pool, EventLog(simulation.folder.events) as events:
        run_rounds(simulation, pool, events, lean=lean, runtime=runtime)
    return simulation


def left(simulation: Simulation, audit: Any) -> dict[str, Any]:
    """All that a run leaves, but for its bytes and times."""
    task, devices = simulation.prepared.spec.task, {}
    for name in simulation.took_part:
        with store_of(simulation.folder.device(name), name) as store:
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
    setting: str, tiny: Callable[..., Simulation], audit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "MOST_SHOWN", 0)
    sections = SETTINGS[setting]
    full, lean = (played(tiny(str(lean), **sections), lean=lean) for lean in (False, True))
    assert len(lean.took_part) >= DEVICES - 1
    expected = left(full, audit)
    if not lean.prepared.method.parts.reads_own:  # of the first devices alone, see below
        for name in lean.took_part:
            expected["devices"][name]["values"]["own"] = None
    assert left(lean, audit) == expected
    assert not lean.folder.updates.exists()
    assert len(set(expected["models"].values())) == 1 + ROUNDS, "each round has changed the model"
    counted = setting == "secure sum"  # whose updates stay what they are
    for run, sends in ((full, True), (lean, counted)):
        result = assemble(run, engine="fast")
        assert all(event["bytes"] > 0 for event in audit.events(run, "update")) == sends
        assert (result.uplink_bytes > 0, result.bits_per_value is not None) == (sends, sends)


@pytest.mark.slow
def test_own_models_of_the_first_devices_are_kept(
    tiny: Callable[..., Simulation], audit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: dict[str, Any] = {"method": {"name": "dp-fedavg"}}
    full, lean = played(tiny("full", **plain), lean=False), played(tiny("lean", **plain), lean=True, workers=2)
    assert left(lean, audit) == left(full, audit)
    monkeypatch.setattr(jobs, "MOST_SHOWN", 1)
    some = left(played(tiny("some", **plain), lean=True), audit)["devices"]
    assert [some[name]["values"]["own"] is not None for name in lean.took_part] == [True, *[False] * (DEVICES - 1)]


def test_who_reads_an_own_model_that_was_not_kept_is_told() -> None:
    whole = np.ones(2)
    for read in (np.asarray, lambda own: own.shape, lambda own: np.where(whole, own, 1.0), lambda own: whole - own):
        with pytest.raises(HushfleetError, match="run it without --lean"):
            read(NotKept())


@pytest.mark.slow
def test_where_training_diverges_it_is_told_or_the_same(
    tiny: Callable[..., Simulation], audit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise alone is sent then, and the device has the own model that it had before."""

    def diverges(method: Any, state: DeviceState, *arguments: Any, **others: Any) -> Trained:
        trained = train_round(method, state, *arguments, **others)
        return trained._replace(end=trained.end * np.nan) if state.public.participations == 1 else trained

    monkeypatch.setattr("hushfleet.edge_client.trainer.train_round", diverges)
    plain: dict[str, Any] = {"method": {"name": "dp-fedavg"}}
    full, lean = (played(tiny(str(lean), **plain), lean=lean) for lean in (False, True))
    assert left(lean, audit) == left(full, audit)
    monkeypatch.setattr(jobs, "MOST_SHOWN", 0)
    with pytest.raises(HushfleetError, match="since training has diverged"):
        played(tiny("not kept", **plain), lean=True)


@pytest.mark.slow
def test_a_cohort_trained_at_once_is_the_same_too(tiny: Callable[..., Simulation], audit: Any) -> None:
    full, lean = (played(tiny(str(lean)), lean=lean, runtime="vmap") for lean in (False, True))
    assert left(lean, audit) == left(full, audit)


NAMED = {
    "the values are written": ("write", ("UncodedUpdates.encode",)),
    "the state is kept": (CALL, ("LeanStore._keep",)),
    "the round is committed on the device": (CALL, ("LeanStore.commit_round",)),
    "the aggregator takes the update": (CALL, ("RoundEngine.accept",)),
    "the round is closed": (CALL, ("RoundEngine.close",)),
}


@pytest.mark.slow
def test_killed_anywhere_it_goes_on_to_the_same_models(
    tiny: Callable[..., Simulation], audit: Any, tmp_path: Path
) -> None:
    calm = left(played(tiny("calm"), lean=True), audit)
    points, result = (
        KillPoints(["simulator/engines/fast", "edge_client", "aggregator/rounds"], NAMED),
        tmp_path / "said",
    )
    labels = points.labels(lambda: played(tiny("counted"), lean=True) and None, result)
    for number, (point, what) in enumerate(points.chosen(labels, spread=8).items()):
        simulation = tiny(f"run-{number}")
        points.kill(lambda simulation=simulation: played(simulation, lean=True), point, result)  # type: ignore[misc]
        assert left(played(simulation, lean=True), audit) == calm, f"killed at {point} of {len(labels)}: {what}"


def test_a_run_goes_on_as_it_was_begun(tiny: Callable[..., Simulation]) -> None:
    for lean, words in ((True, "with --lean"), (False, "without --lean")):
        simulation = played(tiny(f"run-{lean}"), lean=lean)
        with pytest.raises(BadInput, match=f"was begun {words}; go on with it {words}"):
            played(simulation, lean=not lean)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "live"}, "--lean does nothing with --engine live"),
        ({"clocked": True}, "cannot be combined with --boards"),
        ({"sweep_wire": ("1",)}, "cannot be combined with --sweep-wire"),
    ],
)
def test_what_needs_bytes_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        RunOptions(lean=True, **options)


def header(codec: str, counts: list[int], steps: list[float], *, round: int = 1, device: str = "dev") -> UpdateHeader:
    zeros, ones = (0.0,) * len(counts), (1.0,) * len(counts)
    return UpdateHeader(
        task="t-1", round=round, device=device, codec=codec, value_count=sum(counts), steps=tuple(steps),
        noise_stds=zeros, clip_norms=ones, public_digest=bytes(16), rounds_charged=1, epsilon_server=1.0,
        multiplier_server=1.0, noise_split=1,
    )  # fmt: skip


@given(
    form=st.sampled_from([codec.name for codec in CODECS]),
    counts=st.lists(st.sampled_from([0, 1, 2, 5, 300, 70_000]), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_values_are_seen_as_decoded(form: str, counts: list[int], seed: int, tmp_path_factory: Any) -> None:
    rng, size = np.random.default_rng(seed), sum(counts)
    values = rng.normal(size=size).astype(np.float32)
    codec, sent = codec_of(form), np.empty(size, np.float32)
    steps = [] if codec.step_of is None else (10.0 ** rng.uniform(-4, 1, len(counts))).tolist()
    coding = Coding(counts, steps, bytes(15) + b"k")
    coded = codec.encode(values, coding, sent)
    assert codec.seen(values, coding).tobytes() == codec.decode(coded, coding, None).tobytes() == sent.tobytes()
    given_header, updates = header(form, counts, steps), UncodedUpdates(tmp_path_factory.mktemp("updates"), 3)
    encoded = updates.encode(given_header, values, counts=counts, identity=KEY)
    assert encoded.sent.tobytes() == codec.seen(values, given_header.coding(counts)).tobytes()
    found, _ = updates.authenticate(encoded.data, public_key=KEY.public_key)
    assert found == given_header
    assert updates.values(found, encoded.data, counts=counts).tobytes() == encoded.sent.tobytes()


def test_another_update_in_a_file_is_noticed(tmp_path: Path) -> None:
    updates, first, second = UncodedUpdates(tmp_path), header("float32", [2], []), header("float32", [2], [], round=2)
    data = updates.encode(first, np.ones(2, np.float32), counts=[2], identity=KEY).data
    updates.encode(second, np.zeros(2, np.float32), counts=[2], identity=KEY)
    with pytest.raises(Malformed, match="another update than that of dev in round 1"):
        updates.values(first, data, counts=[2])
    with pytest.raises(Malformed, match="another update"):
        updates.values(second, data, counts=[3])  # fewer values than belong there
    (tmp_path / "0").unlink()
    with pytest.raises(StoreError, match="0 cannot be read: No such file or directory; begin the run anew"):
        updates.values(second, data, counts=[2])


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    updates, told = UncodedUpdates(tmp_path, 1), header("float32", [2], [])
    (tmp_path / "1").symlink_to("/dev/full")
    with pytest.raises(StoreFull, match="1 cannot be written: No space left on device; free some space"):
        updates.encode(told, np.ones(2, np.float32), counts=[2], identity=KEY)


@pytest.mark.slow
def test_a_damaged_file_is_told_and_no_round_charged_twice(tiny: Callable[..., Simulation]) -> None:
    simulation = played(tiny("run"), lean=True)
    name = simulation.took_part[0]
    path = simulation.folder.device(name).state
    whole = path.read_bytes()
    for wrong in (b"", whole[:3], whole[:50], whole[:-4], b"\xff\xff\xff\x7f" + whole[4:], bytes(len(whole))):
        path.write_bytes(wrong)
        with pytest.raises(StoreError, match="is damaged"):
            LeanStore(path, device=name)
    path.write_bytes(whole)
    store = LeanStore(path, device=name)
    last = store.ledger.entries()[-1]
    with pytest.raises(LedgerError, match="already charged"):
        store.commit_round(type("Commit", (), {"task": last.task, "round": last.round})())  # type: ignore[arg-type]
    assert path.read_bytes() == whole
