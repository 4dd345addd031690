"""Tasks that a fleet could never do are told at once: too few boards, boards that cannot pay, and one port for two."""

from __future__ import annotations

import re
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hushfleet.aggregator.commands.main import build_app
from hushfleet.aggregator.config.task import Task, load_task
from hushfleet.aggregator.fleet.processes import _print_obstacles
from hushfleet.aggregator.fleet.tasks.next_task import set_task
from hushfleet.aggregator.fleet.tasks.payment import Payment
from hushfleet.aggregator.fleet.tasks.task_check import first_charge, mean_charge, obstacles, spread, thresholds
from hushfleet.aggregator.fleet.trust.folder import FILE_NAME, FleetFolder
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.fleet.watching.watch import FleetWatch, view_now
from hushfleet.aggregator.payloads.prepare import prepare
from hushfleet.aggregator.results.events import EventLog
from hushfleet.aggregator.results.fleet_state import Shortfall
from hushfleet.aggregator.storage.activity import ActivityStore
from hushfleet.errors import BadInput
from hushfleet.methods.cost import RoundTerms
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.privacy.budget import Budget
from hushfleet.privacy.spending import rounds_left
from hushfleet.schema import pack
from support.desk import TASK, make_folder

TASKS = Path(__file__).parents[3] / "tasks"


def task_file(path: Path, *changes: tuple[str, str], name: str = "next") -> Path:
    text = TASK.replace('name = "small"', f'name = "{name}"')
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


SECURE = (("[privacy]", '[privacy]\naccounting = "secure"'), ("devices = 2\n[round]", "devices = 30\n[round]"))
OF_FIVE = (("devices = 2\n[round]", "devices = 5\n[round]"), ("min_devices = 2", "min_devices = 5"))


def test_a_task_for_five_boards_is_refused_by_a_fleet_of_four_and_taken_by_one_of_five(tmp_path: Path) -> None:
    folder, file = make_folder(tmp_path / "fleet", boards=4), task_file(tmp_path / "next.toml", *OF_FIVE)
    with pytest.raises(BadInput, match=r"a round of next opens with 5 boards, and the fleet has 4.*fleet add"):
        set_task(folder, file)
    assert folder.run.name == "small"
    set_task(make_folder(tmp_path / "larger", boards=5), file)


@pytest.mark.parametrize(("zone", "opens"), [("Pacific/Auckland", False), ("America/Los_Angeles", True)])
def test_the_last_day_is_that_of_the_tasks_time_zone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zone: str, opens: bool
) -> None:
    now = datetime(2026, 11, 27, 3, tzinfo=UTC).timestamp()  # in Auckland it is afternoon, on the coast the day before
    monkeypatch.setattr("hushfleet.aggregator.fleet.tasks.task_check.time.time", lambda: now)
    schedule = f'[schedule]\nbetween = "01:00-23:00"\nuntil = 2026-11-{26 if opens else 27}\ntimezone = "{zone}"\n'
    night = schedule.replace("23:00", "05:00") if not opens else schedule
    file = tmp_path / "next.toml"
    file.write_text(TASK.replace('name = "small"', 'name = "next"') + night)
    folder = make_folder(tmp_path / "fleet", boards=2)
    found = obstacles(load_task(file), folder)
    assert any("no window opens any more" in each for each in found) != opens
    folder.task.write_text(file.read_text())
    told = [problem.what for problem in view_now(folder).problems]
    assert any("round 1 of next never opens" in each for each in told) != opens


def test_locked_out_boards_take_no_part(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet", boards=5)
    with FleetRegistry(folder.path) as registry:
        first = registry.boards()[0].device
        registry.block(first, "by its operator")
    with pytest.raises(BadInput, match="opens with 5 boards, and the fleet has 4"):
        set_task(folder, task_file(tmp_path / "next.toml", *OF_FIVE))
    whole = (OF_FIVE[0], ("min_devices = 2\n", ""))  # of the whole fleet none waits for a board that is locked out
    set_task(folder, task_file(tmp_path / "next.toml", *whole))


def test_up_and_status_say_what_a_round_waits_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path / "fleet", boards=4)
    folder.task.write_text(task_file(tmp_path / "next.toml", *OF_FIVE).read_text())
    _print_obstacles(folder)
    assert "note: a round of next opens with 5 boards, and the fleet has 4" in capsys.readouterr().out
    watch = FleetWatch(folder)
    told = [problem.what for problem in watch.view().problems]
    assert "round 1 of next opens with 5 boards, and the fleet has 4: it never opens" in told
    folder.task.write_text(TASK)
    assert not any("opens with" in problem.what for problem in watch.view().problems), "nobody hears who is there"
    log = EventLog(folder.run / "events.jsonl")
    log.write("run", task="small-1", method="m", unit="device", delta=1e-5, rounds=2, devices=2)
    log.write("waits", **asdict(Shortfall(1, able=1, min_devices=2, min_updates=1, absent=3)))
    (waiting,) = (problem for problem in watch.view().problems if "waits" in problem.what)
    assert waiting.what == "round 1 waits: 1 of 2 needed boards can take part; 3 are not there"
    assert f"hushfleet fleet set {folder.path} round.min_devices=1" in waiting.advice
    log.write("round_open", round=1, cohort=["a", "b"])
    assert not any("waits" in problem.what for problem in watch.view().problems)
    watch.close()


BUFFERED = ("min_devices = 2", 'mode = "buffered"\nbuffer_size = 4')
OF_FORTY = ("devices = 2\n[round]", "devices = 40\n[round]")


def test_a_buffer_that_the_fleet_cannot_fill_is_told_before_and_while_it_is_open(tmp_path: Path) -> None:
    folder, file = make_folder(tmp_path / "fleet", boards=3), task_file(tmp_path / "next.toml", BUFFERED, OF_FORTY)
    words = r"a model of next takes 4 updates \(round.buffer_size\), each board sends one, and the fleet has 3"
    with pytest.raises(BadInput, match=words):
        set_task(folder, file)
    folder.task.write_text(file.read_text())
    log = EventLog(folder.run / "events.jsonl")
    log.write("run", task="next-1", method="m", unit="device", delta=1e-5, rounds=2, devices=2)
    log.write("round_open", round=1, cohort_size=3, buffer_size=4)
    assert any(re.match(words, problem.what) for problem in view_now(folder).problems)
    set_task(make_folder(tmp_path / "larger", boards=4), file)


def test_boards_pay_for_buffered_rounds_together(tmp_path: Path) -> None:
    file = task_file(tmp_path / "next.toml", BUFFERED, OF_FORTY, ("rounds = 2", "rounds = 60"))
    budget = Budget.of({"epsilon_server": 8.0})
    assert budget is not None
    task = load_task(file)
    charge = first_charge(task)
    each = rounds_left([], charge, delta=budget.delta, limit=budget.lifetime, at_most=60)
    boards = -(-4 * 60 // each)
    assert 1 < each < 60, "no board can pay for all"
    assert Payment(task, charge, budget, [[]] * boards, 4, boards).obstacle(begun=False) is None
    assert Payment(task, charge, budget, [[]] * (boards - 1), 4, boards - 1).obstacle(begun=False) is not None
    why = Payment(task, charge, budget, [[]] * 8, 4, 8).obstacle(begun=False)
    assert why is not None
    assert f"They can pay for round.rounds = {2 * each}." in why
    assert "no board can pay" in str(Payment(task, charge, budget, [[]], 1, 0).obstacle(begun=False))


LITTLE_NOISE = ("noise_multiplier = 1.0", "noise_multiplier = 0.1")


def test_a_task_that_no_board_can_pay_for_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet")
    file = task_file(tmp_path / "next.toml", LITTLE_NOISE)
    with pytest.raises(BadInput, match=r"0 of 2 boards can pay for a round of next.*cards allow 8 over all tasks"):
        set_task(folder, file)
    text = (folder.path / FILE_NAME).read_text()
    (folder.path / FILE_NAME).write_text(text.replace("epsilon_server = 8.0", "epsilon_server = inf"))
    set_task(FleetFolder(folder.path), file)


def test_what_boards_have_spent_counts(tmp_path: Path) -> None:
    folder, task = make_folder(tmp_path / "fleet"), load_task(task_file(tmp_path / "next.toml"))
    charge = first_charge(task)
    with FleetRegistry(folder.path) as registry, ActivityStore(folder.aggregator) as register:
        one, _ = (row.device for row in registry.boards())
        assert obstacles(task, folder) == []
        for number in (1, 2):
            register.note_charges("earlier", number, {one: pack(charge)}, certain=True)
    (why,) = obstacles(task, folder)
    assert "1 of 2 boards can pay for a round of next" in why
    with ActivityStore(folder.aggregator) as register:
        register.note_charges("earlier", 3, {one: pack(charge)}, certain=True)
    assert obstacles(task, folder) == [], "its owner has raised the limit, nobody here knows how far"


def test_a_task_that_every_board_declines_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet")
    paper = (("[method]\nname = \"dp-fedavg\"", "[method]\nname = \"fedglp-adp\""),
             ("[privacy]\n", '[privacy]\naccounting = "as-published"\n'))  # fmt: skip
    with pytest.raises(BadInput, match=r"every board declines next: fedglp-adp would send without noise: .*fleet.toml"):
        set_task(folder, task_file(tmp_path / "next.toml", *paper))


@pytest.mark.parametrize(
    ("limit", "accounting", "reason"),
    [
        ("min_noise_multiplier = 50.0", "strict", r"noise multiplier of 1; its limits.min_noise_multiplier is 50"),
        ("min_devices = 400", "secure", r"limits.min_devices is 400"),
        ("honest_fraction = 0.2", "secure", r"limits.honest_fraction is 0.2"),
        ("noise_split = 2", "secure", r"limits.noise_split is 2"),
        ("", "secure", r"limits.accounting is \"strict\", which trusts nobody"),
    ],
)
def test_no_limit_of_the_cards_is_forgotten(tmp_path: Path, limit: str, accounting: str, reason: str) -> None:
    folder = make_folder(tmp_path / "fleet")
    text = (folder.path / FILE_NAME).read_text()
    allowed = f'accounting = "{accounting}"\n{limit}\n' if limit else ""
    (folder.path / FILE_NAME).write_text(text.replace("epsilon_server = 8.0\n", f"epsilon_server = 8.0\n{allowed}"))
    task = load_task(task_file(tmp_path / "next.toml", *SECURE if accounting == "secure" else ()))
    assert any(
        re.search(f"every board declines next: .*{reason}", why) for why in obstacles(task, FleetFolder(folder.path))
    )


def test_sums_as_small_as_the_cards_allow_are_not_declined(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet", boards=5)
    text = (folder.path / FILE_NAME).read_text()
    secure = text.replace("epsilon_server = 8.0\n", 'epsilon_server = inf\naccounting = "secure"\n')
    task = load_task(task_file(tmp_path / "next.toml", *OF_FIVE, SECURE[0]))
    for allowed, declined in ((10, True), (2, False)):
        (folder.path / FILE_NAME).write_text(secure.replace("min_devices = 10", f"min_devices = {allowed}"))
        found = [why for why in obstacles(task, FleetFolder(folder.path)) if "every board declines" in why]
        assert bool(found) == declined, found


@pytest.mark.parametrize("name", ["digits-hush.toml", "digits-fedglp-adp.toml"])
def test_a_charge_needs_no_network(name: str) -> None:
    task = load_task(TASKS / name)
    prepared = prepare(task, run_id="seed0")
    terms = RoundTerms(prepared.spec.privacy.noise_split)
    assert first_charge(task) == prepared.method.charge(terms)


@pytest.mark.parametrize(
    ("rules", "blocked", "needed"),
    [({}, 0, 4), ({}, 1, 4), ({"min_devices": 3}, 1, 3), ({"cohort_size": 2}, 1, 2)],
)
def test_boards_needed(tmp_path: Path, rules: dict[str, Any], blocked: int, needed: int) -> None:
    settings = tuple(f"round.{key}={value}" for key, value in rules.items())
    file = task_file(tmp_path / "next.toml", OF_FIVE[0], ("min_devices = 2\n", ""))
    task: Task = load_task(file, settings)
    folder = make_folder(tmp_path / "fleet")
    assert thresholds(task, folder, boards=1, blocked=blocked, begun=False).needed == needed


def init(folder: Path, file: Path, *options: str) -> Any:
    words = ["fleet", "init", str(folder), "--broker-name", "localhost", "--task", str(file), *options]
    return CliRunner().invoke(build_app(), words)


def test_init_says_how_many_boards_and_whether_they_can_pay(tmp_path: Path) -> None:
    made = init(tmp_path / "fleet", task_file(tmp_path / "next.toml", LITTLE_NOISE, *OF_FIVE))
    assert made.exit_code == 0
    assert "a round opens with 5 boards" in made.output
    assert "note: no board can pay for a round of next" in made.output


@pytest.mark.parametrize(
    "options",
    [
        ("--port", "9000", "--enrolment-port", "9000"),
        ("--port", "8884"),
        ("--page-port", "8883"),
        ("--enrolment-port", "8443"),
    ],
)
def test_one_port_for_two_is_refused_before_anything_is_made(tmp_path: Path, options: tuple[str, ...]) -> None:
    made = init(tmp_path / "fleet", task_file(tmp_path / "next.toml"), *options)
    assert isinstance(made.exception, BadInput)
    assert "each needs a port of its own" in str(made.exception)
    assert not (tmp_path / "fleet").exists()


def test_ports_that_were_made_equal_later_are_refused_too(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet")
    one, other = folder.config.broker.port, folder.config.broker.enrolment_port
    file = folder.path / FILE_NAME
    file.write_text(file.read_text().replace(str(one), str(other)))
    with pytest.raises(BadInput, match=f"both {other}"):
        FleetFolder(folder.path)


def with_limits(folder: FleetFolder, limits: str) -> FleetFolder:
    text = (folder.path / FILE_NAME).read_text()
    (folder.path / FILE_NAME).write_text(text.replace("epsilon_server = 8.0", limits))
    return FleetFolder(folder.path)


MANY_ROUNDS = ("rounds = 2", "rounds = 40")


def test_a_task_that_boards_cannot_pay_to_its_end_is_refused_and_one_that_they_can_is_proposed(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet")
    file = task_file(tmp_path / "next.toml", MANY_ROUNDS)
    with pytest.raises(BadInput, match=r"0 of 2 boards can pay for the 40 rounds of next") as caught:
        set_task(folder, file)
    form = r"round.rounds = (\d+)\. With all 40 rounds they can pay for privacy.epsilon = (\d+(?:\.\d+)?)"
    proposed = re.search(form, str(caught.value))
    assert proposed is not None
    rounds, epsilon = int(proposed[1]), proposed[2]
    assert obstacles(load_task(file, (f"round.rounds={rounds}",)), folder) == []
    assert obstacles(load_task(file, (f"round.rounds={rounds + 1}",)), folder) != []
    quieter = task_file(tmp_path / "quieter.toml", MANY_ROUNDS, ("noise_multiplier = 1.0", f"epsilon = {epsilon}"))
    assert obstacles(load_task(quieter), folder) == []
    (folder.path / "runs" / "next").mkdir(parents=True)
    assert obstacles(load_task(file), folder) == [], "a run that was begun goes on as far as it can"


def test_with_an_epsilon_no_fewer_rounds_are_proposed_since_they_would_cost_the_same(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet")
    file = task_file(tmp_path / "next.toml", MANY_ROUNDS, ("noise_multiplier = 1.0", "epsilon = 20"))
    (why,) = obstacles(load_task(file), folder)
    assert obstacles(load_task(file, ("round.rounds=2",)), folder) != []
    assert "round.rounds =" not in why
    assert "With all 40 rounds they can pay for privacy.epsilon = " in why


def test_the_evaluations_of_a_task_are_paid_as_well() -> None:
    """Half of the budget may be theirs; then rounds of training alone cost far less than the task does."""
    task = load_task(TASKS / "digits-hush.toml", ("evaluation.share=0.5", "evaluation.every=2", "round.rounds=6"))
    spent, of_training = (
        epsilon([Step(charge.noise_multiplier, 1.0, 6)], delta=task.delta)
        for charge in (mean_charge(task), first_charge(task))
    )
    assert spent == pytest.approx(task.privacy.epsilon, rel=1e-3)
    assert of_training < 1.4


def test_periods_spread_the_rounds_of_a_task(tmp_path: Path) -> None:
    limits = 'epsilon_server = 8.0\nper = "90d"\nepsilon_lifetime = inf'
    folder = with_limits(make_folder(tmp_path / "fleet"), limits)
    task = load_task(task_file(tmp_path / "next.toml", MANY_ROUNDS))
    assert obstacles(task, folder) == []
    said = spread(task, folder)
    assert said is not None
    assert re.match(r"cards allow epsilon 8 in 90 days, which pays for (\d+) of the 40 rounds", said)
    assert spread(load_task(task_file(tmp_path / "short.toml")), folder) is None
    folder = with_limits(folder, "epsilon_server = 0.5")
    (why,) = obstacles(task, folder)
    assert "no board can pay for a round of next: it costs epsilon" in why
    assert "and cards allow 0.5 in 90 days" in why
    text = (folder.path / FILE_NAME).read_text()
    (folder.path / FILE_NAME).write_text(text.replace('per = "90d"', 'per = "soon"'))
    with pytest.raises(BadInput, match=r"device.limits.per = 'soon'"):
        FleetFolder(folder.path)
