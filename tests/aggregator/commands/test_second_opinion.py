"""Opacus' accountants beside ours."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from hushfleet.aggregator.commands.main import build_app
from hushfleet.aggregator.commands.second_opinion import second_opinion
from hushfleet.errors import BadInput
from hushfleet.privacy.accountant import Step, epsilon

HISTORIES = [
    ([Step(1.0, 0.01, 3000)], 1e-5),
    ([Step(4.992, 1.0, 20)], 0.01),
    ([Step(1.0, 0.01, 1000), Step(2.0, 0.05, 300), Step(4.0, 1.0, 5)], 1e-5),
    ([Step(0.354, 1.0, 10)], 0.0125),
]


@pytest.mark.parametrize(("history", "delta"), HISTORIES)
def test_opacus_finds_what_we_find(history: list[Step], delta: float) -> None:
    found = second_opinion(history, delta=delta, charged=epsilon(history, delta=delta))
    assert found.prv is not None
    assert found.prv[0] <= found.charged <= found.prv[1] <= found.rdp
    assert found.prv[1] - found.prv[0] < 0.03 * found.charged
    assert not found.differs
    ours = epsilon(history, delta=delta, accountant="rdp")
    assert not second_opinion(history, delta=delta, charged=ours, accountant="rdp").differs


@pytest.mark.parametrize("wrong", [0.9, 1.1])
def test_a_charge_that_is_wrong_is_told_either_way(wrong: float) -> None:
    history, delta = HISTORIES[0]
    for accountant in ("exact", "rdp"):
        charged = wrong * epsilon(history, delta=delta, accountant=accountant)
        found = second_opinion(history, delta=delta, charged=charged, accountant=accountant)
        assert found.differs
        assert f"{charged:.4g} is charged ({accountant})" in found.text
        assert f"{found.rdp:.4g}" in found.text
        assert "differ by more than 1%" in found.text


def test_where_opacus_has_no_number_it_is_said() -> None:
    loud = [Step(0.05, 0.5, 3000)]
    found = second_opinion(loud, delta=1e-5, charged=epsilon(loud, delta=1e-5))
    assert (found.prv, found.differs) == (None, False)
    assert "PRV: none above 500" in found.text
    far = [Step(1.0, 0.01, 3000)]
    assert "PRV: none (Floating point errors" in second_opinion(far, delta=1e-15, charged=6.77).text


@pytest.fixture
def app() -> typer.Typer:
    return build_app()


ARGUMENTS = "privacy --noise-multiplier 1 --unit record --rounds 3000 --sample-rate 0.01 --delta 1e-5"


def test_the_command_prints_them_beside_ours(app: typer.Typer) -> None:
    run = CliRunner().invoke(app, [*ARGUMENTS.split(), "--check"], env={"COLUMNS": "160"}, catch_exceptions=False)
    told = [line for line in run.output.splitlines() if line.startswith("check:")]
    assert len(told) == 2
    assert told[0].startswith(
        "check: epsilon_server: 3.194 is charged (exact); Opacus' RDP: 3.511; Opacus' PRV: between"
    )
    plain = json.loads(CliRunner().invoke(app, [*ARGUMENTS.split(), "--check", "--json"]).output)
    assert plain["check"][0]["charged"] == plain["adversaries"][0]["epsilon"]
    assert plain["check"][0]["prv"][0] < plain["check"][0]["charged"] < plain["check"][0]["prv"][1]
    assert [each["differs"] for each in plain["check"]] == [False, False]


def test_without_check_opacus_is_not_imported() -> None:
    ask = f"""
import sys
from hushfleet.aggregator.commands.main import main
sys.argv = {["hushfleet", *ARGUMENTS.split()]}
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
assert not {{"opacus", "torch"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True)


def test_without_opacus_the_command_says_what_to_install(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with pytest.raises(BadInput, match=r"pip install 'hushfleet\[server\]'"):
        CliRunner().invoke(app, [*ARGUMENTS.split(), "--check"], catch_exceptions=False)
