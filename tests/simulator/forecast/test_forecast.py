"""`hushfleet forecast`: figures by hand, policies compared, and what the command says."""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from hushfleet.aggregator.commands.main import build_app
from hushfleet.aggregator.config.schedule import ScheduleSection
from hushfleet.aggregator.config.season import SeasonSection
from hushfleet.aggregator.config.task import Task, load_task, parse_task
from hushfleet.aggregator.fleet.tasks.task_check import season_charge
from hushfleet.aggregator.payloads.prepare import PreparedTask, prepare
from hushfleet.aggregator.report.readable import format_seconds
from hushfleet.errors import BadInput
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.privacy.budget import Budget
from hushfleet.privacy.ledger import epsilon_server_of
from hushfleet.simulator.boards import FleetMix, parse_mix
from hushfleet.simulator.fleet import device_names, make_fleet
from hushfleet.simulator.forecast.days import Days, limited, read_budget
from hushfleet.simulator.forecast.forecast import AS_IN_TASK, Forecast, epsilon_unused, forecast, read_policies
from hushfleet.simulator.forecast.show import print_forecasts, sample_counts
from hushfleet.simulator.world.fleet import WorldFleet
from hushfleet.simulator.world.outcomes import STARTS, Spent
from hushfleet.simulator.world.sizes import sizes_of
from hushfleet.simulator.world.times import Costs

ZERO, ORIN = "raspberry-pi-zero-2-w", "jetson-orin-nano"
COSTS = Costs(batch_s=0.05, sample_s=0.0, release_s=0.0, start_s=0.0, load_s=0.0, accept_s=0.0, close_s=0.0)
TASK = Path(__file__).parents[3] / "tasks" / "digits-fedglp-adp.toml"
HUSH = TASK.with_name("digits-hush.toml")


@pytest.fixture(scope="module")
def prepared(short_task: Callable[..., Task]) -> PreparedTask:
    # gamma = 0 leaves the clip norms alone: nothing raw is sent, and epsilons are finite
    task = short_task(method={"gamma": 0.0}, round={"rounds": 6, "min_updates": 1, "deadline_s": 600})
    return prepare(task, run_id="seed7")


def predict(prepared: PreparedTask, mix: FleetMix, *, samples: int = 160, **changes: Any) -> Forecast:
    """Forecast of 160 samples, 16 a batch: ten batches of 50 ms on the reference board."""
    rules = replace(prepared.task.round, **changes)
    sizes = sizes_of(prepared, name_bytes=len(device_names(len(mix))[0]))
    return forecast(prepared, mix, rules, policy="this", samples=[samples], costs=COSTS, sizes=sizes)


def test_time_energy_and_bytes_of_two_boards(prepared: PreparedTask) -> None:
    one = predict(prepared, FleetMix.in_turn([ZERO, ORIN], 2))
    # the Zero computes 0.5 s / 0.05 a round, the Orin 0.5 s / 0.25; the model has 4,890 parameters
    train_s, quick_s = 10.0, 2.0
    # and a difference between two models is about as large as an update
    transfers_s = 5 * 0.005 + 0.05 + 2 * 2300 * 8 / 35e6
    assert one.round_median_s == pytest.approx(train_s + transfers_s, rel=0.005)
    # the longest of six is the first, in which package and graphs are fetched one after the other; births are gathered
    # for 0.05 s, and the fetch has begun meanwhile
    assert one.round_p95_s - one.round_median_s == pytest.approx(3 * (0.01 + 0.05) - 0.05, rel=0.05)
    assert one.total_s == pytest.approx(6 * (train_s + transfers_s), rel=0.02)
    assert (one.updates_per_round, one.stragglers, one.rounds_without, one.unused_share) == (2, 0, 0, 0)
    idle_wh = (0.7 + 4) * one.total_s / 3600
    active_wh = ((1.8 - 0.7) * 6 * train_s + (15 - 4) * 6 * quick_s) / 3600
    assert one.energy_wh == pytest.approx(idle_wh + active_wh, rel=1e-4)
    # 12 updates, 2 models of four bytes a parameter and 10 differences, and small messages
    assert 12 * 1900 < one.up_bytes < 12 * 2350 + 12 * 1600
    models = 2 * 4 * 4890 + 10 * 2150
    assert models < one.down_bytes - 2 * 12_000 < models * 1.1 + 12 * 2000
    sigma = prepared.spec.privacy.noise_multiplier / math.sqrt(2)
    assert one.epsilon == pytest.approx(epsilon([Step(sigma, 1.0, 6)], delta=prepared.spec.privacy.delta))


def test_days_tell_rounds_and_epsilon_by_quarter_and_when_a_budget_ends(prepared: PreparedTask) -> None:
    """Six rounds, one a week: two owners' limits are held against what each further round would make of them."""
    weekly = replace(prepared, task=replace(prepared.task, schedule=ScheduleSection(every="7d", timezone="UTC")))
    privacy, sizes = prepared.spec.privacy, sizes_of(prepared, name_bytes=1)
    options = {"policy": "this", "samples": [16], "costs": COSTS, "sizes": sizes}

    def spent(rounds: int) -> float:
        return epsilon([Step(privacy.noise_multiplier / math.sqrt(2), 1.0, rounds)], delta=privacy.delta)

    def over(days: int, budget: Budget | None = None) -> Days:
        mix = FleetMix.in_turn([ORIN], 2)
        found = forecast(weekly, mix, weekly.task.round, starts=STARTS, days=days, budget=budget, **options).days
        assert found is not None
        return found

    year = over(365)
    assert [each.rounds for each in year.quarters] == [6, 0, 0, 0]
    assert [each.epsilon for each in year.quarters] == pytest.approx([spent(6), 0, 0, 0])
    assert year.task_ends == pytest.approx(35, abs=0.1)
    assert year.training_h == pytest.approx(6 * 0.05 / 0.25 / 3600, rel=0.01)
    weeks = over(16)
    assert [each.rounds for each in weeks.quarters] == [1, 1, 0, 1]
    assert weeks.task_ends is None, "three of its rounds have run"
    lifetime = over(365, Budget(privacy.delta, lifetime=spent(4)))
    assert (lifetime.period_spent, lifetime.lifetime_spent) == (None, pytest.approx(28, abs=0.1))
    assert lifetime.quarters[0].epsilon == pytest.approx(spent(4)), "nothing is charged beyond the owner's limit"
    # a period of 30 days ends on the 7th of January, two days after STARTS: the next one has room for weeks 1 and 2
    monthly = over(365, Budget(privacy.delta, lifetime=100, in_period=spent(2), period_s=30 * 86400))
    assert (monthly.period_spent, monthly.lifetime_spent) == (pytest.approx(21, abs=0.1), None)
    assert "boards wait for the next period" in str(monthly.rows())
    assert monthly.quarters[0].epsilon == pytest.approx(spent(4)), "weeks 3 and 4 are left out"


def test_a_year_says_until_when_the_fleet_learns(prepared: PreparedTask) -> None:
    """A task of six weeks that repeats in each quarter, and one that does not."""
    schedule = ScheduleSection(every="7d", timezone="UTC")
    privacy = replace(prepared.task.privacy, epsilon=None, noise_multiplier=40.0)
    weekly = replace(prepared.task, schedule=schedule, privacy=privacy)
    season, sizes, mix = season_charge(weekly), sizes_of(prepared, name_bytes=1), FleetMix.in_turn([ORIN], 2)

    def over(seasons: float | None, days: int = 365) -> Days:
        """:param seasons: how many the lifetime limit pays for; None: the task does not repeat."""
        limit = math.inf
        if seasons is not None and seasons < math.inf:
            charge = replace(season, steps=season.steps * int(seasons))
            limit = epsilon_server_of([charge], delta=1e-5) * 1.001
        section = None if seasons is None else SeasonSection(every="90d", lifetime=limit)
        task = replace(prepared, task=replace(weekly, season=section))
        options = {"policy": "this", "samples": [16], "costs": COSTS, "sizes": sizes}
        found = forecast(task, mix, weekly.round, starts=STARTS, days=days, **options).days
        assert found is not None
        return found

    once = over(None)
    assert once.rows()["the fleet"] == "learns until 9 February 2026; then each board goes on alone"
    year = over(math.inf)
    assert [each.rounds for each in year.quarters] == [7, 6, 6, 6], "the fifth season begins on day 360"
    assert (year.seasons, year.task_ends) == (5, None)
    assert year.training_h == pytest.approx(25 / 6 * once.training_h)
    assert "no limit over everything ends it" in year.rows()["the fleet"]
    three = over(3)
    assert [each.rounds for each in three.quarters] == [7, 6, 5, 0]
    assert three.rows()["the fleet"] == "learns until 2 October 2026; then each board goes on alone"
    assert three.rows()["the task ends"].startswith("each season; 3 begin in these days")
    assert over(3, days=20).rows()["the fleet"] == three.rows()["the fleet"]


def test_a_round_of_the_last_night_counts_in_the_last_quarter(prepared: PreparedTask) -> None:
    """Its window passes midnight, so it closes after the last day."""
    schedule = ScheduleSection(every="24h", between="23:00-02:00", timezone="UTC")
    slow = replace(COSTS, batch_s=150.0)  # of ten batches on a board that is five times as fast
    nightly = replace(prepared, task=replace(prepared.task, schedule=schedule))
    sizes, mix = sizes_of(prepared, name_bytes=1), FleetMix.in_turn([ORIN], 2)
    rules = replace(nightly.task.round, deadline_s=7200)
    found = forecast(nightly, mix, rules, policy="this", samples=[160], costs=slow, sizes=sizes, starts=STARTS, days=4)
    assert found.days is not None
    assert found.total_s > 4 * 86400
    assert sum(each.rounds for each in found.days.quarters) == found.rounds


@pytest.mark.parametrize("days", [5, None])
def test_a_schedule_without_a_window_is_told(prepared: PreparedTask, days: int | None) -> None:
    """It was played for ever: from a Monday on, four days have no Sunday, and a last day may have passed."""
    past = date(2025, 1, 1) if days is None else None
    schedule = ScheduleSection(days=("sun",), until=past, timezone="UTC")
    task = replace(prepared, task=replace(prepared.task, schedule=schedule))
    sizes, mix = sizes_of(prepared, name_bytes=1), FleetMix.in_turn([ORIN], 2)
    with pytest.raises(BadInput, match="no round ever opens"):
        forecast(task, mix, task.task.round, policy="this", samples=[1], costs=COSTS, sizes=sizes, days=days)


def test_rounds_that_evaluate_are_played_and_charged() -> None:
    """The charge of all rounds is the task's epsilon, of which an evaluation has its share."""
    few = ("data.devices=12", "data.limit=60", "round.rounds=6")
    whole = load_task(HUSH, (*few, "evaluation.share=0.3", "evaluation.every=2"))
    prepared = prepare(whole, run_id="seed7")
    one = predict(prepared, FleetMix.in_turn([ORIN], whole.data.devices))
    assert one.rounds == 9, "six of training, and three that evaluate"
    assert one.epsilon == pytest.approx(2.0, rel=1e-3)


def test_limits_of_a_period_alone_hold_a_board_back_too() -> None:
    limits = {"epsilon_server": 2.0, "per": "90d", "epsilon_lifetime": float("inf")}
    assert read_budget({"limits": limits}) == read_budget({"device": {"limits": limits}})
    with pytest.raises(BadInput, match="hold a board back"):
        read_budget({"limits": {"epsilon_server": float("inf")}})
    with pytest.raises(BadInput, match="hold a board back"):
        read_budget({"device": 5})


def test_days_need_a_schedule(prepared: PreparedTask) -> None:
    with pytest.raises(BadInput, match=r"has no \[schedule\], so its rounds follow each other"):
        limited(prepared, 365, starts=STARTS)


def test_a_quorum_leaves_the_slow_behind_and_they_spend_nothing(prepared: PreparedTask) -> None:
    mix = FleetMix.in_turn([ORIN, ORIN, ZERO], 6)
    calm, quick = predict(prepared, mix), predict(prepared, mix, quorum=0.6)
    assert quick.total_s < 0.5 * calm.total_s
    assert quick.updates_per_round == 4
    zero, orin = sorted(quick.boards, key=lambda share: share.board, reverse=True)
    assert (zero.board, zero.devices, zero.places) == (ZERO, 2, 12)
    assert (zero.used, zero.stragglers, orin.used, orin.stragglers) == (0, 1, 1, 0)
    assert zero.given_up == 1, "they notice the new round long before their last batch"
    assert quick.stragglers == pytest.approx(1 / 3)
    # their work is ended with the round, so it costs no privacy
    assert (quick.unused_share, quick.epsilon_unused) == (0, 0)


@pytest.mark.parametrize(("devices", "buffer_size"), [(5, 3), (8, 2)])
def test_in_buffered_rounds_each_charge_of_a_ledger_counts(
    devices: int, buffer_size: int, short_task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow board's update is charged when the round that it was trained for has long been over."""
    rules = {"rounds": 12, "min_updates": 1, "mode": "buffered", "buffer_size": buffer_size}
    method, private = {"name": "dp-fedavg"}, {"accounting": "strict"}
    buffered = prepare(short_task(method=method, privacy=private, round=rules), run_id="seed7")
    spent: dict[str, tuple[str, int, float]] = {}
    end, privacy = WorldFleet._end, buffered.spec.privacy

    def ended(world: WorldFleet) -> None:
        for device in world.fleet:
            ledger = world.world.boards[device.name].store.ledger
            spent[device.name] = device.board, ledger.rounds_charged(), ledger.epsilon_server(delta=privacy.delta)
        end(world)

    monkeypatch.setattr(WorldFleet, "_end", ended)
    found = predict(buffered, FleetMix.in_turn([ZERO, "raspberry-pi-4-4gb"], devices))
    assert found.epsilon == pytest.approx(max(epsilon for _, _, epsilon in spent.values()), rel=1e-9)
    assert found.updates_per_round == buffer_size
    for share in found.boards:
        assert share.places == sum(charged for board, charged, _ in spent.values() if board == share.board)
        assert share.used + share.late == pytest.approx(1)
    charged = sum(each for _, each, _ in spent.values())
    assert found.unused_share == pytest.approx(1 - 12 * buffer_size / charged)


def test_epsilon_of_unused_rounds_is_what_they_added(prepared: PreparedTask) -> None:
    spent = Spent(charged=Counter({1: 6}), unused=Counter({1: 4}))
    sigma, delta = prepared.spec.privacy.noise_multiplier, prepared.spec.privacy.delta
    expected = epsilon([Step(sigma, 1.0, 6)], delta=delta) - epsilon([Step(sigma, 1.0, 2)], delta=delta)
    assert epsilon_unused(prepared, spent) == pytest.approx(expected)
    assert epsilon_unused(prepared, Spent(charged=Counter({1: 6}))) == 0


def test_longer_deadlines_use_more_and_faster_boards_end_sooner(prepared: PreparedTask) -> None:
    mix = FleetMix.in_turn([ORIN, ZERO, "raspberry-pi-4-4gb", "raspberry-pi-5-8gb"], 12)
    used = [predict(prepared, mix, deadline_s=each).updates_per_round for each in (1, 3, 6, 12, 50)]
    assert used == sorted(used)
    assert used[0] < used[-1] == 12
    ends = [
        predict(prepared, FleetMix.in_turn([board], 4)).total_s
        for board in (ZERO, "raspberry-pi-4-4gb", ORIN, "raspberry-pi-5-8gb")
    ]
    assert ends == sorted(ends, reverse=True)


def test_parts_of_a_cohort_sum_to_one_under_a_scenario(short_task: Callable[..., Task]) -> None:
    plain = short_task(round={"rounds": 5, "min_updates": 1, "min_devices": 4}).to_plain()
    plain["scenario"] = {
        "day": [{"devices": 4, "period_s": 60.0, "share": 0.5}],
        "drop_out": [{"devices": 3, "at_round": 2, "for_s": 30.0}],
        "outage": [{"devices": "all", "at_s": 50.0, "for_s": 10.0}],
        "crash": [{"process": "aggregator", "at_round": 3, "for_s": 2.0}],
        "slow_disk": [{"devices": 1, "write_mb_s": 0.01}],
        "out_of_memory": [{"devices": 1, "memory_mib": 10}],
    }
    prepared = prepare(parse_task(plain), run_id="seed7")
    one = predict(prepared, FleetMix.in_turn([ORIN, ZERO], 8), quorum=0.8)
    for share in one.boards:
        total = share.used + share.late + share.given_up + share.declined + share.lost
        assert total == pytest.approx(1)
    assert sum(share.declined for share in one.boards) > 0, "the device without memory"


def test_a_large_fleet_is_the_same_each_time(prepared: PreparedTask) -> None:
    text = f'[[board]]\nprofile = "{ZERO}"\nshare = 0.7\n[[board]]\nprofile = "{ORIN}"\nshare = 0.3\n'
    mix = parse_mix(text, devices=100, seed=1)
    one = predict(prepared, mix, cohort_size=20, quorum=0.5)
    assert (one.devices, one.rounds, sum(share.places for share in one.boards)) == (100, 6, 120)
    assert predict(prepared, mix, cohort_size=20, quorum=0.5) == one


def test_policies_change_the_rules_that_they_name(short_task: Callable[..., Task]) -> None:
    task = short_task(round={"rounds": 7, "min_updates": 1, "quorum": 0.9, "deadline_s": 300})
    policies = read_policies(["quorum=0.5, deadline_s=20", "cohort_size=3"], task)
    assert list(policies) == ["quorum=0.5,deadline_s=20", "cohort_size=3"]
    assert policies["quorum=0.5,deadline_s=20"] == replace(task.round, quorum=0.5, deadline_s=20.0)
    assert policies["cohort_size=3"] == replace(task.round, cohort_size=3)
    assert read_policies([], task) == {AS_IN_TASK: task.round}


def test_a_policy_of_another_mode_leaves_out_what_has_no_meaning_in_it(short_task: Callable[..., Task]) -> None:
    strict = {"method": {"name": "dp-fedavg"}, "privacy": {"accounting": "strict"}}
    waiting = {"rounds": 7, "min_updates": 2, "quorum": 0.9}
    buffered = {"rounds": 7, "min_updates": 1, "mode": "buffered", "buffer_size": 2}
    text = "mode=buffered,buffer_size=3"
    rules = read_policies([text], short_task(**strict, round=waiting))[text]
    assert (rules.has_cohort, rules.buffer_size, rules.min_updates, rules.quorum) == (False, 3, 1, 1.0)
    text = "mode=synchronous,min_devices=2"
    rules = read_policies([text], short_task(**strict, round=buffered))[text]
    assert (rules.has_cohort, rules.buffer_size, rules.max_staleness, rules.min_devices) == (True, None, None, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rounds=3", r"'rounds=3' is not KEY=VALUE with one of cohort_size, min_devices"),
        ("quorum", "'quorum' is not KEY=VALUE"),
        ("quorum=2", r"--policy 'quorum=2': quorum = 2: must be in"),
        ("deadline_s=soon", "deadline_s = 'soon'"),
        ("cohort_size=9", "--policy 'cohort_size=9': round.cohort_size = 9: the fleet has 5 devices"),
        ("cohort_size=2", "round.min_updates = 5: a round has 2 devices"),
    ],
)
def test_a_policy_that_is_none_is_explained(text: str, said: str, short_task: Callable[..., Task]) -> None:
    with pytest.raises(BadInput, match=said):
        read_policies([text], short_task())


def test_names_and_samples_are_those_of_a_simulation(prepared: PreparedTask) -> None:
    fleet = make_fleet(prepared.task, prepared.dataset)
    assert device_names(5) == [device.name for device in fleet.devices]
    assert sample_counts(prepared.task, prepared) == [len(device.train) for device in fleet.devices]
    assert device_names(1001)[7] == "device-0007"


def test_numbers_are_shown_in_units_that_suit_them() -> None:
    assert [format_seconds(each) for each in (0.12, 3.21, 119, 150, 7300, 3e5)] == [
        "0.12 s", "3.2 s", "119.0 s", "2.5 min", "2.0 h", "3.5 d"
    ]  # fmt: skip


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    return build_app()


def invoke(app: typer.Typer, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["forecast", *arguments], env={"COLUMNS": "220"}, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_command_compares_policies_and_draws_them(app: typer.Typer, tmp_path: Path) -> None:
    mix, plot = tmp_path / "mix.toml", tmp_path / "plots" / "policies.svg"
    mix.write_text(
        f'[[board]]\nprofile = "{ZERO}"\ncount = 12\nnetwork = {{ up_mbit_s = 1, latency_ms = 50 }}\n'
        f'[[board]]\nprofile = "{ORIN}"\ncount = 8\n'
    )
    arguments = (str(TASK), "--boards", str(mix), "--rounds", "4", "--samples", "160", "--step-ms", "50")
    policies = ("--policy", "quorum=1.0", "--policy", "quorum=0.4")
    plain = json.loads(invoke(app, *arguments, *policies, "--json", "--plot", str(plot)))
    one, other = plain["policies"]
    assert [each["policy"] for each in (one, other)] == ["quorum=1.0", "quorum=0.4"]
    assert (one["devices"], one["rounds"]) == (20, 4), "the counts say how many devices there are"
    # ten steps of 50 ms, twenty times that on a Zero
    assert 10 < one["round_median_s"] < 11.5
    assert 2 < other["round_median_s"] < 3.5
    assert other["boards"][0]["board"] == ZERO
    assert other["boards"][0]["used"] == 0
    assert plot.read_text().lstrip().startswith("<?xml")


def test_people_see_a_row_a_policy_and_a_row_a_board(prepared: PreparedTask) -> None:
    mix = FleetMix.in_turn([ORIN, ORIN, ZERO], 6)
    out = io.StringIO()
    print_forecasts(Console(file=out, width=220), [predict(prepared, mix, quorum=0.6)], COSTS, step_s=0.05)
    shown = out.getvalue()
    assert "6 devices, 6 rounds" in shown
    assert "33.3 %" in shown, "stragglers"
    assert re.search(rf"{ZERO} .* 2 .* 0\.0 \+ 100\.0 %", shown)
    assert "measured here, scaled to one core of generic-x86: a step 50 ms, the rest" in shown
    assert "estimates from data sheets" in shown
    assert "rounds   " not in shown
    found = predict(prepared, mix, quorum=0.6)
    others = [found, replace(found, rounds=3)]
    print_forecasts(Console(file=out, width=220), others, COSTS, step_s=0.05, given=True)
    shown = out.getvalue().removeprefix(shown)
    assert "6 devices, on the virtual clock" in shown, "the policies differ in their rounds"
    assert re.search(r"rounds .* 6 .* 3 ", shown)
    assert "given: a step 50 ms; measured here, scaled to one core of generic-x86: the rest" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--plot", "x.txt"], r"--plot x\.txt: the name must end in \.png"),
        (["--boards", "pi"], "there is no board 'pi'"),
        (["--policy", "speed=1"], "'speed=1' is not KEY=VALUE"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(app: typer.Typer, arguments: list[str], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        invoke(app, str(TASK), *arguments)


def test_the_help_teaches(app: typer.Typer) -> None:
    shown = invoke(app, "--help")
    for text in ("mix.toml", "--policy cohort_size=50,quorum=0.8", "share = 0.6", "estimates"):
        assert text in shown


def test_a_task_in_the_field_needs_to_be_told_the_samples(app: typer.Typer, tmp_path: Path) -> None:
    path = tmp_path / "field.toml"
    path.write_text(
        'name = "field"\n[model]\nname = "digits-cnn"\n[method]\nname = "fedavg"\n'
        '[data]\nname = "folder"\nclass_names = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]\n'
        "input_shape = [1, 8, 8]\ndevices = 3\n"
    )
    with pytest.raises(BadInput, match="by --samples"):
        invoke(app, str(path))
