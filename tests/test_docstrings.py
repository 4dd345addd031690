"""Docstrings are sentences in standard English: none begins with a preposition or a relative word.

`tests/docstring_exceptions.txt` lists those that still do. The list only shrinks: a new violation and an entry without
a violation both fail. `python tests/test_docstrings.py` removes the entries that are no longer needed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXCEPTIONS = Path(__file__).with_name("docstring_exceptions.txt")
PARTS = ("hushfleet", "aggregator", "edge_client", "firmware_profiles", "models", "simulator", "benchmarks")
REFUSED = re.compile(r"(Of|That|Whom|What|As|By|For|Where|Whose)\b")


def violations(source: str) -> Iterator[str]:
    """The qualified names of what has a docstring that begins with a refused word; the module's name is empty."""

    def visit(node: ast.AST, name: str) -> Iterator[str]:
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and REFUSED.match(ast.get_docstring(node) or ""):
            yield name
        for child in ast.iter_child_nodes(node):
            yield from visit(child, f"{name}.{child.name}" if hasattr(child, "name") else name)

    return visit(ast.parse(source), "")


@cache
def found() -> set[str]:
    files = (file for part in PARTS for file in (ROOT / part).rglob("*.py") if not file.is_symlink())
    return {
        f"{file.relative_to(ROOT).as_posix()}{name.replace('.', ':', 1)}"
        for file in files
        for name in violations(file.read_text("utf-8"))
    }


def allowed() -> set[str]:
    return set(EXCEPTIONS.read_text("utf-8").split())


def test_docstrings_are_sentences() -> None:
    new = found() - allowed()
    assert not new, f"begin with a subject or a verb, not with of, that, what, as, by, for, where: {sorted(new)}"


def test_the_list_of_exceptions_only_shrinks() -> None:
    done = allowed() - found()
    assert not done, f"take them out of {EXCEPTIONS.name}, for example by `python tests/{Path(__file__).name}`: {done}"


def test_each_kind_of_docstring_is_looked_at() -> None:
    source = '"""What it is."""\nclass A:\n "As B."\n def f(self):\n  "Whose."\ndef g():\n "Offers."\n'
    assert list(violations(source)) == ["", ".A", ".A.f"]


if __name__ == "__main__":
    EXCEPTIONS.write_text("".join(f"{line}\n" for line in sorted(allowed() & found())), "utf-8")
