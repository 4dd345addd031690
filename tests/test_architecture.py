"""A board's imports, read from its source, with those inside functions. `make imports` checks who imports whom."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
EXTRA = {
    "hushfleet/data/torchvision_sets.py": {"torch"},
    "hushfleet/methods/papers/clip_agent.py": {"torch"},
    "hushfleet/array_api.py": {"torch"},
    "hushfleet/data/tables.py": {"pandas"},
    "hushfleet/data/sound.py": {"soundfile", "soxr"},
}
"""What no board needs, in files that boards have: it is for simulations and for the server's half of a method."""


def imported(file: Path) -> Iterator[str]:
    """The modules that a file imports, without those for type checkers."""
    tree = ast.parse(file.read_text("utf-8"))
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    unseen = {inner for test in tests for statement in test.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        if node in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{file}: imports are absolute"
            assert not node.level, f"{file}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def names_of(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(each).name) for each in requirements}


def test_a_board_imports_what_its_extra_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    brought = names_of([*project["dependencies"], *project["optional-dependencies"]["edge"]])
    modules = {"array-api-compat": "array_api_compat", "paho-mqtt": "paho", "pillow": "PIL"}
    known = {modules.get(name, name) for name in brought} | sys.stdlib_module_names | {"hushfleet"}
    board = [file for file in files("hushfleet", "edge_client", "firmware_profiles") if "cards" not in file.parts]
    found = {}
    for file in board:
        others = {module.partition(".")[0] for module in imported(file)} - known
        if others:
            found[file.relative_to(ROOT).as_posix()] = others
    assert found == EXTRA


LIGHT = ("edge_client.agent", "privacy.protection", "wire.link.mqtt", "wire.format.update")
"""What a board's guardian loads: specifications, costs, ledger, messages and keys, and no arithmetic on vectors."""
HEAVY = {"PIL", "array_api_compat", "numpy", "onnxruntime", "torch"}
LOADED = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(f"hushfleet.{name}")
print(*sys.modules)
"""


def loaded(*names: str, then: str = "") -> set[str]:
    """The modules in a new process that imports these of ours, and then runs `then`."""
    command = [sys.executable, "-c", LOADED.replace("print", f"{then}\nprint"), *names]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_a_guardian_loads_no_arithmetic() -> None:
    assert not loaded(*LIGHT) & HEAVY


def test_a_board_that_listens_has_room_for_its_model() -> None:
    assert not loaded("edge_client.listen.command") & {"cryptography", "hushfleet.methods"}


def test_a_guardian_at_rest_has_not_what_its_tasks_and_its_owner_do_not_ask_for() -> None:
    at_need = set()
    for file in files("hushfleet", "edge_client"):
        at_need |= set(re.findall(r'at_need\("(hushfleet\.[\w.]+)"\)', file.read_text("utf-8")))
    assert {"hushfleet.secure.secure_round", "hushfleet.wire.format.health", "hushfleet.refusals"} < at_need
    at_need -= {"hushfleet.wire.link.address"}  # a worker does without it
    assert not loaded("edge_client.agent", "wire.link.mqtt") & {*at_need, "email", "http.client", "urllib.request"}


def test_a_worker_has_no_broker_no_store_and_no_ssl() -> None:
    """Not even before it limits itself; and it has what only a part of all tasks asks for when they do."""
    of_the_guardian = {"paho", "ssl", "hushfleet.edge_client.storage.store", "hushfleet.wire.link.address"}
    of_some_tasks = {"hushfleet.data.csv_file", "hushfleet.data.folder", "hushfleet.learning.personalized_head"}
    assert not loaded("edge_client.worker.main", "edge_client.worker.work") & (of_the_guardian | of_some_tasks)


AT_NEED = {
    f"hushfleet.{each}"
    for each in (
        "edge_client.fleet.enrol",
        "edge_client.fleet.release_file",
        "edge_client.fleet.slots",
        "release.archive",
    )
}


def test_a_board_of_a_fleet_loads_enrolment_at_need_and_no_installer() -> None:
    assert not loaded("edge_client.fleet.membership") & AT_NEED


CHARGES = """
from hushfleet.wire.format.spec import PrivacySpec
from hushfleet.methods import METHODS, make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.params import ParamLayout
from hushfleet.privacy.ledger import epsilon_server_of
from hushfleet.wire.format.update import UpdateHeader
layout = ParamLayout(("body.weight", "norm.weight", "head.weight", "head.bias"), ((3, 2), (3,), (2, 3), (2,)))
UpdateHeader("t", 1, "d", "quantized", 1, (1.0,), (1.0,), (1.0,), bytes(16), 1, 1.0, 1.0, 1)
for name in METHODS:
    for unit, rate in (("device", 1.0), ("record", 0.1))[: 1 if name == "fedala" else 2]:
        privacy = PrivacySpec(unit, "as-published", 1.0, 2.0, 1e-5, sample_rate=rate, batches=4)
        charge = make_method(name, {}, privacy, layout, rounds=5).charge(RoundTerms())
        assert charge.steps == (4 if unit == "record" else 1)
        assert epsilon_server_of([charge] * 300, delta=1e-5) > 0
"""


def test_the_charge_of_each_method_needs_no_arithmetic() -> None:
    assert not loaded(then=CHARGES) & HEAVY


def test_a_process_of_the_server_side_loads_what_it_needs() -> None:
    """An engine when it is chosen, a fleet's folder where there is a fleet, the report when it is written."""
    aggregator = loaded("aggregator.commands.field_run")
    assert not {name for name in aggregator if name.startswith("hushfleet.aggregator.fleet")}
    simulate = loaded("simulator.command", "simulator.engines.fast.engine")
    assert not {
        name for name in simulate if name.startswith(("hushfleet.simulator.world", "hushfleet.simulator.engines.ray"))
    }
    for process in (aggregator, simulate):
        assert not process & {
            "plotly",
            "hushfleet.aggregator.report.render",
            "hushfleet.aggregator.planning.advice",
            "hushfleet.aggregator.rounds.secure_aggregation",
            "hushfleet.data.csv_file",
            "hushfleet.data.sets",
            "hushfleet.learning.graph_features",
        }
