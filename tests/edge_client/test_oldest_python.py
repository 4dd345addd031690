"""What boards import runs with Python 3.10, that of Ubuntu 22.04 and JetPack 6; nothing else here does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LATER = {
    "asyncio": {"Runner", "TaskGroup", "timeout"},
    "contextlib": {"chdir"},
    "datetime": {"UTC"},
    "enum": {"EnumCheck", "ReprEnum", "StrEnum", "member", "nonmember", "verify"},
    "hashlib": {"file_digest"},
    "itertools": {"batched"},
    "math": {"cbrt", "exp2", "sumprod"},
    "operator": {"call"},
    "sys": {"exception"},
    "typing": {
        "LiteralString", "Never", "NotRequired", "Required", "Self", "TypeVarTuple", "Unpack", "assert_never",
        "assert_type", "override", "reveal_type",
    },
}  # fmt: skip
"""What the standard library has since 3.11 or 3.12."""


def files() -> list[Path]:
    found = [path for name in ("hushfleet", "edge_client", "firmware_profiles") for path in (ROOT / name).rglob("*.py")]
    return sorted(path for path in found if "cards" not in path.parts and path.name != "cli.py")


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those for type checkers, and those for newer versions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "sys.version_info >= (3, 11)"):
            for other in node.orelse:
                yield from (other, *executed(other))
        else:
            yield node
            yield from executed(node)


def too_new(source: str) -> set[str]:
    found = set()
    for node in executed(ast.parse(source, feature_version=(3, 10))):
        if isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{a.name}" for a in node.names if a.name in LATER.get(node.module or "", ())}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= {ast.unparse(node)} if node.attr in LATER.get(node.value.id, ()) else set()
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name == "tomllib"}
        elif isinstance(node, ast.Name) and node.id in ("ExceptionGroup", "BaseExceptionGroup"):
            found.add(node.id)
    return found


def test_boards_use_nothing_newer_than_3_10() -> None:
    assert len(files()) > 150
    assert {str(path.relative_to(ROOT)): new for path in files() if (new := too_new(path.read_text("utf-8")))} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import datetime\nnow = datetime.UTC", {"datetime.UTC"}),
        ("from typing import Any, Self", {"typing.Self"}),
        ("import tomllib", {"tomllib"}),
        ("if TYPE_CHECKING:\n    from typing import Self", set()),
        ("raise ExceptionGroup('', [])", {"ExceptionGroup"}),
    ],
)
def test_newer_things_are_seen(source: str, found: set[str]) -> None:
    assert too_new(source) == found


def test_newer_syntax_is_seen() -> None:
    with pytest.raises(SyntaxError):
        too_new("try: pass\nexcept* ValueError: pass")
