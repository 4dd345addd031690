"""The pages of the project, and the fenced blocks in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# CHANGELOG.md alone is left out: it names what was, too
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)


class Block(NamedTuple):
    """A fenced block of a document."""

    document: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.document}:{self.line}"


def blocks_of(path: Path) -> Iterator[Block]:
    language, start, lines = None, 0, []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        fence = re.match(r"\s*```\s*(\S*)", line)
        if not fence:
            lines.append(line)
        elif language is None:
            language, start, lines = fence[1], number, []
        else:
            yield Block(path.relative_to(ROOT).as_posix(), start, language, "\n".join(lines))
            language = None
    assert language is None, f"{path} ends inside of a block"


BLOCKS = [block for path in DOCUMENTS for block in blocks_of(path)]
