"""Makes the page of all results, in Markdown: each table of a paper, the verdicts, and which claims of each paper hold.

`reproduction.md.j2` has the page's own text. The sentences on results are in the recipes; a test compares their numbers
with the cells (`tests/simulator/studies/reproduce/references.json`).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from hushfleet.aggregator.results.result import write_whole
from hushfleet.simulator.studies.reproduce.cells import Cell, cells_of
from hushfleet.simulator.studies.reproduce.draw import Point, draw, draw_paper, with_own_runs
from hushfleet.simulator.studies.reproduce.kept import Kept
from hushfleet.simulator.studies.reproduce.recipe import (
    METRICS,
    Metric,
    Paper,
    Recipe,
    load_paper,
    load_recipe,
    load_recipes,
    paper_names,
    recipes_folder,
)
from hushfleet.simulator.studies.reproduce.show import epsilons
from hushfleet.simulator.studies.reproduce.table import Block, CellProgress, PaperTable, make_table, window_of
from hushfleet.simulator.studies.reproduce.verdict import ELSEWHERE, FAR, LEAD, NEAR, PlaceVerdict, verdict
from hushfleet.simulator.studies.templates import filled

FIGURES = "figures"
SEEDS = 5
"""Number of seeds (0, 1, ...) that are looked for."""
_MEASURED = {
    "accuracy_own_common": "own models, common test set",
    "accuracy_own_local": "own models, own labels",
    "accuracy_next_local": "all devices' next models, own labels",
    "accuracy_global": "the global model",
    "round_time": METRICS["round_time"],
}
_MAY_STAND_ABOVE = ("data", "reading", "at", "seeds", "noise", "ε server", "ε release", "why")
_CLAIMS = ["", "claim", "holds?", "numbers", "seeds", "what stands in the way"]
_COUNTS = ["numbers printed", "run", "reproduced", "order only", "not"]


class _Judged(NamedTuple):
    """A finished place of a table, and its verdict; `beside` is the number of lines in the comparison."""

    block: Block
    place: Any
    verdict: PlaceVerdict | None
    beside: int


class ReproductionReport:
    """The page.

    :param text: in Markdown.
    :param tables: the tables that are drawn, which have no printed numbers, by the name of the figure.
    :param points: the finished numbers of each paper beside the printed ones, by the name of the figure.
    """

    def __init__(self, kept: Kept, papers: Iterable[str]) -> None:
        self._kept = kept
        self.tables: dict[str, PaperTable] = {}
        self.points = defaultdict[str, list[Point]](list)
        told = [(load_paper(name), load_recipes(name)) for name in papers]
        claims, counts, sections = [], [], []
        for paper, recipes in sorted(told, key=lambda each: (not each[0].method, each[0].name)):
            section, count = self._paper(paper, recipes)
            sections.append(section)
            link = f"[{paper.name}](#{paper.name.lower().replace(' ', '-')})"
            for at, each in enumerate(paper.claims):
                line = each.claim, f"**{each.holds}**", each.numbers, each.seeds, each.obstacle
                claims.append(["" if at else link, *line])
            if paper.method:
                counts.append([link, *(count[each] for each in _COUNTS)])
        text = filled(
            __name__,
            "reproduction.md.j2",
            claims=markdown(pd.DataFrame(claims, columns=_CLAIMS)),
            counts=markdown(pd.DataFrame(counts, columns=["", *_COUNTS])),
            near=f"{NEAR:g}",
            lead=f"{LEAD[0]:g}",
            far=f"{FAR:g}",
            elsewhere=ELSEWHERE,
            cells=len(all_kept := list(kept)),
            named=sum("processor" in one.versions for one in all_kept),
            digests=sum(one.digests is not None for one in all_kept),
            papers=sections,
        )
        self.text = re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"

    def _paper(self, paper: Paper, recipes: Sequence[Recipe]) -> tuple[dict[str, Any], Counter[str]]:
        """Returns the section of a paper as the template takes it, and the count of its numbers."""
        counts, shown, above, folds = Counter[str](), set[tuple[str, Metric]](), set[str](), []
        figure = f"{recipes[0].paper}.svg"
        for recipe in (each for each in recipes if not each.open):
            table = self._made(recipe)
            measured = {(cell.digest, cell.metric) for cell in self._finished(recipe)}
            places = self._each_run_once(list(self._judged(table)))
            printed, run = _numbers(recipe, places)
            counts.update({"numbers printed": len(printed), "run": len(printed & run)})
            if measured <= shown:
                continue
            shown |= measured
            counts.update(each.verdict.word for each in places if each.verdict)
            folds.append(self._fold(paper, table, places, above))
            if not paper.method:
                self.tables[figure] = table
            points = [_point(recipe, each) for each in places if not math.isnan(each.place.paper)]
            if points and recipe.metric != "round_time":
                self.points[figure] += points
        section = {
            "name": paper.name,
            "source": paper.source,
            "figure": figure if figure in self.points else "",
            "contradictions": paper.contradictions,
            "objections": paper.objections,
            "folds": folds,
        }
        return section, counts

    def _judged(self, table: PaperTable) -> Iterator[_Judged]:
        """Yields the finished places with their verdicts, column by column."""
        own = columns = _columns(table)
        if table.recipe.judged_as:
            name, _, without = table.recipe.judged_as.partition("/")
            others = _columns(self._made(load_recipe(recipes_folder() / table.recipe.paper / f"{name}.toml"))).items()
            columns = {where: [each for each in lines if each[1].row != without] for where, lines in others}
        for where, lines in own.items():
            for block, place in lines:
                beside = [each for _, each in columns.get(where, ()) if not each.outside]
                rule = {"only_order": block.group.only_order, "other_data": block.group.other_data}
                found = None if place.outside else verdict(place, beside, **rule)
                yield _Judged(block, place, found, len(beside))

    def _made(self, recipe: Recipe) -> PaperTable:
        return make_table(recipe, self._finished(recipe), CellProgress(self._kept), quick=False)

    def _finished(self, recipe: Recipe) -> list[Cell]:
        """Returns the finished cells of one table, with all seeds."""
        return [cell for cell in cells_of(recipe, seeds=SEEDS, quick=False) if self._kept.of(cell)]

    @staticmethod
    def _each_run_once(places: Sequence[_Judged]) -> list[_Judged]:
        """Drops repeated lines: readings that do not change a run, such as one without noise, share the first's lines.

        A line has the verdict from the reading in which it is compared with the most methods.
        """
        sharing = defaultdict[tuple[str, str], list[_Judged]](list)
        for each in places:
            sharing[each.block.group.id, each.place.runs[0]].append(each)
        lines = []
        for each in places:
            those = sharing[each.block.group.id, each.place.runs[0]]
            if each.block.reading == those[0].block.reading:
                same = (other for other in those if other.place.column == each.place.column)
                lines.append(each._replace(verdict=max(same, key=lambda other: other.beside).verdict))
        return lines

    def _fold(self, paper: Paper, table: PaperTable, places: Sequence[_Judged], told: set[str]) -> dict[str, Any]:
        """Returns a table as the template takes it.

        :param told: texts that are already above on the page; this call adds its own.
        """
        recipe, blocks = table.recipe, table.blocks

        def once(text: str, key: str = "") -> str:
            new = text if (key or text) not in told else ""
            told.add(key or text)
            return new

        settings = once(recipe.readings_text)
        metrics = " or ".join(_MEASURED[metric] for metric in dict.fromkeys(block.metric for block in blocks))
        is_time = recipe.metric == "round_time"
        notes = [f"Time: {metrics}." if is_time else f"Accuracy: {metrics}, {window_of(recipe, blocks)}."]
        for row in recipe.rows:
            if row.outside and any(each.place.row == row.id for each in places) and once(row.outside):
                notes.append(f"{row.title} is outside of the order: {row.outside}.")
        for reading in recipe.readings:
            if reading.note and any(block.reading == reading for block in blocks) and once(reading.note, reading.id):
                notes.append(f"Reading *{reading.title}*: {reading.note}.")
        raw = dict.fromkeys(words for several in table.places.raw_values for words in several)
        if raw and once(sent := ", ".join(raw)):
            notes.append(f"Without noise leave the device: {sent}.")
        printed = any(not math.isnan(each.place.paper) for each in places)
        shared, lines, why = self._lines(recipe, places) if printed else (*_side_by_side(table), [])
        return {
            "label": recipe.label,
            "words": recipe.claim if paper.method and recipe.claim else recipe.title,
            "settings": settings,
            "substitutions": list(dict.fromkeys(words for block in blocks for words in block.group.substitutions)),
            "shared": shared,
            "lines": lines,
            "why": why,
            "notes": [*notes, *recipe.findings],
            "figure": "" if paper.method else f"{recipe.paper}.svg",
        }

    def _lines(self, recipe: Recipe, places: Sequence[_Judged]) -> tuple[str, str, list[str]]:
        """Returns the values that all lines share, a line for each place, and the sentences to which `why` has
        numbers."""
        rows, sentences = [], dict[str, int]()
        for block, place, found, _ in places:
            here = {"group": block.group.id, "row": place.row, "column": place.column, "reading": block.reading_id}
            reasons = [each.why for each in recipe.specials if each.why and each.applies(**here)]
            why = [str(sentences.setdefault(each, len(sentences) + 1)) for each in reasons]
            # the rounds of a time measurement store no epsilon
            server, release = ("", "") if recipe.metric == "round_time" else _least_and_most(place)
            rows.append(
                {
                    "data": block.group.title,
                    "reading": block.reading.title if block.reading else "",
                    "at": place.at,
                    "method": place.method,
                    "paper": "" if math.isnan(place.paper) else f"{place.paper:.2f}",
                    "ours": _mean_and_spread(place),
                    "seeds": len(place.seeds),
                    "noise": f"{place.noise:.3g}" if place.noise > 0 else "",
                    "ε server": server,
                    "ε release": release,
                    "verdict": "" if math.isnan(place.paper) else found or ("outside" if place.outside else "open"),
                    "why": ", ".join(why),
                }
            )
        lines = pd.DataFrame(rows)
        same = [name for name in _MAY_STAND_ABOVE if lines[name].nunique() == 1]
        shared = "; ".join(f"{name}: {lines[name].iloc[0]}" for name in same if lines[name].iloc[0])
        return f"{shared}." if shared else "", markdown(_named_once(lines.drop(columns=same))), list(sentences)


def write_report(kept: Kept, page: Path) -> ReproductionReport:
    """Writes the page, and its figures into `figures/` beside it. Raises `BadInput`, `StoreError`."""
    report = ReproductionReport(kept, paper_names())
    (page.parent / FIGURES).mkdir(parents=True, exist_ok=True)
    for name, table in report.tables.items():
        draw(table, page.parent / FIGURES / name)
    for name, points in report.points.items():
        draw_paper(points, page.parent / FIGURES / name)
    write_whole(page, report.text)
    return report


def _columns(table: PaperTable) -> dict[tuple[str, str, str], list[tuple[Block, Any]]]:
    """Returns the finished places by group, reading and column."""
    columns = defaultdict[tuple[str, str, str], list[tuple[Block, Any]]](list)
    for block in table.blocks:
        for place in block.places[block.places.ours.notna()].sort_values("column", kind="stable").itertuples():
            columns[block.group.id, block.reading_id, str(place.column)].append((block, place))
    return dict(columns)


def _numbers(recipe: Recipe, places: Sequence[_Judged]) -> tuple[set[Any], set[Any]]:
    """Returns the printed numbers, and those of the places. Groups with the same data set, such as with another
    network, share numbers; so do rows that only run another row in another way."""
    rows = {row.id: row for row in recipe.rows}

    def numbers(those: Iterable[tuple[str, str, float | None]]) -> set[Any]:
        keys = ((rows[row], column, value) for row, column, value in those if value is not None)
        return {(row.reads or row.id, "" if row.same_in_all_columns else column, value) for row, column, value in keys}

    printed = numbers(
        (row, column.id, recipe.paper_value(group, row, column.id))
        for group in ([] if recipe.judged_as else recipe.groups)
        for row in rows
        for column in recipe.columns_of(group)
    )
    return printed, numbers((each.place.row, each.place.column, each.place.paper) for each in places)


def _least_and_most(place: Any) -> Iterator[str]:
    """Yields both epsilons in words, with the smallest over seeds if they differ, which depends on random draws."""
    for words, view in zip(epsilons(place), ("server", "release"), strict=True):
        least, most = getattr(place, f"least_{view}"), getattr(place, f"epsilon_{view}")
        yield f"{least:.3g} to {words}" if least < 0.99 * most and not place.raw_values else words


def _point(recipe: Recipe, judged: _Judged) -> Point:
    place, first = judged.place, recipe.readings[:1]
    apart = bool(recipe.judged_as) or (judged.block.reading is not None and judged.block.reading not in first)
    return Point(f"{recipe.label.split(',')[0]}, {judged.block.group.title}", place.paper, tuple(place.values), apart)


def _named_once(lines: pd.DataFrame) -> pd.DataFrame:
    """Clears the leading words of a line if they are the same as in the line above."""
    shown = lines.copy()
    repeated = pd.Series(True, index=lines.index)
    for name in lines.columns[: list(lines.columns).index("method")]:
        repeated &= lines[name] == lines[name].shift()
        shown.loc[repeated, name] = ""
    return shown


def _mean_and_spread(place: Any, places: int = 2) -> str:
    if math.isnan(place.ours):
        return ""
    return f"{place.ours:.{places}f}" + (f" ±{place.spread:.{places}f}" if len(place.seeds) > 1 else "")


def _side_by_side(table: PaperTable) -> tuple[str, str]:
    """Returns a table without printed numbers, and the text above it: one line per row, best first; one column per
    group and column."""
    most = max(map(len, table.places.seeds))

    def word(place: Any) -> str:
        return _mean_and_spread(place, 1) + (f" ({len(place.seeds)})" if 0 < len(place.seeds) < most else "")

    columns = {
        f"{block.title}, {at}": places.set_index("method")
        for block in with_own_runs(table.blocks)
        for at, places in block.places.groupby("at", sort=False, observed=True)
    }
    words = pd.DataFrame({name: places.apply(word, axis=1) for name, places in columns.items()})
    order = next(iter(columns.values())).ours.sort_values(ascending=False).index
    over = f"Mean ± standard deviation over {most} seeds, or over as many as stand in brackets."
    return over if most > 1 else "One seed.", markdown(words.reindex(order).fillna("").reset_index())


def markdown(lines: pd.DataFrame) -> str:
    rows: list[Any] = [lines.columns, *lines.itertuples(index=False)]
    shown = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join([shown[0], "|---" * len(lines.columns) + "|", *shown[1:]])
