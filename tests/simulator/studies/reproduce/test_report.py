"""The page of all results: its numbers are the cells', its verdicts follow the rule, and nothing on it is older."""

from __future__ import annotations

import json
import re
import shutil
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
    base = "equal-privacy/table-1/own-local"

    def accuracies(row: str, metric: str = "accuracy_own_local") -> list[float]:
        paths = sorted((CELLS / base / row / "eps-8").glob("seed*.json"))
        return [100 * json.loads(path.read_text())["accuracies"][metric][-1] for path in paths]

    hush, own, common = accuracies("hush"), f"{base}/hush/eps-8", accuracies("hush", "accuracy_global")
    assert evidence.filled(f"{{{own}}} %") == f"{fmean(hush):.1f} %"
    assert evidence.filled(f"{{seeds: {own}}}") == "3"
    assert evidence.filled(f"{{global: {own}}}") == f"{fmean(common):.1f}"
    # the other has its first seed only: so many are compared, although the first is not what hush has in the mean
    other = f"{base}/pfedsd/eps-8"
    for name in (own, other):
        (tmp_path / "cells" / name).mkdir(parents=True)
    for name in [*(f"{own}/seed{seed}.json" for seed in range(3)), f"{other}/seed0.json"]:
        shutil.copy(CELLS / name, tmp_path / "cells" / name)
    few, first = Evidence(Kept(tmp_path), ["equal-privacy"]), accuracies("pfedsd")[0]
    assert round(hush[0], 1) != round(fmean(hush), 1)
    assert few.filled(f"{{{own} - {other}}}") == f"{hush[0] - first:.1f}"
    assert few.filled(f"{{{own} > {other}}}") == f"{hush[0]:.1f} against {first:.1f}"
    assert few.filled(f"{{{other} < {own}}}") == f"{first:.1f} against {hush[0]:.1f}"
    within = next(recipe for recipe in evidence.recipes["equal-privacy"])
    assert evidence.filled("{own-local/hush/eps-8}", within=within) == f"{fmean(hush):.1f}"
    with pytest.raises(Unsupported, match="does not hold"):
        evidence.filled(f"{{{base}/hush/eps-8 < {base}/pfedsd/eps-8}}")
    with pytest.raises(Unsupported, match="is open"):
        Evidence(Kept(tmp_path / "none"), ["equal-privacy"]).filled(f"{{{base}/hush/eps-8}}")
    for wrong in (f"{{{base}/hush/eps-9}}", f"{{luck: {base}/hush/eps-8}}", f"{{{base}/hush/eps-8 + 1}}"):
        with pytest.raises(BadInput):
            evidence.filled(wrong)


def place(row: str, paper: float, *ours: float) -> SimpleNamespace:
    mean = fmean(ours) if ours else NAN
    spread = (sum((one - mean) ** 2 for one in ours) / (len(ours) - 1)) ** 0.5 if len(ours) > 1 else NAN
    return SimpleNamespace(row=row, paper=paper, ours=mean, spread=spread, seeds=tuple(range(len(ours))), values=ours)


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
        ((70.0, 84.0), place("other", 70.0, 60.0, 70.0), "reproduced"),  # 3.5 off, with a standard error of 7
        ((80.0,), place("other", 75.0, 75.0, 60.0), "reproduced"),  # a lead of 5 with the seed that both have
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
