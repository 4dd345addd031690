"""`hushfleet privacy`, run as a command."""

from __future__ import annotations

import json
import math
import re

import pytest
import typer
from typer.testing import CliRunner

from hushfleet.aggregator.commands.main import build_app
from hushfleet.aggregator.commands.privacy_figures import view_of
from hushfleet.errors import BadInput
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.privacy.protection import guess_rate


@pytest.fixture
def app() -> typer.Typer:
    return build_app()


def run(app: typer.Typer, *arguments: object) -> str:
    result = CliRunner().invoke(app, ["privacy", *map(str, arguments)], catch_exceptions=False, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.output


def facts(app: typer.Typer, *arguments: object) -> dict:
    parsed = json.loads(run(app, *arguments, "--json"))
    parsed["server"], parsed["release"] = parsed["adversaries"]
    return parsed


def refused(app: typer.Typer, *arguments: object) -> str:
    with pytest.raises(BadInput) as caught:
        run(app, *arguments)
    return str(caught.value)


FEDGLP_ADP = ("--noise-multiplier", 3.975, "--rounds", 20, "--delta", 0.1, "--noise-split", 10)
AS_PRINTED = (*FEDGLP_ADP, "--accountant", "rdp")


def test_both_numbers_are_printed_with_delta_and_adjacency(app):
    text = run(app, *FEDGLP_ADP)
    for part in ("epsilon_server", "10.04", "epsilon_release", "1.429", "0.1", "add or remove one device", "1.257"):
        assert part in text
    for part in ("accountant: exact", "or nothing?", "replace-one", "33.52", "4.64", "which of two updates is it?"):
        assert part in text
    printed = run(app, *AS_PRINTED)
    assert all(part in printed for part in ("12.19", "1.996", "accountant: rdp"))


def test_json_has_the_same_numbers(app):
    got = facts(app, *AS_PRINTED)
    assert got["accountant"] == "rdp"
    assert got["server"]["epsilon"] == pytest.approx(12.2, abs=0.05)
    assert got["release"]["epsilon"] == pytest.approx(2.0, abs=0.01)
    assert got["server"]["noise_multiplier"] == pytest.approx(3.975 / math.sqrt(10))
    assert got["unit"] == "device"
    assert "negligible protection: a guess" in got["server"]["meaning"]
    half = facts(app, "--noise-multiplier", 3.975 / 2, *AS_PRINTED[2:])
    assert got["release"]["epsilon_exchange"] == half["release"]["epsilon"]
    # (e^1.9956 + 0.1) / (e^1.9956 + 1) = 7.4565 / 8.3565 = 89.23 %, never rounded down
    assert "89.3 %" in got["release"]["meaning"]
    assert any("a tenth of 1/10" in note for note in got["notes"])


@pytest.mark.parametrize(
    "extra", [(), ("--noise-split", 10), ("--noise-split", 10, "--participants", 4), ("--participants", 7)]
)
def test_the_inverse_gives_the_release_its_epsilon(app, extra):
    got = facts(app, "--epsilon", 2, "--rounds", 20, "--delta", 0.01, *extra)
    assert got["release"]["epsilon"] == pytest.approx(2.0, rel=1e-7)
    assert got["release"]["epsilon"] <= 2.0
    assert got["server"]["epsilon"] >= got["release"]["epsilon"] * (1 - 1e-12)
    again = facts(app, "--noise-multiplier", got["noise_multiplier"], "--rounds", 20, "--delta", 0.01, *extra)
    assert again["server"]["epsilon"] == got["server"]["epsilon"]


def test_client_sampling_helps_against_the_release_only(app):
    got = facts(app, "--noise-multiplier", 2.4224, "--rounds", 100, "--delta", 1e-5, "--sample-rate", 0.1)
    assert got["release"]["epsilon"] == pytest.approx(1.816, rel=0.001)
    assert got["server"]["epsilon"] == epsilon([Step(2.4224, 1.0, 100)], delta=1e-5)
    assert got["release"]["epsilon"] < got["release"]["epsilon_exchange"] < got["server"]["epsilon"]
    rdp = facts(
        app,
        *("--noise-multiplier", 2.4224, "--rounds", 100, "--delta", 1e-5, "--sample-rate", 0.1, "--accountant", "rdp"),
    )
    assert rdp["release"]["epsilon"] == pytest.approx(2.0, rel=1e-4)  # DP-FedSim's
    assert rdp["release"]["epsilon_exchange"] is rdp["release"]["meaning_exchange"] is None
    assert any("sees who takes part" in note for note in got["notes"])


def test_record_sampling_helps_against_both(app):
    got = facts(
        app, "--unit", "record", "--noise-multiplier", 1.0, "--rounds", 1000, "--sample-rate", 0.01, "--delta", 1e-5
    )
    expected = epsilon([Step(1.0, 0.01, 1000)], delta=1e-5)
    assert got["server"]["epsilon"] == got["release"]["epsilon"] == expected
    assert got["adjacency"] == "add or remove one record of the device's data"
    assert got["notes"] == []


def test_no_noise_is_null_in_json_and_inf_in_the_table(app):
    arguments = ("--noise-multiplier", 0, "--rounds", 1, "--delta", 0.01)
    assert facts(app, *arguments)["server"]["epsilon"] is None
    assert "inf" in run(app, *arguments)


def test_the_signal_to_noise_ratio_is_a_note(app):
    text = run(app, "--noise-multiplier", 1, "--rounds", 1, "--delta", 0.01, "--parameters", 1_000_000)
    assert "-60.0 dB" in text


def test_help_teaches_by_examples(app):
    text = run(app, "--help")
    assert "hushfleet privacy --noise-multiplier 3.975 --rounds 20" in text
    assert "--epsilon 2" in text


HUNDRED = ("--accounting", "secure", "--devices", 100, "--rounds", 20, "--delta", 1e-5)


def test_a_secure_aggregation_has_one_number_and_a_ring(app):
    found = json.loads(run(app, *HUNDRED, "--parameters", 5130, "--epsilon", 2, "--json"))
    assert (found["trust"], found["noise_split"], found["sums"]["bits"]) == ("secure-sum", 80, 16)
    assert [each["epsilon"] for each in found["adversaries"]] == pytest.approx([2.0, 2.0], rel=1e-6)
    assert found["sums"]["extra"] < 0.01
    assert found["sums"]["noise"] == pytest.approx(found["sums"]["part"] * math.sqrt(80))
    many = json.loads(run(app, *HUNDRED, "--parameters", 1_000_000, "--epsilon", 2, "--json"))
    assert many["sums"]["bits"] == 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*HUNDRED, "--epsilon", 2), "give --parameters"),
        ((*HUNDRED, "--epsilon", 2, "--noise-split", 2), "alone"),
        ((*HUNDRED, "--epsilon", 2, "--honest-fraction", 0.05), "may have no honest device"),
        ((*HUNDRED, "--epsilon", 2, "--min-devices", 101), "101 of 100 devices"),
        ((*FEDGLP_ADP, "--min-devices", 9), "need --accounting secure"),
        ((*FEDGLP_ADP, "--honest-fraction", 0.5), "need --accounting secure"),
        ((*FEDGLP_ADP, "--parameters", 0), "--parameters must be 1 or more"),
        (("--devices", 100, "--epsilon", 2, "--rounds", 1, "--delta", 0.1), "needs --accounting secure"),
        (
            ("--accounting", "strict", "--noise-split", 2, "--epsilon", 2, "--rounds", 1, "--delta", 0.1),
            "strict noise is not divided",
        ),
        (("--rounds", 1, "--delta", 0.1), "either --noise-multiplier or --epsilon"),
        (("--noise-multiplier", 1, "--epsilon", 1, "--rounds", 1, "--delta", 0.1), "either"),
        (("--noise-multiplier", 1, "--rounds", 0, "--delta", 0.1), "--rounds must be 1 or more"),
        (("--noise-multiplier", 1, "--rounds", 1, "--delta", 1), "delta must lie"),
        (("--noise-multiplier", -1, "--rounds", 1, "--delta", 0.1), "noise multiplier"),
        (("--noise-multiplier", "nan", "--rounds", 1, "--delta", 0.1), "noise multiplier"),
        (("--noise-multiplier", 1, "--rounds", 1, "--delta", 0.1, "--sample-rate", 2), "sample rate"),
        (("--noise-multiplier", 1, "--rounds", 1, "--delta", 0.1, "--noise-split", 0), "1 device or more"),
        (("--noise-multiplier", 1, "--rounds", 1, "--delta", 0.1, "--participants", 0), "participant"),
        (("--noise-multiplier", 1, "--rounds", 1, "--delta", 0.1, "--units", 0), "at least one unit"),
        (("--noise-multiplier", 1, "--rounds", 1, "--delta", 0.1, "--parameters", -1), "must be 1 or more"),
        (("--epsilon", 0.05, "--rounds", 1, "--delta", 1e-5, "--accountant", "rdp"), "no noise multiplier reaches"),
        (("--epsilon", 0, "--rounds", 1, "--delta", 1e-5), "target epsilon"),
        (("--epsilon", 1, "--rounds", 1, "--delta", 1e-5, "--noise-split", 0), "1 device or more"),
        (
            ("--unit", "record", "--epsilon", 1, "--rounds", 1, "--delta", 1e-5, "--noise-split", 2),
            "leave out --noise-split",
        ),
        (
            ("--unit", "record", "--epsilon", 1, "--rounds", 1, "--delta", 1e-5, "--parameters", 2),
            "leave it out",
        ),
    ],
)
def test_bad_input_says_what_to_correct(app, arguments, message):
    assert message in refused(app, *arguments)


def test_what_a_guess_is_right_at_most_is_not_rounded_down() -> None:
    meaning = view_of(
        "server", "all", 5.5, 1.0, unit="device", rounds=20, delta=0.01, accountant="exact"
    ).meaning  # fmt: skip
    (said,) = re.findall(r"at most (\d+\.\d)", meaning)
    spent = epsilon([Step(5.5, 1.0, 20)], delta=0.01)
    bound = 100 * guess_rate(spent, 0.01)
    assert round(bound, 1) < bound <= float(said) < bound + 0.1
