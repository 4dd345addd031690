"""The runtime of a run, where it is left to the simulator."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hushfleet.simulator.engines.fast.runtimes import RUNTIMES, choose_runtime, quickest, unavailable
from hushfleet.simulator.run_folder import begin


def test_a_short_run_takes_the_devices_own_graphs(runs: Any, tmp_path: Path) -> None:
    assert choose_runtime(runs.copy(tmp_path / "run")) == "onnx"


def test_a_long_run_takes_the_quickest_and_keeps_it(
    short_task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = short_task(round={"rounds": 100_000}, data={"limit": None})
    simulation = begin(task, tmp_path / "run", data_dir=None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_runtime(simulation) == quickest("digits-cnn")
    # A resumed run must not change its arithmetic, whatever the machine has now.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_runtime(simulation) == quickest("digits-cnn")
    simulation.folder.runtime.unlink()
    assert choose_runtime(simulation) == "vmap"


def test_who_dies_while_a_run_is_begun_leaves_no_half_of_a_file(
    short_task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty `task.json` would be a run that can be neither begun nor gone on with, an empty runtime PyTorch's."""
    written = ("task.json", "runtime.txt")

    def dies(path: Path, *arguments: Any, **named: Any) -> Any:
        file = open(path, *arguments, **named)  # noqa: SIM115
        if path.name.startswith(written):
            raise KeyboardInterrupt
        return file

    for name in written:
        monkeypatch.setattr("hushfleet.atomic_file.open", dies, raising=False)
        with pytest.raises(KeyboardInterrupt):
            choose_runtime(begin(short_task(), tmp_path / "run", data_dir=None))
        monkeypatch.delattr("hushfleet.atomic_file.open")
        assert not (tmp_path / "run" / name).exists()
        written = ("runtime.txt",)
        shutil.rmtree(tmp_path / "run")


def test_the_quickest_runtime_is_at_hand() -> None:
    for name in ("digits-cnn", "linear"):
        assert quickest(name) == ("onnx" if unavailable("native", name) else "native")
    assert quickest("resnet8-gn") == "torch"
    assert quickest("autoencoder") == "onnx"


@pytest.mark.parametrize("name", RUNTIMES)
def test_every_runtime_knows_whether_it_can(name: str) -> None:
    assert unavailable(name, "digits-cnn") is None or isinstance(unavailable(name, "digits-cnn"), str)
