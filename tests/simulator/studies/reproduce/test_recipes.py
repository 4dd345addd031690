"""The recipes: every one parses, every cell is a task, and the papers' numbers are the papers'."""

from __future__ import annotations

import json
import pickle
import re
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np
import pytest
from scipy.io import savemat

from hushfleet.data.torchvision_sets import import_torchvision
from hushfleet.errors import BadInput
from hushfleet.methods import METHODS
from hushfleet.models import get_model
from hushfleet.simulator.studies.reproduce.cells import cells_of, missing_data
from hushfleet.simulator.studies.reproduce.kept import Kept
from hushfleet.simulator.studies.reproduce.recipe import (
    Quick,
    Recipe,
    find_recipe,
    load_paper,
    load_recipe,
    load_recipes,
    paper_names,
)
from hushfleet.simulator.studies.reproduce.run import run_cell

PUBLISHED = Path(__file__).parents[4] / "docs" / "results"
RAW = {("acdp-pfsd", "as-published"), ("fedaddp", "as-published"), ("fedglp-adp", "as-published")}
PAPERS = ["acdp-pfsd", "apdp-fl", "dp-fedsim", "fedglp-adp", "perfreezeclip"]
RECIPES = [recipe for paper in paper_names() for recipe in load_recipes(paper)]
RUNNABLE = [recipe for recipe in RECIPES if not recipe.open]


def test_every_table_and_figure_is_listed() -> None:
    assert paper_names() == sorted([*PAPERS, "equal-privacy"])
    listed = {(recipe.paper, recipe.name) for recipe in RECIPES}
    # as the papers number them; FedGLP-ADP's first figure and the others' first ones draw the method
    tables = {"fedglp-adp": 6, "dp-fedsim": 2, "apdp-fl": 3, "acdp-pfsd": 3, "perfreezeclip": 4}
    figures = {"fedglp-adp": (2, 3), "dp-fedsim": (3, 7), "apdp-fl": (4, 11), "acdp-pfsd": (3, 4)}
    figures["perfreezeclip"] = (2, 7)
    for paper in PAPERS:
        assert {(paper, f"table-{n}") for n in range(1, tables[paper] + 1)} <= listed
        first, last = figures[paper]
        assert {(paper, f"figure-{n}") for n in range(first, last + 1)} <= listed


@pytest.mark.parametrize("recipe", RUNNABLE, ids=lambda recipe: f"{recipe.paper}-{recipe.name}")
def test_every_cell_whose_method_exists_is_a_task(recipe: Recipe) -> None:
    for quick in (False, True):
        for cell in cells_of(recipe, seeds=1, quick=quick):
            if cell.plain["method"].get("name") not in METHODS or cell.row.open:
                assert cell.open
                continue
            task = cell.task()
            assert task.seed == 0
            assert task.privacy.clip_norm > 0
            assert (task.wire.downlink, task.wire.codec) == ("full", "float32"), "no noise but the stated one"
            classes = {"emnist": 26, "cifar100": 100}.get(task.data.name, 10)
            model = get_model(task.model.name, classes=classes)
            grey = task.data.name in ("mnist", "fashion-mnist", "emnist")
            assert task.model.features or model.input_shape == ((1, 28, 28) if grey else (3, 32, 32))
            if quick:
                assert recipe.quick is not None
                assert recipe.quick.label.startswith("quick: ")


@pytest.mark.parametrize(
    ("paper", "table", "group", "row", "column", "printed", "epsilon"),
    [
        ("fedglp-adp", "1", "fashion-mnist", "fedglp-adp", "eps-2", 80.33, 2),
        ("fedglp-adp", "1", "svhn", "fedaddp", "eps-6", 64.02, 6),
        ("fedglp-adp", "2", "cifar10", "feddpa", "iid", 44.05, None),
        ("fedglp-adp", "3", "svhn", "fixed", "eps-16", 68.48, 16),
        ("fedglp-adp", "4", "svhn", "gamma-0.8", "eps-16", 69.60, None),
        ("fedglp-adp", "5", "fashion-mnist", "glp", "eps-8", 51.67, 8),
        ("dp-fedsim", "I", "fashion-mnist", "dp-fedsam-top-k", "alpha-0.1", 66.51, 2),
        ("dp-fedsim", "II", "cifar10", "acg", "eps-4", 63.84, 4),
        ("apdp-fl", "1", "cifar10", "nodp-fl", "sigma-10", 75.62, 2.0),
        ("acdp-pfsd", "3", "emnist-global", "acdp-pfsd", "sigma-1.3", 38.49, 50.01),
        ("acdp-pfsd", "3", "svhn-personalized", "aqc", "sigma-2.1", 80.21, 23.55),
        ("perfreezeclip", "2", "cifar100", "lg-fedavg", "c-20", 38.76, None),
        ("perfreezeclip", "3", "cifar10-c-5", "fedrep", "tau-0.5", 83.58, None),
        ("perfreezeclip", "4", "cifar100-c-5", "perfreezeclip", "tau-0.7", 88.19, None),
    ],
)
def test_numbers_as_the_papers_print_them(
    paper: str, table: str, group: str, row: str, column: str, printed: float, epsilon: float | None
) -> None:
    recipe = find_recipe(paper, table=table)
    (its,) = [each for each in recipe.groups if each.id == group]
    assert recipe.paper_value(its, row, column) == printed
    (place,) = [each for each in recipe.columns if each.id == column]
    assert place.paper_epsilon == epsilon


def test_multipliers_are_those_that_the_printed_budgets_stand_for() -> None:
    def multipliers(paper: str, table: str, **only: list[str]) -> list[float]:
        asked = cells_of(find_recipe(paper, table=table), seeds=1, quick=False, **only)
        return sorted(cell.task().privacy_spec(train_samples=60_000).noise_multiplier for cell in asked)

    fedglp = multipliers("fedglp-adp", "3", datasets=["fashion-mnist"], methods=["fixed"], readings=["user-level"])
    assert fedglp == pytest.approx([1.062, 2.549, 3.975], abs=0.006)
    one = {"datasets": ["fashion-mnist"], "methods": ["dp-fedavg"], "columns": ["alpha-0.1"]}
    (fedsim,) = multipliers("dp-fedsim", "1", **one, readings=["client-sampling"])
    assert fedsim == pytest.approx(2.4224, abs=1e-4)


def test_readings_of_a_method_are_rows_of_a_table() -> None:
    judged = [recipe for recipe in RECIPES if recipe.judged_as]
    assert judged
    for recipe in judged:
        name, row = recipe.judged_as.split("/")
        (table,) = (each for each in load_recipes(recipe.paper) if each.name == name)
        assert row in {each.id for each in table.rows}
        for axis in ("groups", "columns", "readings"):
            assert {each.id for each in getattr(recipe, axis)} <= {each.id for each in getattr(table, axis)}


def test_sigma_of_apdp_fl_is_half_a_multiplier() -> None:
    """Algorithm 2, line 10: noise of 2 C sigma on a sum that a record moves by C."""
    for recipe in load_recipes("apdp-fl"):
        for cell in [] if recipe.open else cells_of(recipe, seeds=1, quick=False, methods=["apdp-fl"]):
            assert cell.task().privacy.noise_multiplier == 2 * float(cell.column_id.removeprefix("sigma-"))


def test_noise_that_is_divided_among_all_clients_follows_budget_and_cohort() -> None:
    """`all-clients` of DP-FedSim names multipliers: those of `client-sampling`, divided among 100, not the cohort."""
    checked = 0
    for recipe in load_recipes("dp-fedsim"):
        if recipe.open:
            continue
        only = {"datasets": ["fashion-mnist"], "methods": [recipe.rows[-1].id]}
        one, other = (
            {cell.place: cell for cell in cells_of(recipe, seeds=1, quick=False, readings=[reading], **only)}
            for reading in ("client-sampling", "all-clients")
        )
        for place, cell in other.items():
            if not cell.open:
                multiplier = one[place].task().privacy_spec(train_samples=60_000).noise_multiplier
                share = (cell.task().round.cohort_size or 100) / 100
                assert cell.task().privacy.noise_multiplier == pytest.approx(multiplier * share**0.5, rel=0.001), place
                checked += 1
    assert checked > 6


def test_masks_of_each_epoch_are_in_every_table_that_has_the_reading() -> None:
    recipes = [recipe for recipe in load_recipes("dp-fedsim") if not recipe.open]
    cells = [cell for recipe in recipes for cell in cells_of(recipe, seeds=1, quick=False, readings=["epoch-masks"])]
    own = [cell for cell in cells if cell.plain["method"]["name"] == "dp-fedsim" and not cell.open]
    assert {cell.recipe.name for cell in own} == {recipe.name for recipe in recipes}
    assert {cell.plain["method"].get("masks") for cell in own} == {"epoch"}


@pytest.mark.parametrize("recipe", RUNNABLE, ids=lambda recipe: f"{recipe.paper}-{recipe.name}")
def test_what_quick_says_of_rounds_is_so(recipe: Recipe) -> None:
    assert recipe.quick is not None
    fewer, whole = re.findall(r"(\w+) rounds? instead of (\d+)", recipe.quick.label)[0]
    assert recipe.quick.set["round.rounds"] == int(fewer)
    assert recipe.task["round"]["rounds"] == int(whole)


def test_tables_share_the_cells_that_are_the_same_run() -> None:
    def digest(table: str, row: str, column: str, reading: str) -> str:
        recipe = find_recipe("fedglp-adp", table=table)
        only = {"methods": [row], "columns": [column], "readings": [reading]}
        (cell,) = cells_of(recipe, seeds=1, quick=False, datasets=["fashion-mnist"], **only)
        return cell.digest

    for reading in ("user-level", "pooled-sampling"):
        same = {
            digest("1", "fedglp-adp", "eps-16", reading),
            digest("3", "dynamic", "eps-16", reading),
            digest("4", "gamma-0.2", "eps-16", reading),
            digest("5", "glp-acndp", "eps-16", reading),
        }
        assert len(same) == 1
        assert digest("3", "fixed", "eps-16", reading) not in same
        assert digest("1", "dp-fedavg", "eps-2", reading) == digest("5", "dp-fedavg", "eps-2", reading)
    assert len({digest("1", "fedglp-adp", "eps-2", r) for r in ("user-level", "user-level-alpha-100")}) == 2


def test_every_published_cell_is_found_and_says_what_left_without_noise() -> None:
    kept = Kept(PUBLISHED)
    cells = defaultdict(list)  # several where tables take different accuracies of one run
    published = list(kept)
    all_epochs = {json.dumps(one.epochs, sort_keys=True): one.epochs for one in published}
    for cell in (cell for recipe in RUNNABLE for cell in cells_of(recipe, seeds=3, quick=False)):
        for epochs in all_epochs.values():
            cells[cell.digest_at(epochs)].append(cell)
    assert len(published) == len(list(PUBLISHED.glob("cells/**/*.json"))) > 30
    for one in published:
        found = [kept.shown(cell) for cell in cells[one.digest]]
        assert one in found, one.cell
        said = one.task.get("privacy", {}).get("accounting", "as-published")  # the default when they were run
        assert {cell.task().privacy.accounting for cell in cells[one.digest]} == {said}, one.cell
    raw = [one.task for one in published if one.raw_values]
    assert {(task["method"]["name"], task["privacy"]["accounting"]) for task in raw} == RAW


def test_data_that_is_not_at_hand_is_named_with_its_origin_and_its_place(tmp_path: Path) -> None:
    missing = missing_data({"svhn", "cifar100", "digits"}, tmp_path)
    assert set(missing) == {"svhn", "cifar100"}
    assert "fetch it from http://ufldl.stanford.edu/housenumbers/" in missing["svhn"]
    assert f"put it into {tmp_path}: train_32x32.mat and test_32x32.mat" in missing["svhn"]
    assert "cifar-100-python" in missing["cifar100"]


def made_up(name: str, folder: Path) -> None:
    """A few random images, in files as the set is distributed."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 800), ("test", 200)):
        if name == "svhn":
            labels = np.tile(np.arange(1, 11, dtype=np.uint8), count // 10)[:, None]
            images = rng.integers(0, 256, (32, 32, 3, count), dtype=np.uint8)
            savemat(folder / f"{part}_32x32.mat", {"X": images, "y": labels})
        else:
            batch = {"data": rng.integers(0, 256, (count, 3072), dtype=np.uint8), "fine_labels": [*range(100)] * 2}
            batch["fine_labels"] *= count // 200
            (folder / "cifar-100-python").mkdir(exist_ok=True)
            (folder / "cifar-100-python" / part).write_bytes(pickle.dumps(batch, protocol=2))
            meta = {"fine_label_names": [f"class {number}" for number in range(100)]}
            (folder / "cifar-100-python" / "meta").write_bytes(pickle.dumps(meta, protocol=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("paper", "number", "data_set"),
    [
        ("fedglp-adp", {"table": "1"}, "svhn"),
        ("dp-fedsim", {"table": "I"}, "svhn"),
        ("acdp-pfsd", {"table": "3"}, "svhn"),
        ("apdp-fl", {"figure": "10"}, "cifar100"),
        ("perfreezeclip", {"table": "2"}, "cifar100"),
    ],
)
def test_sets_that_are_not_at_hand_run_from_what_users_have(
    paper: str, number: dict[str, str], data_set: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round of the paper's own method on four of twenty devices."""
    made_up(data_set, tmp_path)
    for module in (import_torchvision().datasets.svhn, import_torchvision().datasets.cifar):
        monkeypatch.setattr(module, "check_integrity", lambda *_: True)
    assert not missing_data({data_set}, tmp_path)
    tiny = {
        "round.rounds": 1,
        "round.cohort_size": 4,
        "data.devices": 20,
        "data.alpha": 100.0,
        "data.test_fraction": 0.2,
    }
    if paper == "apdp-fl":
        tiny["method.local_epochs"] = 1  # of twenty
    recipe = find_recipe(paper, **number)
    recipe = msgspec.structs.replace(recipe, quick=Quick(label="quick: one round", set=tiny))
    own = load_paper(paper).method
    cell = next(
        cell
        for cell in cells_of(recipe, seeds=1, quick=True)
        if cell.data_set == data_set and cell.plain["method"]["name"] == own
    )
    kept = run_cell(cell, tmp_path / "run", data_dir=tmp_path, runtime="torch")
    assert kept.value(cell.metric, "last") is not None


def test_a_recipe_with_a_mistake_says_where(tmp_path: Path) -> None:
    (tmp_path / "table-1.toml").write_text('title = "x"\n[task]\nname = "a"\n[[row]]\nid = "a"\nsett = {}\n')
    with pytest.raises(BadInput, match=r"table-1\.toml: Object contains unknown field `sett` - at `\$\.row\[0\]`"):
        load_recipe(tmp_path / "table-1.toml")
    (tmp_path / "table-2.toml").write_text('title = "x"\n')
    with pytest.raises(BadInput, match="a recipe has either a"):
        load_recipe(tmp_path / "table-2.toml")
