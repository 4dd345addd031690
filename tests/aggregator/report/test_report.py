"""The report: every section, the result's own numbers, honest sentences, and nothing from outside."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hushfleet.aggregator.commands.main import load_command
from hushfleet.aggregator.report.charts import line, log_axis
from hushfleet.aggregator.report.page import (
    Heading,
    Plot,
    Prose,
    Section,
    label,
    page,
)
from hushfleet.aggregator.report.readable import epsilon_number, number, percent_up, points, size
from hushfleet.aggregator.report.render import render_report, write_report
from hushfleet.aggregator.report.sections import DASH, ShownRun, device_table, rounds_over_time
from hushfleet.aggregator.report.tables import PageCell, Table
from hushfleet.aggregator.report.verdict import judge
from hushfleet.aggregator.results.result import Example, Rerun, Result, TimelineRow, WireInfo
from hushfleet.privacy.protection import guess_rate
from support import report_samples

samples = vars(report_samples)
sample, bare, QUANTIZED, told_of = samples["sample"], samples["bare"], samples["QUANTIZED"], samples["told"]


PLOTLY = "79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a"
"""SHA-256 of `plotly-cartesian.min.js` in npm's plotly.js-cartesian-dist-min 4.1.1."""


def without_plotly(html: str) -> str:
    return re.sub('(<script type="application/gzip"[^>]*>)[^<]*', r"\1", html)


SECTIONS = ["accuracy", "privacy", "bytes", "fleet", "training", "run", "meaning"]
FIELD = ["bytes", "run", "meaning"]


class Page(HTMLParser):
    """Collects text, plots and attributes by section, and checks that tags are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sections: dict[str, str] = {}
        self.plots: dict[str, list[dict[str, Any]]] = {}
        self.attributes: list[tuple[str, str, str]] = []
        self.scripts: list[str] = []
        self.missing = 0
        self._here = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.attributes += [(tag, name, value) for name, value in values.items()]
        if tag == "section":
            self._here = values["id"]
        self.missing += values.get("class") == "missing"
        if tag not in ("meta", "img"):
            self.open.append(f"{tag} {values.get('type', '')}".strip())

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().split()[0] == tag

    def handle_data(self, data: str) -> None:
        where = self.open[-1] if self.open else ""
        if where == "script application/json":
            self.plots.setdefault(self._here, []).append(json.loads(data))
        elif where == "script application/gzip":
            self.scripts.append(gzip.decompress(base64.b64decode(data)).decode())
        elif where == "script":
            self.scripts.append(data)
        elif where != "style":
            text = data.replace("\N{NO-BREAK SPACE}", " ")
            self.sections[self._here] = self.sections.get(self._here, "") + text + "\n"

    def traces(self, section: str) -> list[dict[str, Any]]:
        return [trace for plot in self.plots[section] for trace in plot["data"]]


@pytest.mark.parametrize("result", [sample(), sample(200, 60, layers=9), sample(1, 1), bare(sample(2, 2))])
def test_every_report_has_every_section_and_is_well_formed(result) -> None:
    page = Page(render_report(result))
    assert page.open == []
    names = [name for name in page.sections if name]
    assert names == (SECTIONS if result.privacy else FIELD)
    anchors = [value for tag, name, value in page.attributes if tag == "a" and name == "href"]
    assert anchors == [f"#{name}" for name in names]


@pytest.mark.parametrize("result", [sample(), sample(200, 60, layers=9), bare(sample())])
def test_a_report_needs_nothing_from_outside_and_runs_no_script_but_its_own(result) -> None:
    html = render_report(result)
    page = Page(html)
    assert not {tag for tag, _, _ in page.attributes} & {"link", "img", "iframe", "object", "base"}
    assert not [a for a in page.attributes if a[1] in {"src", "srcset", "xlink:href"} or a[1].startswith("on")]
    assert all(value.startswith("#") for _, name, value in page.attributes if name == "href")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", html), "HTML forbids control characters"
    digest = hashlib.sha256(page.scripts[0].encode()).hexdigest()
    assert digest == "79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a", (
        "that of npm's plotly.js-cartesian-dist-min 4.1.1"
    )
    rest = without_plotly(html)
    assert len(html) - 700_000 < len(rest) < len(html) - 600_000, "Plotly is inside, once"
    assert not re.search(r"://|url\(|@import|fetch\(|XMLHttpRequest", rest)
    assert "prefers-color-scheme: dark" in rest
    (policy,) = [value for tag, name, value in page.attributes if name == "content" and "default-src" in value]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts]
    plotly, own = hashes
    allowed = f"'sha256-{own}' 'sha256-{plotly}'"
    assert f"default-src 'none'; script-src {allowed};" in policy


def test_every_colour_of_a_plot_is_in_the_style_sheet_for_light_and_dark() -> None:
    html = without_plotly(render_report(sample(12, 6)))
    for name in set(re.findall(r"var\((--[a-z0-9]+)\)", html)):
        assert html.count(f"{name}:") == 2, name


def test_the_numbers_of_the_result_are_in_the_report() -> None:
    page = Page(render_report(sample(2, 3, sweep=((3.0, 0.012), (50.0, 0.04)))))
    head = page.sections[""]
    assert "+5.0 ± 0.0 points" in head  # 75.0 % against 70.0 %
    assert "+2.0 ± 0.0 points" in head  # 90.0 % against 88.0 %
    assert "personalized models, common test: 75.0 %, alone 70.0 %" in head
    assert "Trust model local: nobody is trusted" in head
    assert "epsilon_server = 12.2" in head
    assert "epsilon_release = 2" in head
    # 2 devices x 1000 B x 3 rounds sent; Eq. (20) 3 times and float32 4 times as much
    assert "sent 6 kB up in 3 rounds and received 24 kB" in page.sections["bytes"]
    assert "Eq. (20) counts 18 kB: what was sent is 3 times smaller" in page.sections["bytes"]
    assert "float32 counts 24 kB: what was sent is 4 times smaller" in page.sections["bytes"]
    assert "1e-05" in page.sections["privacy"]
    assert "add or remove one device's whole contribution" in page.sections["privacy"]
    assert "\u22121.2" not in page.sections["privacy"]
    assert "+1.2" in page.sections["privacy"]
    assert "board-001" in page.sections["fleet"]
    assert "2 late" in page.sections["fleet"]
    assert "1 memory" in page.sections["fleet"]
    assert "stranger (1 unknown-device)" in page.sections["fleet"]
    assert "digits-fedglp-adp-0001" in page.sections["run"]
    assert "2.3.1" in page.sections["run"]


def test_what_a_device_paid_for_updates_that_came_too_late_is_not_told_as_nothing() -> None:
    result = sample(3, 2)
    late, declined = result.details.devices[1:]
    details = result.details.but(in_vain={late: 2}, refusals={})
    result = result.but(details=details, privacy=result.privacy[:1])
    table = device_table(result)
    spent = {row[0]: (row[table.head.index("charged")], row[table.head.index("epsilon_server")]) for row in table.rows}
    assert (spent[late], spent[declined]) == ((DASH, DASH), ("0", "0"))
    assert "is in its own ledger alone" in Page(render_report(result)).sections["fleet"]


def test_rounds_over_time_show_who_was_missing_and_nothing_where_nobody_was() -> None:
    result = sample(3, 2)
    whole = [TimelineRow(round=n, opened_s=n - 1.0, closed_s=n, accepted=3) for n in (1, 2)]
    worse = whole[1].but(accepted=1, late=1, lost=1)
    for rows, shown in (([], False), (whole, False), ([whole[0], worse], True)):
        details = result.details.but(timeline=rows)
        found = result.but(details=details)
        parts = [*rounds_over_time(ShownRun(found, judge(found)))]
        assert bool(parts) == shown
    heading, plot = parts
    assert isinstance(heading, Heading)
    assert isinstance(plot, Plot)
    assert {bar["name"]: bar["y"] for bar in plot.traces} == {"accepted": [3, 1], "late": [0, 1], "lost": [0, 1]}
    assert heading.lead.startswith("Of 6 updates that were asked for, 2 did not arrive in time: 1 late, 1 lost. ")
    assert heading.lead.endswith("in round 2: of 3 that were asked, 1 late, 1 lost.")


def test_bytes_of_devices_are_of_updates_where_a_committee_answers_besides() -> None:
    rounds = [row.but(answer_bytes=100) for row in sample().rounds]
    for run, told in ((sample(), "sent up"), (sample().but(rounds=rounds), "updates sent")):
        assert device_table(run).head[4] == told


@pytest.mark.parametrize(
    ("codec", "step", "unit", "told"),
    [
        ("quantized", 0.5, "noise", ["quantized, step 0.5 of the noise", "signal to noise, dB\n0.0895\n"]),
        ("quantized", 1.0, "noise", ["step 1 of the noise", "dB\n0.348\n"]),
        ("quantized", 0.05, "rms", ["of a layer's root mean square", "dB\n\N{EN DASH}\n"]),
        ("one-bit", None, "noise", ["dB\n1.96\n"]),
        ("float16", None, "noise", ["float16\n", "dB\n0\n"]),
        ("float32", None, "noise", ["codec\nfloat32\n", "cost in signal to noise, dB\n0\n"]),
    ],
)
def test_what_the_form_on_the_wire_costs(codec: str, step: float | None, unit: str, told: list[str]) -> None:
    wire = WireInfo(codec=codec, step=step, step_unit=unit)
    words = Page(render_report(sample(2, 3, wire=wire))).sections["bytes"]
    assert [part for part in told if part not in words] == []
    assert "24 kB; as whole float32 models 24 kB, of the same size" in words


def test_text_from_outside_is_escaped() -> None:
    evil = "</script><script>alert(1)</script>"
    result = sample().but(dataset=evil, method="a&b")
    details = result.details.but(devices=[evil, "<b>bold</b>"])
    html = render_report(result.but(details=details))
    page = Page(html)
    assert "alert(1)</script>" not in html
    assert len(page.scripts) == 2
    assert f"a&b on {evil}" in page.sections[""].replace("\n", "")
    assert "&lt;b&gt;bold&lt;/b&gt;" in page.plots["training"][-1]["layout"]["yaxis"]["ticktext"], "Plotly reads markup"
    assert "&lt;owl &amp; co&gt;" in page.plots["training"][-1]["layout"]["xaxis"]["ticktext"]


@pytest.mark.parametrize("result", [sample(2, 3, sweep=((3.0, 0.012), (50.0, 0.04))), sample(200, 60), bare(sample())])
def test_plotly_knows_every_key_and_value_of_a_chart(result) -> None:
    import plotly.graph_objects as go  # checks what the page writes as plain data

    for plots in Page(render_report(result)).plots.values():
        for each in plots:
            go.Figure(each)


def test_small_fleets_have_a_line_a_device_and_large_ones_a_band() -> None:
    small, large = (Page(render_report(sample(devices))).plots["training"][1]["data"] for devices in (12, 13))
    assert [trace["name"] for trace in small] == ["a device", *(f"board-{n:03d}" for n in range(12))]
    assert all(len(trace["x"]) == 3 for trace in small[1:])
    assert [trace.get("fill") for trace in large] == [None, "tonexty", None]
    assert len(without_plotly(render_report(sample(500, 20)))) < 1_000_000


def test_of_ten_thousand_devices_the_page_counts_gains_and_lists_the_worst_and_the_best() -> None:
    count = 10_000
    result = sample(count, 2)
    own = [*range(count)]
    details = result.details.but(
        accuracy_own_common=[[None] * count, [0.5 + n / count / 4 for n in own]], uplink_bytes=own[::-1]
    )
    result = result.but(details=details)
    html = render_report(result)
    assert len(without_plotly(html)) < 200_000
    assert len(html) < 900_000
    page = Page(html)
    (bars,) = page.plots["accuracy"][1]["data"]
    assert (sum(bars["y"]), len(bars["x"])) == (count, 25)
    assert bars["hovertext"][0] == "\u221220.0 to \u221219.0 points"
    assert bars["marker"]["pattern"]["shape"] == ["/"] * 20 + [""] * 5
    table = device_table(result)
    ends = [*range(20), *range(count - 20, count)]
    assert [row[0] for row in table.rows] == [f"board-{n:03d}" for n in ends]
    assert table.folded.startswith("40 of 10,000 devices: the 20 lowest and highest by common test, bytes, refused")
    assert [row[table.head.index("gained, common test")] for row in table.rows][::39] == ["\u221220.0", "+5.0"]
    (images,) = page.plots["training"][-1]["data"]
    assert len(images["z"]) == 400


def test_missing_data_is_said_and_not_drawn() -> None:
    full, field = Page(render_report(sample(sweep=((3.0, 0.1),)))), Page(render_report(bare(sample())))
    assert full.missing == 0
    assert set(full.plots) == {"accuracy", "bytes", "privacy", "training"}
    assert set(field.plots) == {"bytes"}
    assert field.missing == 0
    assert "What Eq. (20) takes was not recorded" in field.sections["bytes"]
    assert "cannot say whether federating was worth it" in field.sections[""]
    assert "no privacy ledger" in field.sections[""]
    once = Page(render_report(sample(rounds=1)))
    assert [plot["layout"].get("yaxis", {}).get("rangemode") for plot in once.plots["privacy"]] == [
        None
    ]  # the signal's
    assert "There is one round; the table of devices has its epsilon" in once.sections["privacy"]


def test_the_plots_have_the_numbers_of_the_result() -> None:
    page = Page(render_report(sample(3, 4, sweep=((3.0, 0.012), (50.0, 0.04)))))
    by_name = {trace["name"]: trace for trace in page.plots["accuracy"][0]["data"]}
    assert by_name["personalized models, common test"]["y"] == [0.75 * n / 4 for n in range(1, 5)]
    assert by_name["alone, own data"]["y"] == [0.88] * 4
    assert by_name["alone, own data"]["line"]["dash"] == "dash"
    (gains,) = page.plots["accuracy"][1]["data"]
    assert gains["y"] == pytest.approx([0.05] * 3)
    assert gains["hovertext"][0] == "board-000: 70.0% alone, 75.0% federated"
    assert page.plots["bytes"][0]["data"][0]["y"] == [3000] * 4
    assert page.plots["bytes"][0]["data"][2]["y"] == [12000.0] * 4
    assert page.plots["privacy"][2]["data"][0]["x"] == [3.0, 50.0]
    assert page.plots["privacy"][2]["layout"]["shapes"][0]["x0"] == 8, "where protection becomes negligible"
    (images,) = page.plots["training"][-1]["data"]
    assert sum(map(sum, images["z"])) == 3 * 30 + 0 + 1 + 2
    (ratio,) = page.plots["privacy"][1]["data"]
    assert ratio["y"] == [-20.0] * 4


def test_a_device_that_is_worse_off_has_a_colour_and_a_pattern_of_its_own() -> None:
    result = sample(3)
    details = result.details.but(local_only_common=[0.7, None, 0.9])
    (bars,) = Page(render_report(result.but(details=details))).plots["accuracy"][1]["data"]
    assert bars["y"] == pytest.approx([-0.15, 0.05])
    assert bars["marker"]["pattern"]["shape"] == ["/", ""]
    assert len(set(bars["marker"]["color"])) == 2


def test_large_fleets_have_sorted_gains_and_heat_maps() -> None:
    result = sample(50)
    details = result.details.but(local_only_common=[n / 50 for n in range(50)])
    page = Page(render_report(result.but(details=details)))
    (bars,) = page.plots["accuracy"][1]["data"]
    assert bars["y"] == pytest.approx(sorted(0.75 - n / 50 for n in range(50)))
    assert bars["hovertext"][0] == "board-049: 98.0% alone, 75.0% federated"
    assert [plot["data"][0]["type"] for plot in page.plots["training"][3:]] == ["heatmap"]
    assert page.plots["training"][-1]["data"][0]["z"][49] == [10, 10, 59]


def test_the_worst_device_and_the_largest_delta_speak_for_all() -> None:
    result = sample()
    worse = result.privacy[1].but(epsilon_server=99.0, delta=0.01)
    verdict = judge(result.but(privacy=[result.privacy[0], worse]))
    assert (verdict.epsilon_server, verdict.epsilon_release, verdict.delta) == (99.0, 2.0, 0.01)


def test_a_run_without_a_model_claims_no_protection_for_readers_of_models() -> None:
    """A release of 0 of nothing looked like the best protection that there is."""
    made = sample(epsilon_server=16.1, epsilon_release=0.0)
    found = made.but(rounds=[row.but(participants=0) for row in made.rounds])
    said = told_of(found, "privacy")
    assert "the devices have paid for nothing: epsilon_server = 16.1, negligible protection" in said
    assert "strong protection" not in said
    assert "strong protection against someone who sees only the aggregate models" not in render_report(found)


def test_devices_that_would_be_better_off_alone_are_counted() -> None:
    result = sample(4)
    details = result.details.but(local_only_common=[0.9, 0.8, 0.7, None])
    result = result.but(details=details)
    assert "1 of 3 devices got a better model" in told_of(result, "answer")
    page = Page(render_report(result))
    assert "Here 2 of 3 would be" in page.sections["accuracy"]


def test_lines_pass_over_what_was_not_measured_and_end_at_infinity() -> None:
    def drawn(*values: float | None) -> list[tuple[float, float | None]]:
        trace = line("a", range(1, len(values) + 1), values, 0)
        return list(zip(trace["x"], trace["y"], strict=True))

    assert drawn(0.1, None, None, 0.4, 0.5) == [(1, 0.1), (4, 0.4), (5, 0.5)]
    assert drawn(0.1, math.inf, 0.3) == [(1, 0.1), (2, None), (3, 0.3)]
    assert drawn(None, None) == []


def test_guessing_by_hand() -> None:
    assert guess_rate(0.0, 0.0) == 0.5
    assert guess_rate(math.log(3), 0.0) == pytest.approx(0.75)
    assert guess_rate(0.0, 0.1) == pytest.approx(0.55)
    assert guess_rate(5000.0, 0.1) == 1.0
    assert percent_up(guess_rate(2.0, 0.0)) == "88.1\N{NO-BREAK SPACE}%"  # 0.8808 is never rounded down
    assert percent_up(0.99998) == "99.999\N{NO-BREAK SPACE}%"
    assert percent_up(0.999991) == "99.9999\N{NO-BREAK SPACE}%"


def test_numbers_as_people_write_them() -> None:
    assert [number(v) for v in (99.96, 9.996, 999.6, -0.0)] == ["100", "10.0", "1,000", "0"]
    assert [number(v) for v in (0, 2.0, 12.2, 379.4, 2463.6, 0.0041, -21.3, math.inf, None)] == [
        "0", "2", "12.2", "379", "2,464", "0.0041", "\u221221.3", "\u221e", "not measured",
    ]  # fmt: skip
    assert [size(v).replace("\N{NO-BREAK SPACE}", " ") for v in (0, 999, 1000, 999_600, 2_290_000, 4.99e9)] == [
        "0 B", "999 B", "1 kB", "1 MB", "2.29 MB", "4.99 GB",
    ]  # fmt: skip
    assert [points(v) for v in (0.032, -0.011, 0.0001, -0.0001, None)] == [
        "+3.2 points", "\u22121.1 points", "0.0 points", "0.0 points", "not measured",
    ]  # fmt: skip


def test_an_epsilon_has_the_digits_of_its_word_and_of_its_limit() -> None:
    assert [epsilon_number(v) for v in (8.0, 7.999, 8.004, 1.0004, 3.00000001, 12.34, 4417.0, 0.0, math.inf, None)] == [
        "8", "8", "8.004", "1.0004", "3.00000001", "12.3", "4,417", "0", "\u221e", "not measured",
    ]  # fmt: skip
    assert [epsilon_number(v, 5.0) for v in (4.996, 5.0, 5.004, 5.1)] == ["5", "5", "5.004", "5.1"]
    assert "epsilon_server = 8.004: negligible protection" in told_of(sample(epsilon_server=8.004), "privacy")


def test_a_logarithmic_axis_has_round_ticks() -> None:
    assert log_axis([3.0, 60.0])["tickvals"] == [1, 2, 5, 10, 20, 50, 100, 200, 500]
    assert log_axis([0.001, 900.0])["tickvals"] == [0.001, 0.01, 0.1, 1, 10, 100, 1000]


def test_a_page_of_ones_own() -> None:
    cells = [("a", PageCell("+1", "better")), ("b", "2")]
    section = Section("one", "One", "lead", [Table(("x", "y"), cells, folded="more")])
    html = page("A & b", [section], tiles=[("3", "of 4")])
    assert '<td class="better">+1</td>' in html
    assert "<td>2</td>" in html
    assert "<details><summary>more</summary>" in html
    assert "A &amp; b - Hushfleet" in html
    assert Page(html).open == []


def test_long_names_lose_their_middle() -> None:
    assert label("board-of-the-third-floor-000017", longest=16) == "board-o\N{HORIZONTAL ELLIPSIS}r-000017"
    assert label("a<b") == "a&lt;b"


def test_the_report_is_written_whole(tmp_path: Path) -> None:
    write_report(sample(), tmp_path / "report.html")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.match(r"<!DOCTYPE html>", html)
    assert html.endswith("</html>\n")


def test_a_file_name_that_is_no_text_does_not_cost_the_report(tmp_path: Path) -> None:
    """Python reads such a byte, `\\xe9` of Latin-1, as a lone surrogate: after the whole run there was no report."""
    again = Rerun(command="hushfleet simulate caf\udce9.toml", task="", digests={})
    write_report(sample().but(rerun=again), tmp_path / "report.html")
    assert r"caf\udce9.toml" in (tmp_path / "report.html").read_text()


def test_images_and_confusion_are_shown_and_only_as_data_of_the_page() -> None:
    result = sample()
    shown = Example(png="aGVsbG8=", label=2, device="<b>", said_global=2, said_own=0)
    counts = [[3, 1, 0], [0, 4, 0], [2, 0, 0]]
    details = {"examples": [shown], "confusion_global": counts, "confusion_own": counts, "confusion_devices": 1}
    html = render_report(result.with_details(**details))
    page = Page(html)
    assert [value for _, name, value in page.attributes if name == "src"] == ["data:image/png;base64,aGVsbG8="]
    words = page.sections["answers"]
    assert "global: <owl & co>" in words
    assert "<b>, own: cat" in words
    assert "alone" not in words
    assert "Weakest class: <owl & co>, 0.0 % right." in words
    heat, _ = page.traces("answers")
    assert heat["z"][0] == [0.75, 0.25, 0]
    field = render_report(result.but(engine="field"))
    assert "Samples and what models say of them stay with their owners" in field


@pytest.mark.parametrize(
    ("result", "colours", "word"),
    [
        (sample(epsilon_release=0.5, epsilon_server=2.0), ["better", "better", "moderate", "strong"], "moderate"),
        (sample(own=0.6, epsilon_server=2072.0), ["worse", "better", "negligible", "moderate"], "negligible"),
        (sample(own=0.2, epsilon_server=5.0), ["nothing", "better", "weak", "moderate"], "weak"),
        (sample(epsilon_server=math.inf), ["better", "better", "no", "moderate"], "no"),
    ],
)
def test_a_tile_has_the_colour_of_its_verdict_or_its_epsilons_word(
    result: Result, colours: list[str], word: str
) -> None:
    page = Page(render_report(result))
    assert [value for tag, name, value in page.attributes if (tag, name) == ("li", "class")] == colours
    assert f"epsilon_server, worst device: {word} protection" in page.sections[""]
    assert ("learned nothing" in page.sections[""]) == ("nothing" in colours)


def test_the_papers_own_count_of_bytes_is_for_its_own_method() -> None:
    result = sample()
    assert "Eq. (20)" in Page(render_report(result)).sections["bytes"]
    assert "Eq. (20)" not in Page(render_report(result.but(method="hush"))).sections["bytes"]


def test_no_half_of_the_page_is_empty() -> None:
    """Plots stand side by side, or span the page."""
    plot, table, note = Plot([], {}, "plot"), Table(["a"], []), Prose(["words"], css="note")
    for parts, wide in (
        ([plot], [True]), ([plot, plot], [False, False]), ([plot, plot, plot], [False, False, True]),
        ([plot, table, plot, Prose(["words"])], [True, False]), ([plot, note], [True]),
    ):  # fmt: skip
        html = page("a page", [Section("one", "One", "A lead.", parts)])
        assert ['class="wide"' in each for each in re.findall("<figure[^>]*>", html)] == wide


def test_the_task_is_there_to_run_it_again() -> None:
    made = Rerun(command="hushfleet simulate t.toml", task='name = "t"\nseed = 7', digests={"test images": "ab12"})
    words = Page(render_report(sample().but(rerun=made))).sections["run"]
    for told in ("hushfleet simulate t.toml", 'name = "t"\nseed = 7', "SHA-256 of the test samples\nab12"):
        assert told in words
    assert "does not say how it was run" in Page(render_report(sample())).sections["run"]


def test_what_the_server_could_see_is_shown_where_it_was_drawn(tmp_path: Path) -> None:
    sample().save(tmp_path / "result.json")
    report = load_command("report")
    report.main([str(tmp_path)], standalone_mode=False)
    assert "no proof" not in Page((tmp_path / "report.html").read_text()).sections["privacy"]
    (tmp_path / "invert.png").write_bytes(b"a picture")
    report.main([str(tmp_path)], standalone_mode=False)
    page = Page((tmp_path / "report.html").read_text())
    assert "no proof" in page.sections["privacy"]
    assert ("img", "src", f"data:image/png;base64,{base64.b64encode(b'a picture').decode()}") in page.attributes
