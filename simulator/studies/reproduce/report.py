"""Makes the page of all results, in Markdown: each table of a paper, the verdicts, and which claims of each paper hold.

Only the sentences of the recipes are written by hand, and their numbers are references to cells. A sentence that the
cells do not support (or not yet) is left out of the page, and reported.
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
from hushfleet.simulator.studies.reproduce.draw import Point, draw, draw_paper, with_own_runs
from hushfleet.simulator.studies.reproduce.evidence import Evidence, Unsupported
from hushfleet.simulator.studies.reproduce.kept import Kept
from hushfleet.simulator.studies.reproduce.recipe import (
    METRICS,
    Metric,
    Paper,
    Recipe,
    TableRow,
    load_paper,
    paper_names,
)
from hushfleet.simulator.studies.reproduce.show import epsilons
from hushfleet.simulator.studies.reproduce.table import Block, CellProgress, PaperTable, make_table, window_of
from hushfleet.simulator.studies.reproduce.verdict import ELSEWHERE, LEAD, NEAR, RULE, PlaceVerdict, verdict

FIGURES = "figures"
_MEASURED = {
    "accuracy_own_common": "own models, common test set",
    "accuracy_own_local": "own models, own labels",
    "accuracy_next_local": "all devices' next models, own labels",
    "accuracy_global": "the global model",
    "round_time": METRICS["round_time"],
}
_VERDICTS = ("reproduced", "order only", "not")
_MAY_STAND_ABOVE = ("data", "reading", "at", "seeds", "noise", "ε server", "ε release", "why")
_PRINTED, _RUN = "numbers printed", "run"
_COUNTED = """*Numbers printed*: accuracies and ratios of times in tables that can be run, or in a text on figures.
*Run*: any cell is finished. Each reading has its own verdict."""
_HEAD = """# Reproduction: what was run, and what came out

Written by `hushfleet reproduce --report` from the [finished cells](results/cells/) and the recipes: change those, not
this page. [Reproducing](reproducing.md) says what a cell is, and a reading.

## The claims

Accuracies are in percent, leads and differences in points.
"""
_RULES = """## How to read the tables
{rule}
Beside a verdict stands what misses "reproduced": the distance, a method on whose wrong side the number stands, or the
lead. A reading that comes near is no proof that the paper did it so. A run that readings share stands under the first.
Two cells are compared on the seeds that both have. ± and the bars of the papers' figures are standard deviations over
seeds; a bar of the last figure joins the lowest seed and the highest. `hushfleet reproduce --list` names the tables
that are not shown, and why. The head of each file in [hushfleet/methods](../hushfleet/methods/) says what its paper
leaves open, what is taken, and each deviation.

**Another processor.** AVX2 in place of AVX-512 moves own models by up to {own:g} points and a global model by up to
{moved:g} ([measured](result.md)); a verdict allows {near:g}, and {lead:g} of a lead. So a verdict of one seed can be
the processor's. Of {cells} cells {named} name their instruction set, and {digests} the commit and the data's
digests, as new ones do.

**Epsilons** are by Rényi accounting ([exact ones](privacy-reference.md#the-accountant) are smaller), of the device
that has spent most in the whole run; of two, the least and the most over seeds. "ε server": against whoever sees a
device's own update; "ε release": only aggregates. `inf (x)`: the method also sends values [without
noise](privacy-reference.md#raw-values); x is what the noised ones cost. "Noise" is its norm in a round's mean, in
clip norms. **Own models** are tested after training, **next models** after aggregation; own labels are test images
with a device's own mix of labels.
"""


class ReproductionReport:
    """The page.

    :param text: in Markdown.
    :param tables: the tables that are drawn, which have no printed numbers, by the name of the figure.
    :param points: the finished numbers of each paper beside the printed ones, by the name of the figure.
    :param left_out: the sentences that the cells do not support, each with the reason.

    Raises `BadInput` for a wrong reference.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self.tables: dict[str, PaperTable] = {}
        self.points = defaultdict[str, list[Point]](list)
        self.left_out: list[tuple[str, str]] = []
        papers = sorted(map(load_paper, evidence.recipes), key=lambda paper: (not paper.method, paper.name))
        names = {load_paper(name).name: name for name in evidence.recipes}
        claims, counts, sections = [], [], list[str]()
        for paper in papers:
            count, lines = self._paper(paper, evidence.recipes[names[paper.name]])
            link = f"[{paper.name}](#{paper.name.lower().replace(' ', '-')})"
            claims += [["" if at else link, *line] for at, line in enumerate(self._claims(paper))]
            if paper.method:
                counts.append([link, *(count[each] for each in (_PRINTED, _RUN, *_VERDICTS))])
            sections += lines
        listed = pd.DataFrame(claims, columns=["", "claim", "holds?", "numbers", "seeds", "what stands in the way"])
        counted = markdown(pd.DataFrame(counts, columns=["", _PRINTED, _RUN, *_VERDICTS]))
        rules = _RULES.format(
            rule=RULE,
            near=NEAR,
            lead=LEAD[0],
            own=ELSEWHERE["own"],
            moved=ELSEWHERE["global"],
            cells=len(kept := list(evidence.kept)),
            named=sum("processor" in one.versions for one in kept),
            digests=sum(one.digests is not None for one in kept),
        )
        lines = [_HEAD, *markdown(listed), "", "## The count", "", *counted, "", _COUNTED, "", rules, *sections]
        self.text = "\n".join(lines).rstrip() + "\n"

    def _claims(self, paper: Paper) -> Iterator[list[str]]:
        for claim in paper.claims:
            prose = claim.claim, f"**{claim.holds}**", claim.numbers, claim.seeds, claim.obstacle
            if len(line := self._sentences(prose)) == len(prose):
                yield line

    def _paper(self, paper: Paper, recipes: Sequence[Recipe]) -> tuple[Counter[str], list[str]]:
        lines = [f"## {paper.name}", "", f"{paper.source}.", ""]
        if contradictions := self._sentences(paper.contradictions):
            lines += ["What does not fit together:", "", *(f"- {each}" for each in contradictions), ""]
        if paper.objections:
            lines += ["What its authors would call unfair:", ""]
            told = [self._sentences([each.objection, each.answer]) for each in paper.objections]
            lines += [*(f"- *{both[0]}* {both[1]}" for both in told if len(both) == 2), ""]
        counts, shown, above = Counter[str](), set[tuple[str, Metric]](), set[str]()
        for recipe in (each for each in recipes if not each.open):
            table = self._made(recipe)
            measured = {(cell.digest, cell.metric) for cell in self._evidence.finished(recipe)}
            places = self._each_run_once(recipe, list(self._judged(table)))
            printed, run = _numbers_printed(recipe), _numbers_run(recipe, places)
            counts.update({_PRINTED: len(printed), _RUN: len(run)})
            if measured <= shown:
                continue
            shown |= measured
            counts.update(each.verdict.word for each in places if each.verdict)
            lines += ["<details markdown>", f"<summary>{_summary(recipe, paper)}</summary>", ""]
            if recipe.readings_text not in above:
                lines += [f"*Settings.* {recipe.readings_text}", ""]
                above.add(recipe.readings_text)
            lines += self._table(table, places, above)
            if not paper.method:
                lines += [f"![{recipe.label}]({FIGURES}/{recipe.paper}.svg)", ""]
                self.tables[f"{recipe.paper}.svg"] = table
            lines += ["</details>", ""]
            printed_too = [each for each in places if not math.isnan(each.place.paper)]
            if printed_too and recipe.metric != "round_time":
                self.points[f"{recipe.paper}.svg"] += [_point(recipe, each) for each in printed_too]
        if self.points.get(figure := f"{recipes[0].paper}.svg"):
            lines[4:4] = [f"![{paper.name}: printed against ours]({FIGURES}/{figure})", ""]
        return counts, lines

    def _judged(self, table: PaperTable) -> Iterator[_Judged]:
        """Yields the finished places with their verdicts, column by column."""
        own = _columns(table)
        columns = self._columns_of(table.recipe.judged_as, table.recipe.paper) if table.recipe.judged_as else own
        for where, lines in own.items():
            for block, place in lines:
                beside = [each for _, each in columns.get(where, ()) if not each.outside]
                group = block.group
                found = None
                if not place.outside:
                    found = verdict(place, beside, only_order=group.only_order, other_data=group.other_data)
                yield _Judged(block, place, found, beside=len(beside))

    def _columns_of(self, row: str, paper: str) -> _Columns:
        """Returns the columns of a table without one of its rows: see `Recipe.judged_as`."""
        table, without = row.split("/")
        (recipe,) = (each for each in self._evidence.recipes[paper] if each.name == table)
        columns = _columns(self._made(recipe))
        return {where: [each for each in lines if each[1].row != without] for where, lines in columns.items()}

    def _made(self, recipe: Recipe) -> PaperTable:
        return make_table(recipe, self._evidence.finished(recipe), CellProgress(self._evidence.kept), quick=False)

    def _each_run_once(self, recipe: Recipe, places: Sequence[_Judged]) -> list[_Judged]:
        """Drops repeated lines: readings that do not change a run, such as one without noise, share the first's lines.

        A line has the verdict from the reading in which it is compared with the most methods.
        """
        runs = [(each.block.group.id, self._digest(recipe, each)) for each in places]
        sharing = defaultdict[tuple[str, str], list[_Judged]](list)
        for run, each in zip(runs, places, strict=True):
            sharing[run].append(each)
        lines = []
        for those, each in zip((sharing[run] for run in runs), places, strict=True):
            if each.block.reading == those[0].block.reading:
                same = (other for other in those if other.place.column == each.place.column)
                lines.append(each._replace(verdict=max(same, key=lambda other: other.beside).verdict))
        return lines

    def _digest(self, recipe: Recipe, each: _Judged) -> str:
        return self._evidence.at(_address(recipe, each.block, each.place), within=recipe).cell.digest

    def _table(self, table: PaperTable, places: Sequence[_Judged], told: set[str]) -> Iterator[str]:
        """:param told: texts that are already above on the page; this call adds its own."""
        recipe, blocks = table.recipe, table.blocks
        printed = any(not math.isnan(each.place.paper) for each in places)
        substitutions = dict.fromkeys(words for block in blocks for words in block.group.substitutions)
        yield from (f"{words[0].upper()}{words[1:]}." for words in substitutions)
        yield ""
        yield from self._lines(recipe, places) if printed else _side_by_side(table)
        yield ""
        metrics = " or ".join(_MEASURED[metric] for metric in dict.fromkeys(block.metric for block in blocks))
        accuracy = f"Accuracy: {metrics}, {window_of(recipe, blocks)}"
        yield f"- {f'Time: {metrics}' if recipe.metric == 'round_time' else accuracy}."
        for row in recipe.rows:
            if row.outside and row.outside not in told and any(each.place.row == row.id for each in places):
                yield f"- {row.title} is outside of the order: {row.outside}."
                told.add(row.outside)
        for reading in recipe.readings:
            if reading.note and reading.id not in told and any(block.reading == reading for block in blocks):
                yield f"- Reading *{reading.title}*: {reading.note}."
                told.add(reading.id)
        if raw := dict.fromkeys(words for several in table.places.raw_values for words in several):
            if (sent := ", ".join(raw)) not in told:
                yield f"- Without noise leave the device: {sent}."
            told.add(sent)
        yield from (f"- {sentence}" for sentence in self._sentences(recipe.findings, recipe))
        yield ""

    def _lines(self, recipe: Recipe, places: Sequence[_Judged]) -> Iterator[str]:
        """Yields a line for each place. Shared values are above all lines; `why` has numbers of the sentences below."""
        rows, sentences = [], dict[str, int]()
        for block, place, found, _ in places:
            spends = recipe.metric != "round_time"  # the rounds of a time measurement store no epsilon
            server, release = self._epsilons(recipe, block, place) if spends else ("", "")
            noise = self._evidence.at(_address(recipe, block, place), within=recipe).noise
            why = [str(sentences.setdefault(each, len(sentences) + 1)) for each in self._why(recipe, block, place)]
            rows.append(
                {
                    "data": block.group.title,
                    "reading": block.reading.title if block.reading else "",
                    "at": place.at,
                    "method": place.method,
                    "paper": _number(place.paper),
                    "ours": _mean_and_spread(place),
                    "seeds": len(place.seeds),
                    "noise": f"{noise:.3g}" if noise > 0 else "",
                    "ε server": server,
                    "ε release": release,
                    "verdict": "" if math.isnan(place.paper) else found or ("outside" if place.outside else "open"),
                    "why": ", ".join(why),
                }
            )
        lines = pd.DataFrame(rows)
        same = [name for name in _MAY_STAND_ABOVE if lines[name].nunique() == 1]
        shared = [f"{name}: {lines[name].iloc[0]}" for name in same if lines[name].iloc[0]]
        yield f"{'; '.join(shared)}.\n" if shared else ""
        yield from markdown(_named_once(lines.drop(columns=same)))
        yield ""
        yield from (f"{number}. {sentence}" for sentence, number in sentences.items())

    def _epsilons(self, recipe: Recipe, block: Block, place: Any) -> Iterator[str]:
        """Yields both epsilons in words, with the smallest over seeds if they differ, which depends on random draws."""
        kept = self._evidence.at(_address(recipe, block, place), within=recipe).kept
        for words, view in zip(epsilons(place), ("epsilon_server", "epsilon_release"), strict=True):
            least, most = (f(getattr(one, view) for one in kept) for f in (min, max))
            yield f"{least:.3g} to {words}" if least < 0.99 * most and not place.raw_values else words

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
    for name, points in report.points.items():
        draw_paper(points, page.parent / FIGURES / name)
    write_whole(page, report.text)
    return report


class _Number(NamedTuple):
    """A number that a paper prints."""

    row: str
    column: str
    value: float | None


class _Judged(NamedTuple):
    """A finished place of a table, and its verdict; `beside` is the number of lines in the comparison."""

    block: Block
    place: Any
    verdict: PlaceVerdict | None
    beside: int


_Columns = dict[tuple[str, str, str], list[tuple[Block, Any]]]


def _columns(table: PaperTable) -> _Columns:
    """Returns the finished places by group, reading and column."""
    columns = defaultdict[tuple[str, str, str], list[tuple[Block, Any]]](list)
    for block in table.blocks:
        for place in block.places[block.places.ours.notna()].sort_values("column", kind="stable").itertuples():
            columns[block.group.id, _reading_id(block), str(place.column)].append((block, place))
    return dict(columns)


def _reading_id(block: Block) -> str:
    return block.reading.id if block.reading else ""


def _numbers_printed(recipe: Recipe) -> set[_Number]:
    """Returns the printed numbers. Groups with the same data set, such as with another network, share numbers."""
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
    return _Number(row.reads or row.id, "" if row.same_in_all_columns else column, value)


def _address(recipe: Recipe, block: Block, place: Any) -> str:
    (row,) = (row for row in recipe.rows if row.id == place.row)
    column = ALL_COLUMNS if row.same_in_all_columns else place.column
    return "/".join([block.group.id, place.row, column, *([_reading_id(block)] if block.reading else [])])


def _summary(recipe: Recipe, paper: Paper) -> str:
    """Returns the line above a fold: the claim, or the title if there is no claim."""
    words = recipe.claim if paper.method and recipe.claim else recipe.title
    return f"<b>{recipe.label}.</b> {words}"


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


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


def _mean_and_spread(place: Any, places: int = 2) -> str:
    if math.isnan(place.ours):
        return ""
    return f"{place.ours:.{places}f}" + (f" ±{place.spread:.{places}f}" if len(place.seeds) > 1 else "")


def _side_by_side(table: PaperTable) -> Iterator[str]:
    """Yields a table without printed numbers: one line per row, best first; one column per group and column."""
    most = max(map(len, table.places.seeds))

    def word(place: Any) -> str:
        return _mean_and_spread(place, 1) + (f" ({len(place.seeds)})" if 0 < len(place.seeds) < most else "")

    columns = {
        f"{block.title}, {at}": places.set_index("method")
        for block in with_own_runs(table.blocks)
        for at, places in block.places.groupby("at", sort=False, observed=True)
    }
    words = pd.DataFrame({name: places.apply(word, axis=1) for name, places in columns.items()})
    first = next(iter(columns.values()))
    order = first.ours.sort_values(ascending=False).index
    over = f"Mean ± standard deviation over {most} seeds, or over as many as stand in brackets."
    yield f"{over if most > 1 else 'One seed.'}\n"
    yield from markdown(words.reindex(order).fillna("").reset_index())


def markdown(lines: pd.DataFrame) -> Iterator[str]:
    """Yields the lines of a table in Markdown."""
    yield f"| {' | '.join(map(str, lines.columns))} |"
    yield "|---" * len(lines.columns) + "|"
    yield from (f"| {' | '.join(map(str, line))} |" for line in lines.itertuples(index=False))
