"""The counts of `make size`, and when it fails."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import size

PAGE = """
| figure | goal | stated | why |
|---|---:|---:|---|
| lines | 1,000 | 1,200 | a reason |
| words | 500 | 400 | |
"""


def problems(page: str, **measured: int) -> list[str]:
    return size.problems(size.rows_of(page), measured)


@pytest.mark.parametrize(("lines", "words"), [(900, 400), (1_200, 500)])
def test_a_figure_may_be_as_large_as_its_goal_or_as_stated(lines: int, words: int) -> None:
    assert problems(PAGE, lines=lines, words=words) == []


def test_a_figure_that_grew_is_named_with_its_goal() -> None:
    (found,) = problems(PAGE, lines=1_201, words=400)
    assert found.startswith("lines: 1,201; its goal is 1,000, and docs/size.md states 1,200")
    (found,) = problems(PAGE, lines=900, words=501)
    assert found.startswith("words: 501; its goal is 500")


def test_a_row_past_its_goal_needs_a_reason() -> None:
    (found,) = problems(PAGE.replace("a reason", ""), lines=900, words=400)
    assert "say why" in found


def test_every_figure_has_one_row() -> None:
    (found,) = problems(PAGE, lines=900, words=400, arrows=3)
    assert "no row 'arrows'" in found
    (found,) = problems(PAGE, lines=900)
    assert "nothing measures" in found


def test_docstrings_comments_and_blank_lines_are_no_code() -> None:
    text = '"""About."""\n\nimport os  # why\n\n\ndef f(a: int) -> str:\n    """Says.\n\n    More."""\n'
    text += '    # why\n    return """x\n    y"""\n'
    assert size.code_lines(text) == 4


def test_bars_and_rules_of_tables_are_no_words() -> None:
    assert size.words("| what | `a b` |\n|---|---:|\n| ε 2 | - |\n") == 5


def test_the_core_has_no_optional_part() -> None:
    inside = (
        "hushfleet/params.py",
        "hushfleet/methods/hush.py",
        "edge_client/agent.py",
        "simulator/engines/fast/chunks.py",
    )
    outside = (
        "hushfleet/methods/papers/ditto.py",
        "aggregator/fleet/tasks/sums.py",
        "simulator/studies/cli.py",
        "benchmarks/wire.py",
    )
    assert [path for path in (*inside, *outside) if size.in_core(path)] == [*inside]


def test_a_process_is_measured_with_what_its_modules_import(tmp_path: Path) -> None:
    alone = size.loaded_lines(["hushfleet.errors"])
    assert 0 < alone < size.loaded_lines(["hushfleet.errors", "hushfleet.params"])
    assert size.loaded_lines(["hushfleet.errors", "hushfleet.no_such_module"]) == alone


def test_new_files_count_before_they_are_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size, "ROOT", tmp_path)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    for name in ("a.py", "b/c.py", "b/ignored.py", "d.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one = 1\n")
    (tmp_path / ".gitignore").write_text("ignored.py\n")
    assert size.tracked("**/*.py") == ["a.py", "b/c.py"]


def test_the_page_has_a_row_for_each_figure() -> None:
    """Whether the figures are small enough says `make size`, not a test."""
    known = {row.figure for row in size.rows_of(size.PAGE.read_text("utf-8"))}
    assert {"lines outside tests", "words of documents", "circles of files"} <= known
    assert known >= {f"lines that a process loads: {name}" for name in size.PROCESSES}
