"""The documents against the code: every command, option, link, key and example file that they show exists."""

from __future__ import annotations

import operator
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from packaging.requirements import Requirement

import hushfleet
from hushfleet import methods
from hushfleet.aggregator.broker.config import mosquitto_acl, mosquitto_config
from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.payloads.prepare import PreparedTask, prepare
from hushfleet.aggregator.storage.devices_file import read_devices
from hushfleet.data.samples import Samples
from hushfleet.edge_client.board.config import LimitsSection, load_config
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.randomness import SeededRandomness
from hushfleet.edge_client.worker.trainer import DeviceRound, Trainer
from hushfleet.learning.graph_session import GradientGraph
from hushfleet.learning.own_samples import HiddenSamples
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.local import GradientRule
from hushfleet.methods.local_round import LocalRound
from hushfleet.methods.state import PublicState
from hushfleet.wire.format.messages import DeclineCode, RefusedCode, RoundPlan
from hushfleet.wire.format.spec import BlobRef, PrivacySpec
from support.documents import BLOCKS, DOCUMENTS, EXAMPLES, ROOT, Block


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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


def test_fragments_of_the_changelog_have_a_kind() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["towncrier"]
    kinds = "|".join(kind["directory"] for kind in settings["type"])
    fragments = [path for path in (ROOT / "changes").iterdir() if path.name != "template.md"]
    assert [path.name for path in fragments if not re.fullmatch(rf"[\w-]+\.({kinds})\.md", path.name)] == []
    assert all(path.read_text("utf-8").strip() for path in fragments)


def test_the_readme_counts_the_methods() -> None:
    privacy = PrivacySpec(unit="device", accounting="strict", clip_norm=1.0, noise_multiplier=1.0, delta=1e-5)
    made = [each.parts(each.config(), privacy, 10) for each in methods.METHODS.values()]
    words = {18: "eighteen", 27: "Twenty-seven"}
    keep = [each.reads_own or type(each.training.gradient).own_model is not GradientRule.own_model for each in made]
    own, published = words[sum(keep) + 1], words[len(made) - len(methods.GROUPS["ours"])]  # `hush` keeps a head
    text = (ROOT / "README.md").read_text("utf-8")
    assert f"{own} of its {len(made)} methods keep one" in text
    assert f"{published} published methods" in text


def test_the_table_of_methods_has_their_groups() -> None:
    text = (ROOT / "docs" / "methods.md").read_text("utf-8").split("## What there is", 1)[1].split("\n\n", 2)[1]
    told = [re.sub(r"[*`]", "", line.split("|")[1]).strip() for line in text.splitlines()[2:]]
    assert told == [word for group, names in methods.GROUPS.items() for word in (group, *names)]


def test_the_containerfile_names_what_exists() -> None:
    text = (ROOT / "Containerfile").read_text("utf-8")
    torch = re.search(r"^TORCH \?= (torch==\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert torch
    assert f" {torch[1]} " in text


def test_torchvision_comes_from_the_index_of_torch() -> None:
    """One for CUDA does not load beside a PyTorch without it."""
    pages = [
        *ROOT.glob("docs/**/*.md"),
        *map(ROOT.joinpath, ("README.md", "CONTRIBUTING.md", "Containerfile", "Makefile")),
    ]
    found = [
        line for page in pages for line in page.read_text("utf-8").splitlines() if "://download.pytorch.org" in line
    ]
    assert len(found) >= 4
    (torchvision,) = re.findall(r"^torchvision==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    for line in found:
        assert re.search(r"\btorch(==\S+)? torchvision\b", line), line
        if "make " in line:  # there the one of constraints.txt is installed before
            assert f" torchvision=={torchvision}+cpu " in line


def test_the_table_of_comparison_names_the_versions_of_the_extra_peers() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    pins = {each.name: str(each.specifier).removeprefix("==") for each in map(Requirement, extras["peers"])}
    assert pins.keys() == {"flwr", "pfl"}, "the table says that nothing was measured beside NVFlare"
    (said,) = re.findall(r"\(Flower ([0-9.]+), NVFlare [0-9.]+\)", (ROOT / "README.md").read_text("utf-8"))
    assert pins["flwr"].startswith(f"{said}.")


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
    """The first column of the table under a heading of field-reference.md."""
    text = (ROOT / "docs" / "field-reference.md").read_text("utf-8")
    section = text.split(heading, 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"^\| `([a-z.-]+)` \|", section, re.MULTILINE))


def test_every_code_is_explained() -> None:
    assert table_codes("## When a device says no") == set(get_args(DeclineCode))
    assert table_codes("## When the aggregator says no") == set(get_args(RefusedCode))


def test_the_brokers_files_say_what_the_kit_generates(tmp_path: Path) -> None:
    assert (EXAMPLES / "mosquitto.acl").read_text().strip() == mosquitto_acl().strip()
    generated = directives(mosquitto_config(host="::", port=8883, tls=None, acl_path=tmp_path))
    example = directives((EXAMPLES / "mosquitto.conf").read_text())
    limits = [key for key in generated if key.startswith("max_") or key == "memory_limit"]
    assert len(limits) == 6
    assert {key: example[key] for key in limits} == {key: generated[key] for key in limits}
    bound = ("require_certificate", "use_identity_as_username", "use_username_as_clientid")
    assert [example[key] for key in bound] == ["true"] * 3
    assert example["allow_anonymous"] == "false"


def directives(config: str) -> dict[str, str]:
    lines = [line.split(None, 1) for line in config.splitlines() if line and not line.startswith("#")]
    return {words[0]: words[1] for words in lines}


def test_the_list_of_devices_can_be_read() -> None:
    assert [row.device for row in read_devices(EXAMPLES / "devices.toml")] == ["greenhouse-01", "greenhouse-02"]


def test_the_method_that_is_shown_is_the_files() -> None:
    (shown,) = (b.text for b in BLOCKS if b.document == "docs/methods.md" and "def fedavgm" in b.text)
    assert (EXAMPLES / "fedavgm.py").read_text("utf-8").rstrip().endswith(f'"""\n\n{shown}')


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
            method=prepared.method,
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
            entry = DeviceRound(trainer, plan).run(params)
            assert entry.pending
        after = store.load_state(spec.task)
    assert after is not None
    assert after.own is not None
    np.testing.assert_array_equal(after.public.mask, state.public.mask)
    assert after.public.participations == 2
    started_again = LocalRound(prepared.method, after, params, RoundTerms(), HiddenSamples()).context.start
    np.testing.assert_array_equal(started_again[last.start :], params[last.start :])
    assert (after.own[: last.start] != params[: last.start]).any()
    np.testing.assert_array_equal(started_again[: last.start], params[: last.start])
