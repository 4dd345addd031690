"""The documents against the code: every command, option, link, key and example file that they show exists."""

from __future__ import annotations

import argparse
import json
import operator
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
import typer
import typer.main

import hushfleet
from hushfleet import methods
from hushfleet.aggregator.broker.config import mosquitto_acl, mosquitto_config
from hushfleet.aggregator.commands.main import build_app, load_command
from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.devices.devices_file import read_devices
from hushfleet.aggregator.publish.prepare import PreparedTask, prepare
from hushfleet.config.spec import BlobRef
from hushfleet.data.samples import Samples
from hushfleet.edge_client.__main__ import _parser
from hushfleet.edge_client.board.config import BrokerSection, DataSection, DeviceSection, LimitsSection, load_config
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.trainer import SeededRandomness, Trainer
from hushfleet.errors import BadInput
from hushfleet.graphs.session import GradientGraph
from hushfleet.methods.state import PublicState, RoundTerms
from hushfleet.simulator.studies.reproduce.cells import cells_of
from hushfleet.simulator.studies.reproduce.recipe import find_recipe
from hushfleet.training.own_samples import HiddenSamples
from hushfleet.wire.format.messages import DeclineCode, RefusedCode, RoundPlan

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "boards").glob("*.md"),
    ]
)
EXAMPLES = ROOT / "examples"
CONSOLE = ("console", "sh", "bash", "shell")
# typer carries its own copy of click, or uses the installed one, by version
USAGE_ERROR = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


class Block(NamedTuple):
    """A fenced block of a document."""

    document: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.document}:{self.line}"


def blocks_of(path: Path) -> Iterator[Block]:
    language, start, lines = None, 0, []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        fence = re.match(r"\s*```\s*(\S*)", line)
        if not fence:
            lines.append(line)
        elif language is None:
            language, start, lines = fence[1], number, []
        else:
            yield Block(path.relative_to(ROOT).as_posix(), start, language, "\n".join(lines))
            language = None
    assert language is None, f"{path} ends inside of a block"


BLOCKS = [block for path in DOCUMENTS for block in blocks_of(path)]
COMMANDS = [
    pytest.param(line.strip(), id=f"{block.where}+{offset}")
    for block in BLOCKS
    if block.language in CONSOLE
    for offset, line in enumerate(block.text.splitlines(), 1)
    if line.strip() and not line.lstrip().startswith("#")
]
INLINE = [
    pytest.param(code, id=f"{path.name}:{index}")
    for path in DOCUMENTS
    for index, code in enumerate(
        re.findall(
            r"(?<!`)`((?:hushfleet|hushfleet-edge|pip install) [^`]+)`(?!`)",
            re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL),
        )
    )
]


@cache
def application() -> Any:
    group = typer.main.get_command(build_app())
    assert hasattr(group, "commands")
    return group


def words_of(command: str) -> list[str]:
    words = shlex.split(command, comments=True)
    if words[:1] == ["sudo"]:
        words = words[1:]
        if words[:1] == ["-u"]:
            words = words[2:]
    return words


def check_hushfleet(arguments: list[str]) -> None:
    """The sub-command exists and takes exactly these options, values and arguments."""
    if not arguments or arguments[0].startswith("-"):
        assert set(arguments) <= {"--help", "--version"}
        return
    group, name, rest = application(), arguments[0], arguments[1:]
    assert name in group.commands, f"there is no `hushfleet {name}`"
    if name == "client":
        check_edge_client(rest)
        return
    command = load_command(name)
    given = command.make_context(name, list(rest), resilient_parsing=not rest).params
    if name == "reproduce" and given["paper"]:
        recipe = find_recipe(given["paper"], table=given["table"], figure=given["figure"])
        only = {"datasets": given["dataset"], "methods": given["method"], "columns": given["column"]}
        assert cells_of(recipe, seeds=1, quick=given["quick"], **{key: value or () for key, value in only.items()})
    task = re.match(r"(tasks|examples|simulator)/.*\.toml$", next(iter(rest), ""))
    if task:
        changes = [value for key, value in pairwise(rest) if key == "--set"]
        files = {key: ROOT / value.split(":")[0] for key, value in pairwise(rest) if key in ("--method", "--model")}
        assert all(file.is_file() for file in files.values())
        if not files:
            load_task(ROOT / task[0], tuple(changes))


def check_edge_client(arguments: list[str]) -> None:
    arguments = list(arguments)
    try:
        options = _parser(arguments).parse_args(arguments)
    except SystemExit as error:
        raise AssertionError(f"`hushfleet-edge {shlex.join(arguments)}` does not parse") from error
    assert isinstance(options, argparse.Namespace)


def check_pip(what: str) -> None:
    """No index has us; an extra of a clone or a wheel exists."""
    assert not what.startswith("hushfleet[")
    if wheel := re.search(r"hushfleet-([0-9.]+)-", what):
        assert wheel[1] == hushfleet.__version__
    for extra in re.findall(r"\[([a-z,]+)\]$", what):
        assert (
            set(extra.split(","))
            <= tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
        )


def check(command: str) -> None:
    """Raises an error if the command does not parse; the files that it names are made, empty, where we are."""
    words = words_of(command)
    for word in words:
        if Path(word).suffix in (".pem", ".key") and not Path(word).is_absolute():
            Path(word).parent.mkdir(exist_ok=True)
            Path(word).touch()
    program = Path(words[0]).name
    if program == "hushfleet":
        check_hushfleet(words[1:])
    elif program == "hushfleet-edge":
        check_edge_client(words[1:])
    elif program.startswith("python") and words[1:3] == ["-m", "edge_client"]:
        check_edge_client(words[3:])
    elif program == "pip":
        check_pip(words[-1])
    elif program == "make":
        assert words[1] in MAKE_TARGETS
    elif program.startswith("python") and words[1:2] != ["-m"]:
        assert (ROOT / words[1]).is_file()
    elif program in ("sh", "cp"):
        source = next(word for word in words[1:] if not word.startswith("-"))
        assert not source.startswith("examples/") or (ROOT / source).is_file()


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_real(command: str) -> None:
    check(command)


@pytest.mark.parametrize("command", INLINE)
def test_commands_in_sentences_are_real(command: str) -> None:
    if "NAME" in command or "TASK" in command or "DEVICE" in command:
        command = command.replace("[NAME]", "").replace("NAME", "generic-x86")
    check(command)


@pytest.mark.parametrize(
    "wrong",
    [
        "hushfleet simulat tasks/a.toml",
        "hushfleet simulate tasks/a.toml --enginee fast",
        "hushfleet simulate tasks/a.toml --engine warp",
        "hushfleet aggregator task.toml --broker",
        "hushfleet reproduce dp-fedsim --table II --method dp-fedsim",
        "hushfleet simulate tasks/digits-hush.toml --set privacy.epsilonn=8",
        "pip install 'hushfleet[ray]'",
        "pip install '.[rya]'",
        "hushfleet-edge status",
        "sudo -u hushfleet /opt/bin/hushfleet-edge status device.toml --jsn",
        "make dmeo",
    ],
)
def test_a_wrong_command_would_be_found(wrong: str) -> None:
    with pytest.raises((AssertionError, USAGE_ERROR, BadInput)):
        check(wrong)


def test_there_is_something_to_check() -> None:
    assert len(COMMANDS) > 30
    assert len(INLINE) > 3
    assert {path.name for path in DOCUMENTS} >= {"README.md", "architecture.md", "field.md", "methods.md"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{path.name}: {target}"
        assert file.is_relative_to(ROOT), f"{path.name}: {target} leads out of the repository"
        if anchor:
            assert anchor in anchors_of(file), f"{path.name}: {target}"


def _is_made(file: Path) -> bool:
    """By running an example here."""
    return file.suffix == ".npz" or bool({"runs", "__pycache__"} & set(file.relative_to(EXAMPLES).parts))


def test_the_readme_lists_every_page() -> None:
    listed = (ROOT / "README.md").read_text("utf-8").split("## Documents", 1)[1]
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"(docs/{page.name})" not in listed] == []


@pytest.mark.parametrize(
    "block", [pytest.param(block, id=block.where) for block in BLOCKS if block.language == "python"]
)
def test_python_is_real(block: Block) -> None:
    """It compiles, and every name of `hf` in it exists."""
    compile(block.text, block.where, "exec")
    for name in re.findall(r"\bhf((?:\.\w+)+)", block.text):
        operator.attrgetter(name[1:])(hushfleet)


@pytest.mark.slow
def test_the_readmes_python_runs(tmp_path: Path) -> None:
    (shown,) = (b.text for b in BLOCKS if b.document == "README.md" and b.language == "python")
    script = tmp_path / "shown.py"
    script.write_text(shown.replace('"tasks/', f'"{ROOT}/tasks/').replace('"privacy.epsilon": 2', '"round.rounds": 2'))
    output = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MPLBACKEND": "agg"},
    ).stdout
    assert "epsilon_server" in output
    assert (tmp_path / "accuracy.svg").is_file()
    assert Path(output.split()[-1]).is_file()


def test_the_readme_counts_the_methods() -> None:
    assert f"of its {len(methods.all_names())} methods" in (ROOT / "README.md").read_text("utf-8")


def test_the_containerfile_names_what_exists() -> None:
    text = (ROOT / "Containerfile").read_text("utf-8")
    for command in re.findall(r" (hushfleet fleet .+)$", text, re.MULTILINE):
        check(command)
    torch = re.search(r"^TORCH \?= (torch==\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert torch
    assert f" {torch[1]} " in text


def peak_mib(model: str, method: str) -> int:
    """Of a client on a board, measured by benchmarks/device.py."""
    measured = json.loads((ROOT / "docs" / "figures" / "board.json").read_text("utf-8"))
    (row,) = (row for row in measured["models"] if row["model"] == model)
    return round(row["methods"][method]["round_peak_mib"])


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("docs/field.md", "peaks at {} MiB of memory"),
        ("docs/architecture.md", "a client's whole round peaks at {} MiB"),
        ("docs/boards/raspberry-pi-4.md", "{} MiB at most with `fashion-mnist-cnn`"),
        ("README.md", "peaks at {} MiB of memory"),
    ],
)
def test_the_memory_of_a_board_is_the_one_measured(page: str, sentence: str) -> None:
    text = " ".join((ROOT / page).read_text("utf-8").split())
    assert sentence.format(peak_mib("fashion-mnist-cnn", "dp-fedavg")) in text


def anchors_of(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "path",
    [*DOCUMENTS, *sorted(file for file in EXAMPLES.rglob("*") if file.is_file() and not _is_made(file))],
    ids=lambda path: path.name,
)
def test_no_path_of_anybodys_machine(path: Path) -> None:
    text = path.read_text("utf-8")
    for folder in ("work", "root", "tmp", "home", "Users"):
        assert f"/{folder}/" not in text


@pytest.mark.parametrize("block", [pytest.param(block, id=block.where) for block in BLOCKS if block.language == "toml"])
def test_toml_blocks_are_valid(block: Block, tmp_path: Path) -> None:
    check_toml(block.text, tmp_path)


@pytest.mark.parametrize(
    "path", sorted([*EXAMPLES.glob("*.toml"), *(ROOT / "tasks").glob("*.toml")]), ids=lambda path: path.name
)
def test_example_files_are_valid(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_example_methods(monkeypatch)
    check_toml(path.read_text("utf-8"), tmp_path)


def check_toml(text: str, folder: Path) -> None:
    """It parses; a whole task or device file also validates."""
    sections = tomllib.loads(text)
    file = folder / "file.toml"
    file.write_text(text, "utf-8")
    if {"model", "method", "data"} <= sections.keys():
        load_task(file)
    elif {"device", "broker", "data", "limits"} <= sections.keys():
        assert load_config(file).simulation is None


def table_codes(heading: str) -> set[str]:
    """The first column of the table under a heading of field.md."""
    text = (ROOT / "docs" / "field.md").read_text("utf-8")
    section = text.split(heading, 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"^\| `([a-z.-]+)` \|", section, re.MULTILINE))


def test_every_code_is_explained() -> None:
    assert table_codes("## When a device says no") == set(get_args(DeclineCode))
    assert table_codes("## When the aggregator says no") == set(get_args(RefusedCode))


def test_every_key_of_a_device_file_is_explained() -> None:
    text = (ROOT / "docs" / "field.md").read_text("utf-8").split("### DEVICE.toml", 1)[1].split("\n### ", 1)[0]
    explained = set(re.findall(r"`((?:device|broker|data|limits)\.[a-z_]+)`", text))
    sections = {"device": DeviceSection, "broker": BrokerSection, "data": DataSection, "limits": LimitsSection}
    assert explained == {f"{name}.{key}" for name, section in sections.items() for key in section.__dataclass_fields__}


def test_the_brokers_files_say_what_the_kit_generates(tmp_path: Path) -> None:
    assert (EXAMPLES / "mosquitto.acl").read_text().strip() == mosquitto_acl().strip()
    generated = directives(mosquitto_config(host="::", port=8883, tls=None, acl_path=tmp_path))
    example = directives((EXAMPLES / "mosquitto.conf").read_text())
    limits = [key for key in generated if key.startswith("max_")]
    assert len(limits) == 4
    assert {key: example[key] for key in limits} == {key: generated[key] for key in limits}
    bound = ("require_certificate", "use_identity_as_username", "use_username_as_clientid")
    assert [example[key] for key in bound] == ["true"] * 3
    assert example["allow_anonymous"] == "false"


def directives(config: str) -> dict[str, str]:
    lines = [line.split(None, 1) for line in config.splitlines() if line and not line.startswith("#")]
    return {words[0]: words[1] for words in lines}


def test_the_list_of_devices_can_be_read() -> None:
    assert [row.device for row in read_devices(EXAMPLES / "devices.toml")] == ["greenhouse-01", "greenhouse-02"]


def test_the_method_that_is_shown_is_the_file() -> None:
    shown = [b.text for b in BLOCKS if b.document == "docs/methods.md" and "class FedBABUConfig" in b.text]
    assert shown == [(EXAMPLES / "fedbabu.py").read_text("utf-8").rstrip()]


def with_example_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they were installed."""
    monkeypatch.setitem(os.environ, methods.ALLOWED_FILE, "")
    for name in ("fedbabu", "fedavgm"):
        allowed = methods.allow_file(f"{EXAMPLES / name}.py:{name}")
        monkeypatch.setattr(methods, "METHODS", {**methods.METHODS, name: methods.find_method(allowed)})


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> PreparedTask:
    with_example_methods(monkeypatch)
    return prepare(load_task(EXAMPLES / "fedbabu.toml", ("method.local_epochs=1",)), run_id="docs")


def test_the_example_method_trains_all_but_its_last_layer(prepared: PreparedTask, tmp_path: Path) -> None:
    spec, layout = prepared.spec, prepared.spec.model.layout
    last = layout.layers[-1]
    state = prepared.method.init_state()
    assert state.public.mask.sum() == last.size
    assert state.public.mask[last.start :].all()
    assert prepared.dataset is not None
    samples: Samples = prepared.dataset.train.take(slice(0, 64))
    with DeviceStore(tmp_path / "store.sqlite", device="one", durable=False) as store:
        trainer = Trainer(
            device="one",
            store=store,
            spec=spec,
            gradient=GradientGraph(prepared.blobs[spec.model.gradient.digest], layout),
            logits_of=prepared.inference,
            samples=lambda: samples,
            randomness=SeededRandomness(0, 0),
            limits=LimitsSection(epsilon_server=float("inf")),
        )
        params = prepared.initial
        for number in (1, 2):
            plan = RoundPlan(
                task=spec.task,
                round=number,
                rounds=spec.rounds,
                phase="open",
                global_digest=BlobRef.of(params.tobytes()).digest,
                global_bytes=params.nbytes,
                cohort={"one": PublicState.initial(layout.size).digest()},
                noise_split=1,
                deadline_s=60.0,
            )
            entry = trainer.run_round(plan, params)
            assert entry.pending
        after = store.load_state(spec.task)
    assert after is not None
    assert after.own is not None
    np.testing.assert_array_equal(after.public.mask, state.public.mask)
    assert after.public.participations == 2
    started_again = prepared.method.begin(after, params, RoundTerms(), HiddenSamples()).start
    np.testing.assert_array_equal(started_again[last.start :], params[last.start :])
    assert (after.own[: last.start] != params[: last.start]).any()
    np.testing.assert_array_equal(started_again[: last.start], params[: last.start])
