"""Makes the pages of all results, in Markdown: first what holds of each paper, then a page a paper with claims, tables
and verdicts.

`reproduction.md.j2` and `paper.md.j2` have the pages' own text. The sentences on results are in the recipes; a test
compares their numbers with the cells (`tests/simulator/studies/reproduce/references.json`).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hushfleet.aggregator.results.result import write_whole
from hushfleet.simulator.studies.reproduce.cells import Cell, cells_of
from hushfleet.simulator.studies.reproduce.draw import Point, draw, draw_claims, draw_paper, with_own_runs
from hushfleet.simulator.studies.reproduce.kept import Kept
from hushfleet.simulator.studies.reproduce.recipe import (
    WINDOWS,
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
from hushfleet.simulator.studies.reproduce.table import CellProgress, PaperTable, make_table
from hushfleet.simulator.studies.reproduce.verdict import ELSEWHERE, FAR, LEAD, NEAR, verdict
from hushfleet.simulator.studies.templates import filled

FIGURES, PAGES, CLAIMS = "figures", "reproduction", "claims.svg"
SEEDS = 5
"""Number of seeds (0, 1, ...) that are looked for."""
_MEASURED = {
    "accuracy_own_common": "own models, common test set",
    "accuracy_own_local": "own models, own labels",
    "accuracy_next_local": "next models, own labels",
    "accuracy_global": "global model",
    "round_time": "processor time of a round, in percent of the first row's",
}
_TITLES = ("data", "reading", "at")
_OF_A_LINE = ("method", "paper", "ours", "verdict")
"""Columns that never stand above the table."""
_MARKS = {"reproduced": "✓", "order only": "≈", "not": "✗"}
_ALIKE = 1.05
"""Epsilons of methods at equal privacy differ by this factor at most."""
_CLAIMS = ["claim", "holds?", "numbers", "seeds", "what stands in the way"]
_COUNTS = ["numbers printed", "run", "reproduced", "order only", "not", "not testable"]
_SHARE = "reproduced or in order"


class ReproductionReport:
    """The pages.

    :param text: the first page, in Markdown.
    :param pages: a page for each paper, by its name in `--list`.
    :param tables: the tables that are drawn, which have no printed numbers, by the name of the figure.
    :param points: the finished numbers of each paper beside the printed ones, by the name of the figure.
    """

    def __init__(self, kept: Kept, papers: Iterable[str]) -> None:
        self._kept = kept
        self.tables: dict[str, PaperTable] = {}
        self.points = defaultdict[str, list[Point]](list)
        self.pages = dict[str, str]()
        told, rows = {name: load_paper(name) for name in papers}, dict[str, Counter[str]]()
        for name, paper in told.items():
            section, rows[name] = self._paper(paper, load_recipes(name))
            self.pages[name] = _tidy(filled(__name__, "paper.md.j2", **section))
        # the best reproduced first, and last what is no paper
        names = sorted(told, key=lambda name: (bool(told[name].method), _in_order(rows[name])), reverse=True)
        self.papers = {name: told[name] for name in names}
        counts = [
            [self._link(name), *(rows[name][each] for each in _COUNTS), f"{_in_order(rows[name]):.0%}"]
            for name, paper in self.papers.items()
            if paper.method
        ]
        self.text = _tidy(
            filled(
                __name__,
                "reproduction.md.j2",
                papers=[(self._link(name), paper.summary) for name, paper in self.papers.items()],
                counts=markdown(pd.DataFrame(counts, columns=["", *_COUNTS, _SHARE])),
                near=f"{NEAR:g}",
                lead=f"{LEAD[0]:g}",
                far=f"{FAR:g}",
                elsewhere=ELSEWHERE,
                cells=len(all_kept := list(kept)),
                named=sum("processor" in one.versions for one in all_kept),
                digests=sum(one.digests is not None for one in all_kept),
            )
        )

    def _link(self, name: str) -> str:
        return f"[{self.papers[name].name}]({PAGES}/{name}.md)"

    def _paper(self, paper: Paper, recipes: Sequence[Recipe]) -> tuple[dict[str, Any], Counter[str]]:
        """Returns the section of a paper as the template takes it, and the count of its numbers."""
        counts, shown, above, folds = Counter[str](), set[tuple[str, Metric]](), set[str](), []
        figure = f"{recipes[0].paper}.svg"
        for recipe in (each for each in recipes if not each.open):
            table = self._made(recipe)
            measured = {(cell.digest, cell.metric) for cell in self._finished(recipe)}
            places = _each_run_once(self._judged(table))
            printed, run = _numbers(recipe, places)
            counts.update({"numbers printed": len(printed), "run": len(printed & run)})
            if measured <= shown:
                continue
            shown |= measured
            counts.update(found.word for found in places.verdict if found)
            folds.append(self._fold(paper, table, places, above))
            if not paper.method:
                self.tables[figure] = table
            numbers = places[places.paper.notna()]
            if len(numbers) and recipe.metric != "round_time":
                self.points[figure] += [_point(recipe, each) for each in _each(numbers)]
        claims = [[each.claim, f"**{each.holds}**", each.numbers, each.seeds, each.obstacle] for each in paper.claims]
        section = {
            "name": paper.name,
            "claims": markdown(pd.DataFrame(claims, columns=_CLAIMS)),
            "source": paper.source,
            "figure": figure if figure in self.points else "",
            "contradictions": paper.contradictions,
            "objections": paper.objections,
            "folds": folds,
        }
        return section, counts

    def _judged(self, table: PaperTable) -> pd.DataFrame:
        """Returns the finished places with `verdict` (None: open, or outside of the order), and `beside`, the number of
        lines in the comparison."""
        others, without = table.finished, ""
        if table.recipe.judged_as:
            name, _, without = table.recipe.judged_as.partition("/")
            others = self._made(load_recipe(recipes_folder() / table.recipe.paper / f"{name}.toml")).finished
        compared = others[~others.outside.astype(bool) & (others.row != without)]
        columns = {key: list(lines.itertuples()) for key, lines in compared.groupby(["group", "reading", "column"])}
        verdicts, beside = [], []
        for place in _each(table.finished):
            lines = columns.get((place.group, place.reading, place.column), [])
            rule = {"only_order": place.only_order, "other_data": place.other_data}
            verdicts.append(None if place.outside else verdict(place, lines, **rule))
            beside.append(len(lines))
        column = np.fromiter(verdicts, object, len(verdicts))
        return table.finished.assign(verdict=column, beside=beside)

    def _made(self, recipe: Recipe) -> PaperTable:
        return make_table(recipe, self._finished(recipe), CellProgress(self._kept), quick=False)

    def _finished(self, recipe: Recipe) -> list[Cell]:
        """Returns the finished cells of one table, with all seeds."""
        return [cell for cell in cells_of(recipe, seeds=SEEDS, quick=False) if self._kept.shown(cell)]

    def _fold(self, paper: Paper, table: PaperTable, places: pd.DataFrame, told: set[str]) -> dict[str, Any]:
        """Returns a table as the template takes it.

        :param told: texts that are already above on the page; this call adds its own.
        """
        recipe, groups = table.recipe, table.groups()

        def once(text: str, key: str = "") -> str:
            new = text if (key or text) not in told else ""
            told.add(key or text)
            return new

        settings, printed = once(recipe.readings_text), places.paper.notna().any()
        shown, again = _told_once(places, told) if printed else (pd.concat(with_own_runs(table.finished)), 0)
        notes = []
        for row in recipe.rows:
            if row.outside and (shown.row == row.id).any() and once(row.outside):
                notes.append(f"{row.title} is outside of the order: {row.outside}.")
        for reading in recipe.readings:
            if reading.note and (shown.reading == reading.id).any() and once(reading.note, reading.id):
                notes.append(f"*{reading.title}*: {reading.note}.")
        if sent := list(filter(once, table.raw_values)):
            notes.append(f"Without noise leave the device: {', '.join(sent)}.")
        if again:
            notes.append(f"Left out: {again} open lines, whose runs stand above.")
        shared, lines = _lines(shown) if printed else _side_by_side(shown)
        at_the_top = not paper.method or any(f"({recipe.label})" in each.claim for each in paper.claims)
        metrics = " or ".join(_MEASURED[metric] for metric in table.places.metric.unique())
        window = "" if (words := table.window(groups)) == WINDOWS["last"] else f", {words}"
        others = list(dict.fromkeys(words for group in groups for words in group.substitutions))
        above = ["; ".join([f"{metrics}{window}", *shared]), *others]
        return {
            "label": recipe.label,
            "words": recipe.title if at_the_top or not recipe.claim else recipe.claim,
            "settings": settings,
            "above": " ".join(f"{words[0].upper()}{words[1:]}." for words in above),
            "lines": lines,
            "notes": [*notes, *recipe.findings],
            "figure": "" if paper.method else f"{recipe.paper}.svg",
        }


def _tidy(text: str) -> str:
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _in_order(counts: Counter[str]) -> float:
    """Returns the share of the verdicts that are reproduced or in order."""
    good = counts["reproduced"] + counts["order only"]
    return good / max(1, good + counts["not"])


def _each(places: pd.DataFrame) -> Iterator[Any]:
    """Yields each place, whose fields are the columns."""
    return iter(places.itertuples())


def _each_run_once(places: pd.DataFrame) -> pd.DataFrame:
    """Drops repeated lines: readings that do not change a run, such as one without noise, share the first's lines.

    A line has the verdict from the reading in which it is compared with the most methods.
    """
    same = ["group", "run", "column"]
    places = places.assign(run=places.runs.str[0])
    best = places.sort_values("beside", ascending=False, kind="stable").drop_duplicates(same)
    first = places.groupby(same[:2]).reading.transform("first")
    return places[places.reading == first].drop(columns="verdict").merge(best[[*same, "verdict"]], "left", on=same)


def _told_once(places: pd.DataFrame, told: set[str]) -> tuple[pd.DataFrame, int]:
    """Drops lines of a run that no column changes, if they are judged alike, and lines without a verdict whose run is
    in `told`, which gets the runs of the others. Returns the number of the latter, too."""
    first = places.assign(words=places.verdict.map(str)).drop_duplicates(["group", "row", "runs", "paper", "words"])
    runs = first.metric + first.runs.str[0]
    again = runs.isin(told) & first.verdict.isna() & first.paper.notna() & ~first.outside.astype(bool)
    told.update(runs)
    return first[~again], int(again.sum())


def _lines(places: pd.DataFrame) -> tuple[list[str], str]:
    """Returns the values that all lines share, and a line for each place."""
    paid, most = _paid(places), places.seeds.map(len).max()
    judged = places[places.verdict.notna()]
    said = {(*_column(place), place.method, place.verdict.because) for place in _each(judged)}
    lines = pd.DataFrame([_line(place, _is_equal(place, paid), most, said) for place in _each(places)])
    if (lines["ε server"] == lines["ε release"]).all():
        lines = lines.drop(columns="ε release").rename(columns={"ε server": "ε server, release"})
    same = [name for name in lines if name not in _OF_A_LINE and lines[name].nunique() == 1]
    told = [name for name in same if lines[name].iloc[0] not in ("", "none")]
    shared = [("" if name in _TITLES else f"{name}: ") + lines[name].iloc[0] for name in told]
    if most > 1:
        shared.append(f"±: {most} seeds")
    return shared, markdown(_named_once(lines.drop(columns=same)))


def _line(place: Any, equal_privacy: str, most: int, said: set[Any]) -> dict[str, str]:
    # the rounds of a time measurement store no epsilon
    server, release = ("", "") if place.metric == "round_time" else _least_and_most(place)
    median, *spent = (f"{each:.3g}" for each in (place.median, place.epsilon_server, place.noised_server))
    return {
        "data": place.data,
        "reading": place.meaning,
        "at": place.at,
        "equal privacy": equal_privacy,
        "method": place.method,
        "paper": "" if math.isnan(place.paper) else f"{place.paper:.2f}",
        "ours": _mean_and_spread(place, most, 2),
        "ε server": server,
        "ε median": "" if median in ("nan", *spent) else median,
        "ε release": release,
        "verdict": _verdict(place, said),
    }


def _verdict(place: Any, said: set[Any]) -> str:
    """Returns the mark of the verdict, and what misses unless it is the distance, which the line shows.

    :param said: what misses, with its place: of two methods in the wrong order, the one that is printed above says so.
    """
    if math.isnan(place.paper):
        return ""
    if not place.verdict:
        return "outside" if place.outside else "open"
    word, because = place.verdict
    other = (*_column(place), because.removeprefix("above "), f"below {place.method}")
    known = word not in _MARKS or re.fullmatch(r"[+-][\d.]+", because) or other in said
    return _MARKS.get(word, word) + ("" if known or not because else f" {because}")


def _column(place: Any) -> tuple[str, str, str]:
    return place.group, place.reading, place.column


def _paid(places: pd.DataFrame) -> dict[Any, list[float]]:
    """Returns what the private methods of each column pay, those whose values are all noised."""
    paid = defaultdict[Any, list[float]](list)
    for place in _each(places[places.private.astype(bool)]):
        paid[_column(place)].append(place.epsilon_server)
    return paid


def _is_equal(place: Any, paid: dict[Any, list[float]]) -> str:
    """Says whether the private methods of a place's column pay the same; empty if there are not two of them."""
    those = paid[_column(place)]
    if len(those) < 2:
        return ""
    return "yes" if max(those) <= _ALIKE * min(those) else "no"


def write_report(kept: Kept, page: Path) -> ReproductionReport:
    """Writes the page, and figures and papers' pages into folders beside it. Raises `BadInput`, `StoreError`."""
    report, figures = ReproductionReport(kept, paper_names()), page.parent / FIGURES
    for folder in (figures, page.parent / PAGES):
        folder.mkdir(parents=True, exist_ok=True)
    for name, table in report.tables.items():
        draw(table, figures / name)
    for name, points in report.points.items():
        draw_paper(points, figures / name)
    draw_claims(
        {paper.name: [each.holds for each in paper.claims] for paper in report.papers.values()}, figures / CLAIMS
    )
    write_whole(page, report.text)
    for name, text in report.pages.items():
        write_whole(page.parent / PAGES / f"{name}.md", text)
    return report


def _numbers(recipe: Recipe, places: pd.DataFrame) -> tuple[set[Any], set[Any]]:
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
    return printed, numbers(zip(places.row, places.column, places.paper, strict=True))


def _least_and_most(place: Any) -> Iterator[str]:
    """Yields both epsilons in words, with the smallest over seeds if they differ, which depends on random draws."""
    for words, view in zip(epsilons(place), ("server", "release"), strict=True):
        least, most = getattr(place, f"least_{view}"), getattr(place, f"epsilon_{view}")
        yield (f"{least:.3g} to {words}" if least < 0.99 * most and not place.raw_values else words).replace("inf", "∞")


def _point(recipe: Recipe, place: Any) -> Point:
    apart = bool(recipe.judged_as) or place.reading not in ("", *(each.id for each in recipe.readings[:1]))
    return Point(f"{recipe.label.split(',')[0]}, {place.data}", place.paper, tuple(place.values), apart)


def _named_once(lines: pd.DataFrame) -> pd.DataFrame:
    """Clears the leading words of a line if they are the same as in the line above, and puts a mark of repetition in
    place of its epsilons."""
    shown, above = lines.copy(), lines.shift()
    repeated = pd.Series(True, index=lines.index)
    for name in lines.columns[: list(lines.columns).index("method")]:
        repeated &= lines[name] == above[name]
        shown.loc[repeated, name] = ""
    for name in (name for name in lines if name == "paper" or name.startswith("ε")):
        shown.loc[(lines[name] == above[name]) & (lines[name] != ""), name] = "″"
        shown.loc[lines[name] == "∞ (" + above[name] + ")", name] = "∞ (″)"
    return shown


def _mean_and_spread(place: Any, most: int, places: int) -> str:
    """Returns our accuracy, with the number of seeds if it is neither 1 nor `most`, and the mark of older code."""
    spread = f"±{place.spread:.{places}f}" if len(place.seeds) > 1 else ""
    fewer = f" ({len(place.seeds)})" if 1 < len(place.seeds) < most else ""
    return f"{place.ours:.{places}f}{spread}{fewer}" + "*" * bool(place.stale)


def _side_by_side(places: pd.DataFrame) -> tuple[list[str], str]:
    """Returns what stands above a table without printed numbers, and the table: one line per row, best first; one
    column per group and column."""
    most = places.seeds.map(len).max()
    columns = {
        f"{block.title.iloc[0]}, {at}": lines.set_index("method")
        for _, block in places.groupby("block")
        for at, lines in block.groupby("at", sort=False)
    }
    words = pd.DataFrame(
        {name: lines.apply(_mean_and_spread, axis=1, most=most, places=1) for name, lines in columns.items()}
    )
    order = next(iter(columns.values())).ours.sort_values(ascending=False).index
    return [f"±: {most} seeds"] if most > 1 else [], markdown(words.reindex(order).fillna("").reset_index())


def markdown(lines: pd.DataFrame) -> str:
    rows: list[Any] = [lines.columns, *lines.itertuples(index=False)]
    shown = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join([shown[0], "|---" * len(lines.columns) + "|", *shown[1:]])
