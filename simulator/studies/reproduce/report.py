"""The page of all results, in Markdown: a table for each table of a paper, verdicts, and what of each paper holds.

Nothing on it is written by hand but the sentences of the recipes, whose numbers are references to cells. A sentence
that the cells do not carry, or not yet, is left out, and named.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from hushfleet.aggregator.results.result import write_whole
from hushfleet.simulator.studies.reproduce.cells import ALL_COLUMNS
from hushfleet.simulator.studies.reproduce.draw import draw
from hushfleet.simulator.studies.reproduce.evidence import Evidence, Unsupported
from hushfleet.simulator.studies.reproduce.kept import Kept
from hushfleet.simulator.studies.reproduce.recipe import (
    METRICS,
    Paper,
    Recipe,
    TableRow,
    load_paper,
    paper_names,
)
from hushfleet.simulator.studies.reproduce.show import epsilons, explain_raw
from hushfleet.simulator.studies.reproduce.table import Block, CellProgress, PaperTable, make_table, measured_as
from hushfleet.simulator.studies.reproduce.verdict import RULE, PlaceVerdict, verdict

FIGURES = "figures"
_VERDICTS = ("reproduced", "order only", "not")
_MAY_STAND_ABOVE = ("data", "reading", "at", "seeds", "noise", "ε server", "ε release", "why")
_PRINTED, _RUN = "numbers printed", "run"
_COUNTED = """*Numbers printed* are accuracies in tables that can be run, and those that a text prints of figures. *Run*
are those of them for which any cell is finished, in whatever reading, and whether or not network and data are the
paper's. Each reading that changes a run has its own verdict, so there may be more verdicts than numbers run."""
_HEAD = """# Reproduction: what was run, and what came out

Written by `hushfleet reproduce --report` from the [finished cells](results/cells/) and the recipes: change those, not
this page. [Reproducing](reproducing.md) says what a cell and a reading are.

**Epsilons are by Rényi accounting, as the papers' are, and of the noised values**; the
[exact ones](privacy.md#the-accountant) are smaller. Each is that of the device that has spent most: "ε server" against
whoever sees a device's own update, "ε release" against whoever sees only the aggregate models. `inf (x)`: the method
also sends values [without noise](privacy.md#raw-values); then what holds is infinite, and x is what the noised values
alone cost. "Noise" is the norm of the noise in a round's mean, in clip norms. A clip norm bounds what each device adds
to that mean, but for DP-FedSim, whose devices may add many times as much. FedADDP's noise is not in proportion to it
and has no entry.

## How a verdict is found
{rule}
What misses "reproduced" stands beside a verdict: how far the number is off, the method on whose wrong side it stands,
or the lead that is not as printed. With one seed a spread is not known, and a verdict is that of one run. Readings are
judged apart: that one of them comes near says that the numbers can be had so, not that the paper did it so. Where
several readings share a run ("and 4 more"), it is judged in the one in which most methods are finished. A table shows
the mean over all its seeds; where a sentence compares two cells, both are means over the seeds that both have. In
figures a line reaches from the lowest seed to the highest.
"""


class ReproductionReport:
    """The page.

    :param text: in Markdown.
    :param tables: by the name of its figure, each table that has one.
    :param left_out: sentences that the cells do not carry, and why.

    Raises `BadInput` for a reference that is none.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self.tables: dict[str, PaperTable] = {}
        self.left_out: list[tuple[str, str]] = []
        papers = sorted(map(load_paper, evidence.recipes), key=lambda paper: (not paper.method, paper.name))
        names = {load_paper(name).name: name for name in evidence.recipes}
        counts, held, sections = [], list[str](), list[str]()
        for paper in papers:
            count, lines = self._paper(paper, evidence.recipes[names[paper.name]])
            link = f"[{paper.name}](#{paper.name.lower().replace(' ', '-')})"
            if paper.method:
                counts.append([link, *(count[each] for each in (_PRINTED, _RUN, *_VERDICTS))])
            held += [f"**{link}.** {' '.join(self._sentences(paper.holds))}", ""]
            sections += lines
        counted = markdown(pd.DataFrame(counts, columns=["", _PRINTED, _RUN, *_VERDICTS]))
        head = [_HEAD.format(rule=RULE), "## What of each paper holds", ""]
        lines = [*head, *held, *counted, "", _COUNTED, "", *sections]
        self.text = "\n".join(lines).rstrip() + "\n"

    def _paper(self, paper: Paper, recipes: Sequence[Recipe]) -> tuple[Counter[str], list[str]]:
        lines = [f"## {paper.name}", "", f"{paper.source}.", ""]
        waiting = defaultdict[str, list[str]](list)
        counts, shown, told = Counter[str](), set[str](), set[str]()
        for recipe in recipes:
            if recipe.open:
                waiting[recipe.open].append(recipe.label)
                continue
            table, digests = self._made(recipe), {cell.digest for cell in self._evidence.finished(recipe)}
            places = self._each_run_once(recipe, list(self._judged(table)))
            printed, run = _numbers_printed(recipe), _numbers_run(recipe, places)
            counts.update({_PRINTED: len(printed), _RUN: len(run)})
            if digests <= shown:
                waiting["what is finished of it stands above" if digests else "not run yet"].append(recipe.label)
                continue
            shown |= digests
            counts.update(each.verdict.word for each in places if each.verdict)
            lines += [f"### {recipe.label}: {recipe.title}", ""] if recipe.title != paper.name else []
            if recipe.readings_text not in told:
                lines += [f"*Settings.* {recipe.readings_text}", ""]
                told.add(recipe.readings_text)
            lines += self._table(table, places)
            lines += [f"![{recipe.label}]({FIGURES}/{_figure(recipe)})", ""]
            if printed > run:
                lines += [f"Run: {len(run)} of the {len(printed)} numbers that the paper prints.", ""]
            self.tables[_figure(recipe)] = table
        reasons = [f"- {', '.join(labels)}: {reason}." for reason, labels in waiting.items()]
        return counts, [*lines, "Not shown:", "", *reasons, ""] if reasons else lines

    def _judged(self, table: PaperTable) -> Iterator[_Judged]:
        """The finished places, column by column."""
        own = _columns(table)
        columns = self._columns_of(table.recipe.judged_as, table.recipe.paper) if table.recipe.judged_as else own
        for where, lines in own.items():
            for block, place in lines:
                beside = [each for _, each in columns.get(where, ())]
                found = verdict(place, beside, only_order=block.group.only_order)
                yield _Judged(block, place, found, beside=len(beside))

    def _columns_of(self, row: str, paper: str) -> _Columns:
        """Those of a table without one of its rows: see `Recipe.judged_as`."""
        table, without = row.split("/")
        (recipe,) = (each for each in self._evidence.recipes[paper] if each.name == table)
        columns = _columns(self._made(recipe))
        return {where: [each for each in lines if each[1].row != without] for where, lines in columns.items()}

    def _made(self, recipe: Recipe) -> PaperTable:
        return make_table(recipe, self._evidence.finished(recipe), CellProgress(self._evidence.kept), quick=False)

    def _each_run_once(self, recipe: Recipe, places: Sequence[_Judged]) -> list[_Judged]:
        """Readings that do not touch a run, such as one without noise, share the first one's lines.

        A line's verdict is that of the reading in which most methods stand beside it.
        """
        runs = [(each.block.group.id, self._digest(recipe, each)) for each in places]
        sharing = defaultdict[tuple[str, str], list[_Judged]](list)
        for run, each in zip(runs, places, strict=True):
            sharing[run].append(each)
        lines = []
        for those, each in zip((sharing[run] for run in runs), places, strict=True):
            if each.block.reading == those[0].block.reading:
                same = (other for other in those if other.place.column == each.place.column)
                most = max(same, key=lambda other: other.beside)
                readings = len({_reading_id(other.block) for other in those})
                lines.append(each._replace(verdict=most.verdict, readings=readings))
        return lines

    def _digest(self, recipe: Recipe, each: _Judged) -> str:
        return self._evidence.at(_address(recipe, each.block, each.place), within=recipe).cell.digest

    def _table(self, table: PaperTable, places: Sequence[_Judged]) -> Iterator[str]:
        recipe, blocks = table.recipe, table.blocks
        printed = any(not math.isnan(each.place.paper) for each in places)
        if printed and recipe.claim:
            yield f"The paper: {recipe.claim}"
        for instead in dict.fromkeys(words for block in blocks for words in block.group.substitutions):
            yield f"{instead[0].upper()}{instead[1:]}."
        yield ""
        yield from self._lines(recipe, places) if printed else _side_by_side(table)
        yield ""
        metrics = {block.metric: block.group.title for block in blocks}
        if len(metrics) == 1:
            yield f"- Accuracy: {measured_as(recipe, blocks[0].metric)}."
        else:
            yield from (f"- {title}: {measured_as(recipe, metric)}." for metric, title in metrics.items())
        for row in recipe.rows:
            if row.metric and recipe.metric in metrics and any(each.place.row == row.id for each in places):
                where = "" if len(metrics) == 1 else f"{metrics[recipe.metric]}, "
                yield f"- {where}{row.title}: {METRICS[row.metric]}."
        for reading in recipe.readings:
            if reading.note and any(block.reading == reading for block in blocks):
                yield f"- Reading *{reading.title}*: {reading.note}."
        if raw := explain_raw(table.places):
            yield f"- {raw}."
        yield from (f"- {sentence}" for sentence in self._sentences(recipe.findings, recipe))
        yield ""

    def _lines(self, recipe: Recipe, places: Sequence[_Judged]) -> Iterator[str]:
        """A line for each place. What all lines share stands above them; `why` are numbers of the sentences below."""
        rows, sentences = [], dict[str, int]()
        for block, place, found, _, readings in places:
            more = f" and {readings - 1} more" if readings > 1 else ""
            server, release = epsilons(place)
            noise = self._evidence.at(_address(recipe, block, place), within=recipe).noise
            why = [str(sentences.setdefault(each, len(sentences) + 1)) for each in self._why(recipe, block, place)]
            rows.append(
                {
                    "data": block.group.title,
                    "reading": block.reading.title + more if block.reading else "",
                    "at": place.at,
                    "method": place.method,
                    "paper": _number(place.paper),
                    "ours": _mean_and_spread(place),
                    "seeds": len(place.seeds),
                    "noise": f"{noise:.3g}" if noise > 0 else "",
                    "ε server": server,
                    "ε release": release,
                    "verdict": "" if math.isnan(place.paper) else found or "open",
                    "why": ", ".join(why),
                }
            )
        lines = pd.DataFrame(rows)
        same = [name for name in _MAY_STAND_ABOVE if lines[name].nunique() == 1]
        shared = [f"{name}: {lines[name].iloc[0]}" for name in same if lines[name].iloc[0]]
        yield f"{'; '.join(shared)}.\n" if shared else ""
        yield from markdown(lines.drop(columns=same))
        yield ""
        yield from (f"{number}. {sentence}" for sentence, number in sentences.items())

    def _why(self, recipe: Recipe, block: Block, place: Any) -> list[str]:
        here = {"group": block.group.id, "row": place.row, "column": place.column, "reading": _reading_id(block)}
        return self._sentences([each.why for each in recipe.specials if each.why and each.applies(**here)], recipe)

    def _sentences(self, prose: Sequence[str], recipe: Recipe | None = None) -> list[str]:
        filled = []
        for sentence in prose:
            try:
                filled.append(self._evidence.filled(sentence, within=recipe))
            except Unsupported as reason:
                self.left_out.append((sentence, str(reason)))
        return filled


def write_report(kept: Kept, page: Path) -> ReproductionReport:
    """Writes the page, and its figures into `figures/` beside it. Raises `BadInput`, `StoreError`."""
    report = ReproductionReport(Evidence(kept, paper_names()))
    (page.parent / FIGURES).mkdir(parents=True, exist_ok=True)
    for name, table in report.tables.items():
        draw(table, page.parent / FIGURES / name)
    write_whole(page, report.text)
    return report


class _Number(NamedTuple):
    """One that a paper prints."""

    row: str
    column: str
    value: float | None


class _Judged(NamedTuple):
    """A finished place of a table and its verdict, among `beside` lines; `readings`: how many share the run."""

    block: Block
    place: Any
    verdict: PlaceVerdict | None
    beside: int
    readings: int = 1


_Columns = dict[tuple[str, str, str], list[tuple[Block, Any]]]


def _columns(table: PaperTable) -> _Columns:
    """The finished places by group, reading and column."""
    columns = defaultdict[tuple[str, str, str], list[tuple[Block, Any]]](list)
    for block in table.blocks:
        for place in block.places[block.places.ours.notna()].sort_values("column", kind="stable").itertuples():
            columns[block.group.id, _reading_id(block), str(place.column)].append((block, place))
    return dict(columns)


def _reading_id(block: Block) -> str:
    return block.reading.id if block.reading else ""


def _numbers_printed(recipe: Recipe) -> set[_Number]:
    """Groups that stand for the same data set, such as with another network, have the same numbers."""
    numbers = {
        _number_of(row, column.id, recipe.paper_value(group, row.id, column.id))
        for group in recipe.groups
        for row in recipe.rows
        for column in recipe.columns_of(group)
    }
    return set() if recipe.judged_as else {each for each in numbers if each.value is not None}


def _numbers_run(recipe: Recipe, places: Sequence[_Judged]) -> set[_Number]:
    rows = {row.id: row for row in recipe.rows}
    run = {_number_of(rows[place.row], place.column, place.paper) for _, place, *_ in places}
    return run & _numbers_printed(recipe)


def _number_of(row: TableRow, column: str, value: float | None) -> _Number:
    return _Number(row.id, "" if row.same_in_all_columns else column, value)


def _address(recipe: Recipe, block: Block, place: Any) -> str:
    (row,) = (row for row in recipe.rows if row.id == place.row)
    column = ALL_COLUMNS if row.same_in_all_columns else place.column
    return "/".join([block.group.id, place.row, column, *([_reading_id(block)] if block.reading else [])])


def _figure(recipe: Recipe) -> str:
    return f"{recipe.paper}-{recipe.name}.svg"


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


def _mean_and_spread(place: Any) -> str:
    return _number(place.ours) + (f" ± {place.spread:.2f}" if len(place.seeds) > 1 else "")


def _side_by_side(table: PaperTable) -> Iterator[str]:
    """Without printed numbers: a line for each row, best first, and a column for each group and column."""
    most = max(map(len, table.places.seeds))

    def word(place: Any) -> str:
        return _mean_and_spread(place) + (f" ({len(place.seeds)})" if 0 < len(place.seeds) < most else "")

    columns = {
        f"{block.title}, {at}": places.set_index("method")
        for block in table.blocks
        for at, places in block.places.groupby("at", sort=False, observed=True)
    }
    words = pd.DataFrame({name: places.apply(word, axis=1) for name, places in columns.items()})
    first = next(iter(columns.values()))
    order = first.ours.sort_values(ascending=False).index
    yield f"Mean ± standard deviation over {most} seeds, or over as many as stand in brackets.\n"
    yield from markdown(words.reindex(order).fillna("").reset_index())


def markdown(lines: pd.DataFrame) -> Iterator[str]:
    """A table in Markdown."""
    yield f"| {' | '.join(map(str, lines.columns))} |"
    yield "|---" * len(lines.columns) + "|"
    yield from (f"| {' | '.join(map(str, line))} |" for line in lines.itertuples(index=False))
