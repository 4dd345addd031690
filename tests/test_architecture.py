"""A board's imports, read from its source, with those inside functions. `make imports` checks who imports whom."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
EXTRA = {
    "hushfleet/data/torchvision_sets.py": {"torch"},
    "hushfleet/methods/clip_agent.py": {"torch"},
    "hushfleet/torch_threads.py": {"torch"},
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
