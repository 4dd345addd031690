"""`hushfleet plan`: what it says, what it writes, and whether its formulas are the product's."""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.fleet.tasks.task_check import season_limits
from hushfleet.aggregator.planning.advice import Advice, Question
from hushfleet.aggregator.planning.gain_table import gain_table
from hushfleet.aggregator.planning.year import Year
from hushfleet.data.sound import write_clip
from hushfleet.errors import BadInput
from hushfleet.firmware_profiles import load_board
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.privacy.budget import Budget
from hushfleet.privacy.charge import DEVICE_ADJACENCY, Charge
from hushfleet.privacy.ledger import epsilon_server_of
from hushfleet.secure.committee import committee_rule
from hushfleet.secure.masking import mask
from hushfleet.secure.prime_field import PRIMES
from hushfleet.simulator.studies.plan.cli import plan, read_shape
from hushfleet.simulator.studies.plan.needs import HEADER_BYTES, ROUND_S, BoardCosts, needs
from hushfleet.simulator.studies.plan.own_images import own_images
from hushfleet.simulator.studies.plan.show import rows, show
from hushfleet.simulator.studies.plan.task_file import task_text

ASKED = Question(devices=60, images=40, classes=10, epsilon=4)
OPTIONS = ["--devices", "60", "--images", "40", "--classes", "10", "--epsilon", "4"]


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(plan)
    return app


def test_it_answers_in_words_and_in_json(app: typer.Typer) -> None:
    options = ["--devices", "1000", "--images", "5", "--classes", "10", "--epsilon", "8"]
    words = CliRunner().invoke(app, options, env={"COLUMNS": "250"})
    assert words.exit_code == 0
    assert "It pays" in words.output
    assert "[evaluation] with share = 0.05 tells the gain of 1000 devices to ± " in words.output
    found = json.loads(CliRunner().invoke(app, [*options, "--json"]).output)
    assert (found["answer"], found["way"]) == ("yes", "other data")
    own = found["intervals"]["own"]
    assert own["low"] < found["accuracy"]["gain"] < own["high"]
    assert f"{100 * own['low']:+.1f} to {100 * own['high']:+.1f} points" in words.output
    (row,) = (row for row in found["sizes"] if row["devices"] == 1000)
    assert row == {"devices": 1000, "gain": found["accuracy"]["gain"], **own, "answer": "yes"}
    assert "; not measured above 8 " in words.output


def test_a_no_is_an_answer_and_not_an_error(app: typer.Typer) -> None:
    done = CliRunner().invoke(
        app, ["--devices", "30", "--images", "20", "--classes", "10", "--epsilon", "0.5", "--alpha", "0.1"]
    )
    assert done.exit_code == 0
    assert "does not pay" in done.output


def test_a_plan_is_measured_on_a_folder_of_images(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, fewer in (("SEEDS", (0, 1)), ("TIMES", (0.5, 1.0))):
        monkeypatch.setattr(f"hushfleet.simulator.studies.plan.own_images.{name}", fewer)
    pil, rng = pytest.importorskip("PIL.Image"), np.random.default_rng(0)
    for label, name in enumerate(("dark", "bright", "striped")):
        (tmp_path / name).mkdir()
        for number in range(40):
            pixels = rng.integers(0, 60, (9, 9)) + (0, 180, 0)[label]
            pixels[:: 2 if label == 2 else 9] += 60
            pil.fromarray(pixels.astype(np.uint8)).save(tmp_path / name / f"{number}.png")
    asked = ["--devices", "100", "--images", "5", "--epsilon", "4", "--features", "filters", "--data", str(tmp_path)]
    out = tmp_path.with_suffix(".toml")
    done = CliRunner().invoke(app, [*asked, "--json", "--out", str(out)])
    found = json.loads(done.stdout)
    assert found["question"]["classes"] == 3
    assert found["class_names"] == ["bright", "dark", "striped"]
    assert load_task(out).class_names == ("bright", "dark", "striped"), "as the folders are named"
    out.write_text(out.read_text().replace("# path = ", "path = "))
    assert load_task(out).data.path == tmp_path, "as it stands there, for a simulation"
    assert found["measured_on"].startswith("90 images")
    assert found["way"] == "simulated"
    assert {row["epsilon"] for row in found["epsilons"]} >= {2.0, 4.0}  # those that were simulated, and no others
    assert all(2.0 <= row["epsilon"] <= 4.0 for row in found["epsilons"])
    assert "18 devices of 100" in found["outside"][0]
    assert 0.5 < found["accuracy"]["alone"] <= 1
    assert found["public"]["samples"] == 18, "a fifth of the images, for fourteen devices with the others"
    assert min(found["public"].values()) > 0.5
    for changes, said in (
        (["--classes", "3"], "--classes or --data"),
        (["--images", "20"], "too few: at least 8 devices are needed"),
    ):
        assert said in str(CliRunner().invoke(app, [*asked, *changes]).exception)
    (tmp_path / "empty").mkdir()
    assert "has too few images" in str(CliRunner().invoke(app, asked).exception)


@pytest.mark.parametrize(
    "tops",
    [("a", "b", "c"), ("train", "test"), ("train/a", "train/b", "test/a"), ("2026-11-28", "2026-11-29"),
     ("a/2026-11-28", "a/2026-11-29", "b/2026-11-29"), ("a/2026/11/28", "a/2026/11/29", "b/2026/11/29"),
     ("a/2026-10/31", "a/2026-11/29", "b/2026-11/29")],
)  # fmt: skip
def test_classes_are_the_inner_folders_if_their_names_repeat(tmp_path: Path, tops: tuple[str, ...]) -> None:
    """The eight speakers of DEVICE/CLASS were taken for eight classes, and "It pays" was the answer."""
    for top in tops:
        for number, name in enumerate(("yes", "no") * 6):
            write_clip(tmp_path / top / name / f"{number}.wav", np.full(800, 99, np.int16), 16000)
    own = own_images(str(tmp_path), (1, 1, 800), data_dir=None)
    assert (own.class_names, own.stand_in, own.classes) == (("no", "yes"), "", 2)
    assert len(own.train) + len(own.test) == 12 * len(tops)
    assert np.ptp(np.bincount(own.train.y)) <= 1


@pytest.mark.parametrize("inner", ["", "day", "{}"])
def test_classes_are_the_outer_folders_otherwise(tmp_path: Path, inner: str) -> None:
    for number, name in enumerate(("yes", "no") * 6):
        write_clip(tmp_path / name / inner.format(name) / f"{number}.wav", np.full(800, 99, np.int16), 16000)
        write_clip(tmp_path / name / f"more-{number}.wav", np.full(800, 99, np.int16), 16000)
    own = own_images(str(tmp_path), (1, 1, 800), data_dir=None)
    assert (own.class_names, own.stand_in) == (("no", "yes"), str(tmp_path))


@pytest.mark.parametrize(
    "day",
    ["2026-11-2{}", "2026112{}", "2026.11.2{}", "2026-0{}", "202{}", "2026/11/2{}", "2026-11/0{}", "2026/2026-11-2{}"],
)
def test_dates_are_no_classes(tmp_path: Path, day: str) -> None:
    for number, name in enumerate(("yes", "no") * 6):
        write_clip(tmp_path / name / day.format(number % 3 + 1) / f"{number}.wav", np.full(800, 99, np.int16), 16000)
    own = own_images(str(tmp_path), (1, 1, 800), data_dir=None)
    assert (own.class_names, own.stand_in) == (("no", "yes"), str(tmp_path))


def test_a_folder_with_brackets_in_its_name_is_shown_as_it_is() -> None:
    """Rich took `[/a]` for the end of a style: a traceback in place of the last lines."""
    table = copy.copy(gain_table())
    table.measured_on = "90 images of photos[/a]"
    console = Console(width=200, file=io.StringIO(), record=True)
    show(console, Advice.on(ASKED, table), needs(ASKED), [], None)
    assert "Measured on 90 images of photos[/a]" in console.export_text()


def test_images_are_held_out_of_each_class(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="sub-folder of images for each class"):
        own_images(str(tmp_path), (1, 8, 8), data_dir=None)
    own = own_images("digits", (1, 8, 8), data_dir=None)
    assert (own.classes, len(own.train), len(own.test)) == (10, 1437, 360)


def test_a_folder_of_sound_gives_the_loudest_segment_of_each_clip(tmp_path: Path) -> None:
    for number in range(16):
        pcm = np.repeat(np.array([1, 9, 2], np.int16), 8000) * (number % 2 + 1)
        write_clip(tmp_path / ("bell", "alarm")[number % 2] / f"{number}.wav", pcm, 16000)
    for asked, length in (((1, 28, 28), 16000), ((1, 1, 8000), 8000)):
        own = own_images(str(tmp_path), asked, data_dir=None)
        assert (own.classes, len(own.train), len(own.test)) == (2, 12, 4)
        assert own.train.images.shape[1:] == (1, 1, length)
        assert (own.train.images.max((1, 2, 3)) == 9 * (2 - own.train.y)).all()
    question = replace(ASKED, features="sound:speech", classes=2, shape=(1, 1, 8000))
    (tmp_path / "task.toml").write_text(task_text(question, needs(ASKED), class_names=own.class_names))
    task = load_task(tmp_path / "task.toml")
    assert (task.data.name, task.data.shape, task.class_names) == ("sound", (1, 1, 8000), ("alarm", "bell"))


def test_a_shape_is_three_numbers() -> None:
    assert read_shape("3, 32,32") == (3, 32, 32)
    for text in ("32,32", "2,8,8", "3,x,8", "3,0,8"):
        with pytest.raises(BadInput, match="such as 3,32,32"):
            read_shape(text)


def test_features_that_no_task_has_are_refused(app: typer.Typer) -> None:
    found = CliRunner().invoke(app, [*OPTIONS, "--features", "scatter"])
    assert isinstance(found.exception, BadInput)
    assert "--features scatter: there are scattering, filters" in str(found.exception)
    found = CliRunner().invoke(app, [*OPTIONS, "--features", "sound:log-mel"])
    assert isinstance(found.exception, BadInput)
    assert "a linear layer takes features = 'sound:speech'" in str(found.exception)


def test_the_file_that_it_writes_is_a_task_with_the_same_numbers(app: typer.Typer, tmp_path: Path) -> None:
    path = tmp_path / "task.toml"
    assert CliRunner().invoke(app, [*OPTIONS, "--out", str(path)]).exit_code == 0
    task, needed = load_task(path), needs(ASKED)
    assert (task.round.rounds, task.privacy.clip_norm) == (needed.rounds, needed.clip_norm)
    assert 10 * (task.model.directions + 1) == needed.values < 5130
    spec = task.privacy_spec(size=needed.values)
    assert spec.noise_multiplier == pytest.approx(needed.noise_multiplier)
    assert spec.secure is not None
    assert (spec.secure.bits, spec.secure.honest_devices) == (needed.bits, ASKED.honest_devices)
    again = CliRunner().invoke(app, [*OPTIONS, "--out", str(path)])  # nothing is overwritten, nor computed
    assert (again.exit_code, again.output) == (1, "")
    assert "exists already" in str(again.exception)


@pytest.mark.parametrize(
    "changes",
    [{"local": True}, {"features": "filters"}, {"features": "sound:speech"}, {"classes": 3, "honest_fraction": 0.7}],
)
def test_other_plans_are_tasks_too(changes: dict[str, object], tmp_path: Path) -> None:
    asked = Question(**{"devices": 200, "images": 20, "classes": 10, "epsilon": 2.0, **changes})  # type: ignore[arg-type]
    path = tmp_path / "task.toml"
    path.write_text(task_text(asked, needs(asked)))
    task, needed = load_task(path), needs(asked)
    spent = epsilon([Step(task.privacy_spec(size=needed.values).noise_multiplier, 1.0, needed.rounds)], delta=1e-5)
    assert spent == pytest.approx(2.0, rel=1e-6)
    assert task.data.name == ("sound" if asked.features == "sound:speech" else "folder")


def test_the_features_of_any_file_name_can_be_read_again() -> None:
    for name in ('my "net".onnx', r"C:\nets\mine.onnx"):
        written = tomllib.loads(task_text(replace(ASKED, features=name), needs(ASKED)))
        assert written["model"]["features"] == name


def test_a_task_of_ten_boards_names_the_option_that_its_fleet_needs() -> None:
    asked = replace(ASKED, devices=10)
    assert "hushfleet fleet init --min-devices 9" in task_text(asked, needs(asked))
    assert "--min-devices" not in task_text(ASKED, needs(ASKED))


def test_the_honest_devices_are_those_that_a_committee_counts_on() -> None:
    asked = replace(ASKED, devices=100, honest_fraction=0.55)  # 0.55 times 100 is a little more than 55 in floats
    assert rows(Advice.on(asked), needs(asked), [])["trust"] == "secure-sum: 55 of 100 devices are honest"


def test_bytes_are_those_of_a_masked_update() -> None:
    needed, rule = needs(ASKED), committee_rule(60, honest_fraction=0.9)
    keys = [bytes([member]) * 32 for member in range(rule.members)]
    made = mask(np.zeros(needed.values, np.uint32), keys, rule, PRIMES[16])
    assert needed.up == (made.values.size + made.corrections.size) * 2 + HEADER_BYTES


def test_a_slow_board_takes_longer() -> None:
    zero, five = (
        BoardCosts.of(load_board(name), ASKED, needs(ASKED)) for name in ("raspberry-pi-zero-2-w", "raspberry-pi-5-8gb")
    )
    assert zero.round_s > five.round_s > 0
    assert zero.features_s > five.features_s > 0
    idle = zero.round_s - ROUND_S / 0.05
    assert zero.round_wh == pytest.approx((1.8 * ROUND_S / 0.05 + 0.7 * idle) / 3600)  # of the profile


@pytest.mark.parametrize("lifetime", ["8", None])
def test_a_plan_of_years_writes_a_task_that_repeats(app: typer.Typer, tmp_path: Path, lifetime: str | None) -> None:
    file = tmp_path / "task.toml"
    words = [*OPTIONS[:-1], "2", "--per", "90d", *(["--lifetime", lifetime] if lifetime else []), "--out", str(file)]
    told = CliRunner().invoke(app, words, env={"COLUMNS": "250"}).output
    task = load_task(file)
    assert task.season is not None
    assert (task.season.every, task.season.lifetime) == ("90d", float(lifetime or "inf"))
    assert season_limits(task) == {"epsilon_server": 2.0, "per": "90d", "epsilon_lifetime": 8.0}
    if lifetime:
        assert "Begun today, the fleet learns until" in " ".join(told.split())
    wrong = CliRunner().invoke(app, [*OPTIONS, "--per", "90.5d", "--out", str(tmp_path / "b.toml")])
    assert "--per 90.5d with --out" in str(wrong.exception)


def test_it_needs_no_torch() -> None:
    code = "import sys; import hushfleet.simulator.studies.plan.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_limit_that_lasts_longer_than_is_computed_is_not_told_to_end() -> None:
    asked = replace(ASKED, devices=200, epsilon=1.0)
    needed = needs(asked)
    rounds, multiplier = needed.rounds, needed.noise_multiplier
    year = Year.of(asked, rounds=rounds, multiplier=multiplier, per="1d", lifetime=2000.0)
    assert epsilon([Step(multiplier, 1.0, rounds * 10_001)], delta=1e-5) < 1000
    assert (year.periods, year.ends_after_s) == (None, None)
    assert year.rows()["the budget ends"] == "not in 10,000 periods"


def test_the_limits_of_boards_have_the_delta_of_the_plan() -> None:
    """At their usual delta of 1e-5 boards would count epsilon 5.5 in place of 4, and decline the last rounds."""
    asked = replace(ASKED, delta=1e-3)
    needed = needs(asked)
    rounds, multiplier = needed.rounds, needed.noise_multiplier
    year = Year.of(asked, rounds=rounds, multiplier=multiplier, per="90d", lifetime=8.0)
    told = year.rows()["limits on the boards"]
    limits = tomllib.loads(told.replace(", ", "\n"))
    charge = Charge("device", DEVICE_ADJACENCY, "gaussian", multiplier, steps=rounds)
    for given, fits in ((limits, True), ({**limits, "delta": 1e-5}, False)):
        budget = Budget.of(given)
        assert budget is not None
        assert (epsilon_server_of([charge], delta=budget.delta) <= budget.in_period) is fits


def test_a_year_of_periods_is_composed_exactly_and_ends_with_the_lifetime_limit(app: typer.Typer) -> None:
    asked = [*OPTIONS[:-1], "2", "--per", "90d", "--lifetime", "8"]
    found = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)
    year, needed = found["year"], found["needs"]

    def after(periods: int) -> float:
        return epsilon([Step(needed["noise_multiplier"], 1.0, needed["rounds"] * periods)], delta=1e-5)

    assert year["epsilon_in_all"] == {
        "1": pytest.approx(after(4)),
        "2": pytest.approx(after(8)),
        "5": pytest.approx(after(year["periods"])),
    }
    assert after(year["periods"]) <= 8.0 < after(year["periods"] + 1)
    assert year["ends_after_s"] == year["periods"] * 90 * 86400
    assert year["rounds_a_month"] == pytest.approx(needed["rounds"] * 365 / 12 / 90)
    assert found["in_words"].startswith("It may pay, for 2.7 years: 60 devices")
    words = " ".join(CliRunner().invoke(app, asked, env={"COLUMNS": "250"}).output.split())
    assert 'epsilon_server = 2, per = "90d", epsilon_lifetime = 8' in words
    assert f"after {year['periods']} periods" in words
    for wrong, said in (
        (["--per", "quarter"], "--per 'quarter' is no duration"),
        (["--per", "30min"], "--per 30min: must be an hour or more"),
        (["--per", "90d", "--lifetime", "1"], "must be at least --epsilon 4"),
        (["--lifetime", "9"], "--lifetime needs --per"),
    ):
        assert said in str(CliRunner().invoke(app, [*OPTIONS, *wrong]).exception)
