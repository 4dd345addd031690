"""Who imports whom (docs/architecture.md), read from the source: also what is imported only when it is called."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
MAY = {
    "hushfleet": set[str](),
    "models": {"hushfleet"},
    "firmware_profiles": {"hushfleet"},
    "firmware_profiles/cards": {"edge_client", "hushfleet"},
    "edge_client": {"firmware_profiles", "hushfleet"},
    "aggregator": {"models", "hushfleet"},
    "simulator": {"aggregator", "edge_client", "models", "firmware_profiles", "hushfleet"},
}
"""What each part may import. `cards` is not for boards, so the rest of its folder may not import it."""
PACKS_BOARDS = ("aggregator/commands/", "aggregator/fleet/")
"""What of the aggregator may also import `firmware_profiles` and its cards."""
EXTRA = {
    "hushfleet/data/torchvision_sets.py": {"torch"},
    "hushfleet/methods/clip_agent.py": {"torch"},
    "hushfleet/torch_threads.py": {"torch"},
}
"""What no board needs, in files that boards have: it is for simulations and for the server's half of a method."""


def part_of(path: str) -> str:
    """The longest part that the path is in."""
    return max((part for part in MAY if f"{path}/".startswith(f"{part}/")), key=len)


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


def ours(module: str) -> str:
    """Where a module of ours lies in the checkout: `hushfleet.models.checks` in `models/checks`."""
    inner = module.partition(".")[2].replace(".", "/")
    return inner if inner.partition("/")[0] in MAY else module.replace(".", "/")


def test_imports_point_downwards() -> None:
    wrong, seen = [], set()
    for file in files(*(part for part in MAY if "/" not in part)):
        name = file.relative_to(ROOT).as_posix()
        part = part_of(name)
        for module in imported(file):
            if module.partition(".")[0] != "hushfleet":
                continue
            other = part_of(ours(module))
            seen.add((part, other))
            also = {"firmware_profiles", "firmware_profiles/cards"} if name.startswith(PACKS_BOARDS) else set()
            if other not in {part} | MAY[part] | also:
                wrong.append(f"{name} imports {module}")
    assert wrong == []
    assert {(part, other) for part in MAY for other in MAY[part]} - seen == set(), "allowed, and never used"


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


@pytest.mark.parametrize(
    ("name", "module", "part"),
    [
        ("models/checks.py", "hushfleet.models.checks", "models"),
        ("hushfleet/params.py", "hushfleet.params", "hushfleet"),
        ("hushfleet/__init__.py", "hushfleet", "hushfleet"),
        ("firmware_profiles/cards/seed.py", "hushfleet.firmware_profiles.cards.seed", "firmware_profiles/cards"),
        ("firmware_profiles/board.py", "hushfleet.firmware_profiles.board", "firmware_profiles"),
    ],
)
def test_modules_and_files_are_of_one_part(name: str, module: str, part: str) -> None:
    assert part_of(name) == part_of(ours(module)) == part
