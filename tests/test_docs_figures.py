"""Figures on pages against their one source: the files that benchmarks wrote, or the function that computes them.

What was measured and has no such file stands on one page, and others link to it.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from math import isclose
from pathlib import Path
from typing import Any

import pytest

import hushfleet as hf
from hushfleet.aggregator.planning.gain_errors import WORTH, Way, gain_errors
from hushfleet.aggregator.planning.gain_table import Accuracies, Estimate
from hushfleet.simulator.studies.reproduce.kept import Kept
from hushfleet.simulator.studies.reproduce.recipe import paper_names
from hushfleet.simulator.studies.reproduce.report import CLAIMS, write_report
from support.documents import BLOCKS, ROOT

FIGURES = ROOT / "docs" / "figures"
GAINS = json.loads((ROOT / "aggregator" / "planning" / "private_gain.json").read_text("utf-8"))["fleets"]
BOARD = {row["model"]: row for row in json.loads((FIGURES / "board.json").read_text("utf-8"))["models"]}
NETWORK = BOARD["fashion-mnist-cnn"]


def rows_of(page: str, start: str) -> list[list[str]]:
    """The cells of all table lines of a page that begin so."""
    lines = (ROOT / page).read_text("utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith(start)]
    assert rows, f"{page}: no line {start!r}"
    return rows


def in_words(page: str) -> str:
    return " ".join((ROOT / page).read_text("utf-8").split())


def gain(data: str, devices: int, images: int) -> dict[str, Any]:
    wanted = {"data": data, "devices": devices, "images": images, "alpha": None, "classes": 10, "honest": 1.0}
    found: dict[str, Any]
    (found,) = (fleet for fleet in GAINS if wanted.items() <= fleet.items())
    return found


def percents(fleet: dict[str, Any]) -> list[str]:
    """At epsilon 1, 2, 4, 8."""
    shared = {point["epsilon"]: point["shared"]["common"] for point in fleet["points"]}
    return [f"{100 * shared[epsilon]:.1f}" for epsilon in (1, 2, 4, 8)]


@pytest.mark.parametrize(
    ("data", "devices", "images"),
    [("fashion-mnist", 30, 20), ("fashion-mnist", 100, 20), ("fashion-mnist", 1000, 20), ("digits", 100, 12)],
)
def test_what_a_board_gains(data: str, devices: int, images: int) -> None:
    fleet, name = gain(data, devices, images), {"fashion-mnist": "Fashion-MNIST"}.get(data, data)
    (row,) = rows_of("README.md", f"| {name}, {devices:,} x {images} |")
    assert row[1:] == [f"{100 * fleet['alone']['common']:.1f}", *percents(fleet)]


def test_the_readmes_first_sentence_on_it() -> None:
    fleet = gain("digits", 100, 12)
    alone = f"{100 * fleet['alone']['common']:.1f}"
    assert f"reach {percents(fleet)[1]} % at epsilon 2, alone {alone} %" in in_words("README.md")


def test_how_far_a_plan_can_be_off() -> None:
    ways: dict[str, Way] = {
        "the table, for other images": "other data",
        "the table, for a data set in it": "same data",
        "`--data`, if": "simulated",
    }
    for start, way in ways.items():
        ((tried, share, *shown),) = (row[1:] for row in rows_of("docs/field-reference.md", f"| {start}"))
        held, gains = gain_errors().held(way)
        assert tried.startswith(f"{gains} gains of {len(gain_errors().ways[way]['data'])} data sets")
        assert share == f"{held / gains:.0%}"
        for alpha, interval in zip((None, 0.5, 0.1), shown, strict=True):
            asked = Estimate(64.0, Accuracies(0.5, 0.6, 0.5, 0.6, 0.02), (), (), alpha)
            assert f"{interval} points" == str(gain_errors().intervals(way, asked).own)


def test_the_pay_sentence_against_the_truth() -> None:
    lines = [json.loads(line) for line in (FIGURES / "pay_sentence.jsonl").read_text("utf-8").splitlines()]

    def is_right(line: dict[str, Any], way: str) -> bool:
        said, gain = line[way], line["gain"]
        if said["answer"] == "perhaps":
            return bool(said["low"] <= gain <= said["high"])
        return (said["answer"] == "yes") == (gain >= WORTH)

    for start, way in (("a task by `plan --data`", "simulated"), ("a task by the table", "table")):
        ((*shown, right),) = (row[1:] for row in rows_of("docs/field-reference.md", f"| {start}"))
        judged = [(line[way]["answer"], is_right(line, way)) for line in lines]
        for words, answer in zip(shown, ("yes", "no", "perhaps"), strict=True):
            of = [found for said, found in judged if said == answer]
            assert words == f"{sum(of)} of {len(of)} right"
        assert right == f"{sum(found for _, found in judged)} of {len(lines)}"
        assert not any(line[way]["answer"] == "yes" and line["gain"] < -2 * line["error"] for line in lines)
    assert sum(is_right(line, "simulated") for line in lines) >= 11 / 12 * len(lines)


def test_other_methods_beside_it() -> None:
    lines = [json.loads(line) for line in (FIGURES / "other_methods.jsonl").read_text("utf-8").splitlines()]
    measured: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        cell = line["cell"]
        measured[tuple(cell[name] for name in ("data", "devices", "method", "noise", "epsilon"))].append(line)

    def told(method: str, noise: str, kind: str = "global", data: str = "digits") -> list[tuple[float, float]]:
        seen = [[line[kind] for line in measured[data, 100, method, noise, float(epsilon)]] for epsilon in (1, 2, 4, 8)]
        assert all(len(values) == 3 for values in seen)
        return [(100 * statistics.mean(values), 100 * statistics.stdev(values)) for values in seen]

    def shown(start: str) -> list[tuple[float, float]]:
        (row,) = rows_of("docs/methods.md", f"| {start}")
        return [tuple(map(float, cell.split(" ±"))) for cell in row[1:]]

    for start, method, noise, kind in (
        ("DP-FedAvg on the same head and features", "dp-fedavg-head", "sum", "global"),
        ("DP-FedAvg on `digits-cnn`", "dp-fedavg", "sum", "global"),
        ("FedGLP-ADP on `digits-cnn`", "fedglp-adp", "sum", "global"),
        ("FedGLP-ADP's personalized models", "fedglp-adp", "sum", "own"),
        ("each device adds all of the noise: DP-FedAvg on the head", "dp-fedavg-head", "local", "global"),
        ("likewise DP-FedAvg on `digits-cnn`", "dp-fedavg", "local", "global"),
        ("likewise FedGLP-ADP", "fedglp-adp", "local", "global"),
    ):
        for was, now in zip(shown(start), told(method, noise, kind), strict=True):
            assert was == pytest.approx(now, abs=0.051), start
    simulated = shown("`hush`, secure aggregation (simulated)")
    assert [f"{mean:.1f}" for mean, _ in simulated] == percents(gain("digits", 100, 12))
    ours, theirs = percents(gain("fashion-mnist", 100, 20)), told("dp-fedavg-head", "sum", data="fashion-mnist")
    they_have = "{:.1f}, {:.1f}, {:.1f} and {:.1f}".format(*(mean for mean, _ in theirs))
    assert f"On Fashion-MNIST, 100 x 20, it has {they_have} " in in_words("docs/methods.md")
    assert "where `hush` has {}, {}, {} and {} ".format(*ours) in in_words("docs/methods.md")


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("docs/field-reference.md", "peaks at {ours} MiB of memory"),
        (
            "docs/architecture.md",
            "a client's whole round peaks at {ours} MiB against {theirs} MiB of a plain",
        ),
        ("docs/performance.md", "| fashion-mnist-cnn, DP-FedAvg (goal 90) | 79 | 128 | {ours} | {theirs} |"),
        ("README.md", "peaks at {ours} MiB of memory"),
    ],
)
def test_the_memory_of_a_board_is_the_one_measured(page: str, sentence: str) -> None:
    ours, theirs = NETWORK["methods"]["dp-fedavg"]["round_peak_mib"], NETWORK["plain PyTorch"]["peak_mib"]
    assert sentence.format(ours=round(ours), theirs=round(theirs)) in in_words(page)


def test_what_the_server_could_see() -> None:
    views = json.loads((FIGURES / "invert.json").read_text("utf-8"))["views"]
    said = ("raw, or ", "a little noise ", "noised, as ", "noised | 8", "noised | 2", "the sum of 100 ")
    said += ("that sum, noised ",)
    for start, view in zip(said, views, strict=True):
        (row,) = rows_of("docs/privacy-reference.md", f"| {start}")
        epsilon = "infinite" if view["epsilon_server"] is None else f"{view['epsilon_server']:,.0f}"
        recognised, psnr = view["recognised"], statistics.median(view["psnr_db"])
        assert row[1:3] == [epsilon, f"{sum(recognised)} of {len(recognised)}"], start
        assert float(row[3]) == pytest.approx(psnr, abs=0.051), start


@pytest.mark.parametrize(
    "row",
    [
        rows_of("docs/privacy-reference.md", f"| {start} |")[0]
        for start in ("2 | 3.975", "4 | 2.549", "6 | 1.965", "8 | 1.636", "16 | 1.062")
    ],
)
def test_the_epsilons_of_divided_noise(row: list[str]) -> None:
    printed, multiplier, *told = map(float, row)
    by_rdp = hf.privacy.epsilon(multiplier, rounds=20, delta=0.1, noise_split=10, accountant="rdp")
    exact = hf.privacy.epsilon(multiplier, rounds=20, delta=0.1, noise_split=10)
    assert isclose(by_rdp.release, printed, rel_tol=0.005)
    for shown, text, value in zip(told, row[2:], (by_rdp.server, exact.release, exact.server), strict=True):
        assert f"{value:.{len(text.partition('.')[2])}f}" == text, (shown, value)
    if printed == 2:
        assert f'"epsilon = 2" is {row[2]} against the server by its own accountant, and exactly {row[4]},' in in_words(
            "README.md"
        )


def test_what_the_page_on_python_says_that_privacy_costs() -> None:
    shown = [
        line.split("  # ")
        for block in BLOCKS
        if block.document == "docs/python.md"
        for line in block.text.splitlines()
        if line.startswith("hf.privacy.")
    ]
    assert len(shown) == 2
    for call, said in shown:
        value = repr(eval(call, {"hf": hf}))
        for part in re.split(r"\.\.\.", said):
            assert part.strip(" ,)") in value


def test_the_papers_figures_are_drawn_from_the_cells(tmp_path: Path) -> None:
    """Byte for byte: the same cells give the same file."""
    report = write_report(Kept(ROOT / "docs" / "results"), tmp_path / "reproduction.md")
    assert {*report.points, *report.tables} == {f"{paper}.svg" for paper in paper_names()}
    for name in {*report.points, *report.tables, CLAIMS}:
        assert (FIGURES / name).read_bytes() == (tmp_path / "figures" / name).read_bytes(), name


def test_the_epsilons_of_the_example_method() -> None:
    """As `examples/fedavgm.toml` is run: strict, sigma 0.1, 8 devices, 5 rounds, a tenth of 1/8 for delta."""
    server, release = (hf.privacy.epsilon(0.1 * n**0.5, rounds=5, delta=0.1 / 8).server for n in (1, 8))
    assert f"epsilon_server {server:.0f} and epsilon_release {release:.1f}: it runs" in in_words("docs/methods.md")
