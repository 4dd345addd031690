"""A run that has ended, as scripts see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hushfleet.errors import BadInput
from hushfleet.simulator.runs import Run
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
