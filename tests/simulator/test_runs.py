"""A run that has ended, as scripts see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hushfleet.errors import BadInput
from hushfleet.simulator.runs import Run, compare
from support import report_samples

samples = vars(report_samples)


def test_a_run_of_the_field_has_no_accuracies_to_plot_and_says_so(tmp_path: Path) -> None:
    samples["bare"](samples["sample"](2)).save(tmp_path / "result.json")
    run = Run(tmp_path)
    for plot in (run.plot_accuracy, run.plot_devices):
        with pytest.raises(BadInput, match="devices in the field do not send theirs"):
            plot()


def test_a_run_of_which_no_round_has_closed_has_no_rows(tmp_path: Path) -> None:
    result = samples["bare"](samples["sample"](2)).but(rounds=[])
    result.save(tmp_path / "result.json")
    run = Run(tmp_path)
    assert run.rounds.empty
    assert "accuracy_global" in run.rounds
    with pytest.raises(BadInput, match="no such accuracy was measured"):
        run.plot_accuracy()


def test_columns_have_the_names_of_a_dict_and_the_frame_is_printed(tmp_path: Path) -> None:
    for name, own in (("a", 0.75), ("b", 0.8), ("c", 0.6)):
        (tmp_path / name).mkdir()
        samples["sample"](2, own=own).save(tmp_path / name / "result.json")
    found = compare({"FedAvg": Run(tmp_path / "a"), "MOON": [tmp_path / "b", str(tmp_path / "c")]})
    assert list(found.frame) == list(found.values["runs"]) == ["FedAvg", "MOON", "MOON, c"]
    assert "global model, common test" in str(found)
    assert list(compare([tmp_path / "a", tmp_path / "b"]).frame) == ["a", "b"]


def test_devices_have_the_names_of_the_data(tmp_path: Path) -> None:
    result = samples["sample"](2)
    result.save(tmp_path / "result.json")
    assert "name" not in Run(tmp_path).devices
    assert "device_names" not in (tmp_path / "result.json").read_text()
    result.with_details(device_names=["north", "south"]).save(tmp_path / "result.json")
    assert Run(tmp_path).devices["name"].tolist() == ["north", "south"]
