"""No sentence about a run contradicts the row of the table that it is about, for any figures."""

from __future__ import annotations

import math
import re
from statistics import fmean, stdev
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from hushfleet.aggregator.report import sections
from hushfleet.aggregator.report.comparison import comparison_json
from hushfleet.aggregator.report.render import render_report
from hushfleet.aggregator.report.summary import summary_table
from hushfleet.aggregator.report.verdict import judge
from hushfleet.aggregator.results.result import PersonalizedHead, Result
from hushfleet.privacy.protection import NEGLIGIBLE_ABOVE
from support.report_samples import rows_of, sample
from support.report_samples import told as told_of

VERBS = {
    "beats training alone": "better",
    "is worse than training alone": "worse",
    "is too close to training alone to call": "close",
    "has learned nothing": "nothing",
}
CELLS = {
    "better": "better than alone",
    "worse": "worse than alone",
    "close": "too close to call",
    "nothing": "learned nothing",
}
_CLAUSE = re.compile(f"({'|'.join(VERBS)})")
_ITEM = re.compile(
    r"(\S+ ± \S+ points|\S+ points|\S+\s%)(?: with (?:the )?(shared head|personalized heads))? on "
    r"(the common test set|each device's own kind of data)"
)


class Expected(NamedTuple):
    """A row of the table, computed here in the slow and obvious way."""

    verdict: str | None
    told: str
    gains: list[float]


def expected_of(federated: list[float], alone: list[float], chance: float, images: int) -> Expected:
    gains = [f - a for f, a in zip(federated, alone, strict=True)]
    mean, error = fmean(federated) - fmean(alone), stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else None
    right = (chance * images + 1) / (images + 2)
    if fmean(federated) <= chance + 2 * math.sqrt(right * (1 - right) / images):
        return Expected("nothing", f"{100 * fmean(federated):.1f}\N{NO-BREAK SPACE}%", gains)
    points = f"{round(100 * mean, 1) + 0.0:+.1f}".replace("-", "\N{MINUS SIGN}").replace("+0.0", "0.0")
    told = f"{points} points" if error is None else f"{points} ± {100 * error:.1f} points"
    if error is None or abs(mean) < 2 * error or abs(mean) < 0.0005:
        return Expected("close", told, gains)
    return Expected("better" if mean > 0 else "worse", told, gains)


ACCURACIES = st.integers(3000, 9900).map(lambda n: n / 10_000)
NEAR = st.sampled_from([0.0, 0.0001, -0.0001, 0.0004, -0.0004, 0.0005, -0.0005, 0.0006, 0.02, -0.02, 0.094, -0.094])


@st.composite
def runs(draw: st.DrawFn) -> tuple[Result, dict[str, Expected]]:
    """Draws a run, and the rows that its table must have, by name."""
    devices = draw(st.integers(1, 4))

    def values(around: list[float] | None = None) -> list[float]:
        if around is None or draw(st.booleans()):
            return [draw(ACCURACIES) for _ in range(devices)]
        shift, spread = draw(NEAR), draw(st.booleans())
        return [min(1.0, each + shift + (draw(NEAR) if spread else 0.0)) for each in around]

    alone, alone_local = values(), values()
    own, own_local, shared = values(alone), values(alone_local), draw(ACCURACIES)
    heads, images = draw(st.booleans()), draw(st.sampled_from([20, 1000]))
    counts = draw(st.sampled_from([[10, 10, 10], [30, 10, 10]]))
    base = sample(devices, 1, epsilon_server=draw(st.sampled_from([0.5, 5.0, 10.0, 500.0])))
    row = base.rounds[0].but(
        accuracy_own_common=fmean(own), accuracy_own_local=fmean(own_local), accuracy_global=shared
    )
    details = base.details.but(
        accuracy_own_common=[own],
        accuracy_own_local=[own_local],
        local_only_common=alone,
        local_only_local=alone_local,
        label_counts=[counts] * devices,
        common_test_images=images,
        local_test_images=[images] * devices,
        own_heads=[PersonalizedHead(images=5)] * devices if heads else [],
    )
    chance = max(counts) / sum(counts)
    rows = {
        f"{'personalized heads' if heads else 'personalized models'}, common test": expected_of(
            own, alone, chance, images
        ),
        f"{'personalized heads' if heads else 'personalized models'}, own data": expected_of(
            own_local, alone_local, chance, images * devices
        ),
    }
    if heads:
        rows["shared head, common test"] = expected_of([shared] * devices, alone, chance, images)
    return base.but(rounds=[row], details=details), rows


@settings(max_examples=250, derandomize=True)
@given(runs())
def test_every_sentence_agrees_with_its_row(run: tuple[Result, dict[str, Expected]]) -> None:
    result, rows = run
    heads = bool(result.details.own_heads)
    told = told_of(result, "answer")
    told, _, of_global = told.partition("The global model has learned nothing")
    assert not (of_global and heads)
    clauses = _CLAUSE.split(told)[1:]
    seen = set()
    for verb, text in zip(clauses[::2], clauses[1::2], strict=True):
        for figure, model, test in _ITEM.findall(text):
            name = f"{model or 'personalized models'}, {'common test' if 'common' in test else 'own data'}"
            assert (VERBS[verb], figure) == (rows[name].verdict, rows[name].told.replace("\N{NO-BREAK SPACE}", " "))
            assert bool(model) == heads, "of two kinds of heads, it says which"
            seen.add(name)
    assert seen == set(rows), "each row has its sentence"
    for subject, count, of in re.findall(
        r"(?:(shared head|Personalized heads) (?:is|are) better than alone for )?(\w+) of (\d+) devices (?=on|got)",
        told,
    ):
        expected = rows[f"{(subject or 'personalized models').lower()}, common test"]
        better = sum(gain >= 0.0005 for gain in expected.gains)
        assert (count.lower(), int(of)) == ("all" if better == int(of) else str(better or "none"), len(expected.gains))


@settings(max_examples=250, derandomize=True)
@given(runs())
def test_the_last_sentence_weighs_what_the_table_says(run: tuple[Result, dict[str, Expected]]) -> None:
    result, rows = run
    headline = judge(result)
    common = {name.partition(",")[0]: row.verdict for name, row in rows.items() if name.endswith("common test")}
    better = {model for model, verdict in common.items() if verdict == "better"}
    told = told_of(result, "trade")
    found = re.search(r"(a|no sure) gain on the common test set(?: with (.*?))?(?: \((.*?)\))?(?:,|\.)", told)
    assert found is not None
    assert (found[1] == "a") == bool(better)
    if found[2]:
        assert set(found[2].replace("the ", "").split(" and with ")) == better
    others = dict(each.split(": ") for each in (found[3] or "").split("; ") if each)
    assert others == {model: CELLS[verdict or ""] for model, verdict in common.items() if model not in better}
    private = (headline.epsilon_server or 0.0) <= NEGLIGIBLE_ABOVE
    assert told.startswith("This run has both") == (private and bool(better))
    assert ("negligible protection" in told) == (not private)


@settings(max_examples=60, derandomize=True)
@given(runs())
def test_tables_page_and_file_have_the_same_figures(
    tmp_path_factory: pytest.TempPathFactory, run: tuple[Result, dict[str, Expected]]
) -> None:
    result, rows = run
    path = tmp_path_factory.getbasetemp() / "result.json"
    result.save(path)
    loaded = Result.load(path)
    assert (judge(loaded), told_of(loaded, "answer")) == (judge(result), told_of(result, "answer"))
    terminal = Console(width=400, record=True, file=(path.with_suffix(".txt")).open("w"))
    terminal.print(summary_table(result))
    lines = terminal.export_text().splitlines()
    for name, row in rows.items():
        (line,) = [line for line in lines if name in line]
        assert (CELLS["nothing"] if row.verdict == "nothing" else row.told) in line
    first, second = judge(result).rows[:2]
    json = comparison_json({"a": result})["runs"]["a"]
    for key, name in (("common_test", first.name), ("own_data", second.name)):
        assert (json[key]["verdict"], json[key]["models"]) == (rows[name].verdict, name.partition(",")[0])
    table = {line[0]: line[1] for line in rows_of({"a": result})}
    assert table["verdict, common test"] == CELLS[rows[first.name].verdict or ""]
    lead = sections.ShownRun(result, judge(result)).heading("devices").lead
    for below, of, model in re.findall(
        r"(\w+) of (\d+) would be, on the common test set(?: with (?:the )?([a-z]+ heads?))?", lead
    ):
        gains = rows[f"{model or 'personalized models'}, common test"].gains
        worse = sum(gain <= -0.0005 for gain in gains)
        assert (below, int(of)) == (str(worse or "none"), len(gains))


def test_the_reported_run_no_longer_contradicts_itself() -> None:
    """Personalized heads had +9.4 points on the common test; a sentence about the shared head said that the run has no
    gain."""
    result = sample(3, 1, own=0.794, alone=0.70, own_local=0.9, alone_local=0.88, epsilon_server=5.0)
    details = result.details.but(own_heads=[PersonalizedHead(images=5)] * 3)
    result = result.but(details=details)  # its shared head: 60 %
    told = told_of(result, "trade")
    assert told == (
        "This run has both: a gain on the common test set with personalized heads (shared head: worse than alone), "
        "and weak protection against the server."
    )
    page = render_report(result)
    assert "+9.4 ± 0.0 points" in page
    assert told in page
    assert "no gain" not in page
