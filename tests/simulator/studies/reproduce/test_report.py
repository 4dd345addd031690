"""The page of all results: its numbers are the cells', its verdicts follow the rule, and nothing on it is older."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest

from hushfleet.errors import BadInput
from hushfleet.simulator.studies.reproduce.evidence import REFERENCE, Evidence, Unsupported
from hushfleet.simulator.studies.reproduce.kept import Kept
from hushfleet.simulator.studies.reproduce.recipe import load_paper, load_recipes, paper_names
from hushfleet.simulator.studies.reproduce.report import FIGURES, Report
from hushfleet.simulator.studies.reproduce.verdict import verdict

DOCS = Path(__file__).parents[4] / "docs"
CELLS = DOCS / "results" / "cells"
NAN = float("nan")


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return Evidence(Kept(DOCS / "results"), paper_names())


def test_the_published_page_is_what_the_published_cells_say(evidence: Evidence) -> None:
    report = Report(evidence)
    assert report.left_out == [], "sentences that the cells do not carry"
    page = (DOCS / "reproduction.md").read_text("utf-8")
    assert page == report.text, "write it anew: hushfleet reproduce --report"
    for name in re.findall(rf"\({FIGURES}/(.*?)\)", page):
        assert (DOCS / FIGURES / name).exists()


def test_numbers_of_the_prose_are_references() -> None:
    """Settings may stand as they are; a result, in percent or points, may not."""
    for paper in paper_names():
        recipes = load_recipes(paper)
        prose = [*load_paper(paper).holds, *(sentence for recipe in recipes for sentence in recipe.findings)]
        prose += [special.why for recipe in recipes for special in recipe.specials]
        for sentence in prose:
            assert not re.search(r"\d[\d.,]*\s*(%|points)", REFERENCE.sub("", sentence)), sentence


def test_prose_is_filled_from_the_cells(evidence: Evidence, tmp_path: Path) -> None:
    def accuracy(row: str, metric: str) -> float:
        those = (CELLS / "equal-privacy" / "table-1" / "own-local" / row).glob("seed*.json")
        return 100 * fmean(json.loads(path.read_text())["accuracies"][metric][-1] for path in those)

    hush, other = (accuracy(f"{row}/eps-8", "accuracy_own_local") for row in ("hush", "pfedsd"))
    base = "equal-privacy/table-1/own-local"
    assert evidence.filled(f"{{{base}/hush/eps-8}} %") == f"{hush:.1f} %"
    assert evidence.filled(f"{{{base}/hush/eps-8 - {base}/pfedsd/eps-8}}") == f"{hush - other:.1f}"
    assert evidence.filled(f"{{{base}/hush/eps-8 > {base}/pfedsd/eps-8}}") == f"{hush:.1f} against {other:.1f}"
    assert evidence.filled(f"{{seeds: {base}/hush/eps-8}}") == "3"
    assert evidence.filled(f"{{global: {base}/hush/eps-8}}") == f"{accuracy('hush/eps-8', 'accuracy_global'):.1f}"
    within = next(recipe for recipe in evidence.recipes["equal-privacy"])
    assert evidence.filled("{own-local/hush/eps-8}", within=within) == f"{hush:.1f}"
    with pytest.raises(Unsupported, match="does not hold"):
        evidence.filled(f"{{{base}/hush/eps-8 < {base}/pfedsd/eps-8}}")
    with pytest.raises(Unsupported, match="is open"):
        Evidence(Kept(tmp_path), ["equal-privacy"]).filled(f"{{{base}/hush/eps-8}}")
    for wrong in (f"{{{base}/hush/eps-9}}", f"{{luck: {base}/hush/eps-8}}", f"{{{base}/hush/eps-8 + 1}}"):
        with pytest.raises(BadInput):
            evidence.filled(wrong)


def place(row: str, paper: float, *ours: float) -> SimpleNamespace:
    mean = fmean(ours) if ours else NAN
    spread = (sum((one - mean) ** 2 for one in ours) / (len(ours) - 1)) ** 0.5 if len(ours) > 1 else NAN
    return SimpleNamespace(row=row, paper=paper, ours=mean, spread=spread, seeds=tuple(range(len(ours))))


@pytest.mark.parametrize(
    ("ours", "other", "found"),
    [
        ((80.0,), place("other", 75.0, 74.5), "reproduced"),
        ((80.0,), place("other", 75.0, 77.0), "order only"),  # near, but a lead of 3 for a printed one of 5
        ((80.0,), place("other", 75.0, 81.0), "not"),  # near, but behind
        ((80.0,), place("other", 85.0, 90.0), "reproduced"),  # it answers only for its lead over those below it
        ((70.0,), place("other", 85.0, 90.0), "order only"),
        ((70.0,), place("other", 75.0), "not"),  # nothing to be in order with
        ((80.0,), place("other", 75.0), "reproduced"),
        ((70.0, 84.0), place("other", 70.0, 65.0), "reproduced"),  # 3.5 off, with a standard error of 7
        ((), place("other", 75.0, 74.5), None),
    ],
)
def test_the_rule_of_verdicts(ours: tuple[float, ...], other: SimpleNamespace, found: str | None) -> None:
    its = place("its", 80.5, *ours)
    assert verdict(its, [its, other], only_order=False) == found


def test_where_numbers_cannot_be_compared_only_the_order_counts() -> None:
    its, below, above = place("its", 80.0, 80.0), place("below", 75.0, 75.0), place("above", 85.0, 79.0)
    assert verdict(its, [its], only_order=True) is None
    assert verdict(its, [its, below], only_order=True) == "order only"
    assert verdict(its, [its, below, above], only_order=True) == "not"
