"""`hushfleet reproduce` on a table of our own: cells run, resumed, kept, failed, and what is said about them."""

from __future__ import annotations

import io
import json
import math
import multiprocessing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from hushfleet.aggregator.storage.checkpoints import Checkpoints
from hushfleet.errors import BadInput
from hushfleet.simulator.engines.fast.device import store_of
from hushfleet.simulator.engines.fast.engine import FastFleet
from hushfleet.simulator.engines.fast.loaded_run import LoadedRun
from hushfleet.simulator.engines.fast.next_models import next_models_accuracy
from hushfleet.simulator.fleet import device_names
from hushfleet.simulator.options import RunOptions
from hushfleet.simulator.run import run
from hushfleet.simulator.run_folder import begin
from hushfleet.simulator.studies.reproduce import recipe as recipes
from hushfleet.simulator.studies.reproduce.cells import Cell, cells_of
from hushfleet.simulator.studies.reproduce.cli import reproduce
from hushfleet.simulator.studies.reproduce.command import to_run
from hushfleet.simulator.studies.reproduce.kept import Kept, KeptCell, cell_path
from hushfleet.simulator.studies.reproduce.recipe import find_recipe
from hushfleet.simulator.studies.reproduce.run import RUN, Failure, Shares, run_cell, run_cells
from hushfleet.simulator.studies.reproduce.show import epsilons, print_table
from hushfleet.simulator.studies.reproduce.table import CellProgress, PaperTable, make_table
from hushfleet.simulator.studies.reproduce.verdict import ELSEWHERE

pytestmark = pytest.mark.slow

PAPER = 'name = "Our own"\nsummary = "Nothing holds."\nsource = "Nobody, nowhere"\n'
TABLE = """
title = "Two methods and a noise"
claim = "Noise costs something."
metric = "accuracy_own_common"
window = "mean-last-10"
readings_text = "Nothing is left open."
first = ["digits/dp-fedavg/sigma-2"]
[task]
[task.model]
name = "digits-cnn"
[task.method]
learning_rate = 0.003
[task.privacy]
clip_norm = 1.0
delta = 0.1
[task.data]
name = "digits"
devices = 2
limit = 300
[task.round]
rounds = 2
[quick]
label = "quick: one round instead of two"
set = { "round.rounds" = 1 }
[[column]]
id = "sigma-1"
title = "σ = 1"
paper_epsilon = 3.5
set = { "privacy.noise_multiplier" = 1.0 }
[[column]]
id = "sigma-2"
title = "σ = 2"
set = { "privacy.noise_multiplier" = 2.0 }
[[row]]
id = "fedavg"
title = "FedAvg"
same_in_all_columns = true
set = { "method.name" = "fedavg", "privacy.noise_multiplier" = 0.0 }
[[row]]
id = "dp-fedavg"
title = "DP-FedAvg"
set = { "method.name" = "dp-fedavg" }
[[row]]
id = "too-many"
title = "Impossible"
set = { "method.name" = "dp-fedavg", "data.min_samples" = 200 }
[[row]]
id = "unheard-of"
title = "Unheard of"
set = { "method.name" = "unheard-of" }
[[row]]
id = "named"
title = "Only named"
open = "only named by the paper"
[[group]]
id = "digits"
title = "Digits"
substitutions = ["digits instead of something larger"]
[group.values]
fedavg = [91.0, 91.0]
dp-fedavg = [80.5, 70.25]
too-many = [nan, 1.0]
"""
KEPT = Path(__file__).with_name("kept_cell.json")


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "recipes"
    (folder / "own").mkdir(parents=True)
    (folder / "own" / "paper.toml").write_text(PAPER)
    (folder / "own" / "table-1.toml").write_text(TABLE)
    (folder / "own" / "figure-2.toml").write_text('title = "Curves"\nopen = "curves only"\n')
    monkeypatch.setattr(recipes, "recipes_folder", lambda: folder)
    return folder


def cells(*, seeds: int = 1, quick: bool = False, **only: list[str]) -> list[Cell]:
    return cells_of(find_recipe("own", table="1"), seeds=seeds, quick=quick, **only)


def typed(*words: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(reproduce)
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "150"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_the_most_telling_cell_comes_first_and_seeds_last(book: Path) -> None:
    ordered = [(cell.seed, cell.row.id, cell.column_id) for cell in cells(seeds=2) if not cell.open]
    one = [("dp-fedavg", "sigma-2"), ("fedavg", "all"), ("dp-fedavg", "sigma-1")]
    one += [("too-many", "sigma-1"), ("too-many", "sigma-2")]
    assert ordered == [(seed, *cell) for seed in (0, 1) for cell in one]
    assert [cell.row.id for cell in cells(methods=["fedavg"])] == ["fedavg"]
    with pytest.raises(BadInput, match="--method nothing: this table has fedavg, dp-fedavg, too-many"):
        cells(methods=["nothing"])
    reasons = {cell.row.id: cell.open for cell in cells() if cell.open}
    assert reasons["named"] == "only named by the paper"
    assert reasons["unheard-of"] == "the method unheard-of is not in this version of Hushfleet"


def test_a_cell_keeps_the_papers_accountant(book: Path) -> None:
    """What the committed results were run with, whatever the default; a digest is of the recipe alone."""
    for cell in cells(methods=["dp-fedavg"]):
        assert cell.task().privacy.accountant == "rdp"
        assert "accountant" not in cell.plain.get("privacy", {})


def test_an_interrupted_cell_goes_on_to_the_same_result(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = cells(methods=["dp-fedavg"], columns=["sigma-2"])
    whole = run_cell(cell, tmp_path / "whole", data_dir=None, runtime="onnx")
    play, rounds = FastFleet.play, []

    def until_the_second(self, devices, **options):
        rounds.append(self.engine.plan.round)
        if len(rounds) == 2:
            raise KeyboardInterrupt
        return play(self, devices, **options)

    monkeypatch.setattr(FastFleet, "play", until_the_second)
    folder = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        run_cell(cell, folder, data_dir=None, runtime="onnx")
    resumed = run_cell(cell, folder, data_dir=None, runtime="onnx", workers=2)
    assert rounds == [1, 2, 2]  # the first round was not run again
    assert resumed.accuracies == whole.accuracies
    assert resumed.rounds == 2
    assert all(value is not None for value in resumed.accuracies["accuracy_own_common"])  # both of the last ten
    # what a cell is worth: mean of the last rounds, the last one, the best one
    own = resumed.accuracies["accuracy_own_common"]
    assert resumed.value("accuracy_own_common", "mean-last-10") == pytest.approx(sum(own) / 2)
    assert resumed.value("accuracy_own_common", "last") == own[-1]
    assert resumed.value("accuracy_own_common", "best") == max(own)
    # the ledger's numbers: two rounds at multiplier 2, against the server at 2 / sqrt(2)
    assert 0 < resumed.epsilon_release < resumed.epsilon_server < 10
    assert json.loads((folder / RUN / "task.json").read_text())["method"]["name"] == "dp-fedavg"


def test_a_reading_stops_after_the_last_round_within_the_budget_of_the_median_device(
    book: Path, tmp_path: Path
) -> None:
    table = TABLE.replace('"accuracy_own_common"', '"accuracy_global"').replace('"mean-last-10"', '"last"')
    table = table.replace("devices = 2", "devices = 4").replace("rounds = 2", "rounds = 3\ncohort_size = 2")
    (book / "own" / "table-1.toml").write_text(table)
    (cell,) = cells(methods=["dp-fedavg"], columns=["sigma-2"])
    (short,) = cells(methods=["dp-fedavg"], columns=["sigma-2"], quick=True)
    kept, first = (run_cell(each, tmp_path / each.key, data_dir=None, runtime="onnx") for each in (cell, short))
    spent, reached = kept.by_round["median"], kept.accuracies["accuracy_global"]
    assert kept.value_of(cell) == reached[-1]
    assert spent[0] == pytest.approx(kept.by_round["server"][0] / 2, rel=1e-5), "two of four devices have taken part"
    assert kept.by_round["release"][-1] == pytest.approx(kept.epsilon_release, rel=1e-5) != kept.epsilon_server
    assert kept.epsilon("median", cell) == kept.epsilon_server_median == pytest.approx(spent[-1], rel=1e-5)
    assert first.by_round["median"] == spent[:1] == [pytest.approx(first.epsilon_server_median, rel=1e-5)]
    for budget in (0.9 * spent[0], spent[0], (spent[1] + spent[2]) / 2, 2 * spent[2]):
        stopped = replace(cell, reading=recipes.PaperReading(id="stopped", title="stopped", stop_epsilon=budget))
        last = max((round for round in (1, 2, 3) if spent[round - 1] <= budget), default=0)
        assert kept.value_of(stopped) == (reached[last - 1] if last else None)
        if last:
            assert kept.epsilon("median", stopped) == spent[last - 1]
            assert kept.epsilon("release", stopped) == kept.by_round["release"][last - 1]
    older = replace(kept, by_round={})  # a cell of an earlier version cannot say when to stop
    assert older.value_of(stopped) is None


def test_a_cell_run_again_gives_the_same_bits_and_says_what_made_it(book: Path, tmp_path: Path) -> None:
    """On one machine: another processor's bits may differ, which is why a cell names it and its instruction set."""
    table = TABLE.replace('{ "method.name" = "dp-fedavg" }', '{ "method.name" = "dp-fedsim" }')
    (book / "own" / "table-1.toml").write_text(table)
    (cell,) = cells(methods=["dp-fedavg"], columns=["sigma-1"], quick=True)
    first, again = (run_cell(cell, tmp_path / name, data_dir=None, runtime="onnx") for name in ("first", "again"))
    assert replace(first, seconds=0) == replace(again, seconds=0)
    assert KeptCell.load(first.save(tmp_path)) == first
    assert first.digests is not None
    assert all(len(digest) == 64 for digest in first.digests.values())
    assert "package" not in " ".join(first.digests)
    assert first.processor
    assert first.versions["processor"]
    assert first.commit is None or len(first.commit.removesuffix("-changed")) == 40
    assert first.epsilon_server_median == first.epsilon_server
    assert first.largest_stretch is not None
    assert first.largest_stretch > 1
    # the cell as it was kept on another day: the same bits here, and elsewhere what the page says of other processors
    kept = KeptCell.load(KEPT)
    assert (kept.digest, kept.digests) == (first.digest, first.digests)
    here = (kept.processor, kept.versions) == (first.processor, first.versions)
    same = kept.accuracies == first.accuracies and kept.largest_stretch == first.largest_stretch
    assert same if here else is_near(kept, first)
    assert is_near(first, run_cell(cell, tmp_path / "other", data_dir=None, runtime="torch"))  # rounds in another way


def test_a_time_is_a_ratio_to_the_first_rows_rounds_which_alternate_with_its_own(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that FedAvg's rounds move by 2 s and the other's by 5 s, the first one by 90 s, which do not count."""
    timed = TABLE.replace('"accuracy_own_common"', '"round_time"').replace('"mean-last-10"', '"last"')
    (book / "own" / "table-1.toml").write_text(timed.replace("rounds = 2", "rounds = 3"))
    (cell,) = cells(methods=["dp-fedavg"], columns=["sigma-2"])
    play, now, trained = FastFleet.play, [0.0], []

    def by_the_clock(self, devices, **options):
        method, round = self.engine.prepared.task.method.name, self.engine.plan.round
        trained.append((round, method))
        assert not options["evaluate"]
        now[0] += 90.0 if round == 1 else {"fedavg": 2.0, "dp-fedavg": 5.0}[method]
        return play(self, devices, **options)

    monkeypatch.setattr(FastFleet, "play", by_the_clock)
    monkeypatch.setattr("time.process_time", lambda: now[0])
    kept = run_cell(cell, tmp_path / "run", data_dir=None, runtime="onnx")
    assert trained == [(round, method) for round in (1, 2, 3) for method in ("dp-fedavg", "fedavg")]
    assert kept.value("round_time", "last") == 2.5
    assert kept.value("accuracy_global", "last") is None
    assert KeptCell.load(kept.save(tmp_path)) == kept


def is_near(one: KeptCell, other: KeptCell) -> bool:
    """Whether all accuracies are within what another processor moves."""
    return all(
        abs(a - b) <= ELSEWHERE["global" if metric == "accuracy_global" else "own"] / 100
        for metric, values in one.accuracies.items()
        for a, b in zip(values, other.accuracies[metric], strict=True)
        if a is not None and b is not None
    )


def test_each_device_alone_is_a_cell_of_its_own(book: Path, tmp_path: Path) -> None:
    """Beside `fedavg` with the same task; what it keeps is what a simulation calls the local-only baseline."""
    alone_too = TABLE.replace('title = "FedAvg"\n', 'title = "FedAvg"\nalone = true\n')
    (fedavg,) = cells(methods=["fedavg"])
    (book / "own" / "table-1.toml").write_text(alone_too)
    (alone,) = cells(methods=["fedavg"])
    assert alone.plain == fedavg.plain
    assert alone.digest != fedavg.digest
    kept = run_cell(alone, tmp_path / "alone", data_dir=None, runtime="onnx")
    begun = begin(alone.task(), tmp_path / "run", data_dir=None)
    whole = run(begun, RunOptions(workers=1), console=Console(quiet=True))
    assert whole.local_only is not None
    assert kept.value("accuracy_own_local", "last") == pytest.approx(whole.local_only.accuracy_own_local, abs=1e-6)
    assert kept.value("accuracy_own_common", "last") == pytest.approx(whole.local_only.accuracy_own_common, abs=1e-6)
    assert kept.value("accuracy_global", "last") is None
    assert (kept.rounds, kept.uplink_bytes, kept.epsilon_server, kept.raw_values) == (0, 0, 0.0, ())
    assert KeptCell.load(kept.save(tmp_path)) == kept


def test_after_aggregation_all_devices_are_tested_with_their_own_part_in_the_new_global_model(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the vectors put together by hand; devices that have never trained have the first head."""
    table = TABLE.replace('"accuracy_own_common"', '"accuracy_next_local"')
    table = table.replace("devices = 2", "devices = 4").replace("rounds = 2", "rounds = 3\ncohort_size = 1")
    table = table.replace('"dp-fedavg", "data.min_samples" = 200', '"fedper"')
    (book / "own" / "table-1.toml").write_text(table)
    (cell,) = cells(methods=["too-many"], columns=["sigma-1"])
    whole = run_cell(cell, tmp_path / "whole", data_dir=None, runtime="onnx").accuracies["accuracy_next_local"]
    assert len(whole) == 3
    run = LoadedRun(tmp_path / "whole" / RUN, "onnx")
    params = Checkpoints(run.folder.aggregator, run.spec.model.layout).read(3)
    first = Checkpoints(run.folder.aggregator, run.spec.model.layout).read(0)
    head, reached, trained = run.method.init_state().public.mask, [], 0
    for name in device_names(4):
        begin = np.where(head, first, params)
        if run.folder.has_store(name):
            with store_of(run.folder, name) as store:
                state = store.load_state(run.spec.task)
                if state is not None:
                    trained, begin = trained + 1, np.where(head, state.own, params)
        test = run.local_test(name)
        reached.append((run.inference(begin, test.x).argmax(-1) == test.y).mean())
    assert 0 < trained < 4
    assert len(set(reached)) > 1
    assert whole[-1] == pytest.approx(np.mean(reached), abs=1e-6)

    # killed between a round's close and its test: the test is made up for
    folder, measure = tmp_path / "cut", next_models_accuracy

    def cut(simulation, workers, round, **options):
        if round == 2:
            raise KeyboardInterrupt
        return measure(simulation, workers, round, **options)

    monkeypatch.setattr("hushfleet.simulator.studies.reproduce.run.next_models_accuracy", cut)
    with pytest.raises(KeyboardInterrupt):
        run_cell(cell, folder, data_dir=None, runtime="onnx")
    monkeypatch.setattr("hushfleet.simulator.studies.reproduce.run.next_models_accuracy", measure)
    resumed = run_cell(cell, folder, data_dir=None, runtime="onnx")
    assert resumed.accuracies["accuracy_next_local"] == whole


def test_cells_run_in_parallel_are_kept_and_a_failing_one_stops_nobody(book: Path, tmp_path: Path) -> None:
    out, runs = tmp_path / "out", tmp_path / "runs"
    words = ["own", "--table", "1", "--seeds", "1", "--out", str(out), "--runs", str(runs), "--results", str(book)]
    words += ["--method", "dp-fedavg", "--method", "too-many", "--column", "sigma-2"]
    words += ["--runtime", "onnx", "--jobs", "2"]
    code, said = typed(*words)
    assert code == 1
    assert "failed Digits, Impossible, σ = 2, seed 0: data.devices = 2 with data.min_samples = 200 each" in said
    assert "DP-FedAvg, σ = 2, seed 0:" in said
    assert "1 of 2 cells are finished" in said
    # the same cell in this process is the same to the bit
    (cell,) = cells(methods=["dp-fedavg"], columns=["sigma-2"])
    kept = KeptCell.load(cell_path(out, cell.key))
    assert kept.accuracies == run_cell(cell, tmp_path / "here", data_dir=None, runtime="onnx").accuracies
    assert not (runs / cell.key).exists()  # nothing heavy stays
    # finished cells are found again, wherever they are published, and by another name too
    both = Kept(tmp_path / "empty", out)
    assert [cell.row.id for cell in to_run(cells(columns=["sigma-2"]), both, {})] == ["fedavg", "too-many"]
    assert to_run(cells(columns=["sigma-2"]), Kept(out), {"digits": "gone"}) == []
    renamed = (book / "own" / "table-1.toml").read_text().replace('id = "dp-fedavg"', 'id = "other"')
    (book / "own" / "table-1.toml").write_text(renamed.replace("dp-fedavg = [", "other = ["))
    assert both.of(cells(methods=["other"], columns=["sigma-2"])[0]) is not None
    # other settings, and quick ones, are other cells
    assert both.of(cells(quick=True, methods=["other"], columns=["sigma-2"])[0]) is None
    assert both.of(cells(methods=["other"], columns=["sigma-1"])[0]) is None


def test_an_interruption_says_how_to_go_on(book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hushfleet.simulator.studies.reproduce.command.run_cells", interrupted)
    monkeypatch.setattr("sys.argv", ["hushfleet", "reproduce", "own", "--table", "1"])
    code, said = typed("own", "--table", "1", "--out", str(tmp_path / "out"), "--results", str(book))
    assert code == 130
    assert "nothing is lost. Go on with:\n  hushfleet reproduce own --table 1\n" in said
    assert (tmp_path / "out" / "own" / "table-1.json").exists()


def test_what_table_and_report_say(book: Path, tmp_path: Path) -> None:
    for cell in [*cells(seeds=2, methods=["dp-fedavg"], columns=["sigma-1"]), *cells(methods=["fedavg"])]:
        common = [0.5, 0.9] if cell.row.id == "fedavg" else [0.7, 0.75 + cell.seed / 10]
        pretended(cell, common, epsilon=float("inf") if cell.row.id == "fedavg" else 4.0).save(tmp_path)
    recipe, asked = find_recipe("own", table="1"), cells(seeds=2)
    kept = Kept(tmp_path)
    table = make_table(recipe, asked, CellProgress(kept), quick=False)
    (block,) = table.blocks
    squares = {(place.row, place.column): place for place in block.itertuples()}
    noisy = squares["dp-fedavg", "sigma-1"]
    assert (noisy.paper, noisy.ours, noisy.seeds) == (80.5, pytest.approx(75.0), (0, 1))
    assert noisy.values == pytest.approx((72.5, 77.5))  # means of (70, 75) and of (70, 85)
    assert noisy.spread == pytest.approx(5 / 2**0.5)
    assert noisy.difference == pytest.approx(75.0 - 80.5)
    assert (noisy.paper_epsilon, noisy.epsilon_server, noisy.epsilon_release) == (3.5, 4.0, 2.0)
    plain = squares["fedavg", "sigma-1"]
    assert plain.ours == squares["fedavg", "sigma-2"].ours == pytest.approx(70.0)
    assert (plain.seeds, plain.asked, math.isnan(plain.paper_epsilon)) == ((0,), 2, True)
    assert math.isnan(squares["too-many", "sigma-1"].paper)
    assert squares["dp-fedavg", "sigma-2"].open == "not run yet"
    said = printed(table)
    for words in ("80.50", "75.00 ± 3.54", "-5.50", "digits instead of something larger", "only named by the paper"):
        assert words in said
    assert "up to 2 seeds" in said
    first, *_, last = json.loads(json.dumps(table.to_plain(), allow_nan=False))["blocks"][0]["cells"]
    assert first["epsilon_server"] == "inf"
    assert (first["values"], first["spread"], last["ours"]) == ([pytest.approx(70.0)], None, None)


def printed(table: PaperTable) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_table(console, table, "Own")
    return console.file.getvalue()  # type: ignore[attr-defined]


def pretended(cell: Cell, common: list[float], *, epsilon: float) -> KeptCell:
    return KeptCell(
        cell=cell.key,
        digest=cell.digest,
        quick=cell.quick,
        task=cell.plain,
        accuracies={"accuracy_own_common": list(common), "accuracy_global": [0.1, 0.2]},
        epsilon_server=epsilon,
        epsilon_release=epsilon / 2,
        noise_multiplier=1.0,
        rounds=2,
        uplink_bytes=10,
        seconds=2.0,
        runtime="onnx",
        processor="nobody's",
        versions={},
    )


def test_what_leaves_without_noise_is_infinite_beside_the_papers_number(book: Path, tmp_path: Path) -> None:
    """The kept file says what the noise costs; which values were raw follows from its task."""
    table = TABLE.replace('{ "method.name" = "dp-fedavg" }', '{ "method.name" = "fedglp-adp" }', 1)
    (book / "own" / "table-1.toml").write_text(table)
    (cell,) = (one for one in cells() if (one.row.id, one.column_id) == ("dp-fedavg", "sigma-1"))
    kept = Kept(tmp_path)
    kept.add(KeptCell.load(pretended(cell, [0.7, 0.8], epsilon=12.2).save(tmp_path)))
    table = make_table(cell.recipe, [cell], CellProgress(kept), quick=False)
    (square,) = table.places.itertuples()
    assert square.raw_values == ("clip norms that follow the norms of raw updates",)
    assert square.epsilon_server == square.epsilon_release == math.inf
    assert epsilons(square) == ("inf (12.2)", "inf (6.1)")
    assert "clip norms that follow the norms of raw updates" in printed(table)


def test_quick_says_so_everywhere_and_a_figure_of_curves_says_why(book: Path, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out"), "--results", str(tmp_path)]
    code, said = typed("own", "--table", "1", "--quick", "--max-cells", "0", *out)
    assert code == 0
    assert "quick: one round instead of two" in said
    assert json.loads((tmp_path / "out" / "own" / "table-1-quick.json").read_text())["quick"] is True
    assert not (tmp_path / "out" / "own" / "table-1.json").exists()
    assert all(cell.key.endswith("-quick") and cell.plain["round"]["rounds"] == 1 for cell in cells(quick=True))
    with pytest.raises(BadInput, match=r"Figure 2 \(Curves\) cannot be run: curves only"):
        typed("own", "--figure", "2", *out)
    with pytest.raises(BadInput, match="give one of --table 1, --figure 2"):
        typed("own", *out)
    with pytest.raises(BadInput, match="own has no table 7 here; it has --table 1, --figure 2"):
        typed("own", "--table", "7", *out)
    with pytest.raises(BadInput, match="there is no paper 'others'; there are own"):
        typed("others", "--table", "1", *out)
    code, said = typed("--list", *out)
    assert code == 0
    assert "0/27" in said
    assert "curves only" in said


@pytest.mark.parametrize("columns", [80, 120])
def test_a_table_fits_its_terminal(book: Path, tmp_path: Path, columns: int) -> None:
    for cell in cells(seeds=2, methods=["dp-fedavg"]):
        pretended(cell, [0.7, 0.75 + cell.seed / 10], epsilon=4123.0).save(tmp_path)
    table = make_table(find_recipe("own", table="1"), cells(seeds=2), CellProgress(Kept(tmp_path)), quick=False)
    seen = io.StringIO()
    print_table(Console(width=columns, file=seen), table, "Own")
    text = seen.getvalue()
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert "75.00 ± 3.54" in text
    assert ("difference" in text) == (columns > 80)


@pytest.mark.parametrize(
    ("cells", "asked", "cores", "free_gib", "expected"),
    [
        (9, 0, 4, 64, (4, 1)),
        (1, 0, 4, 64, (1, 4)),
        (3, 0, 4, 64, (3, 1)),
        (2, 0, 5, 64, (2, 2)),
        (9, 2, 4, 64, (2, 2)),
        (9, 6, 4, 64, (6, 1)),
        (9, 0, 4, 6, (3, 1)),
        (1, 0, 4, 1, (1, 1)),
        (0, 0, 4, 64, (1, 4)),
    ],
)
def test_cells_share_all_cores_that_memory_allows(
    monkeypatch: pytest.MonkeyPatch, cells: int, asked: int, cores: int, free_gib: int, expected: tuple[int, int]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(cores))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free_gib << 30))
    shares = Shares.of(cells, asked)
    assert (shares.jobs, shares.workers) == expected


@pytest.mark.parametrize(("second", "shown"), [(91.0, ["sigma-1"]), (90.0, ["sigma-1", "sigma-2"])])
def test_a_run_that_serves_all_columns_stands_once_for_the_same_printed_number(
    book: Path, tmp_path: Path, second: float, shown: list[str]
) -> None:
    (book / "own" / "table-1.toml").write_text(TABLE.replace("fedavg = [91.0, 91.0]", f"fedavg = [91.0, {second}]", 1))
    (cell,) = cells(methods=["fedavg"])
    table = make_table(cell.recipe, [cell], CellProgress(Kept(tmp_path)), quick=False)
    assert list(table.places.column) == shown
    beside = cells(methods=["fedavg", "dp-fedavg"])
    table = make_table(cell.recipe, beside, CellProgress(Kept(tmp_path)), quick=False)
    assert list(table.places.column) == ["sigma-1", "sigma-2"] * 2


def test_a_cell_whose_process_dies_fails_alone(book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cell,) = cells(methods=["dp-fedavg"], columns=["sigma-2"])
    how = {"runs": tmp_path / "runs", "shares": Shares(jobs=1, workers=1), "data_dir": None}
    run = run_cells([cell], Kept(tmp_path / "out"), **how, watch=kill_children)
    ((_, outcome),) = run
    assert isinstance(outcome, Failure)
    assert outcome.error.startswith("its process was ended by signal 9: it said nothing")


def kill_children(under_way: object) -> None:
    for child in multiprocessing.active_children():
        child.kill()


def test_a_kept_cell_that_is_broken_is_named(tmp_path: Path) -> None:
    path = cell_path(tmp_path, "own/table-1/digits/fedavg/all/seed0")
    path.parent.mkdir(parents=True)
    path.write_text('{"schema": 1, "cell"')
    with pytest.raises(BadInput, match=r"seed0\.json is no finished cell"):
        Kept(tmp_path)
