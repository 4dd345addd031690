"""Fleets through storms: ten seeds as anybody can run them, and faults that the audit of a run must find.

The long form is `make chaos`.
"""

from __future__ import annotations

import io
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import typer
from rich.console import Console

from chaos.campaign import Campaign, chaos_task, parse_seeds, run_campaign, summary
from chaos.plan import KINDS, Moment, Plan, Tampering, Trouble, What, draw_plan, tempting
from chaos.trial import Outcome, TrialRunner
from hushfleet.aggregator.config.task import load_task
from hushfleet.errors import BadInput
from hushfleet.simulator.run_folder import Simulation, begin

pytestmark = pytest.mark.slow

TASK = Path(__file__).parents[2] / "tasks" / "digits-chaos.toml"
MUTANTS = Path(__file__).with_name("mutants.py")
SECURE = ('method.name="dp-fedavg"', 'privacy.accounting="secure"', "privacy.delta=1e-5")
NAMES = [f"device-{number}" for number in range(6)]
LONG_FORM = range(200)
SEEDS = (1, 2, 3, 5)  # the fewest that have every kind of trouble


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    return begin(chaos_task(load_task(TASK)), tmp_path_factory.mktemp("chaos") / "prepared", data_dir=None)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    """Two devices and two rounds: enough for a planted fault."""
    task = load_task(TASK, ("data.devices=2", "data.limit=160", "round.rounds=2"))
    return begin(chaos_task(task), tmp_path_factory.mktemp("pair") / "prepared", data_dir=None)


@pytest.fixture(scope="module")
def runner(prepared: Simulation, library: Path | None) -> TrialRunner:
    return TrialRunner(prepared, library=library)


@pytest.mark.parametrize("seed", SEEDS[1:])
def test_a_fleet_comes_through_a_storm(runner: TrialRunner, seed: int, tmp_path: Path) -> None:
    outcome = runner.run(seed, tmp_path / "run")
    assert outcome.wrong == []
    assert outcome.played


def test_a_fleet_with_secure_aggregation_comes_through_a_storm(library: Path | None, tmp_path: Path) -> None:
    """With a device that sends bad updates, and never answers as a member of the committee."""
    task = load_task(TASK, SECURE)
    runner = TrialRunner(begin(chaos_task(task), tmp_path / "prepared", data_dir=None), library=library)
    assert runner.plan(1).hostile
    outcome = runner.run(1, tmp_path / "run")
    assert outcome.wrong == []
    assert outcome.played
    assert outcome.bad_updates > 0


def test_the_same_seed_gives_the_same_plan() -> None:
    for seed in LONG_FORM:
        assert draw_plan(seed, NAMES, rounds=3) == draw_plan(seed, NAMES, rounds=3)
    assert draw_plan(1, NAMES, rounds=3).troubles != draw_plan(8, NAMES, rounds=3).troubles


def test_the_long_form_has_every_trouble() -> None:
    plans = [draw_plan(seed, NAMES, rounds=3) for seed in LONG_FORM]
    troubles = [trouble for plan in plans for trouble in plan.troubles]
    assert min(Counter(trouble.kind for trouble in troubles)[kind] for kind in KINDS) >= 20
    killed = Counter(name for trouble in troubles if trouble.kind == "kill" for name in trouble.targets)
    assert min(killed[name] for name in (*NAMES, "aggregator", "broker")) >= 10
    for kind in ("power-cut", "full-disk", "clock-jump"):
        struck = {name for trouble in troubles if trouble.kind == kind for name in trouble.targets}
        assert struck >= {"aggregator", *NAMES[:-1]}
    assert sum(bool(trouble.again_s) for trouble in troubles) >= 20, "killed while they start"
    assert {trouble.amount for trouble in troubles if trouble.kind == "power-cut"} == {0.0, 0.5, 1.0}
    assert {trouble.amount > 0 for trouble in troubles if trouble.kind == "clock-jump"} == {True, False}
    assert {trouble.moment.what for trouble in troubles} == set(get_args(What))
    assert {how for plan in plans for how in plan.tampering} == set(get_args(Tampering))
    for some in ("field_noise", "hostile", "links"):
        assert 20 <= sum(bool(getattr(plan, some)) for plan in plans) <= 100
    assert {plan.broker for plan in plans} == {"auto", "amqtt"}


def test_the_few_of_the_tests_have_every_kind_of_trouble() -> None:
    plans = [draw_plan(seed, NAMES, rounds=3) for seed in SEEDS]
    assert {trouble.kind for plan in plans for trouble in plan.troubles} == set(KINDS)
    assert all(any(getattr(plan, some) for plan in plans) for some in ("field_noise", "hostile", "links", "tampering"))


def plan_of(seed: int, *troubles: Trouble, field_noise: bool) -> Plan:
    return Plan(seed, "auto", field_noise, (), None, {}, troubles)


def mutant(fault: str) -> tuple[str, ...]:
    return (sys.executable, str(MUTANTS), fault)


def test_noise_that_is_drawn_again_is_found(pair: Simulation, library: Path | None, tmp_path: Path) -> None:
    """By what left the device, and never by a time limit: what the ledger has is not what was offered."""
    deaf, dead = tempting(random.Random(1), "device-1")
    deaf = replace(deaf, lasts_s=60.0, until=Moment("committed", 2, "device-1"))
    runner = TrialRunner(pair, library=library, client=mutant("noises-again"))
    outcome = runner.play(plan_of(1, deaf, dead, field_noise=True), tmp_path / "run")
    assert any("ledger" in wrong for wrong in outcome.wrong), outcome.wrong
    assert not any("not finished" in wrong for wrong in outcome.wrong)


def test_noise_that_the_ledger_kept_from_leaving_is_found(
    pair: Simulation, library: Path | None, tmp_path: Path
) -> None:
    runner = TrialRunner(pair, library=library, client=mutant("noises-again-in-vain"))
    outcome = runner.play(plan_of(2, field_noise=True), tmp_path / "run")
    assert any("declined round 1" in wrong for wrong in outcome.wrong), outcome.wrong


def test_a_ledger_that_is_written_late_is_found(pair: Simulation, library: Path | None, tmp_path: Path) -> None:
    deaf = Trouble("kill", Moment("training", 1, "device-1"), 0.0, ("aggregator",), 60.0)  # no next round until then
    dead = Trouble("kill", Moment("sent", 1, "device-1"), 0.0, ("device-1",), 0.0)
    runner = TrialRunner(pair, library=library, client=mutant("charges-late"))
    outcome = runner.play(plan_of(3, deaf, dead, field_noise=False), tmp_path / "run")
    assert any("its ledger did not have" in wrong for wrong in outcome.wrong), outcome.wrong


@pytest.mark.needs("compiler")
def test_a_store_that_does_not_sync_is_found(pair: Simulation, library: Path | None, tmp_path: Path) -> None:
    cut = Trouble("power-cut", Moment("round_close", 1), 0.0, ("device-1",), 0.0)
    runner = TrialRunner(pair, library=library, client=mutant("does-not-sync"))
    outcome = runner.play(plan_of(4, cut, field_noise=True), tmp_path / "run")
    assert any("its ledger did not have" in wrong for wrong in outcome.wrong), outcome.wrong


def test_a_round_is_measured_again_by_who_died_before_the_commit_alone(
    pair: Simulation, library: Path | None, tmp_path: Path
) -> None:
    """Both devices lose a round that they had measured. To the audit that is right for the one that was killed."""
    runner = TrialRunner(pair, library=library, client=mutant("begins-anew"))
    kill = Trouble("kill", Moment("round_open", 1), 0.0, ("device-1",), 0.0)
    outcome = runner.play(plan_of(6, kill, field_noise=False), tmp_path / "run")
    assert outcome.wrong == ["device-0 was started once and measured the rounds ['1', '1', '2']"]


def test_an_update_that_is_added_twice_is_found(pair: Simulation, library: Path | None, tmp_path: Path) -> None:
    kill = Trouble("kill", Moment("update", 1), 0.0, ("device-1",), 0.0)
    runner = TrialRunner(pair, library=library, aggregator=mutant("adds-twice"))
    outcome = runner.play(plan_of(5, kill, field_noise=False), tmp_path / "run")
    assert outcome.wrong == ["the models are not those of the calm run"]


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("3", [0, 1, 2]), ("17-17", [17]), ("4-6", [4, 5, 6]), ("3,17,5-6,3", [3, 17, 5, 6])],
)
def test_seeds(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "0", "x", "5-3", "1-2-3", "-4", "200000"])
def test_what_is_no_seeds(text: str) -> None:
    with pytest.raises(BadInput, match="how many seeds"):
        parse_seeds(text)


def test_a_campaign_notes_what_was_run_and_goes_on(prepared: Simulation, tmp_path: Path) -> None:
    """The first storm, by the command's own way: a worker, a summary, and nothing left to do for --resume."""
    task, (seed, *_) = load_task(TASK), SEEDS
    campaign = Campaign(tmp_path / "campaign", [seed], jobs=1)
    simulation = campaign.prepare(task, data_dir=None, resume=False)
    outcomes = list(campaign.run(simulation))
    assert [(outcome.seed, outcome.wrong) for outcome in outcomes] == [(seed, [])]
    assert outcomes[0].played
    assert not (campaign.folder / f"seed-{seed}").exists(), "only what failed is kept"
    again = campaign.prepare(task, data_dir=None, resume=True)
    assert campaign.done() == outcomes
    assert list(campaign.run(again)) == []
    plain = summary(outcomes, seconds=1.0)
    assert (plain["seeds"], plain["passed"], plain["failed"]) == (1, 1, [])
    with pytest.raises(BadInput, match="another task"):
        campaign.prepare(load_task(TASK, ("seed=8",)), data_dir=None, resume=True)


class Pretended(Campaign):
    """A campaign whose runs are over at once; seed 2 fails."""

    def prepare(self, task: object, **_: object) -> None:
        self.folder.mkdir()

    def library(self) -> tuple[None, str]:
        return None, ""

    def run(self, simulation: object) -> Iterator[Outcome]:
        for seed in self.seeds:
            plan = plan_of(seed, field_noise=False)
            wrong = ["two [noisings] of round 1"] if seed == 2 else []
            yield Outcome.of(plan, wrong=wrong, seconds=3.25, played=[("kill", "device-1"), ("kill", "aggregator")])


def test_a_pipe_gets_a_line_for_each_seed_and_what_failed_can_be_replayed(tmp_path: Path) -> None:
    said, campaign = io.StringIO(), Pretended(tmp_path / "campaign", [1, 2, 3])
    typed = {"again": "", "replay": "chaos x"}
    with pytest.raises(typer.Exit) as ended:
        run_campaign(load_task(TASK), campaign, Console(file=said), data_dir=None, resume=False, **typed)
    assert ended.value.exit_code == 1
    lines = said.getvalue().splitlines()
    assert lines[0] == "seed 1: passed in 3.2 s; kill of device, kill of aggregator"
    assert lines[1] == "seed 2: two [noisings] of round 1"
    assert lines[2].startswith("seed 3: passed")
    assert lines[-1].strip() == "chaos x --seeds 2-2"
    plain = json.loads((campaign.folder / "chaos.json").read_text())
    assert (plain["passed"], plain["failed"], plain["happened"]["kill of device"]) == (2, [2], 3)
