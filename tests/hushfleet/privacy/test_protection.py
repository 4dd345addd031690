"""One word for an epsilon, wherever it is told."""

from __future__ import annotations

import html
import io
import math
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hushfleet.aggregator.commands.privacy_figures import view_of
from hushfleet.aggregator.fleet import descriptions
from hushfleet.aggregator.fleet.view import FleetView, PrivacyLeft, RunView
from hushfleet.aggregator.planning.advice import Advice, Question
from hushfleet.aggregator.report import sections
from hushfleet.aggregator.report.comparison import comparison_table
from hushfleet.aggregator.report.display import FleetDisplay
from hushfleet.aggregator.report.page import Facts
from hushfleet.aggregator.report.render import render_report
from hushfleet.aggregator.report.summary import summary_table
from hushfleet.aggregator.report.verdict import judge
from hushfleet.edge_client import status
from hushfleet.privacy.noise_for import noise_multiplier_for
from hushfleet.privacy.protection import LARGEST_EPSILON, guess_rate, protection, worth
from hushfleet.simulator.studies.plan import show
from hushfleet.simulator.studies.plan.needs import needs
from support.report_samples import sample
from support.report_samples import told as told_of

ROOT = Path(__file__).resolve().parents[3]
STRAY = re.compile(
    r"hardly a promise|(no|any|more|with|of) meaningful (protection|privacy)|worth the name|protects? (nobody|nothing)",
    re.IGNORECASE,
)
# Noise whose seed is known, a certificate's first day, what is not clipped or noised at all: no word for an epsilon.
NOT_ABOUT_EPSILON = ("seed", "first day", "clipping is for stability", "without a finite bound", "epsilons describe")


def test_no_other_words_are_left() -> None:
    """The list finds what 0.3.0 said of one and the same epsilon of 8 and more."""
    for said in ("hardly a promise: a guess", "no meaningful protection against", "Above 8 it protects nobody."):
        assert STRAY.search(said)
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    stray = []
    for name in files:
        if not name.endswith((".py", ".md", ".toml", ".txt", ".html")) or name in ("CHANGELOG.md", _HERE):
            continue
        text = " ".join((ROOT / name).read_text().split())
        for found in STRAY.finditer(text):
            around = text[max(0, found.start() - 120) : found.end() + 40].lower()
            if not any(word in around for word in NOT_ABOUT_EPSILON):
                stray.append(f"{name}: {text[max(0, found.start() - 40) : found.end()]}")
    assert not stray


_HERE = "tests/hushfleet/privacy/test_protection.py"


def test_the_table_of_the_page_is_the_table() -> None:
    page = (ROOT / "docs/privacy.md").read_text()
    row = r"^\| (?:up to (\d+)[^|]*|above 8|infinite) \| (\w+)(?: protection)? \| ([\d.]*)"
    rows = re.findall(row, page, re.MULTILINE)
    assert [word for _, word, _ in rows] == list(LARGEST_EPSILON)
    for limit, word, right in rows:
        if limit:
            assert LARGEST_EPSILON[word] == float(limit)
            assert 0 <= float(right) - 100 * guess_rate(float(limit), 0.0) < 0.1


def test_a_bound_is_not_rounded_down() -> None:
    assert "right at most 88.1 % of the time" in worth(2.0, 0.0, "in?")
    assert "right more than 99.9 % of the time" in worth(7.0, 0.0, "in?")
    assert worth(math.inf, 0.0, "in?").startswith("no protection: ")


def shown(*what: Any) -> str:
    console = Console(file=io.StringIO(), width=300)
    for each in what:
        console.print(each)
    return str(console.file.getvalue())  # type: ignore[attr-defined]  # it is the StringIO above


BOARD: dict[str, Any] = {
    **dict.fromkeys(
        ("certificate", "stopped_because", "accelerator", "model", "waits_for", "own_head", "releases", "assumption")
    ),
    **dict.fromkeys(("data", "training", "rounds_left", "task_rounds_left", "state_place", "second_place")),
    **{name: [] for name in ("held_out", "windows", "classes", "raw_values", "tasks", "waiting")},
    "data_kind": "folder",
    "device": "a",
    "public_key": "00",
    "running": True,
    "trust": "local",
    "trust_words": "",
    "trust_allowed": "",
    "epsilon_limit": 8.0,
    "delta": 1e-5,
    "unit": "device",
}
"""What `hushfleet-edge status --json` prints of a board, without its epsilon."""


@pytest.mark.parametrize("epsilon", [0.9, 2.0, 8.0, 60.0])
def test_all_say_the_same_of_one_epsilon(epsilon: float) -> None:
    """`privacy`, report, comparison (which demo ends with), display, a fleet's status and page, a board's, plan."""
    word = protection(epsilon)
    others = {f"{each} protection" for each in LARGEST_EPSILON} - {word}
    multiplier = noise_multiplier_for(epsilon=epsilon, delta=1e-5, steps=20)
    result = sample(epsilon_server=epsilon, epsilon_release=epsilon)
    display = FleetDisplay(console=Console(file=io.StringIO()))
    display.apply_metrics("a", {"epsilon_server": epsilon})
    run = RunView("t", "hush", "device", 20, 20, epsilon=epsilon, epsilon_release=epsilon)
    board = BOARD | {"epsilon_server": epsilon}
    planned = Question(100, 20, 4, epsilon=epsilon)
    told = {
        "privacy": view_of(
            "server", "own", multiplier, 1.0, unit="device", rounds=20, delta=1e-5, accountant="exact"
        ).meaning,
        "report": told_of(result, "privacy"),
        "comparison": shown(comparison_table({"a": result, "b": result}, title="")),
        "end of a run": shown(summary_table(result)),
        "fleet": descriptions.run_privacy(run, None),
        "page": descriptions.meaning(run),
        "board": next(line for line in status.format_status(board) if line.startswith("privacy ")),
        "board, details": next(line for line in status.format_status(board, details=True) if line.startswith("means ")),
        "fleet's owner": descriptions.privacy_left(FleetView("f", 0.0, privacy_left=PrivacyLeft("a", epsilon))),
        "plan": show.rows(Advice.on(planned), needs(planned), [])["given away"],
    }
    if epsilon > 8:
        told["display"] = shown(display)
    for where, text in told.items():
        assert word in text, where
        assert not [other for other in others if other in text], where


@pytest.mark.parametrize(("accounting", "is_local"), [("strict", True), ("secure", False), ("as-published", False)])
def test_the_glossary_says_what_epsilon_server_is_by_trust_model(accounting: str, is_local: bool) -> None:
    """0.3.0 said of secure aggregation, too, that it is local differential privacy."""
    result = sample().but(accounting=accounting, trust=None)
    (facts,) = [part for part in sections.meaning(sections.ShownRun(result, judge(result))) if isinstance(part, Facts)]
    glossary = dict(facts.rows)
    assert ("This is local differential privacy" in glossary["epsilon_server"]) == is_local
    assert ("not local differential privacy" in glossary["epsilon_server"]) == (accounting == "secure")
    assert glossary["levels of protection"].startswith("An epsilon up to 1 is strong protection, up to 3 moderate")
    assert glossary["epsilon_server"] in html.unescape(render_report(result))
