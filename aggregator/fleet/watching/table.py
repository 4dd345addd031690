"""Draws a fleet as a table for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from hushfleet.aggregator.fleet import descriptions
from hushfleet.aggregator.fleet.view import FleetView
from hushfleet.aggregator.fleet.watching.columns import TABLE
from hushfleet.aggregator.report.display import COLORS, SOFT, WARNING
from hushfleet.wire.format.health import Problem

URGENT = "#e07b5a"


def table(view: FleetView, *, details: bool = False) -> RenderableType:
    """Draws the fleet for a terminal.

    :param details: whether to add figures for engineers and for the person responsible for privacy.
    """
    sentences = Table.grid(Column(style=SOFT, no_wrap=True), "", padding=(0, 2, 0, 0))
    for name, said in descriptions.sentences(view).items():
        sentences.add_row(name, Text(said))
    parts: list[RenderableType] = [Text(view.federation, "bold"), sentences]
    if view.run is not None:
        parts.append(Text(descriptions.progress(view.run, view.season)))
    if following := descriptions.next_round(view):
        parts.append(Text(following))
    if view.sums is not None:
        parts += [Text(view.sums.server_sees), Text(descriptions.membership_list(view.sums))]
    if view.rollout is not None:
        parts.append(Text(descriptions.rollout(view.rollout)))
    if details:
        parts += [Text(line) for line in descriptions.figures(view)]
    parts += [_problem("", problem) for problem in view.problems]
    if view.boards:
        parts.append(_boards(view, details=details))
    parts += [_problem(board.device, problem) for board in view.boards for problem in board.problems]
    parts += [Text(descriptions.refused_device(each), WARNING) for each in view.refused_devices]
    parts += [Text(descriptions.asks(each, view.at), WARNING) for each in view.asking]
    parts += [] if details else [Text("epsilon by adversary, bytes and certificates: --details", SOFT)]
    return Group(*parts)


def _boards(view: FleetView, *, details: bool) -> Table:
    has_places = details or any(board.place for board in view.boards)
    columns = [column for column in TABLE if column.name != "place" or has_places]
    rows = Table(Column("board", no_wrap=True), *(c.name for c in columns), box=None, header_style="bold")
    for board in view.boards:
        style = URGENT if board.is_urgent else COLORS.get(board.state, SOFT)
        rows.add_row(
            board.device,  # the others have the board's own words, which are no markup
            *(Text(c.text(board, view.at) or "-", style if c.name == "state" else "") for c in columns if c.text),
        )
    return rows


def _problem(device: str, problem: Problem) -> Text:
    who = f"{device} " if device else ""
    return Text.assemble((f"{who}{problem.what}", URGENT if problem.urgent else WARNING), (f"  {problem.advice}", SOFT))
