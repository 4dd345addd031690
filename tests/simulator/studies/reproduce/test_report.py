"""The page of all results: its numbers are the cells', its verdicts follow the rule, and nothing on it is older."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from statistics import fmean, stdev
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
    apart = [one - other for one, other in zip(hush, accuracies("pfedsd"), strict=True)]
    assert evidence.filled(f"{{spread: {own} - {other}}}") == f"{stdev(apart):.1f}"
    few, first = Evidence(Kept(tmp_path), ["equal-privacy"]), accuracies("pfedsd")[0]
    assert round(hush[0], 1) != round(fmean(hush), 1)
    assert few.filled(f"{{{own} - {other}}}") == f"{hush[0] - first:.1f}"
    assert few.filled(f"{{{own} > {other}}}") == f"{hush[0]:.1f} against {first:.1f}"
    assert few.filled(f"{{{other} < {own}}}") == f"{first:.1f} against {hush[0]:.1f}"
    assert few.filled(f"It is behind.{{if: {other} < {own}}}") == "It is behind."
    with pytest.raises(Unsupported, match="does not hold"):
        few.filled(f"It is ahead.{{if: {other} > {own}}}")
    within = next(recipe for recipe in evidence.recipes["equal-privacy"])
    assert evidence.filled("{own-local/hush/eps-8}", within=within) == f"{fmean(hush):.1f}"
    # what a paper prints is known without a cell
    printed = "dp-fedsim/table-1/svhn"
    none = Evidence(Kept(tmp_path / "none"), ["dp-fedsim"])
    both = f"{printed}/fedavg/alpha-0.1/client-sampling - {printed}/dp-fedavg/alpha-0.1/client-sampling"
    assert none.filled(f"{{paper: {both}}}") == "1.0"
    with pytest.raises(Unsupported, match="is open"):
        none.filled(f"{{{both}}}")
    with pytest.raises(Unsupported, match="does not hold"):
        evidence.filled(f"{{{base}/hush/eps-8 < {base}/pfedsd/eps-8}}")
    with pytest.raises(Unsupported, match="is open"):
        Evidence(Kept(tmp_path / "none"), ["equal-privacy"]).filled(f"{{{base}/hush/eps-8}}")
    for wrong in (f"{{{base}/hush/eps-9}}", f"{{luck: {own}}}", f"{{{own} + 1}}", f"{{if: {own}}}"):
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


def test_methods_with_the_same_printed_number_have_no_order() -> None:
    its, same, below = place("its", 80.0, 70.0), place("same", 80.0, 75.0), place("below", 75.0, 65.0)
    assert verdict(its, [its, same], only_order=False) == "not"
    assert verdict(its, [its, same, below], only_order=False) == "order only"


def lines_of(tmp_path: Path, paper: str, *cells: str) -> dict[str, list[str]]:
    """The page of a paper with these published cells alone: what its tables say, by method."""
    for cell in cells:
        to = tmp_path / "cells" / paper / f"{cell}.json"
        to.parent.mkdir(parents=True)
        shutil.copy(CELLS / paper / f"{cell}.json", to)
    page = Report(Evidence(Kept(tmp_path), [paper])).text
    lines = [[word.strip() for word in line.strip("|").split("|")] for line in page.split("\n") if "|" in line]
    return {word: line for line in lines for word in line[:3]}


def test_a_reading_of_a_method_is_judged_among_the_other_methods_of_its_table(tmp_path: Path) -> None:
    """Both are near the printed 49.87; the paper prints 7.30 points above DP-FedAvg, with 42.57."""
    table, readings = "table-2/cifar10", "table-2-readings/cifar10"
    cells = [f"{table}/dp-fedavg/iid/seed0", f"{readings}/beta-0.45/iid/seed0", f"{readings}/sequential/iid/seed0"]
    lines = lines_of(tmp_path, "fedglp-adp", *cells)
    assert lines["beta 0.45"][1:3] == ["49.87", "51.65"]  # 6.26 points above
    assert lines["beta 0.45"][-1] == "reproduced"
    assert lines["personal part first, two gradients"][1:3] == ["49.87", "48.51"]  # 3.12 points above
    assert lines["personal part first, two gradients"][-1] == "order only"
    # the readings are of a number that Table 2 has; of Tables 1 to 5 and Fig. 3 one number is run
    assert lines["[FedGLP-ADP](#fedglp-adp)"][1:6] == ["103", "1", "1", "1", "1"]


def test_noise_is_in_clip_norms_where_it_follows_them(evidence: Evidence) -> None:
    """FedADDP's follows each parameter, divided among nobody: no bound is known to the ledger."""
    table = "fedglp-adp/table-2/cifar10"
    # in the sum of ten devices, 0.3 on each of 343,946 parameters
    assert evidence.at(f"{table}/dp-fedavg/iid").noise == pytest.approx(0.3 * 343946**0.5 / 10)
    assert math.isnan(evidence.at(f"{table}/fedaddp/iid").noise)


def test_a_run_that_readings_share_is_judged_where_most_methods_stand_beside_it(tmp_path: Path) -> None:
    """FedAvg has no noise to be read: alone in the first reading, above DP-FedAvg in a later one, as printed."""
    group = "table-1/fashion-mnist"
    cells = [f"{group}/fedavg/alpha-0.1/client-sampling-seed0", f"{group}/dp-fedavg/alpha-0.1/all-clients-seed0"]
    lines = lines_of(tmp_path, "dp-fedsim", *cells)
    assert lines["FedAvg"][0] == "cohorts of 10 out of 100 and 4 more"
    assert lines["FedAvg"][-1] == "order only"


def test_where_numbers_cannot_be_compared_only_the_order_counts() -> None:
    its, below, above = place("its", 80.0, 80.0), place("below", 75.0, 75.0), place("above", 85.0, 79.0)
    assert verdict(its, [its], only_order=True) is None
    assert verdict(its, [its, below], only_order=True) == "order only"
    assert verdict(its, [its, below, above], only_order=True) == "not"
