"""How large the project is, beside the goals of docs/size.md: `make size`.

It fails where a figure is larger than its goal and than the figure that its row states, and where a row that states
more than its goal gives no reason.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grimp
import networkx

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "size.md"
LINKS = ROOT / "build" / "links"
PAGES = ("*.md", "changes/*.md", "docs/**/*.md")
OPTIONAL = (
    *(
        "aggregator/fleet",
        "aggregator/planning",
        "edge_client/fleet",
        "edge_client/labelling",
        "edge_client/listen",
        "firmware_profiles/cards",
    ),
    *("hushfleet/methods/papers", "hushfleet/release"),
    *("models/features", "models/native", "models/resnet.py", "simulator/forecast", "simulator/engines/ray"),
    *("simulator/engines/fast/vmap", "simulator/studies", "benchmarks", "examples", "setup.py"),
)
"""Folders and files outside the core, as docs/architecture.md says."""
PROCESSES = {
    "guardian": ["hushfleet.edge_client.agent"],
    "guardian and worker": ["hushfleet.edge_client.agent", "hushfleet.edge_client.worker.work"],
    "aggregator process": ["hushfleet.aggregator.commands.field_run"],
    "`simulate`": ["hushfleet.simulator.command", "hushfleet.simulator.engines.fast.engine"],
}
"""The modules by which a process begins; one that does not exist is left out."""
LOAD = """
import importlib.util, sys
for name in sys.argv[1:]:
    if importlib.util.find_spec(name):
        importlib.import_module(name)
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] == "hushfleet" and getattr(module, "__file__", None):
        print(module.__file__)
"""


@dataclass(frozen=True)
class Row:
    """A row of docs/size.md.

    :param stated: the figure that the page allows where the goal is not met.
    """

    figure: str
    goal: int
    stated: int
    reason: str


def main() -> int:
    """Prints each figure beside its goal; returns 1 if one is wrong."""
    rows, measured = rows_of(PAGE.read_text("utf-8")), measure()
    for row in rows:
        print(f"{row.figure:56}{measured.get(row.figure, 0):>8,}   goal {row.goal:>7,}   stated {row.stated:>7,}")
    wrong = problems(rows, measured)
    print(*wrong, sep="\n")
    return int(bool(wrong))


def rows_of(page: str) -> list[Row]:
    """Returns the rows of its table with four columns: figure, goal, stated, reason."""
    found = re.findall(r"^\| ([^|]+) \| ([\d,]+) \| ([\d,]+) \|([^|]*)\|$", page, re.MULTILINE)
    return [Row(figure, _number(goal), _number(stated), reason.strip()) for figure, goal, stated, reason in found]


def problems(rows: Sequence[Row], measured: Mapping[str, int]) -> list[str]:
    """Returns a sentence for each figure that grew, and for each row without its reason."""
    found = [f"docs/size.md has no row {name!r}" for name in measured.keys() - {row.figure for row in rows}]
    for row in rows:
        if row.figure not in measured:
            found.append(f"docs/size.md, {row.figure!r}: nothing measures this figure")
        elif measured[row.figure] > max(row.goal, row.stated):
            allowed = f"its goal is {row.goal:,}, and docs/size.md states {row.stated:,}"
            found.append(f"{row.figure}: {measured[row.figure]:,}; {allowed}: make it smaller, or say why there")
        if row.stated > row.goal and not row.reason:
            found.append(f"docs/size.md, {row.figure!r}: say why it is larger than its goal")
    return found


def measure() -> dict[str, int]:
    """Returns every figure of the files that git knows, by its name on the page."""
    texts = {path: (ROOT / path).read_text("utf-8") for path in tracked("**/*.py")}
    lines = {path: text.count("\n") for path, text in texts.items()}
    outside = [path for path in texts if not path.startswith("tests/")]
    return {
        "lines outside tests": sum(lines[path] for path in outside),
        "lines of code outside tests": sum(code_lines(texts[path]) for path in outside),
        "lines of the core": sum(lines[path] for path in outside if in_core(path)),
        "lines of tests": sum(lines.values()) - sum(lines[path] for path in outside),
        "words of documents": sum(words((ROOT / path).read_text("utf-8")) for path in tracked(*PAGES)),
        **{f"lines that a process loads: {name}": loaded_lines(modules) for name, modules in PROCESSES.items()},
        **rooms(),
    }


def tracked(*patterns: str) -> list[str]:
    """Returns the files of these patterns that git knows, and new ones that it does not ignore."""
    listing = [
        "git",
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        *(f":(glob){p}" for p in patterns),
    ]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted(name for name in set(names) if (ROOT / name).is_file())


def in_core(path: str) -> bool:
    """Whether a file outside tests belongs to the core."""
    return not path.startswith(OPTIONAL)


def code_lines(text: str) -> int:
    """Counts lines with code: without docstrings, comments and blank lines."""
    blank = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}
    words = (each for each in tokenize.generate_tokens(io.StringIO(text).readline) if each.type not in blank)
    alone = (each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Expr))
    strings = (each for each in alone if isinstance(each.value, ast.Constant) and isinstance(each.value.value, str))
    return len(
        {line for word in words for line in range(word.start[0], word.end[0] + 1)}
        - {line for each in strings for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)}
    )


def words(text: str) -> int:
    """Counts words: what has a letter or a digit, and stands between spaces."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def loaded_lines(modules: Iterable[str]) -> int:
    """Counts the lines of our modules that a new Python has after it has imported these."""
    done = subprocess.run([sys.executable, "-c", LOAD, *modules], cwd=ROOT, capture_output=True, text=True, check=True)
    return sum(Path(file).read_text("utf-8").count("\n") for file in done.stdout.splitlines())


def rooms() -> dict[str, int]:
    """Counts the packages of the core (rooms), the longest way of imports between them (floors), who imports whom
    (arrows), and circles of files, with imports for types alone."""
    sys.path.insert(0, str(LINKS))
    sys.path_importer_cache.clear()
    graph = grimp.build_graph("hushfleet", cache_dir=None)
    files = networkx.DiGraph(
        (one, other) for one in graph.modules for other in graph.find_modules_directly_imported_by(one)
    )
    packages = networkx.DiGraph()
    for one, other in files.edges:
        ours, theirs = _room(one), _room(other)
        if ours and theirs and ours != theirs:
            packages.add_edge(ours, theirs)
    floors = networkx.dag_longest_path_length(networkx.condensation(packages)) + 1
    return {
        "rooms: packages of the core": len(packages),
        "floors: packages above each other": floors,
        "arrows: a package imports another": packages.number_of_edges(),
        "circles of files": sum(len(each) > 1 for each in networkx.strongly_connected_components(files)),
    }


def _room(module: str) -> str | None:
    """Returns the folder of a module, from the repository's root; None outside the core, and for the root itself."""
    path = Path(*module.split("."))
    folder = path if (LINKS / path).is_dir() else path.parent
    if folder == Path("hushfleet"):
        return None
    real = (LINKS / folder).resolve().relative_to(ROOT).as_posix()
    return real if in_core(f"{real}/") else None


def _number(written: str) -> int:
    return int(written.replace(",", ""))


if __name__ == "__main__":
    sys.exit(main())
