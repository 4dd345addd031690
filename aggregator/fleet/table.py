"""A fleet as a table for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from hushfleet.aggregator.fleet import owner_words, words
from hushfleet.aggregator.fleet.view import BoardView, FleetView, Problem
from hushfleet.aggregator.observe.display import COLORS, SOFT, WARNING

URGENT = "#e07b5a"


def table(view: FleetView, *, details: bool = False) -> RenderableType:
    """The fleet for a terminal.

    :param details: what engineers and whoever answers for privacy ask besides.
    """
    sentences = Table.grid(Column(style=SOFT, no_wrap=True), "", padding=(0, 2, 0, 0))
    for name, said in owner_words.sentences(view).items():
        sentences.add_row(name, Text(said))
    parts: list[RenderableType] = [Text(view.federation, "bold"), sentences]
    if view.run is not None:
        parts.append(Text(words.progress(view.run)))
    if view.sums is not None:
        parts += [Text(view.sums.server_sees), Text(words.roster(view.sums))]
    if view.rollout is not None:
        parts.append(Text(words.rollout(view.rollout)))
    if details:
        parts += [Text(line) for line in words.figures(view)]
    parts += [_problem("", problem) for problem in view.problems]
    if view.boards:
        parts.append(_boards(view))
    parts += [_problem(board.device, problem) for board in view.boards for problem in board.problems]
    parts += [Text(words.stranger(each), WARNING) for each in view.strangers]
    parts += [] if details else [Text("epsilon by adversary, bytes and certificates: --details", SOFT)]
    return Group(*parts)


def _boards(view: FleetView) -> Table:
    rows = Table(
        Column("board", no_wrap=True), "state", "seen", "release", "health", "rounds", "spent", "sent",
        box=None, header_style="bold",
    )  # fmt: skip
    for board in view.boards:
        rows.add_row(
            board.device,
            _state(board),
            words.ago(board.seen, view.at),
            Text(words.release(board)),  # the board's own words
            words.health(board),
            str(board.rounds),
            words.spent(board),
            words.sent(board),
        )
    return rows


def _state(board: BoardView) -> Text:
    style = COLORS.get(board.state, SOFT)
    return Text(words.state(board), URGENT if board.is_urgent else style)


def _problem(device: str, problem: Problem) -> Text:
    who = f"{device} " if device else ""
    return Text.assemble((f"{who}{problem.what}", URGENT if problem.urgent else WARNING), (f"  {problem.advice}", SOFT))
