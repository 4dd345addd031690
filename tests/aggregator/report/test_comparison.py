"""Runs side by side: every row has a value of each run, and the page holds the table that the terminal shows."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from hushfleet.aggregator.report.comparison import (
    comparison_json,
    comparison_table,
    differ_by_seed,
    load_runs,
    run_folders,
    task_differences,
    write_comparison,
)
from hushfleet.aggregator.report.readable import gained
from hushfleet.aggregator.report.sweeps import seed_table
from hushfleet.aggregator.results.gains import Gain
from hushfleet.aggregator.results.result import Rerun, Result, SeedPoint
from hushfleet.errors import BadInput
from hushfleet.simulator.runs import Comparison
from support.report_samples import rows_of, sample

RUNS = {
    "paper": sample(own=0.75, alone=0.70, epsilon_server=4417.0),
    "sums": sample(own=0.60, alone=0.70, epsilon_server=2.0),
}


def row(name: str) -> list[str]:
    (found,) = [values for first, *values in rows_of(RUNS) if first == name]
    return found


def test_a_row_has_a_value_of_each_run() -> None:
    assert {len(values) for values in rows_of(RUNS)} == {3}
    assert row("") == ["paper", "sums"]
    assert [value.partition(" ")[0] for value in row("epsilon_server (delta)")] == ["4,417", "2"]
    gains = row("gained, common test")
    assert gains[0].startswith("+5.0")
    assert gains[1].startswith("\N{MINUS SIGN}10.0")


def test_the_page_holds_the_table_and_says_where_the_whole_reports_are(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_comparison("Two fleets", RUNS, {"paper": "paper/report.html", "sums": "sums/report.html"}, path)
    text = path.read_text()
    for values in rows_of(RUNS):
        for value in values:
            assert value in text
    assert "paper/report.html" in text
    assert "sums/report.html" in text


def test_bytes_are_over_all_updates_that_were_sent() -> None:
    """A round whose updates were too few for a model has their bytes, and no participants."""
    result = sample(2, 4)
    rounds = [row.but(**({"participants": 0} if row.round > 1 else {})) for row in result.rounds]
    runs = {"few": result.but(rounds=rounds), "all": result}
    (sent,) = [values for first, *values in rows_of(runs) if first == "sent up by a device, a round"]
    assert sent == ["1\N{NO-BREAK SPACE}kB"] * 2


def seeded(seed: int, own: float, *, epsilon: float = 2.0, rounds: int = 3) -> Result:
    task = f'name = "t"\nseed = {seed}\nprivacy.epsilon = {epsilon}'
    made = Rerun(command="hushfleet simulate t.toml", task=task, digests={})
    return sample(2, rounds, own=own).but(seed=seed, rerun=made)


def test_runs_of_other_seeds_have_their_mean_and_its_spread() -> None:
    runs = {f"seed-{n}": seeded(n, own) for n, own in enumerate((0.75, 0.77, 0.79))}
    rows = {name: values for name, *values in rows_of(runs)}
    assert rows[""][-1] == "mean of 3 seeds"
    spread = Gain.of([0.05, 0.07, 0.09])
    assert rows["gained, common test"][-1] == gained(spread)
    assert rows["federated, common test"][-1] == "77.0\N{NO-BREAK SPACE}% (sd 2.0)"
    assert not differ_by_seed([seeded(0, 0.7), seeded(1, 0.7, epsilon=4.0)])
    assert not differ_by_seed([seeded(0, 0.7), seeded(0, 0.8)])
    assert not differ_by_seed(list(RUNS.values())), "files that do not say their task"


def test_seeds_of_which_one_has_learned_nothing_have_no_mean_gain() -> None:
    """As `comparison` has it: a model that guesses gains nothing, however little devices reach alone."""
    points = [
        SeedPoint(seed=seed, accuracy_own_common=own, gain_over_local_only=own - 0.2)
        for seed, own in ((0, 0.3), (1, 0.9))
    ]
    result = sample()
    result = result.with_details(seeds=points)
    *_, mean, _ = seed_table(result).rows
    assert (mean[0], mean[-1]) == ("mean", "learned nothing")


def test_seeds_of_one_configuration_are_one_column_beside_another() -> None:
    runs = {f"two-{n}": seeded(n, own) for n, own in enumerate((0.75, 0.77))}
    runs |= {f"four-{n}": seeded(n, own, epsilon=4.0) for n, own in enumerate((0.80, 0.84))}
    runs["eight"] = seeded(3, 0.9, epsilon=8.0)
    rows = {name: values for name, *values in rows_of(runs)}
    assert rows[""] == ["two-0, 2 seeds", "four-0, 2 seeds", "eight"]
    assert rows["task: privacy.epsilon"] == ["2.0", "4.0", "8.0"]
    runs["four-1"] = seeded(1, 0.84, epsilon=4.0, rounds=2)
    (told,) = [values for name, *values in rows_of(runs) if name == "devices, rounds"]
    assert told == ["2, 3", "2, 2 to 3", "2, 3"]
    assert "task: seed" not in rows
    assert [each.replace("\N{NO-BREAK SPACE}", "") for each in rows["federated, common test"]] == [
        "76.0% (sd 1.4)",
        "82.0% (sd 2.8)",
        "90.0%",
    ]
    found = comparison_json(runs)["seeds"]
    assert [each["runs"] for each in found] == [["two-0", "two-1"], ["four-0", "four-1"]]
    assert found[1]["common_test"]["federated"] == pytest.approx(0.82)
    assert found[1]["common_test"]["standard_error"] == pytest.approx(0.02)


def test_a_latex_table_has_no_sign_that_latex_lacks() -> None:
    """Letters it has."""
    made, ascii = Comparison({"a_ü": seeded(0, 0.3), "b": seeded(0, 0.6, epsilon=4.0)}), set(map(chr, range(128)))
    assert set(made.frame.to_string()) - ascii == {"ü", "\N{NO-BREAK SPACE}", "\N{MINUS SIGN}", "±"}
    assert set(made.to_latex()) - ascii == {"ü"}
    for sign in (r"a\_ü", r"~\%", r"$\pm$", "$-$"):
        assert sign in made.to_latex()


def test_the_keys_in_which_tasks_differ_are_rows_of_their_own() -> None:
    rows = {name: values for name, *values in rows_of({"a": seeded(0, 0.7), "b": seeded(0, 0.7, epsilon=4.0)})}
    assert rows["task: privacy.epsilon"] == ["2.0", "4.0"]
    assert [name for name in rows if name.startswith("task:")] == ["task: privacy.epsilon"]


def test_the_global_model_has_rows_of_its_own_before_the_personalized_ones() -> None:
    runs = {"a": seeded(0, 0.7), "b": seeded(0, 0.7, epsilon=4.0)}
    last = runs["a"].rounds[-1]
    runs["a"] = runs["a"].but(rounds=[*runs["a"].rounds[:-1], last.but(accuracy_global=0.5, metrics={"f1": 0.25})])
    rows = {name: values for name, *values in rows_of(runs)}
    assert rows["global model, common test"] == ["50.0\N{NO-BREAK SPACE}%", "60.0\N{NO-BREAK SPACE}%"]
    assert rows["global model, f1"][0] == "0.25"
    names = list(rows)
    assert names.index("global model, common test") < names.index("federated, common test")
    found = [each["common_test"] for each in comparison_json(runs)["runs"].values()]
    assert [each["global"] for each in found] == [pytest.approx(0.5), pytest.approx(0.6)]
    assert [each["global_metrics"] for each in found] == [{"f1": 0.25}, {}]


def test_the_same_data_at_another_path_are_no_difference() -> None:
    def of(name: str, digest: str, partition: str = "iid", counts: int = 5) -> Result:
        task = f'data.path = "/runs/{name}/data.npz"\ndata.partition = "{partition}"'
        made = Rerun(command="", task=task, digests={"training images": digest})
        return sample().with_details(label_counts=[[counts] * 3] * 2).but(rerun=made)

    assert task_differences([of("a", "0"), of("b", "0", counts=6)]) == {}
    assert list(task_differences([of("a", "0"), of("b", "1")])) == ["data.path"]
    given = [of(name, "0", "given", counts) for name, counts in (("a", 5), ("b", 5), ("c", 6))]
    assert task_differences(given[:2]) == {}
    assert list(task_differences(given)) == ["data.path"], "other devices hold these samples"


def test_json_has_the_numbers_and_the_verdict() -> None:
    found = comparison_json(RUNS)["runs"]
    assert found["paper"]["common_test"]["gain"] == pytest.approx(0.05)
    assert [each["common_test"]["verdict"] for each in found.values()] == ["better", "worse"]
    json.dumps(found)


def test_runs_are_named_by_their_folders_and_a_folder_without_a_result_is_refused(tmp_path: Path) -> None:
    for name in ("a/run", "b/run", "c"):
        (tmp_path / name).mkdir(parents=True)
        sample().save(tmp_path / name / "result.json")
    assert list(load_runs([tmp_path / "a" / "run", tmp_path / "c"])) == ["run", "c"]
    assert list(load_runs([tmp_path / "a" / "run", tmp_path / "b" / "run"])) == [
        str(tmp_path / n / "run") for n in "ab"
    ]
    with pytest.raises(BadInput, match=r"result\.json"):
        load_runs([tmp_path / "a"])
    with pytest.raises(BadInput, match="give each run once"):
        load_runs([tmp_path / "c", tmp_path / "a" / ".." / "c"])


def test_methods_in_files_are_compared_by_their_names() -> None:
    def of(name: str) -> Result:
        made = Rerun(command="", task=f'method.name = "/a/long/path/{name}.py:{name}"\nseed = 1', digests={})
        return sample().but(method=name, rerun=made)

    rows = rows_of({"a": of("one"), "b": of("two")})
    assert ["method", "one", "two"] in rows
    assert not any("/a/long/path" in cell for row in rows for cell in row)
    same = rows_of({"a": of("one"), "b": of("two").but(method="one")})
    assert any("/a/long/path/two.py:two" in cell for row in same for cell in row)  # nothing else tells them apart


def test_names_in_brackets_are_no_markup_of_the_terminal() -> None:
    """Rich took `[lr=0.1]` for a style, and `[/a]` for the end of one, which was a traceback."""
    runs = {"exp[lr=0.1]": RUNS["paper"], "exp[/a]": RUNS["sums"]}
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(comparison_table(runs, title="of [all]"))
    text = console.export_text()
    assert "exp[lr=0.1]" in text
    assert "exp[/a]" in text
    assert "of [all]" in text


def test_a_seed_that_is_given_by_another_path_is_no_second_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = tmp_path / "a" / "seeds" / "1"
    seed.mkdir(parents=True)
    for folder in (seed, tmp_path / "a"):
        RUNS["paper"].save(folder / "result.json")
    monkeypatch.chdir(tmp_path)
    assert list(run_folders([Path("a"), seed])) == ["a", "1"]
