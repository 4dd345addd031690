"""result.json: the keys that were promised, infinity in standard JSON, and errors that name the place."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from msgspec import ValidationError

from hushfleet.aggregator.results.result import Details, Result, RoundRow, last_measured, write_whole
from hushfleet.errors import BadInput, StoreError
from hushfleet.plain_json import to_json
from support import report_samples

samples = vars(report_samples)
sample, bare = samples["sample"], samples["bare"]

PROMISED = {
    "": "schema task method dataset partition devices seed engine rounds local_only privacy versions model "
    "recorded_at federation accounting trust sums assumption accountant clip_norm noise_multiplier wire boards details "
    "rerun evaluations pay statistic lost_rounds",
    "rounds": "round participants accuracy_own_common accuracy_own_local accuracy_global loss uplink_bytes "
    "downlink_bytes snr_db wall_s opened_at closed_at committee answers answer_bytes suspected_wraps",
    "privacy": "devices unit adjacency delta epsilon_server epsilon_release rounds_charged "
    "raw_values noised_server noised_release exchange_server lifetime",
}


def strict_json(path: Path) -> dict:
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no standard JSON"))


def test_a_device_keeps_its_name_where_the_measure_has_another(tmp_path: Path) -> None:
    """A board was renamed with the keys, and of two boards one was lost."""
    names = {"accuracy_1": "pi", "auroc_1": "orin"}
    counted = {"faults": {"auroc_1": 1}, "refusals": {"accuracy_1": {"late": 2}}, "declines": {"auroc_1": {"disk": 1}}}
    details = sample(2).details.but(devices=list(names), measure="AUROC", **counted)
    result = sample(2).but(boards=names, details=details)
    result.save(tmp_path / "result.json")
    assert Result.load(tmp_path / "result.json") == result
    assert "auroc_global" in strict_json(tmp_path / "result.json")["rounds"][0]


def test_a_result_survives_the_file(tmp_path: Path) -> None:
    result = sample(3, 4, sweep=((math.inf, 0.1), (3.0, -0.2)))
    result.save(tmp_path / "run" / "result.json")
    assert Result.load(tmp_path / "run" / "result.json") == result
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["result.json"]


def test_a_file_of_0_3_is_read_and_told_by_kinds_of_devices_from_then_on(tmp_path: Path) -> None:
    """Version 0.3.0 wrote it: a simulation with personalized heads, two seeds and a sweep over noise."""
    path = Path(__file__).with_name("result_0_3_0.json")
    result = Result.load(path)
    assert result.details.privacy_sweep[0].epsilon_server == math.inf
    result.save(tmp_path / "result.json")
    assert Result.load(tmp_path / "result.json") == result
    ours, theirs = (strict_json(each) for each in (tmp_path / "result.json", path))
    assert (theirs.pop("schema"), ours.pop("schema")) == (1, 2)
    kinds, rows = ours.pop("privacy"), theirs.pop("privacy")
    assert ours == theirs
    assert sorted(name for kind in kinds for name in kind["devices"]) == [row["device"] for row in rows]
    for row in rows:
        (kind,) = [kind for kind in kinds if row["device"] in kind["devices"]]
        assert {**row, "devices": kind["devices"]} == {**kind, "device": row["device"]}


def test_a_file_of_an_earlier_version_lacks_keys(tmp_path: Path) -> None:
    data = strict_json(Path(__file__).with_name("result_0_3_0.json"))
    for name in (
        "recorded_at",
        "federation",
        "trust",
        "sums",
        "accountant",
        "pay",
        "rerun",
        "evaluations",
        "lost_rounds",
    ):
        del data[name]
    (tmp_path / "result.json").write_text(json.dumps(data))
    result = Result.load(tmp_path / "result.json")
    assert (result.trust, result.accountant, result.pay, result.evaluations) == (None, "rdp", "", [])


def test_the_file_has_exactly_the_promised_keys(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    sample().save(path)
    data = strict_json(path)
    assert set(data) == set(PROMISED[""].split())
    assert set(data["rounds"][0]) == set(PROMISED["rounds"].split())
    assert set(data["privacy"][0]) == set(PROMISED["privacy"].split())
    assert set(data["local_only"]) == {"accuracy_own_common", "accuracy_own_local", "way"}
    assert data["schema"] == 2
    assert data["model"] == {"name": "digits-cnn", "parameters": 200, "layers": [["fc0", 100], ["fc1", 100]]}


def test_every_key_is_documented(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "result.md").read_text()
    data = to_json(Result.of(sample(sweep=((3.0, 0.1),))))
    names = {*data, *data["rounds"][0], *data["privacy"][0], *data["details"], *data["wire"]}
    names |= {*data["details"]["privacy_sweep"][0]}
    assert len(names) > 50
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_bits_for_each_value_that_was_sent() -> None:
    assert sample(2, 3).bits_per_value == 8.0  # a device's 1,000 bytes hold 1,000 values
    assert bare(sample()).bits_per_value is None
    rows = [row.but(uplink_bytes=2500, answer_bytes=500) for row in sample(2, 3).rounds]
    assert sample(2, 3).but(rounds=rows).bits_per_value == 8.0, "answers are no updates"


def test_infinity_is_written_as_a_string_and_read_as_a_number(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    result = sample(epsilon_server=math.inf).but(clip_norm=math.inf)
    result.save(path)
    data = strict_json(path)
    assert data["privacy"][0]["epsilon_server"] == "inf"
    assert data["clip_norm"] == "inf"
    assert data["details"]["epsilon_server"][0] == ["inf", "inf"]
    again = Result.load(path)
    assert again.privacy[0].epsilon_server == math.inf
    assert again.details.epsilon_server[0] == [math.inf, math.inf]


def test_what_is_not_a_number_is_null_and_an_epsilon_may_not_be(tmp_path: Path) -> None:
    row = RoundRow.of(
        RoundRow(round=1, participants=2, uplink_bytes=0, downlink_bytes=0, loss=math.nan, accuracy_global=np.nan)
    )
    assert row.loss is None
    assert row.accuracy_global is None
    with pytest.raises(ValidationError):
        sample(epsilon_server=math.nan).save(tmp_path / "result.json")
    assert not (tmp_path / "result.json").exists()


def test_arrays_of_numpy_are_taken_as_lists() -> None:
    details = Details.of(
        Details(
            devices=["a", "b"],
            accuracy_own_common=np.array([[0.5, np.nan]]),
            label_counts=[np.array([1, 2]), np.array([3, 4])],
            rounds_accepted=np.array([1, 2]),
            eq20_bytes=[np.float64(8.0)],
        )
    )
    assert details.accuracy_own_common == [[0.5, None]]
    assert details.label_counts == [[1, 2], [3, 4]]
    assert details.rounds_accepted == [1, 2]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("personal_share", [[0.1, 0.1]]),
        ("epsilon_server", [[1.0], [1.0], [1.0]]),
        ("label_counts", [[1, 2, 3]]),
        ("eq20_bytes", [1.0]),
        ("local_only_common", [0.5]),
    ],
)
def test_lists_that_do_not_fit_the_run_are_refused_by_name(key: str, value: object) -> None:
    data = to_json(sample())
    data["details"][key] = value
    with pytest.raises(ValidationError, match=f"details.{key}"):
        Result.of(data)


@pytest.mark.parametrize("accuracy", [1.2, -0.1, 97.0])
def test_an_accuracy_is_a_fraction(accuracy: float) -> None:
    with pytest.raises(ValidationError):
        RoundRow.of(RoundRow(round=1, participants=1, uplink_bytes=0, downlink_bytes=0, accuracy_global=accuracy))


def test_a_reader_leaves_out_keys_it_does_not_know_and_a_writer_may_not_invent_them(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    sample().save(path)
    data = strict_json(path)
    data["new"] = 1
    data["rounds"][0]["new"] = 1
    path.write_text(json.dumps(data))
    assert Result.load(path) == sample()
    with pytest.raises(TypeError, match="new"):
        sample().but(new=1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not a readable JSON"),
        ("[" * 100_000, "not a readable JSON"),
        ("[]", "schema None"),
        ('{"schema": 3}', "schema 3, and this Hushfleet reads schema 1 and 2"),
        ('{"schema": 1}', "missing required field `task`"),
        ('{"schema": 2, "privacy": [{"devices": 3}, 4]}', "missing required field `device`"),
    ],
)
def test_other_files_are_refused_in_words(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=told):
        Result.load(path)
    with pytest.raises(BadInput, match=r"absent has no result\.json: the run has not ended"):
        Result.load(tmp_path / "absent" / "result.json")
    with pytest.raises(BadInput, match=r"result\.json is a file; give the run's folder"):
        Result.load(path / "result.json")


def test_lists_that_do_not_fit_are_told_in_our_own_words(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    sample(rounds=3).save(path)
    data = strict_json(path)
    data["details"]["accuracy_own_common"].pop()
    path.write_text(json.dumps(data))
    with pytest.raises(BadInput, match=r"schema 2: details\.accuracy_own_common has 2 entries, and must have 3$"):
        Result.load(path)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    sample().save(path)
    before = path.read_bytes()
    (tmp_path / "result.json.part").mkdir()
    with pytest.raises(StoreError, match="cannot be written"):
        write_whole(path, "new")
    assert path.read_bytes() == before


def test_the_newest_measured_value() -> None:
    rows = sample(2, 4).rounds
    assert last_measured(rows, lambda row: row.accuracy_global) == 0.6
    assert last_measured(rows, lambda row: row.loss if row.round < 3 else None) == 1.5
    assert last_measured(bare(sample()).rounds, lambda row: row.accuracy_global) is None
