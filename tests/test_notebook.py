"""The example notebook runs from its first cell to its last, with four rounds a run."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "notebook" / "first.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_in_a_kernel() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    setting = '{"privacy.epsilon": 8}'
    (first,) = [cell for cell in notebook.cells if setting in cell.source]
    first.source = first.source.replace(setting, '{"privacy.epsilon": 8, "round.rounds": 4}')
    (run,) = [cell for cell in notebook.cells if "quiet=True" in cell.source]
    run.source = run.source.replace("quiet=True", "quiet=False").replace("hf.compare([run, other])", "")
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [each for each in outputs if each.get("name") == "stderr"]
    (loud,) = [each["data"]["text/plain"] for each in run.outputs]  # one display, with all that was said and the panel
    assert "gradients by" in loud
    assert "4/4" in loud
    assert any("image/png" in each.get("data", {}) for each in outputs)
