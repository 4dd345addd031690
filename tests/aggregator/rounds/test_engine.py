"""Rounds without a network: cohorts, verdicts, exact aggregation, deadlines, and resuming."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.aggregator.payloads.checked_update import CheckedUpdate
from hushfleet.aggregator.results.metrics import RoundSummary, privacy_tables
from hushfleet.aggregator.results.result import PrivacyRow
from hushfleet.aggregator.rounds.policy import choose_cohort
from hushfleet.errors import BadInput, StoreError, StoreFull
from hushfleet.learning.evaluation import Evaluation
from hushfleet.methods.state import PublicState
from hushfleet.privacy.accountant import Step, epsilon
from support.accelerator import SUM_DEVICES

MakeFleet = Callable[..., Any]


def spent(fleet: Any, until: float = math.inf) -> list[PrivacyRow]:
    (table,) = privacy_tables(fleet.store, [until], delta=0.01)
    return list(table.values())


def test_the_global_model_is_the_mean_of_what_was_sent_over_those_who_share_it(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(wire={"downlink": "full"})
    for _ in range(3):
        before = fleet.engine.global_params.astype(np.float64)
        fleet.open()
        total, counts = np.zeros(256), np.zeros(256)
        for name in fleet.names:
            shared = ~fleet.devices.states[name].public.mask
            update = fleet.update(name)
            assert fleet.engine.accept(name, update.data).code == "accepted"
            total[shared] += np.rint(update.encoded.sent.astype(np.float64) * 2**40)
            counts[shared] += 1
        fleet.engine.close()
        mean = np.divide(total / 2**40, counts, out=np.zeros(256), where=counts > 0)
        assert np.array_equal(fleet.engine.global_params, (before + mean).astype(np.float32))
    assert fleet.engine.finished
    assert counts.min() < 3, "after two rounds some parameters are personal somewhere"


def test_both_sides_hold_the_same_public_states(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    for _ in range(3):
        plan = fleet.open()
        for name in fleet.names:
            assert plan.cohort[name] == fleet.devices.states[name].public.digest()
            fleet.engine.accept(name, fleet.update(name).data)
        fleet.engine.close()
    for name in fleet.names:
        held = PublicState.from_bytes(fleet.store.public_state(name), size=256)
        assert held.digest() == fleet.devices.states[name].public.digest()
        assert held.participations == 3


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]])
def test_the_order_of_arrival_changes_no_bit(make_fleet: MakeFleet, order: list[int]) -> None:
    results = []
    for indices in ([0, 1, 2, 3], order):
        fleet = make_fleet(devices=4)
        fleet.open()
        updates = {name: fleet.update(name).data for name in fleet.names}
        for index in indices:
            fleet.engine.accept(fleet.names[index], updates[fleet.names[index]])
        fleet.engine.close()
        results.append(fleet.engine.global_digest)
    assert results[0] == results[1]


@pytest.mark.parametrize("sums_on", SUM_DEVICES)
@pytest.mark.parametrize(
    "settings", [{"method": "fedglp-adp"}, {"method": "dp-fedsim"}, {"method": "dp-fedavg", "aggregation": "median"}]
)
def test_where_sums_are_held_changes_no_bit(make_fleet: MakeFleet, settings: dict[str, Any], sums_on: str) -> None:
    here, there = make_fleet(devices=5, **settings), make_fleet(devices=5, sums_on=sums_on, **settings)
    for _ in range(2):
        here.run_round()
        there.run_round()
    there.restart()
    for fleet in (here, there):
        fleet.run_round()
    assert there.engine.global_digest == here.engine.global_digest
    np.testing.assert_array_equal(there.engine.global_params, here.engine.global_params)


def test_a_duplicate_is_acknowledged_and_not_added_again(make_fleet: MakeFleet) -> None:
    fleet, calm = make_fleet(), make_fleet()
    fleet.open()
    first = fleet.update("dev-0")
    assert fleet.engine.accept("dev-0", first.data).acknowledged
    again = fleet.engine.accept("dev-0", first.data)
    assert (again.code, again.acknowledged) == ("duplicate", True)
    for name in ("dev-1", "dev-2"):
        fleet.engine.accept(name, fleet.update(name).data)
    fleet.engine.close()
    late = fleet.engine.accept("dev-0", first.data)
    assert (late.code, late.acknowledged) == ("duplicate", True)
    calm.run_round()
    assert fleet.engine.global_digest == calm.engine.global_digest
    assert len(fleet.store.charges()) == 3


def test_another_update_for_the_same_round_is_refused(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.open()
    fleet.engine.accept("dev-0", fleet.update("dev-0", advance=False).data)
    other = fleet.engine.accept("dev-0", fleet.update("dev-0", seed=99).data)
    assert (other.code, other.acknowledged) == ("duplicate", False)
    assert len(fleet.store.updates(1)) == 1


def test_offers_and_updates_are_held_to_the_same_rules_in_the_same_words(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(devices=4)
    fleet.open(["dev-0", "dev-1", "dev-2"])
    engine, good, other = fleet.engine, fleet.update("dev-0", advance=False), fleet.update("dev-0", seed=9)
    assert engine.accept("dev-0", good.data).code == "accepted"
    engine.exclude("dev-2")
    header = good.header
    cases = {
        "duplicate": ("dev-0", other),
        "late": ("dev-1", fleet.devices.sign("dev-1", header, good.values, good.counts, device="dev-1", round=2)),
        "not-in-cohort": ("dev-3", fleet.devices.sign("dev-3", header, good.values, good.counts, device="dev-3")),
        "unknown-device": ("dev-2", fleet.devices.sign("dev-2", header, good.values, good.counts, device="dev-2")),
    }
    for code, (name, update) in cases.items():
        digest = hashlib.sha256(update.data).digest()
        offered = CheckedUpdate(name, kind="offer", task="tiny-0001", round=update.header.round, digest=digest)
        assert not engine.admit(offered)
        came = engine.accept(name, update.data)
        assert (offered.code, offered.acknowledged) == (came.code, came.acknowledged) == (code, False)
        assert offered.reason == came.reason
    other_task = CheckedUpdate("dev-1", kind="offer", task="tiny-0002", round=1)
    assert not engine.admit(other_task)
    assert "tiny-0002" in other_task.reason
    assert engine.admit(CheckedUpdate("dev-1", kind="offer", task="tiny-0001", round=1))
    digest = hashlib.sha256(good.data).digest()
    again = CheckedUpdate("dev-0", kind="offer", task="tiny-0001", round=1, digest=digest)
    assert not engine.admit(again)
    assert (again.code, again.acknowledged, engine.accepted) == ("duplicate", True, 1)


def test_a_section_with_the_public_state_makes_no_second_update(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.open()
    state = fleet.devices.states["dev-0"].public.to_bytes()
    update = fleet.update("dev-0")
    with_state = fleet.devices.sign("dev-0", update.header, update.values, update.counts, public=state)
    assert with_state.data != update.data
    assert fleet.engine.accept("dev-0", update.data).code == "accepted"
    assert fleet.engine.accept("dev-0", with_state.data).code == "duplicate"


def test_cohorts_are_all_who_are_present_or_a_seeded_choice(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(devices=5)
    assert sorted(fleet.open(["dev-3", "dev-1", "dev-1"]).cohort) == ["dev-1", "dev-3"]
    chosen = []
    for seed in (1, 2, 3, 4):
        fleet = make_fleet(devices=5, cohort_size=2, seed=seed)
        plan = fleet.open()
        assert len(plan.cohort) == plan.noise_split == 2
        chosen.append(sorted(plan.cohort))
    assert len({tuple(c) for c in chosen}) > 1


names = st.lists(st.from_regex(r"[a-z][a-z0-9]{0,20}", fullmatch=True), unique=True, max_size=40)


@given(present=names, size=st.integers(0, 50), seed=st.integers(0, 2**62), random=st.randoms(use_true_random=False))
def test_a_cohort_depends_on_seed_round_and_who_is_there(present: list[str], size: int, seed: int, random: Any) -> None:
    cohort = choose_cohort(present, size=size, seed=seed, round=7)
    random.shuffle(present)
    assert cohort == choose_cohort(present, size=size, seed=seed, round=7)
    assert cohort == sorted(cohort)
    assert set(cohort) <= set(present)
    assert len(cohort) == (min(size, len(present)) if size else len(present))


def test_a_cohort_never_outgrows_its_plan(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(devices=3)
    many = [f"{'x' * 58}{index:05d}" for index in range(2000)]
    plan = fleet.engine.open_round(many)
    assert 600 < len(plan.cohort) < 800
    assert plan.noise_split == 3, "what the task package names, however many there are"


def test_a_round_cannot_be_opened_twice_or_without_devices_or_after_the_end(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(rounds=1)
    with pytest.raises(BadInput, match="no device"):
        fleet.engine.open_round([])
    with pytest.raises(BadInput, match="no round is open"):
        fleet.engine.close()
    fleet.run_round()
    assert fleet.engine.announcement.phase == "finished"
    with pytest.raises(BadInput, match="no round can be opened"):
        fleet.open()


def test_a_round_closes_at_the_quorum(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(devices=4, quorum=0.5)
    fleet.open()
    fleet.engine.accept("dev-0", fleet.update("dev-0").data)
    assert not fleet.engine.should_close(fleet.now)
    fleet.engine.accept("dev-1", fleet.update("dev-1").data)
    assert fleet.engine.should_close(fleet.now)


def test_a_round_closes_when_everyone_has_answered(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(devices=4, deadline_s=100)
    fleet.open()
    fleet.engine.accept("dev-0", fleet.update("dev-0").data)
    assert fleet.engine.decline("dev-1", "budget", "spent", round=1)
    assert not fleet.engine.decline("dev-1", "budget", "spent", round=1)
    assert not fleet.engine.decline("dev-2", "budget", "spent", round=2)
    assert not fleet.engine.decline("stranger", "budget", "spent", round=1)
    loud = fleet.update("dev-2")
    fleet.engine.accept("dev-2", fleet.devices.sign("dev-2", loud.header, loud.values * 1000, loud.counts).data)
    assert not fleet.engine.should_close(fleet.now)
    fleet.engine.lost("dev-3")
    assert not fleet.engine.should_close(fleet.now + 24), "it may only be rebooting"
    assert fleet.engine.should_close(fleet.now + 25)
    fleet.engine.back("dev-3")
    assert not fleet.engine.should_close(fleet.now + 99)
    fleet.now += 50
    fleet.engine.lost("dev-3")
    fleet.now += 10
    fleet.engine.lost("dev-3")  # a second will changes nothing
    assert not fleet.engine.should_close(fleet.now + 14)
    assert fleet.engine.should_close(fleet.now + 15)


def test_a_declined_device_may_still_change_its_mind(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.open()
    fleet.engine.decline("dev-0", "busy", "training took too long", round=1)
    assert fleet.engine.accept("dev-0", fleet.update("dev-0").data).code == "accepted"


def test_the_deadline_closes_with_enough_and_extends_with_fewer(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(min_updates=2, deadline_s=60)
    plan = fleet.open()
    fleet.engine.accept("dev-0", fleet.update("dev-0").data)
    assert not fleet.engine.should_close(fleet.now + 59)
    assert not fleet.engine.should_close(fleet.now + 60)
    assert fleet.engine.responses.extensions == 1
    assert fleet.engine.plan.deadline_s == 120 != plan.deadline_s
    fleet.engine.accept("dev-1", fleet.update("dev-1").data)
    assert not fleet.engine.should_close(fleet.now + 119)
    assert fleet.engine.should_close(fleet.now + 120)


def test_a_round_is_not_closed_while_the_whole_fleet_is_away(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(min_updates=2, deadline_s=60)
    fleet.open()
    for name in fleet.names:
        fleet.engine.lost(name)
    for minute in range(1, 100):
        assert not fleet.engine.should_close(fleet.now + 60 * minute, ready=0)
    assert fleet.engine.responses.extensions == 99
    assert fleet.engine.should_close(fleet.now + 6000, ready=3), "others are waiting"


def test_too_few_updates_leave_the_model_and_release_nothing(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(min_updates=2, deadline_s=60, method="dp-fedavg")
    before = fleet.engine.global_digest
    fleet.open()
    fleet.engine.accept("dev-0", fleet.update("dev-0").data)
    for name in ("dev-1", "dev-2"):
        fleet.engine.decline(name, "no-data", "", round=1)
    assert not fleet.engine.should_close(fleet.now)
    assert fleet.engine.should_close(fleet.now + 60)
    summary = fleet.engine.close()
    assert (summary.participants, summary.multiplier_release) == (0, None)
    assert fleet.engine.global_digest == before
    (row,) = spent(fleet)
    assert (row.device, row.rounds_charged, row.epsilon_release) == ("dev-0", 1, 0.0)
    assert row.epsilon_server == pytest.approx(epsilon([Step(2 / math.sqrt(3), 1.0, 1)], delta=0.01))


def test_with_records_a_round_without_a_model_counts_against_readers_too(make_fleet: MakeFleet) -> None:
    """What a device keeps of such a round has an effect on its later updates, bounded by the noise of the round."""
    unit = {"unit": "record", "sample_rate": 0.1, "delta": 1e-5}
    fleet = make_fleet(min_updates=2, deadline_s=60, method="dp-fedavg", unit=unit)
    for names in (fleet.names[:1], fleet.names):
        fleet.open()
        for name in names:
            assert fleet.engine.accept(name, fleet.update(name).data).code == "accepted"
        for name in set(fleet.names) - set(names):
            fleet.engine.decline(name, "no-data", "", round=1)
        fleet.now += 1e6
        summary = fleet.engine.close()
    assert summary.participants == 3
    rows = {row.device: row for row in spent(fleet)}
    assert rows["dev-0"].epsilon_release == rows["dev-0"].epsilon_server
    assert rows["dev-0"].epsilon_release > rows["dev-1"].epsilon_release > 0


def test_the_summary_of_a_round(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(method="dp-fedavg", evaluate=lambda params: Evaluation(0.25, float("nan")))
    fleet.open()
    updates = [fleet.update(name) for name in fleet.names[:2]]
    for name, update in zip(fleet.names, updates, strict=False):
        fleet.engine.accept(name, update.data)
    fleet.now += 12.5
    summary = fleet.engine.close()
    assert summary == RoundSummary(
        round=1,
        cohort_size=3,
        participants=2,
        uplink_bytes=sum(len(update.data) for update in updates),
        downlink_bytes=2 * 256 * 4,
        snr_db=summary.snr_db,
        wall_s=12.5,
        accuracy_global=0.25,
        loss=None,
        multiplier_release=2 * math.sqrt(2 / 3),
        eq20_bytes=2 * 256 * 33 / 8,
        float32_bytes=2 * 256 * 4,
    )
    assert RoundSummary(**fleet.store.last_round().metrics) == summary


def test_eq20_counts_what_is_really_shared(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.run_round()
    fleet.open()
    updates = [fleet.update(name) for name in fleet.names]
    for name, update in zip(fleet.names, updates, strict=True):
        fleet.engine.accept(name, update.data)
    personal = sum(256 - sum(update.counts) for update in updates)
    assert personal > 0
    assert fleet.engine.close().eq20_bytes == (3 * 33 * 256 - 32 * personal) / 8


def test_signal_to_noise_of_what_was_sent(make_fleet: MakeFleet) -> None:
    """Updates clipped to 0.5 under noise of 0.5 x 0.005 on 256 values: 10 log10(0.25 / (256 x 0.0025^2))."""
    fleet = make_fleet(method="dp-fedavg", multiplier=0.005, accounting="strict")
    assert fleet.run_round().snr_db == pytest.approx(10 * math.log10(0.25 / (256 * 0.0025**2)), abs=0.3)
    assert make_fleet(method="dp-fedavg", multiplier=50.0).run_round().snr_db is None
    assert make_fleet(method="fedavg", multiplier=0.0).run_round().snr_db is None


def test_raw_values_cost_infinity_beside_what_the_noise_costs(make_fleet: MakeFleet) -> None:
    """FedGLP-ADP as published: its clip norms follow raw norms, and so does the noise in the models."""
    fleet = make_fleet()
    fleet.run_round()
    for row in spent(fleet):
        assert row.raw_values == ["clip norms that follow the norms of raw updates"]
        assert row.epsilon_server == row.epsilon_release == math.inf
        assert row.noised_server == pytest.approx(epsilon([Step(2 / math.sqrt(3), 1.0, 1)], delta=0.01))
        assert row.noised_release == pytest.approx(epsilon([Step(2.0, 1.0, 1)], delta=0.01))


@pytest.mark.parametrize(
    ("wire", "adds_up"),
    [({}, True), ({"codec": "float32", "step": 2.0}, True), ({"step": 1.5}, False), ({"codec": "one-bit"}, False)],
)
def test_a_coarse_code_hides_a_device_by_its_own_noise_alone(
    make_fleet: MakeFleet, wire: dict[str, Any], adds_up: bool
) -> None:
    """One bit a value also carries the noise of a round into later ones, by its residual."""
    fleet = make_fleet(method="dp-fedavg", accounting="strict", wire=wire)
    assert fleet.run_round().multiplier_release == pytest.approx(2 * math.sqrt(3) if adds_up else 2.0)
    for row in spent(fleet):
        assert (row.epsilon_release < row.epsilon_server) == adds_up


def test_privacy_of_each_device_against_both_adversaries(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(method="dp-fedavg")
    fleet.run_round()
    fleet.open()
    for name in ("dev-0", "dev-1"):
        fleet.engine.accept(name, fleet.update(name).data)
    fleet.engine.close()
    fleet.open()
    fleet.engine.accept("dev-0", fleet.update("dev-0").data)
    rows = {row.device: row for row in spent(fleet)}
    local = Step(2 / math.sqrt(3), 1.0, 1)
    whole, two_of_three = Step(2.0, 1.0, 1), Step(2 * math.sqrt(2 / 3), 1.0, 1)
    assert [rows[name].rounds_charged for name in fleet.names] == [3, 2, 1]
    for rounds, name in ((3, "dev-0"), (2, "dev-1"), (1, "dev-2")):
        assert rows[name].epsilon_server == pytest.approx(epsilon([local] * rounds, delta=0.01), rel=1e-12)
    assert rows["dev-0"].epsilon_release == pytest.approx(epsilon([whole, two_of_three], delta=0.01), rel=1e-12)
    assert rows["dev-2"].epsilon_release == pytest.approx(epsilon([whole], delta=0.01), rel=1e-12)
    first = {row.device: row for row in spent(fleet, until=1)}
    assert [first[name].rounds_charged for name in fleet.names] == [1, 1, 1]
    # all rounds at once, as each by itself
    by_round = privacy_tables(fleet.store, [1, 2, 3], delta=0.01)
    assert [list(table.values()) for table in by_round] == [spent(fleet, until) for until in (1, 2, 3)]
    assert by_round[0]["dev-2"] == by_round[2]["dev-2"]
    assert by_round[0]["dev-0"] != by_round[1]["dev-0"] != by_round[2]["dev-0"]


def test_what_a_device_says_of_itself_counts_where_it_is_more(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(method="dp-fedavg")
    fleet.open()
    update = fleet.update("dev-0")
    more = fleet.devices.sign(
        "dev-0", update.header, update.values, update.counts, rounds_charged=7, epsilon_server=55.5
    )
    assert fleet.engine.accept("dev-0", more.data).code == "accepted"
    (row,) = spent(fleet)
    assert (row.rounds_charged, row.epsilon_server) == (7, 55.5)


def test_no_noise_is_an_infinite_epsilon(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(method="fedavg", multiplier=0.0)
    fleet.run_round()
    (row, *_) = spent(fleet)
    assert row.epsilon_server == row.epsilon_release == math.inf


def test_a_restart_at_every_step_ends_in_the_same_model(make_fleet: MakeFleet) -> None:
    calm, restless = make_fleet(), make_fleet()
    while not calm.engine.finished:
        calm.run_round()
    while not restless.engine.finished:
        restless.restart().open_round(restless.names)
        for name in restless.names:
            plan = restless.restart().plan
            assert plan is not None
            assert restless.engine.accept(name, restless.update(name).data).code == "accepted"
        assert restless.restart().accepted == 3
        restless.engine.close()
    restless.restart()
    assert restless.engine.global_digest == calm.engine.global_digest
    assert restless.engine.announcement == calm.engine.announcement
    assert restless.store.charges() == calm.store.charges()


def test_declines_survive_a_restart(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.open()
    fleet.engine.accept("dev-0", fleet.update("dev-0").data)
    fleet.engine.decline("dev-1", "budget", "spent", round=1)
    fleet.restart()
    assert [fleet.engine.responses.expects(name) for name in fleet.names] == [False, False, True]


def test_a_store_of_another_task_is_refused(make_fleet: MakeFleet, tmp_path: Any) -> None:
    fleet = make_fleet()
    fleet.run_round()
    fleet.prepared = make_fleet(method="dp-fedavg").prepared
    with pytest.raises(BadInput, match="tiny-0001"):
        fleet.restart()


def test_a_checkpoint_that_was_tampered_with_is_refused(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.run_round()
    other = fleet.engine.global_params.copy()
    other[0] += 1
    fleet.engine.model.checkpoints.write(1, other)
    with pytest.raises(StoreError, match="not the model that the store names"):
        fleet.restart()


def test_old_checkpoints_go_and_the_first_and_the_last_stay(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(rounds=6)
    while not fleet.engine.finished:
        fleet.run_round()
    kept = sorted(path.name for path in fleet.folder.glob("global-*.safetensors"))
    assert kept == [f"global-{n}.safetensors" for n in (0, 4, 5, 6)]


def fill_up(store: Any) -> None:
    """SQLite then says what it says of a full disk."""
    pages = store.rows("PRAGMA page_count")[0][0]
    store.rows(f"PRAGMA max_page_count = {pages}")
    filler = (f"filler-{index}" for index in range(1000))
    with pytest.raises(StoreFull):
        _put_all(store, filler)


def test_a_full_disk_loses_nothing_and_the_round_goes_on_when_there_is_room(make_fleet: MakeFleet) -> None:
    fleet, calm = make_fleet(devices=60), make_fleet(devices=60)
    calm.run_round()
    fleet.open()
    updates = {name: fleet.update(name).data for name in fleet.names}
    fill_up(fleet.store)
    codes = {name: fleet.engine.accept(name, updates[name]).code for name in fleet.names}
    assert set(codes.values()) == {"accepted", "store-full"}
    for name, code in codes.items():
        assert fleet.engine.responses.expects(name) == (code == "store-full")
    taken = [name for name, code in codes.items() if code == "accepted"]
    assert [row.device for row in fleet.store.charges()] == sorted(taken)
    assert [row.device for row in fleet.store.updates(1)] == sorted(taken)
    fleet.store.rows("PRAGMA max_page_count = 1000000")
    for name, code in codes.items():
        again = fleet.engine.accept(name, updates[name])
        assert again.code == ("accepted" if code == "store-full" else "duplicate")
    fleet.engine.close()
    assert fleet.engine.global_digest == calm.engine.global_digest


def test_a_checkpoint_that_finds_no_room_leaves_the_round_open(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, calm = make_fleet(), make_fleet()
    calm.run_round()
    fleet.open()
    for name in fleet.names:
        fleet.engine.accept(name, fleet.update(name).data)
    before = fleet.engine.global_digest
    with monkeypatch.context() as patch:
        patch.setattr("hushfleet.atomic_file.os.replace", _no_room)
        with pytest.raises(StoreFull, match="free some space"):
            fleet.engine.close()
    assert fleet.engine.global_digest == before
    assert not list(fleet.folder.glob("*.part"))
    fleet.engine.close()
    assert fleet.engine.global_digest == calm.engine.global_digest


def _no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


def _put_all(store: Any, keys: Any) -> None:
    for key in keys:
        store.put(key, bytes(100))
