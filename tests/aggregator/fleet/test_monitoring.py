"""What the examples for Prometheus and Grafana name is there, and what is there is documented."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from hushfleet.aggregator.commands.main import build_app
from hushfleet.aggregator.fleet.watching.metrics import METRICS, metrics
from hushfleet.aggregator.results.fleet_state import Opening
from support.fleet_views import a_view

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "monitoring"
METRIC = re.compile(r"\bhushfleet_\w+")


def expressions(file: str) -> list[str]:
    if file == "alerts.yml":
        (group,) = yaml.safe_load((FOLDER / file).read_text())["groups"]
        return [rule["expr"] for rule in group["rules"]]
    panels = json.loads((FOLDER / file).read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


@pytest.mark.parametrize("file", ["alerts.yml", "grafana-dashboard.json"])
def test_every_metric_that_is_named_exists(file: str) -> None:
    found = [name for expression in expressions(file) for name in METRIC.findall(expression)]
    assert len(found) >= 10
    assert set(found) <= set(METRICS)


@pytest.mark.parametrize("file", ["alerts.yml", "grafana-dashboard.json"])
def test_every_label_that_is_named_exists(file: str) -> None:
    labels = {label for described in METRICS.values() for label in described.labels}
    text = (FOLDER / file).read_text()
    named = re.findall(r"\$labels\.(\w+)|\{\{(\w+)\}\}|by \((\w+)\)", text)
    assert {name for names in named for name in names if name} <= labels


def test_every_code_that_is_named_exists() -> None:
    named = [codes.split("|") for each in expressions("alerts.yml") for codes in re.findall(r'code=~"([^"]+)"', each)]
    assert named
    assert {code for codes in named for code in codes} <= set(METRICS["hushfleet_refusals_total"].codes)


def test_every_alert_says_what_to_do() -> None:
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_every_command_that_an_alert_names_exists() -> None:
    named = re.findall(r"hushfleet( (?:fleet|release) \w+)(?: DIR)?( --\w+)?", (FOLDER / "alerts.yml").read_text())
    assert (" release rollout", " --pause") in named, "pausing training stops no roll-out"
    for command, option in named:
        told = CliRunner().invoke(build_app(), [*command.split(), "--help"])
        assert told.exit_code == 0, command
        assert option.strip() in told.output


def test_a_task_that_ends_before_its_last_round_has_ended() -> None:
    run = a_view().run
    assert run is not None
    for finished in (False, True):
        told = metrics(replace(a_view(), run=replace(run, finished=finished))).decode()
        assert f"\nhushfleet_task_ended {float(finished)}\n" in told
    assert "hushfleet_aggregator_up == 0 and hushfleet_task_ended == 0" in expressions("alerts.yml")


def test_a_round_that_rests_is_not_stuck() -> None:
    view = a_view()
    assert view.run is not None
    resting = replace(
        view, run=replace(view.run, opened=view.at - 86_400, next_opening=Opening(2, view.at + 60, "UTC"))
    )
    told = metrics(resting).decode()
    assert "\nhushfleet_round_open_timestamp_seconds " in told
    assert "\nhushfleet_next_round_timestamp_seconds " in told
    (stuck,) = (each for each in expressions("alerts.yml") if "hushfleet_round_open_timestamp_seconds" in each)
    assert stuck.endswith("unless (hushfleet_next_round_timestamp_seconds or hushfleet_paused == 1)")


def test_prometheus_reads_the_page_with_its_token() -> None:
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert (job["scheme"], job["metrics_path"]) == ("https", "/metrics")
    assert set(job["authorization"]) == {"credentials_file"}


def test_every_metric_is_documented() -> None:
    rows = re.findall(
        r"^\| `(hushfleet_\w+)` \| (.*?) \| (.+) \|$", (ROOT / "docs/watching.md").read_text(), re.MULTILINE
    )
    assert {name: (re.findall(r"`(\w+)`", labels), words) for name, labels, words in rows} == {
        name: (list(described.labels), described.help) for name, described in METRICS.items()
    }
