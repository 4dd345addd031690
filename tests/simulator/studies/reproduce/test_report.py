"""The page of all results: its numbers are the cells', its verdicts follow the rule, and nothing on it is older."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest

from hushfleet.errors import BadInput
from hushfleet.methods.papers.fedglp_adp import FedGLPADPConfig, final_share
from hushfleet.models import get_model
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.simulator.studies import reproduce
from hushfleet.simulator.studies.reproduce.kept import Kept
from hushfleet.simulator.studies.reproduce.recipe import Recipe, load_paper, load_recipes, paper_names
from hushfleet.simulator.studies.reproduce.report import FIGURES, PAGES, ReproductionReport
from hushfleet.simulator.studies.reproduce.verdict import verdict
from support.evidence import REFERENCE, Evidence, Unsupported

DOCS = Path(__file__).parents[4] / "docs"
CELLS = DOCS / "results" / "cells"
NAN = float("nan")
RESNET_18 = get_model("resnet18-gn").layout.size
RECIPES = Path(reproduce.__file__).parent / "recipes"
REFERENCES = json.loads(Path(__file__).with_name("references.json").read_text("utf-8"))
QUOTED = {"78.93", "0.097", "0.103", "0.45", "63.53", "78.76", "4.22", "10.55", "4.04"}
"""What papers print elsewhere: texts of DP-FedSim, APDP-FL and FedGLP-ADP, FedGLP-ADP's beta of Table 3; and weights
of a check that is no cell."""
PROSE = ("summary", "findings", "claim", "contradictions", "objection", "note", "readings_text")


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return Evidence(Kept(DOCS / "results"), paper_names())


def test_the_published_page_is_what_the_published_cells_say(evidence: Evidence) -> None:
    report = ReproductionReport(evidence.kept, paper_names())
    pages = {"reproduction.md": report.text, **{f"{PAGES}/{name}.md": text for name, text in report.pages.items()}}
    for name, text in pages.items():
        assert (DOCS / name).read_text("utf-8") == text, "write them anew: hushfleet reproduce --report"
        for figure in re.findall(rf"\((?:\.\./)?{FIGURES}/(.*?)\)", text):
            assert (DOCS / FIGURES / figure).exists()
    table_6 = "<summary><b>Table 6.</b> FedGLP-ADP takes"
    assert table_6 in report.pages["fedglp-adp"], "times of runs whose accuracies stand above"
    assert words(report.text) <= 700, "a minute"
    assert sum(map(words, pages.values())) <= 6500, "say it once, or not: a table or a figure may say it"


def test_the_best_reproduced_paper_stands_first() -> None:
    first, *others = re.findall(r"\| (\d+)% \|$", (DOCS / "reproduction.md").read_text("utf-8"), re.MULTILINE)
    assert int(first) == max(map(int, [first, *others]))
    assert len(others) == 4


def test_every_finished_number_stands_on_its_page_and_says_if_older_code_has_run_it(evidence: Evidence) -> None:
    for address, place in evidence.places():
        page, mean = (DOCS / PAGES / f"{address.partition('/')[0]}.md").read_text("utf-8"), fmean(place.accuracies())
        older = any(evidence.kept.stale(cell) for cell in place.cells)
        number = rf"\| ({mean:.2f}|{mean:.1f})(±\S+)?( \(\d\))?"
        assert re.search(number + (r"\*" if older else "") + r" \|", page), address


def test_a_claim_is_read_at_a_glance() -> None:
    for paper in map(load_paper, paper_names()):
        for claim in paper.claims:
            for cell in (claim.claim, claim.numbers, claim.obstacle):
                assert words(cell) <= 25, cell


def words(text: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_numbers_of_the_prose_are_references() -> None:
    """Settings may stand as they are; a result, in percent or points, may not."""
    for _, sentence in prose():
        assert not re.search(r"\d[\d.,]*\s*(%|points)", REFERENCE.sub("", sentence)), sentence


def test_other_decimals_of_the_prose_are_settings_or_computed() -> None:
    for paper, sentence in prose():
        settings = set(decimals(json.dumps([without_prose(read(path)) for path in (RECIPES / paper).glob("*.toml")])))
        free = decimals(re.sub(r"Section [\d.]+", "", REFERENCE.sub("", sentence)))
        assert set(free) <= settings | computed().keys() | QUOTED, sentence


def test_decimals_of_claims_are_printed_numbers_or_their_differences() -> None:
    """Of recipes that print several numbers of a column; what others claim is in no table."""
    for paper in filter(lambda paper: load_paper(paper).method, paper_names()):
        recipes = [recipe for recipe in load_recipes(paper) if not recipe.open]
        known = {f"{each:.{places}f}" for recipe in recipes for each in printed_and_leads(recipe) for places in (1, 2)}
        for recipe in (each for each in recipes if max(map(len, printed(each))) > 1):
            settings = decimals(json.dumps(without_prose(read(RECIPES / paper / f"{recipe.name}.toml"))))
            assert set(decimals(recipe.claim)) <= known | set(settings) | QUOTED, (paper, recipe.name)


def printed(recipe: Recipe) -> list[list[float]]:
    """The numbers of each column."""
    places = [(group, column) for group in recipe.groups for column in recipe.columns_of(group)]
    columns = [[recipe.paper_value(group, row.id, column.id) for row in recipe.rows] for group, column in places]
    return [[value for value in column if value is not None] for column in columns]


def printed_and_leads(recipe: Recipe) -> Iterator[float]:
    for column in printed(recipe):
        yield from column
        yield from (abs(one - other) for one, other in itertools.combinations(column, 2))


def test_sentences_say_what_the_cells_say(evidence: Evidence) -> None:
    """`references.json` has the sentences with references in place of numbers, as `support.evidence` reads them."""
    recipes = {f"{paper}/{recipe.name}": recipe for paper, those in evidence.recipes.items() for recipe in those}
    told = {sentence for _, sentence in written()}
    for each in REFERENCES:
        filled = evidence.filled(each["text"], within=recipes.get(each["recipe"]))
        assert filled in told, f"{each['recipe']}: the cells say: {filled}"


def prose() -> Iterator[tuple[str, str]]:
    """Each sentence of the recipes and its paper, with references in place of numbers where it has them."""
    evidence = Evidence(Kept(DOCS / "results"), paper_names())
    recipes = {f"{paper}/{recipe.name}": recipe for paper, those in evidence.recipes.items() for recipe in those}
    referring = {evidence.filled(each["text"], within=recipes.get(each["recipe"])): each["text"] for each in REFERENCES}
    return ((paper, referring.get(sentence, sentence)) for paper, sentence in written())


def written() -> Iterator[tuple[str, str]]:
    """Each sentence of the recipes, and its paper."""
    for paper in paper_names():
        recipes = load_recipes(paper)
        told = load_paper(paper)
        yield from ((paper, sentence) for sentence in (told.summary, *told.contradictions))
        yield from ((paper, sentence) for each in told.claims for sentence in (each.numbers, each.seeds, each.obstacle))
        yield from ((paper, sentence) for each in told.objections for sentence in (each.objection, each.answer))
        yield from ((paper, sentence) for recipe in recipes for sentence in recipe.findings)


def read(path: Path) -> Any:
    return tomllib.loads(path.read_text("utf-8"))


def without_prose(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: without_prose(each) for name, each in part.items() if name not in PROSE}
    return [without_prose(each) for each in part] if isinstance(part, list) else part


def decimals(text: str) -> list[str]:
    return re.findall(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)", text)


def computed() -> dict[str, float]:
    """Numbers of the prose that no cell has, by how they are written."""
    numbers = {
        # FedGLP-ADP, Eq. (11) at Table 2's noise multiplier: sigma_0 of 40 rounds, of 20, FedDPA's, the smallest
        "0.183": share(0.3, sigma_0=2.778),
        "0.215": share(0.3, sigma_0=1.965),
        "0.296": share(0.3, sigma_0=0.366),
        "0.319": share(0.3, sigma_0=0.0),
        # and at Table 1's, by pooled sampling at epsilon 2
        "0.221": share(pooled := 0.43297, sigma_0=1.965),
        "0.304": share(pooled, sigma_0=0.366),
        # ACDP-pFSD: ResNet-18, in millions of parameters, and the noise in its mean of 50 clients, in clip norms
        "11.2": RESNET_18 / 1e6,
        "66.9": RESNET_18**0.5 / 50,
        # APDP-FL: five steps in each of a tenth of the rounds, with noise 2 C sigma
        "2.4": epsilon([Step(2 * 5.0, 1.0, int(63 / 10 * 5))], delta=1e-5, accountant="rdp"),
        "1.3": epsilon([Step(2 * 10.0, 1.0, int(76 / 10 * 5))], delta=1e-5, accountant="rdp"),
    }
    for written, value in numbers.items():
        assert f"{value:.{len(written.split('.')[1])}f}" == written
    return numbers


def share(noise_multiplier: float, *, sigma_0: float) -> float:
    return final_share(FedGLPADPConfig(beta_0=0.3, beta_growth=0.2, sigma_0=sigma_0), noise_multiplier)


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


def place(row: str, paper: float, *ours: float, chance: float = 10.0, private: bool = True) -> SimpleNamespace:
    mean = fmean(ours) if ours else NAN
    spread = (sum((one - mean) ** 2 for one in ours) / (len(ours) - 1)) ** 0.5 if len(ours) > 1 else NAN
    return SimpleNamespace(
        row=row, method=row, paper=paper, ours=mean, spread=spread, seeds=tuple(range(len(ours))), values=ours,
        chance=chance, private=private, runs=(f"{row}, {ours}",),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "other", "found"),
    [
        ((80.0,), place("other", 75.0, 74.5), "reproduced"),
        ((80.0,), place("other", 75.0, 77.0), "order only: 3.0 above other, printed 5.5"),
        ((80.0,), place("other", 75.0, 81.0), "not: below other"),
        ((80.0,), place("other", 85.0, 90.0), "reproduced"),  # it answers only for its lead over those below it
        ((80.0,), place("other", 85.0, 79.0), "reproduced"),
        ((70.0,), place("other", 85.0, 90.0), "not: -10.5"),
        ((71.0,), place("other", 85.0, 90.0), "order only: -9.5"),
        ((95.0,), place("other", 85.0, 90.0), "not: above other"),
        ((70.0,), place("other", 75.0), "not: -10.5"),  # nothing to be in order with
        ((80.0,), place("other", 75.0), "reproduced"),
        ((70.0, 84.0), place("other", 70.0, 60.0, 70.0), "reproduced"),  # 3.5 off, with a standard error of 7
        ((80.0,), place("other", 75.0, 75.0, 60.0), "reproduced"),  # a lead of 5 with the seed that both have
        ((), place("other", 75.0, 74.5), None),
    ],
)
def test_the_rule_of_verdicts(ours: tuple[float, ...], other: SimpleNamespace, found: str | None) -> None:
    its = place("its", 80.5, *ours)
    judged = verdict(its, [its, other], only_order=False)
    assert (judged and str(judged)) == found


def test_methods_with_the_same_printed_number_have_no_order() -> None:
    its, same, below = place("its", 80.0, 71.0), place("same", 80.0, 75.0), place("below", 75.0, 65.0)
    assert str(verdict(its, [its, same], only_order=False)) == "not: -9.0"
    assert str(verdict(its, [its, same, below], only_order=False)) == "order only: -9.0"


def test_of_several_methods_in_the_wrong_order_the_first_is_named() -> None:
    its, one, two = place("its", 80.0, 80.0), place("one", 75.0, 81.0), place("two", 70.0, 82.0)
    assert str(verdict(its, [its, one, two], only_order=False)) == "not: below one"


def lines_of(tmp_path: Path, paper: str, *cells: str) -> dict[str, list[str]]:
    """The page of a paper with these published cells alone: what its tables say, by method."""
    for cell in cells:
        to = tmp_path / "cells" / paper / f"{cell}.json"
        to.parent.mkdir(parents=True)
        shutil.copy(CELLS / paper / f"{cell}.json", to)
    report = ReproductionReport(Kept(tmp_path), [paper])
    page = report.text + report.pages[paper]
    lines = [[word.strip() for word in line.strip("|").split("|")] for line in page.split("\n") if "|" in line]
    return {word: line for line in lines for word in line[:3]}


def test_a_reading_of_a_method_is_judged_among_the_other_methods_of_its_table(tmp_path: Path) -> None:
    """Both are near the printed 49.87; the paper prints 7.30 points above DP-FedAvg, with 42.57."""
    table, readings = "table-2/cifar10", "table-2-readings/cifar10"
    cells = [f"{table}/dp-fedavg/iid/seed0", f"{readings}/beta-0.45/iid/seed0", f"{readings}/sequential/iid/seed0"]
    lines = lines_of(tmp_path, "fedglp-adp", *cells)
    assert lines["personal part first"][1:3] == ["49.87", "48.51*"]  # 3.3 points above
    assert lines["personal part first"][-1] == "≈ 3.3 above DP-FedAvg, printed 7.3"
    assert lines["beta 0.45"][1:3] == ["″", "51.65*"]  # 6.4 points above
    assert lines["beta 0.45"][-1] == "✓"
    # the readings are of a number that Table 2 has; of Tables 1 to 6 and Fig. 3 one number is run
    assert lines["[FedGLP-ADP](reproduction/fedglp-adp.md)"][1:6] == ["113", "1", "1", "1", "1"]


def test_noise_is_in_clip_norms_where_it_follows_them(evidence: Evidence) -> None:
    """FedADDP's follows each parameter, divided among nobody: no bound is known to the ledger."""
    table = "fedglp-adp/table-2/cifar10"
    # in the sum of ten devices, 0.3 on each of 343,946 parameters
    noised, without_bound = (evidence.at(f"{table}/{row}/iid") for row in ("dp-fedavg", "fedaddp"))
    assert noised.kept[0].noise(noised.cell) == pytest.approx(0.3 * 343946**0.5 / 10)
    assert math.isnan(without_bound.kept[0].noise(without_bound.cell))


def test_a_run_that_readings_share_is_judged_where_most_methods_stand_beside_it(tmp_path: Path) -> None:
    """FedAvg has no noise to be read: alone in the first reading, above DP-FedAvg in a later one, as printed."""
    group = "table-1/fashion-mnist"
    cells = [f"{group}/fedavg/alpha-0.1/client-sampling-seed0", f"{group}/dp-fedavg/alpha-0.1/all-clients-seed0"]
    lines = lines_of(tmp_path, "dp-fedsim", *cells)
    assert lines["FedAvg"][0] == "cohorts of 10"
    assert lines["FedAvg"][-1] == "≈"


def test_a_run_stands_for_no_number_that_the_recipe_leaves_open(evidence: Evidence) -> None:
    """The noise of this reading is known at epsilon 2 alone, so the task at epsilon 4 and 8 is the same."""
    cell = "dp-fedsim/table-2/cifar10/neither/{}/pooled-sampling"
    assert evidence.at(cell.format("eps-2"))
    for budget in ("eps-4", "eps-8"):
        with pytest.raises(Unsupported):
            evidence.at(cell.format(budget))


def test_chance_and_far_numbers_are_in_no_order() -> None:
    """Two classes a device: 50 is what guessing gives."""
    guessing, below = place("its", 80.3, 50.6, chance=50.0), place("below", 40.0, 30.0)
    assert str(verdict(guessing, [guessing, below], only_order=True)) == "not: chance"
    far = place("its", 80.3, 65.0)
    assert str(verdict(far, [far, below], only_order=True)) == "not: -15.3"
    assert str(verdict(far, [far, below], only_order=True, other_data=True)) == "order only"
    near = place("its", 10.5, 10.0)
    assert str(verdict(near, [near], only_order=False)) == "reproduced"


def test_an_order_of_methods_at_chance_is_not_testable() -> None:
    its, rival = place("its", 75.6, 10.2), place("rival", 74.7, 9.8)
    without_noise = place("FedAvg", 89.0, 91.0, private=False)
    assert verdict(its, [its, rival, without_noise], only_order=False).word == "not testable"
    assert str(verdict(its, [its, place("rival", 74.7, 60.0), without_noise], only_order=False)) == "not: below rival"
    assert verdict(without_noise, [its, rival, without_noise], only_order=False).word == "order only"


def test_a_run_has_no_lead_over_itself() -> None:
    its, same = place("its", 80.0, 81.0), place("same", 75.0, 81.0)
    assert str(verdict(its, [its, same], only_order=False)) == "not: below same"
    same.runs = its.runs
    assert str(verdict(its, [its, same], only_order=False)) == "reproduced"


def test_a_method_whose_noise_is_not_comparable_stands_outside_of_the_order(tmp_path: Path) -> None:
    """FedADDP is above FedGLP-ADP here, and printed below it."""
    table = "table-2/cifar10"
    lines = lines_of(tmp_path, "fedglp-adp", *(f"{table}/{row}/iid/seed0" for row in ("fedaddp", "fedglp-adp")))
    assert lines["FedADDP"][-1] == "outside"
    assert lines["FedGLP-ADP"][-1] == "✓"


@pytest.mark.parametrize(
    ("cell", "printed"),
    [
        ("mnist/dp-fl/sigma-5/algorithm-2", 63),
        ("mnist/apdp-fl/sigma-10/algorithm-2", 76),
        ("fashion-mnist/apdp-fl/sigma-5/clip-10", 72),
        ("fashion-mnist/dp-fl/sigma-10/clip-10", 80),
    ],
)
def test_a_number_is_that_of_the_round_that_the_paper_prints(evidence: Evidence, cell: str, printed: int) -> None:
    """Each data set has its own, in Sections 6.2.1 and 6.2.2."""
    cell = f"apdp-fl/table-1/{cell}"
    folder, name = (CELLS / cell).parent, Path(cell).name
    rounds = [json.loads(path.read_text())["accuracies"]["accuracy_global"] for path in folder.glob(f"{name}-seed*")]
    taken, last = (fmean(100 * each[at - 1] for each in rounds) for at in (printed, 100))
    assert (evidence.filled(f"{{{cell}}}"), evidence.filled(f"{{last: {cell}}}")) == (f"{taken:.1f}", f"{last:.1f}")


def test_each_fold_says_by_itself_what_is_not_as_in_the_paper() -> None:
    """Readers open one of them, and not those above it."""
    pages = "".join(path.read_text("utf-8") for path in (DOCS / PAGES).glob("*.md"))
    folds = re.findall(r"<details markdown>.*?</details>", pages, re.DOTALL)
    assert len(folds) > 15
    of_cifar = [fold for fold in folds if re.search(r"CIFAR-10 \||\| CIFAR-10,|; CIFAR-10[;.]", fold)]
    assert len(of_cifar) > 8
    measured = r"(?m)^(Own models|Next models|Global model|Processor time)"
    assert all("JPEG copies" in fold for fold in of_cifar if "Processor time" not in fold)
    assert all(re.search(measured, fold) for fold in folds)
    (svhn,) = (fold for fold in folds if "gamma = 0 loses" in fold)
    assert "Fashion-MNIST instead of SVHN" in svhn
    (rounds,) = (fold for fold in folds if "NoDP-FL" in fold)
    assert "Global model, after the printed round" in rounds


def test_the_page_counts_the_cells_that_name_what_they_were_run_on() -> None:
    cells = [json.loads(path.read_text()) for path in CELLS.glob("**/*.json")]
    named = sum("processor" in cell["versions"] for cell in cells)
    digests = sum(cell.get("digests") is not None for cell in cells)
    said = f"Of {len(cells)} cells {named} name their instruction set, {digests} commit and data."
    assert said in " ".join((DOCS / "reproduction.md").read_text("utf-8").split())


def test_where_numbers_cannot_be_compared_only_the_order_counts() -> None:
    its, below, best = place("its", 80.0, 80.0), place("below", 75.0, 75.0), place("best", 85.0, 79.0)
    assert verdict(its, [its], only_order=True) is None
    assert str(verdict(its, [its, below], only_order=True)) == "order only"
    assert str(verdict(its, [its, below, best], only_order=True)) == "not: above best"
