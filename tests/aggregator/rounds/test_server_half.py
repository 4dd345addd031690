"""What a method's server half decides, hears and weighs, through the round engine and its restarts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hushfleet import methods
from hushfleet.aggregator.rounds.server_half import server_state_from_bytes, server_state_to_bytes
from hushfleet.errors import BadInput, StoreError
from hushfleet.learning.evaluation import Evaluation
from hushfleet.methods.method import CLIP_AND_NOISE, Method, Published, TrainingConfig
from hushfleet.methods.server import ClosedRound, ServerArrays, ServerHalf
from hushfleet.methods.stages import NumberReport
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import PrivacySpec

MakeFleet = Callable[..., Any]


@dataclass(frozen=True)
class Steered(ServerHalf):
    """Clips to half of the last clip norm plus a tenth of the reports' sum; weighs devices by what they send."""

    clip_norm: float

    def initial(self, seed: int) -> ServerArrays:
        return {"clip_norm": np.array(self.clip_norm), "seen": np.zeros((0, 2))}

    def controls(self, state: ServerArrays, round: int) -> dict[str, float]:
        return {"clip_norm": float(state["clip_norm"]), "noise_multiplier": 1.0 + round}

    def weight(self, state: ServerArrays, global_params: np.ndarray, sent: np.ndarray, layout: ParamLayout) -> float:
        return 1.5 if sent[0] > 0 else 0.5

    def advance(self, state: ServerArrays, closed: ClosedRound) -> ServerArrays:
        reports = np.array(closed.reports)
        moved = np.linalg.norm(closed.after - closed.before)
        return {
            "clip_norm": state["clip_norm"] / 2 + 0.1 * reports.sum() + 0 * moved,
            "seen": np.concatenate([state["seen"], reports]),
        }


def parts(config: TrainingConfig, privacy: PrivacySpec, rounds: int) -> Method:
    told = NumberReport(2, "a sign", lambda context, update: (0.5 * (update[0] > 0), 0.5))
    return Method(stages=(*CLIP_AND_NOISE, told), server=Steered(privacy.clip_norm))


@pytest.fixture(autouse=True)
def steered(monkeypatch: pytest.MonkeyPatch) -> None:
    method = Published("steered", "these tests", "a server half that leaves traces", TrainingConfig, parts)
    monkeypatch.setattr(methods, "METHODS", {**methods.METHODS, "steered": method})


def test_the_plan_says_what_the_server_chose_and_updates_are_held_to_it(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(method="steered")
    plan = fleet.open()
    assert plan.controls == {"clip_norm": 0.5, "noise_multiplier": 2.0}
    update = fleet.update("dev-0")
    assert update.header.clip_norms == (0.5, 0.5)
    assert update.header.multiplier_server == pytest.approx(2.0 / 3**0.5)
    louder = fleet.devices.sign("dev-0", update.header, update.values, update.counts, clip_norms=(0.6, 0.6))
    assert fleet.engine.accept("dev-0", louder.data).code == "out-of-bounds"
    fleet = make_fleet(method="steered")
    summary = fleet.run_round()
    assert summary.multiplier_release == pytest.approx(2.0)
    assert [row.noise_multiplier for row in fleet.store.charges()] == [pytest.approx(2.0 / 3**0.5)] * 3


def test_reports_move_the_server_and_weights_the_mean(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(method="steered", wire={"codec": "float32"})
    before = fleet.engine.global_params.astype(np.float64)
    fleet.open()
    updates = [fleet.update(name, seed=seed) for seed, name in enumerate(fleet.names, 30)]
    for name, update in zip(fleet.names, updates, strict=True):
        assert fleet.engine.accept(name, update.data).code == "accepted"
    fleet.engine.close()
    weights = [1.5 if update.values[0] > 0 else 0.5 for update in updates]
    assert len(set(weights)) == 2, "both weights must occur, or nothing is tested"
    mean = sum(w * update.values.astype(np.float64) for w, update in zip(weights, updates, strict=True)) / sum(weights)
    np.testing.assert_allclose(fleet.engine.global_params, before + mean, atol=1e-6)
    told = sum(sum(update.header.report) for update in updates)
    assert fleet.open().controls["clip_norm"] == pytest.approx(0.25 + 0.1 * told)


def test_a_restart_at_every_step_ends_in_the_same_state(make_fleet: MakeFleet) -> None:
    calm, restless = make_fleet(method="steered"), make_fleet(method="steered")
    while not calm.engine.finished:
        calm.run_round()
    while not restless.engine.finished:
        plan = restless.restart().open_round(restless.names)
        for name in restless.names:
            assert restless.restart().plan == plan
            assert restless.engine.accept(name, restless.update(name).data).code == "accepted"
        restless.restart()
        restless.engine.close()
    restless.restart()
    assert restless.engine.global_digest == calm.engine.global_digest
    ours, theirs = (server_state_from_bytes(f.store.get("server_state")) for f in (restless, calm))
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_a_round_with_too_few_updates_moves_nothing(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(method="steered", min_updates=2, deadline_s=1.0)
    fleet.open()
    fleet.engine.accept("dev-0", fleet.update("dev-0").data)
    fleet.engine.close()
    assert fleet.open().controls == {"clip_norm": 0.5, "noise_multiplier": 3.0}


@pytest.mark.parametrize("last_fails", [False, True])
def test_the_task_ends_with_what_the_method_makes_of_all_rounds(make_fleet: MakeFleet, last_fails: bool) -> None:
    """Hush: the mean of the last third, through restarts, and where the last round had too few updates."""
    fleet = make_fleet(method="hush", rounds=6, min_updates=2, wire={"downlink": "full"})
    iterates = []
    for _ in range(5):
        fleet.run_round()
        iterates.append(fleet.restart().global_params.astype(np.float64))
    plan = fleet.open()
    updates = {name: fleet.update(name) for name in fleet.names[: 1 if last_fails else 3]}
    for name, update in updates.items():
        fleet.engine.accept(name, update.data)
    shared = ~fleet.prepared.method.init_state().public.mask
    last = iterates[-1].copy()
    if not last_fails:
        last[shared] += np.mean([update.encoded.sent.astype(np.float64) for update in updates.values()], axis=0)
    engine = fleet.restart()
    engine.close()
    np.testing.assert_allclose(engine.global_params, (iterates[-1] + last) / 2, atol=1e-6)
    assert engine.announcement.global_digest != plan.global_digest or last_fails
    assert fleet.restart().finished


def test_updates_of_the_unit_record_carry_their_noise_inside(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(method="dp-fedavg", unit={"unit": "record", "sample_rate": 0.1, "delta": 1e-5})
    fleet.open()
    update = fleet.update("dev-0")
    assert update.header.noise_stds == (0.0, 0.0)
    assert update.header.multiplier_server == 2.0
    declared = fleet.devices.sign("dev-0", update.header, update.values, update.counts, noise_stds=(1.0, 1.0))
    assert fleet.engine.accept("dev-0", declared.data).code == "out-of-bounds"
    changes = {"device": "dev-1", "multiplier_server": 1.0}
    quieter = fleet.devices.sign("dev-1", update.header, update.values, update.counts, **changes)
    assert fleet.engine.accept("dev-1", quieter.data).code == "out-of-bounds"
    assert fleet.engine.accept("dev-2", fleet.update("dev-2").data).code == "accepted"
    (charge,) = fleet.store.charges()
    assert (charge.unit, charge.sample_rate, charge.steps) == ("record", 0.1, 10)


@pytest.mark.parametrize(
    ("hook", "returned", "said"),
    [
        ("aggregate", None, r"NoneType: must return the global vector, shape \(\d+,\)"),
        ("aggregate", np.zeros(1), r"an array of shape \(1,\): must return the global vector"),
        ("advance", None, "NoneType: must return a dict of named arrays"),
    ],
)
def test_a_server_half_that_returns_something_else_is_refused(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, hook: str, returned: Any, said: str
) -> None:
    monkeypatch.setattr(Steered, hook, lambda *arguments: returned)
    with pytest.raises(BadInput, match=rf"steered\.{hook} returned {said}"):
        make_fleet(method="steered").run_round()


def test_a_state_that_does_not_load_says_so() -> None:
    whole = server_state_to_bytes({"a": np.arange(3)})
    np.testing.assert_array_equal(server_state_from_bytes(whole)["a"], np.arange(3))
    for broken in (b"", whole[:-30], b"x" * 100):
        with pytest.raises(StoreError, match="server half"):
            server_state_from_bytes(broken)


@pytest.mark.parametrize("clipping", ["ppo", "quantile"])
@pytest.mark.parametrize("accounting", ["as-published", "strict"])
def test_a_killed_server_chooses_the_same_clip_norms(make_fleet: MakeFleet, clipping: str, accounting: str) -> None:
    chosen: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for dies in chosen:
        settings = {"clipping": clipping, "agent_buffer": 2}
        fleet = make_fleet(method="acdp-pfsd", rounds=6, accounting=accounting, settings=settings)
        for number in range(6):
            chosen[dies].append(dict(fleet.open().controls))
            for index, name in enumerate(fleet.names):
                found = Evaluation(0.1 * number + 0.01 * index, 2.0 - 0.1 * number)
                fleet.devices.measured[name] = found
                assert fleet.engine.accept(name, fleet.update(name).data).code == "accepted"
                if dies and index == 1:
                    fleet.restart()
            fleet.engine.close()
            if dies:
                fleet.restart()
    assert chosen[True] == chosen[False]
    assert len({tuple(each.items()) for each in chosen[True]}) > 2, "the clip norm moves"
