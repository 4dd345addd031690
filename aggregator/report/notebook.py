"""Shows a run in a notebook: one display that is redrawn takes the place of a terminal's lines and panel."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import RenderableType

from hushfleet.aggregator.report.console import Console

EVERY_S = 0.5
_WIDTH = 96
_HTML = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;'
    "font-family:Menlo,'DejaVu Sans Mono',consolas,monospace\">{code}</pre>"
)


class NotebookConsole(Console):
    """Shows printed lines, and a changing part below them, in one display, for code that runs in a notebook."""

    def __init__(self) -> None:
        super().__init__(file=io.StringIO(), force_jupyter=False, force_terminal=False, width=_WIDTH)
        self._printed: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._moving: RenderableType | None = None
        self._handle: Any = None
        self._drawing = threading.Lock()

    def print(self, *objects: Any, **options: Any) -> None:
        self._printed.append((objects, options))
        self._draw()

    @contextmanager
    def moving(self, what: RenderableType, *, stays: bool) -> Iterator[None]:
        """Redraws `what` twice a second inside this context.

        :param stays: its last state stays in the display.
        """
        ended = threading.Event()

        def redraw() -> None:
            while not ended.wait(EVERY_S):
                self._draw()

        self._moving, thread = what, threading.Thread(target=redraw, name="notebook", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._moving = None
            if stays:
                self.print(what)
            else:
                self._draw()

    def _draw(self) -> None:
        from IPython.display import display  # installed only with a notebook

        with self._drawing:
            page = Console(file=io.StringIO(), record=True, width=_WIDTH, force_jupyter=False)
            for objects, options in [*self._printed, *([] if self._moving is None else [((self._moving,), {})])]:
                page.print(*objects, **options)
            text = page.export_text(clear=False)
            data = {"text/plain": text, "text/html": page.export_html(inline_styles=True, code_format=_HTML)}
            if self._handle is None:
                self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]  # IPython has no types
            else:
                self._handle.update(data, raw=True)


def run_console(*, quiet: bool) -> Console:
    """Returns the console of a run that a program has started."""
    console = Console(quiet=quiet)
    return NotebookConsole() if console.is_jupyter and not quiet else console
