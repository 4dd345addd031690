"""`hushfleet` as typed: runs, bad input in one clear paragraph, help that teaches by example."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hushfleet.aggregator.commands.main import build_app, main
from hushfleet.aggregator.results.events import iterate_events
from hushfleet.aggregator.results.result import Result
from hushfleet.privacy.terms import AS_PUBLISHED

pytestmark = pytest.mark.slow

TASK = """
name = "typed"
[model]
name = "digits-cnn"
[method]
name = "dp-fedavg"
local_epochs = 1
[privacy]
noise_multiplier = 0.5
[data]
name = "digits"
devices = 3
limit = 200
[round]
rounds = 2
"""


@pytest.fixture
def task_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "task.toml"
    path.write_text(TASK)
    return path


def typed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str, str]:
    """The whole command in this process: exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["hushfleet", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def _own(name: str) -> list[str]:
    """Options for own data."""
    keys = (f"name={name}", 'class_names=["a", "b"]', "input_shape=[1, 8, 8]")
    return [word for key in keys for word in ("--set", f"data.{key}")]


BAD = {
    "no such file": (["absent.toml"], ["absent.toml"]),
    "a number that is none": (["--set", "round.rounds=many"], ["round.rounds", "many", "integer"]),
    "out of range": (["--set", "round.rounds=0"], ["round.rounds", "0", "[1,"]),
    "a key that is none": (["--set", "round.pace=3"], ["round:", "pace"]),
    "no key": (["--set", "rounds"], ["rounds", "="]),
    "a method that is none": (["--set", "method.name=fedsgd"], ["fedsgd", "fedglp-adp", "dp-fedavg", "fedavg"]),
    "a setting of the method": (["--set", "method.learning_rate=-1"], ["learning_rate", "-1"]),
    "a model that is none": (["--set", "model.name=vgg"], ["vgg", "digits-cnn"]),
    "a model of another shape": (["--set", "model.name=cifar10-cnn"], ["cifar10-cnn", "3 x 32 x 32", "1 x 8 x 8"]),
    "a data set that is none": (["--set", "data.name=imagenet"], ["data.name", "imagenet", "digits"]),
    "a partition that is none": (["--set", "data.partition=fair"], ["data.partition", "fair", "iid"]),
    "two noises": (
        ["--set", "privacy.epsilon=3", "--set", "privacy.noise_multiplier=1"],
        ["noise_multiplier", "epsilon", "not both"],
    ),
    "a board that is none": (["--boards", "abacus"], ["abacus", "raspberry-pi-zero-2-w"]),
    "a sweep of words": (["--sweep", "0,some"], ["--sweep", "0,some", "numbers"]),
    "an option of another engine": (["--own-processes", "2"], ["--own-processes", "does nothing", "--engine live"]),
    "an option that is gone": (["--engine", "live", "--emulate"], ["--emulate is gone", "--boards"]),
    "a runtime where devices have theirs": (["--engine", "live", "--runtime", "torch"], ["--runtime torch", "live"]),
    "a folder in a file": (["--out", "task.toml/run"], ["--out", "task.toml", "is a file"]),
    "nothing to resume": (["--resume", "--out", "nowhere"], ["nowhere", "resume", "by --out"]),
    "no data": (_own("folder"), ["needs training data", "data.path", "'folder'"]),
    "a file of another kind": ([*_own("arrays"), "--set", "data.path=task.toml"], [".npz file", "numpy.savez"]),
    "a file without columns": (
        [*_own("csv"), "--set", "data.path=task.toml"],
        ["task.toml: the first line", "'label'"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_paragraph_and_exit_code_2(
    case: str, task_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, expected = BAD[case]
    given = [] if words[0].endswith(".toml") else [str(task_file)]
    code, _, err = typed(capsys, monkeypatch, "simulate", *given, *words)
    assert code == 2, err
    assert "Traceback" not in err
    assert err.startswith("error:")
    assert "\n\n" not in err.strip(), "one paragraph"
    text = "".join(err.split())  # long paths are cut at the terminal's edge
    for part in expected:
        assert "".join(part.split()) in text
    assert not Path("runs").exists(), "nothing was begun"


def test_what_the_options_parser_refuses_is_exit_code_2_too(
    task_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, expected in (
        (["--engine", "warp"], "fast"),
        (["--rounds", "0"], "round.rounds = 0"),
        (["--fast"], "--fast"),
    ):
        code, _, err = typed(capsys, monkeypatch, "simulate", str(task_file), *words)
        assert code == 2
        assert expected in err


def test_a_run_as_typed_and_the_same_folder_again(
    task_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["simulate", str(task_file), "--workers", "1", "--out", "run", "--rounds", "1", "--devices", "2"]
    words += ["--seed", "5", "--set", "privacy.noise_multiplier=0.25", "--set", "wire.codec=float32", "--sweep", "2,0"]
    words += ["--boards", "raspberry-pi-5-8gb,jetson-orin-nano"]
    code, out, err = typed(capsys, monkeypatch, *words)
    assert code == 0, err
    assert "run/report.html" in out
    result = Result.load(Path("run/result.json"))
    assert (len(result.rounds), result.devices, result.seed, result.noise_multiplier) == (1, 2, 5, 0.25)
    assert list(result.boards.values()) == ["raspberry-pi-5-8gb", "jetson-orin-nano"]
    assert [point.noise_multiplier for point in result.details.privacy_sweep] == [0.0, 0.25, 2.0], (
        "the run itself among them"
    )
    assert None not in (result.local_only.accuracy_own_common, result.local_only.accuracy_own_local)
    assert result.details.eq20_bytes[0] > 0
    assert Path("run/report.html").stat().st_size > 10_000

    code, _, err = typed(capsys, monkeypatch, *words)
    assert code == 2
    assert "--resume" in err

    changed = ["--rounds", "2", "--set", "privacy.noise_multiplier=0.5"]
    code, _, err = typed(capsys, monkeypatch, *words, "--resume", *changed)
    assert code == 2
    text = " ".join(err.split())
    assert "round.rounds = 1, not 2" in text
    assert "privacy.noise_multiplier = 0.25, not 0.5" in text

    before = Path("run/aggregator/global-1.safetensors").read_bytes()
    code, _, err = typed(capsys, monkeypatch, *words, "--resume")
    assert code == 0, err
    assert Path("run/aggregator/global-1.safetensors").read_bytes() == before
    assert Result.load(Path("run/result.json")).rounds == result.rounds


def test_a_run_that_repeats_a_paper_says_so_at_its_start(
    task_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the terminal, in the log and in the report."""
    words = ["simulate", str(task_file), "--workers", "1", "--no-local-only", "--out", "paper"]
    code, out, err = typed(capsys, monkeypatch, *words, "--set", "privacy.accounting=as-published")
    assert code == 0, err
    said = " ".join(out.split())
    assert said.index(AS_PUBLISHED) < said.index("gradients by")
    begun = next(iterate_events(Path("paper/aggregator/events.jsonl")))
    assert (begun["accounting"], begun["note"]) == ("as-published", AS_PUBLISHED)
    assert "Trust model as-published" in Path("paper/report.html").read_text()


def test_an_interrupted_run_says_what_to_type(
    task_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hushfleet.simulator.engines.fast.engine.run_rounds", interrupted)
    words = ["simulate", str(task_file), "--workers", "1", "--set", "data.class_names=[]", "--no-local-only"]
    code, out, _ = typed(capsys, monkeypatch, *words)
    assert code == 130
    (folder,) = Path("runs").iterdir()
    (line,) = [line for line in out.splitlines() if "hushfleet simulate" in line]
    typed_again = shlex.split(line)
    assert typed_again == ["hushfleet", *words, "--out", str(folder), "--resume"]
    monkeypatch.undo()
    monkeypatch.chdir(task_file.parent)
    code, _, err = typed(capsys, monkeypatch, *typed_again[1:])
    assert code == 0, err
    assert len(Result.load(folder / "result.json").rounds) == 2


def commands() -> list[str]:
    command: Any = typer.main.get_command(build_app())
    return sorted(command.commands)


COMMANDS = [
    "aggregator", "audit", "boards", "broker", "compare", "demo", "features", "flash", "fleet", "forecast",
    "invert", "log", "methods", "plan", "privacy", "push", "release", "report", "reproduce", "simulate",
]  # fmt: skip


def test_every_part_brings_its_command() -> None:
    assert commands() == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_help_teaches_by_example(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(build_app(), [name, "--help"])
    assert result.exit_code == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", result.output + capfd.readouterr().out)
    below_usage = text.split("\n", 2)[2]
    assert f"hushfleet {name}" in below_usage


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["methods"], {"name", "source", "summary", "settings"}),
        (["boards"], {"name", "memory_mib", "cores"}),
        (["boards", "raspberry-pi-5-8gb"], {"name", "memory_mib", "cores"}),
        (["privacy", "--noise-multiplier", "1", "--rounds", "10", "--delta", "1e-5"], set()),
        (["privacy", "--epsilon", "2", "--rounds", "10", "--delta", "1e-5", "--noise-split", "4"], set()),
    ],
)
def test_json_parses(words: list[str], keys: set[str]) -> None:
    result = CliRunner().invoke(build_app(), [*words, "--json"])
    assert result.exit_code == 0, result.output
    content: Any = json.loads(result.stdout)
    assert content
    for row in content if isinstance(content, list) else [content]:
        assert keys <= set(row)
    if words[0] == "privacy":
        assert "epsilon" in json.dumps(content)


def test_the_installed_script_is_this_command() -> None:
    script = Path(sys.executable).with_name("hushfleet")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"hushfleet \d+\.\d+\.\d+\S*\n", done.stdout)
