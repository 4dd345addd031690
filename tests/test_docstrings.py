"""Docstrings are sentences in standard English: none begins with a preposition or a relative word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ("hushfleet", "aggregator", "edge_client", "firmware_profiles", "models", "simulator", "benchmarks")
REFUSED = re.compile(r"(Of|That|Whom|What|As|By|For|Where|Whose)\b")


def violations(source: str) -> Iterator[str]:
    """Yields the qualified names of what has a docstring that begins with a refused word; a module's name is empty."""

    def visit(node: ast.AST, name: str) -> Iterator[str]:
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and REFUSED.match(ast.get_docstring(node) or ""):
            yield name
        for child in ast.iter_child_nodes(node):
            yield from visit(child, f"{name}.{child.name}" if hasattr(child, "name") else name)

    return visit(ast.parse(source), "")


def test_docstrings_are_sentences() -> None:
    files = (file for part in PARTS for file in (ROOT / part).rglob("*.py") if not file.is_symlink())
    found = {
        f"{file.relative_to(ROOT).as_posix()}{name.replace('.', ':', 1)}"
        for file in files
        for name in violations(file.read_text("utf-8"))
    }
    assert not found, f"begin with a subject or a verb, not with of, that, what, as, by, for, where: {sorted(found)}"


def test_each_kind_of_docstring_is_looked_at() -> None:
    source = '"""What it is."""\nclass A:\n "As B."\n def f(self):\n  "Whose."\ndef g():\n "Offers."\n'
    assert list(violations(source)) == ["", ".A", ".A.f"]
