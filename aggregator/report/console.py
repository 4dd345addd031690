"""rich's console, which escapes names and texts of others, and may command the terminal itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

import rich.console
from rich.segment import Segment
from rich.text import Text

from hushfleet.output import shown, unescaped


class Console(rich.console.Console):
    """The only console of the commands; a rule of the linter forbids rich's own."""

    @property
    def file(self) -> IO[str]:
        stream: IO[str] = unescaped(super().file)
        return stream

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(shown(text), **options)  # before its width is measured

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=shown(segment.text))
