"""The Python API, from a script as people write them: without `if __name__ == "__main__"`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import hushfleet as hf
import hushfleet.simulator.run as run_module
from hushfleet.errors import BadInput
from hushfleet.simulator import api
from hushfleet.simulator.api import _interrupt, task

SCRIPT = """
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

import hushfleet as hf

with open("starts.txt", "a") as file:
    file.write("x")

labels = np.random.default_rng(0).integers(0, 3, 300)
samples = (np.random.default_rng(1).normal(size=(300, 6)) + labels[:, None]).astype("float32")


class Net(nn.Module):
    def __init__(self, classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = nn.Linear(input_shape[0], classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


TASK = {
    "name": "own",
    "privacy": {"noise_multiplier": 0.1, "clip_norm": 1.0, "delta": 1e-3},
    "data": {"devices": 3},
    "round": {"rounds": 3},
}

mine = replace(hf.methods.METHODS["dp-fedavg"], name="mine")
kinds: list[str] = []
for event in hf.events(TASK, out="run", model=Net, data=(samples, labels), method="dp-fedavg", workers=2):
    kinds.append(event["event"])
    if event["event"] == "round_close":
        break
assert kinds[0] == "run" and kinds.count("round_close") == 1, kinds
run = hf.simulate(
    TASK, model=Net, data=(samples, labels), method="dp-fedavg", workers=2, out="run", resume=True, quiet=True
)
assert list(run.rounds.index) == [1, 2, 3]
assert list(run.devices.rounds_accepted) == [3, 3, 3]
again = hf.simulate(TASK, model=Net, data=hf.Data(samples, labels), method=mine, out="again", quiet=True)
assert again.result.method == "mine"
same = ["participants", "accuracy_global", "loss"]
# an interruption, and another way to name the method change nothing
assert run.rounds[same].equals(again.rounds[same]), (run.rounds, again.rounds)
assert "report" in run._repr_html_()
net, test, (mean, std) = Net(3, (6,)), np.load("run/common_test.npz"), run.normalisation
x = (torch.tensor(test["images"])[:, :, 0, 0] - torch.tensor(mean)) / torch.tensor(std)
for which, accuracy in (("global", run.rounds.accuracy_global[3]), ("device-0", run.devices.accuracy_own["device-0"])):
    net.load_state_dict(run.model(which))
    right = net(x).argmax(1).numpy() == test["labels"]
    assert abs(right.mean() - accuracy) < 1e-6, (which, right.mean(), accuracy)
print(hf.compare([run, again]).frame)
print(run.plot_accuracy(), run.plot_devices())
print(run.summary)
"""


@pytest.mark.slow
def test_a_script_with_its_own_network_data_and_method(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert (tmp_path / "starts.txt").read_text() == "x"


def test_a_run_that_starts_threads_is_interrupted_itself() -> None:
    """Not the thread that it starts just now, for whose beginning it would wait for ever: one trial of six, once."""
    for _ in range(50):
        begun = threading.Event()

        def work(begun: threading.Event = begun) -> None:
            with suppress(KeyboardInterrupt):
                while True:
                    other = threading.Thread(target=begun.set)
                    other.start()
                    other.join()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        assert begun.wait(60)
        interrupting = threading.Thread(target=_interrupt, args=(thread,), daemon=True)
        interrupting.start()
        interrupting.join(60)
        assert not thread.is_alive()


def test_a_task_of_a_dict_leaves_the_dict_as_it_was() -> None:
    plain = {
        "name": "t",
        "model": {"name": "linear"},
        "method": {"name": "fedavg"},
        "data": {"name": "digits", "devices": 2},
    }
    changed = task(plain, {"data.devices": 3})
    assert changed.data.devices == 3
    assert plain["data"] == {"name": "digits", "devices": 2}
    assert task(changed, {"round.rounds": 4}).data.devices == 3
    with pytest.raises(BadInput, match=r"unknown field .devicez."):
        task(plain, {"data.devicez": 3})
    for value in (None, [1, None], {"a": 1}, {1, 2}):
        with pytest.raises(BadInput, match="cannot be a value"):
            task(plain, {"data.devices": value})


def test_changes_may_be_lists_and_numbers_of_numpy() -> None:
    plain = {"name": "t", "model": {"name": "linear"}, "method": {"name": "fedavg"}, "data": {"name": "arrays"}}
    names, shape = ["5", 'café, "x"', "a\\b"], np.array([1, 8, 8])
    changes = {"data.class_names": names, "data.input_shape": shape, "data.mean": (0.5,), "data.std": [np.float64(2)]}
    data = task(plain, {**changes, "data.devices": np.int64(3), "model.loss": "binary"}).data
    assert data.class_names == tuple(names)
    assert (data.input_shape, data.mean, data.std, data.devices) == ((1, 8, 8), (0.5,), (2.0,), 3)


def test_epsilon_is_that_of_the_command() -> None:
    spent = hf.privacy.epsilon(3.975, rounds=20, delta=0.1, noise_split=10, accountant="rdp")
    assert spent.release == pytest.approx(1.996, abs=1e-3)
    noise = hf.privacy.noise_multiplier(2, rounds=20, delta=0.01)
    assert hf.privacy.epsilon(noise, rounds=20, delta=0.01) == pytest.approx((2, 2))


def test_import_is_light_and_every_name_is_there() -> None:
    code = (
        "import sys, hushfleet; heavy = {'torch', 'pandas', 'rich', 'typer', 'scipy', 'pydantic', 'onnxruntime'};"
        "hushfleet.privacy.epsilon(1.0, rounds=1, delta=0.1); assert not heavy & set(sys.modules);"
        "[getattr(hushfleet, name) for name in hushfleet.__all__]; assert 'typer' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_script_ends_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with hf.script(["a.b=c=d", "e="]) as changes:
        assert changes == {"a.b": "c=d", "e": ""}
    for arguments, said in ((["x"], "error: 'x': give KEY=VALUE"), (["round.rounds=x"], "error: ")):
        with pytest.raises(SystemExit) as left, hf.script(arguments) as changes:
            hf.task({"name": "t"}, changes)
        assert left.value.code == 2
        assert capsys.readouterr().err.startswith(said)
    with pytest.raises(ZeroDivisionError), hf.script([]):
        1 / 0  # noqa: B018 - a fault of the script itself


@pytest.mark.parametrize("name", ["data.npz", "notes.txt"])
def test_a_folder_with_a_users_files_stays_as_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    plain = {"name": "t", "model": {"name": "linear"}, "method": {"name": "fedavg"}, "data": {"devices": 2}}
    data = np.zeros((6, 2), np.float32), np.arange(6) % 3
    with pytest.raises(BadInput, match=rf"other files: {name}\."):
        hf.simulate(plain, data=data, out=tmp_path, quiet=True)
    with pytest.raises(BadInput, match="there is no run to resume"):
        hf.simulate(plain, data=data, out=tmp_path, resume=True, quiet=True)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [(name, "mine")]


def test_an_option_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(BadInput, match=r"simulate has no option lean; it has model, data, .*, engine, out, .*, sweep"):
        hf.simulate({}, lean=True)
    with pytest.raises(BadInput, match=r"simulate has no option metric \(did you mean 'metrics'\?\)"):
        hf.simulate({}, metric=len)
    for name, key in (("seed", "seed"), ("rounds", "round.rounds"), ("devices", "data.devices")):
        with pytest.raises(BadInput, match=rf'a key of the task, changes={{"{key}": \.\.\.}}'):
            hf.simulate({}, **{name: 3})


def test_names_and_data_are_shown_shortly() -> None:
    assert set(hf.__all__) <= set(dir(hf))
    data = hf.Data(np.zeros((900, 2), np.float32), np.zeros(900), class_names=["a", "b"])
    assert repr(data) == "Data(train_x: [900, 2], train_y: [900], class_names: [2])"
    assert repr(hf.Data([[1, 2], [3]], layout="channels-last")) == "Data(train_x: [2], layout: channels-last)"


OWNED = np.eye(90, 4, dtype=np.float32), np.arange(90) % 3, np.arange(90) % 3
PLAIN = {"name": "t", "model": {"name": "linear"}, "method": {"name": "fedavg"}, "round": {"rounds": 1}}


@pytest.mark.parametrize("data", [{}, {"devices": 10}])
@pytest.mark.parametrize("form", ["dict", "file", "task"])
def test_data_that_name_their_devices_say_how_many_there_are(tmp_path: Path, data: dict[str, int], form: str) -> None:
    source = {**PLAIN, "data": {"name": "digits", "min_samples": 1, **data}}
    (tmp_path / "t.json").write_text(json.dumps(source))
    given = {"dict": source, "file": tmp_path / "t.json", "task": hf.task(source)}[form]
    found = api._number_of_devices(hf.as_data(OWNED), given, {})
    assert found == ({} if data and form != "task" else {"data.devices": 3})  # a task does not keep what was left out
    assert api._number_of_devices(hf.as_data(OWNED), given, {"data.devices": 10}) == {}
    if form == "dict" and data:
        with pytest.raises(BadInput, match=r"data.devices = 10: .* it must be 3"):
            hf.simulate(source, data=OWNED, keep=False, quiet=True)


def test_events_take_changes_as_simulate_does(tmp_path: Path) -> None:
    task = {**PLAIN, "data": {"min_samples": 1}}
    how = {"out": tmp_path / "a", "data": OWNED, "local_only": False, "report": False, "workers": 1}
    rounds = [
        event["round"] for event in hf.events(task, {"round.rounds": 2}, **how) if event["event"] == "round_close"
    ]
    assert rounds == [1, 2]
    assert len(hf.open_run(tmp_path / "a").devices) == 3


def test_two_threads_of_one_program_prepare_their_runs_in_turn(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    inside, gate, folders = threading.Lock(), threading.Barrier(2), []

    def open_simulation(_: object, folder: Path, **__: object) -> None:
        assert inside.acquire(blocking=False), "PyTorch would trace two networks at once"
        time.sleep(0.05)
        folder.mkdir(parents=True)
        inside.release()

    def simulate() -> None:
        gate.wait()
        folders.append(hf.simulate(plain, quiet=True))

    monkeypatch.setattr(run_module, "open_simulation", open_simulation)
    monkeypatch.setattr(api, "run", lambda *_, **__: None)
    monkeypatch.setattr(api, "Run", lambda folder: folder)
    plain = {"name": "t", "model": {"name": "linear"}, "method": {"name": "fedavg"}, "data": {"name": "digits"}}
    threads = [threading.Thread(target=simulate) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(set(folders)) == 2


TRIAL = {
    "name": "trial",
    "model": {"name": "linear", "features": "filters"},
    "method": {"name": "dp-fedavg", "optimizer": "sgd"},
    "privacy": {"noise_multiplier": 0.1, "clip_norm": 1.0},
    "data": {"name": "digits", "devices": 3, "limit": 150},
    "round": {"rounds": 2},
}


def test_a_trial_leaves_nothing_but_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept = hf.simulate(TRIAL, out=tmp_path / "kept", report=False, local_only=False, quiet=True, workers=1)
    assert not [
        path for path in kept.folder.rglob("*") if path.suffix in (".html", ".onnx") and "graphs" not in path.parts
    ]
    with pytest.raises(BadInput, match="has no report: `hushfleet report"):
        kept.report()
    monkeypatch.setattr("hushfleet.aggregator.report.render.write_report", lambda *_: pytest.fail("a report"))
    run = hf.simulate(TRIAL, keep=False, local_only=False, quiet=True, workers=1)
    assert run.rounds.drop(columns="wall_s").equals(kept.rounds.drop(columns="wall_s"))
    assert (run.devices.equals(kept.devices), run.finished) == (True, True)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    for asked in (lambda: run.model(), lambda: run.events, run.report, lambda: run.normalisation):
        with pytest.raises(BadInput, match="the run was not kept"):
            asked()
    assert list(hf.compare([run, kept]).frame)[1:] == ["kept"]


@pytest.mark.slow
def test_workers_stay_and_forget_a_run_whose_folder_is_taken_again(tmp_path: Path) -> None:
    how = {"local_only": False, "quiet": True, "report": False, "out": tmp_path / "a"}
    with hf.Workers(2) as workers:
        first = hf.simulate(TRIAL, workers=workers, **how)
        pids = {process.pid for process in workers._processes}
        assert len(pids) == 2
        hf.simulate(TRIAL, {"method.learning_rate": 0.3}, workers=workers, **how | {"out": tmp_path / "b"})
        assert {process.pid for process in workers._processes} == pids
        shutil.rmtree(tmp_path / "a")
        other = hf.simulate(TRIAL, {"method.learning_rate": 0.3, "data.devices": 5}, workers=workers, **how)
    alone = hf.simulate(
        TRIAL, {"method.learning_rate": 0.3, "data.devices": 5}, workers=1, **how | {"out": tmp_path / "c"}
    )
    assert first.rounds.accuracy_global.tolist() != other.rounds.accuracy_global.tolist()
    assert other.rounds.accuracy_global.equals(alone.rounds.accuracy_global)
