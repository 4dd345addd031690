"""Docstrings are sentences, what is public on the ground floor has one, and a class name has one meaning."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ("docs", "hushfleet", "aggregator", "edge_client", "firmware_profiles", "models", "simulator", "benchmarks")
DOCUMENTED = ("hushfleet/", "models/", "simulator/api.py", "simulator/runs.py")
"""Where all that is public has a docstring: ground floor, networks, Python API."""
REFUSED = re.compile(r"(Of|That|Whom|What|As|By|For|Where|Whose)\b")


@cache
def trees() -> dict[str, ast.Module]:
    """The syntax tree of each file outside the tests, by its path."""
    files = (file for part in PARTS for file in (ROOT / part).rglob("*.py") if not file.is_symlink())
    return {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text("utf-8")) for file in files}


def violations(tree: ast.Module) -> Iterator[str]:
    """Yields the qualified names of what has a docstring that begins with a refused word; a module's name is empty."""

    def visit(node: ast.AST, name: str) -> Iterator[str]:
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and REFUSED.match(ast.get_docstring(node) or ""):
            yield name
        for child in ast.iter_child_nodes(node):
            yield from visit(child, f"{name}.{child.name}" if hasattr(child, "name") else name)

    return visit(tree, "")


def test_docstrings_are_sentences() -> None:
    found = {f"{path}{name.replace('.', ':', 1)}" for path, tree in trees().items() for name in violations(tree)}
    assert not found, f"begin with a subject or a verb, not with of, that, what, as, by, for, where: {sorted(found)}"


def test_each_kind_of_docstring_is_looked_at() -> None:
    source = '"""What it is."""\nclass A:\n "As B."\n def f(self):\n  "Whose."\ndef g():\n "Offers."\n'
    assert list(violations(ast.parse(source))) == ["", ".A", ".A.f"]


def undocumented(all_trees: list[ast.Module], watched: list[ast.Module]) -> Iterator[str]:
    """Yields the names of what is public in `watched` and has no docstring.

    These need none: special methods; properties, which their names describe; a method that `published` describes; a
    method that a base class, or a protocol with all whose methods the class has, documents. Bases are found by name.
    """
    classes = {node.name: node for tree in all_trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def methods(node: ast.ClassDef) -> dict[str, bool]:
        return {m.name: bool(ast.get_docstring(m)) for m in node.body if isinstance(m, ast.FunctionDef)}

    def bases(node: ast.ClassDef) -> list[str]:
        return [re.split(r"[.[]", ast.unparse(base).removeprefix("hf."))[0] for base in node.bases]

    def inherits(node: ast.ClassDef, name: str) -> bool:
        known = [classes[base] for base in bases(node) if base in classes and base != node.name]
        return any(methods(base).get(name, False) or inherits(base, name) for base in known)

    protocols = [methods(node) for node in classes.values() if "Protocol" in bases(node)]

    def needs_none(function: ast.FunctionDef, owner: ast.ClassDef | None) -> bool:
        marks = {re.split(r"[.(]", ast.unparse(each))[0] for each in function.decorator_list}
        if marks & {"property", "cached_property", "published"}:
            return True
        if owner is None:
            return False
        own = methods(owner)
        implemented = any(each.get(function.name, False) and each.keys() <= own.keys() for each in protocols)
        return implemented or inherits(owner, function.name)

    def visit(node: ast.Module | ast.ClassDef, name: str) -> Iterator[str]:
        for child in node.body:
            if not isinstance(child, (ast.ClassDef, ast.FunctionDef)) or child.name.startswith("_"):
                continue
            owner = node if isinstance(node, ast.ClassDef) else None
            exempt = isinstance(child, ast.FunctionDef) and needs_none(child, owner)
            if not ast.get_docstring(child) and not exempt:
                yield f"{name}{child.name}"
            if isinstance(child, ast.ClassDef):
                yield from visit(child, f"{name}{child.name}.")

    for tree in watched:
        yield from visit(tree, "")


def test_what_is_public_on_the_ground_floor_has_a_docstring() -> None:
    watched = [tree for path, tree in trees().items() if path.startswith(DOCUMENTED)]
    found = list(undocumented(list(trees().values()), watched))
    assert not found, f"have no docstring: {sorted(found)}"


def test_what_a_base_documents_needs_no_docstring() -> None:
    source = """
class Base(Protocol):
    "A base."
    def a(self):
        "Documented."
class Derived(Base):
    def a(self): ...
    def b(self): ...
    @property
    def c(self): ...
class Implementation:
    "It has the method of the protocol."
    def a(self): ...
def _private(): ...
def public(): ...
"""
    tree = ast.parse(source)
    assert list(undocumented([tree], [tree])) == ["Derived", "Derived.b", "public"]


def described_by(node: ast.AST) -> set[str]:
    """Returns the names that `:param` may describe: parameters of a function; parameters and attributes of a class."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
    if not isinstance(node, ast.ClassDef):
        return set()
    functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    fields = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    of_init = [init for init in functions if init.name == "__init__"]
    stored = {each.attr for init in of_init for each in ast.walk(init) if isinstance(each, ast.Attribute)}
    return fields.union({each.name for each in functions}, stored, *map(described_by, of_init))


def wrong_params(tree: ast.Module) -> Iterator[str]:
    """Yields each `:param` that does not describe exactly one name, with its owner."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for name in re.findall(r"^:param ([^:]*):", ast.get_docstring(node) or "", re.M):
                if name not in described_by(node):
                    yield f"{node.name}: {name}"


def test_each_param_of_a_docstring_is_one_parameter() -> None:
    """The page of the API shows the first of `:param a, b:` as a type of the second, and links it."""
    found = [f"{path}: {wrong}" for path, tree in trees().items() for wrong in wrong_params(tree)]
    assert not found, found
    source = 'class A:\n ":param b: is one.\\n:param c: is none."\n b: int\ndef f(x, y):\n ":param x, y: both."\n'
    assert list(wrong_params(ast.parse(source))) == ["A: c", "f: x, y"]


def test_a_class_name_is_defined_once_or_listed() -> None:
    defined: defaultdict[str, set[str]] = defaultdict(set)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                assert path not in defined[node.name], f"{path} defines {node.name} twice"
                defined[node.name].add(path)
    for path, tree in trees().items():  # a class and a type of the same name are two meanings too
        targets = [node.targets[0] for node in tree.body if isinstance(node, ast.Assign)]
        for name in {target.id for target in targets if isinstance(target, ast.Name)} & defined.keys():
            defined[name].add(path)
    rows = re.findall(r"^\| `(\w+)` \| `([\w/]+\.py)` \|", (ROOT / "docs" / "code.md").read_text("utf-8"), re.M)
    listed = {name: {path for each, path in rows if each == name} for name, _ in rows}
    wrong = {name: paths - defined[name] for name, paths in listed.items() if paths - defined[name]}
    assert not wrong, f"docs/code.md names classes where none is: {wrong}"
    twice = {name: paths for name, paths in defined.items() if len(paths) > 1 and paths != listed.get(name)}
    assert not twice, f"have several meanings; rename one, or list each in docs/code.md: {twice}"
