"""Rounds that made no model are counted with what they have cost, and told in the same words everywhere."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hushfleet.aggregator.fleet import descriptions
from hushfleet.aggregator.fleet.page.render import render_parts
from hushfleet.aggregator.fleet.watching.metrics import metrics
from hushfleet.aggregator.fleet.watching.table import table
from hushfleet.aggregator.fleet.watching.watch import view_now
from hushfleet.aggregator.report.render import render_report
from hushfleet.aggregator.results.events import EventLog
from hushfleet.aggregator.results.metrics import lost_rounds
from hushfleet.aggregator.results.record import record
from hushfleet.aggregator.results.result import LostRounds
from hushfleet.plain_json import to_json
from hushfleet.privacy.ledger import epsilon_server_of
from support.desk import make_folder

LOST = LostRounds(rounds=4, boards=11, epsilon=1.4321)
TOLD = "4 of 6 rounds made no model, because too few updates came; 11 boards paid epsilon 1.43 for them"


def test_what_was_paid_for_no_model_is_in_result_and_report(make_fleet: Callable[..., Any]) -> None:
    fleet = make_fleet(devices=3, min_updates=2, rounds=4, accounting="strict")
    assert lost_rounds(fleet.store, delta=0.01) is None
    charge = fleet.engine.next_charge
    fleet.run_round()
    for senders in (["dev-0"], ["dev-0", "dev-1"], ["dev-0"]):
        fleet.open()
        for name in senders:
            assert fleet.engine.accept(name, fleet.update(name).data).acknowledged
        fleet.engine.close()
    result = record(fleet.store, fleet.prepared, engine="field", seed=None)
    lost = result.lost_rounds
    assert lost is not None
    assert (lost.rounds, lost.boards) == (2, 1)
    assert lost.epsilon == pytest.approx(epsilon_server_of([charge, charge], delta=0.01))
    assert lost.words(4) in render_report(result)


def test_status_page_metrics_and_report_of_a_fleet_tell_it(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet", boards=2)
    with EventLog(folder.run / "events.jsonl") as log:
        log.write("run", task="small-1", method="m", unit="device", delta=1e-5, rounds=8, devices=2)
        for number in range(1, 7):
            log.write("round_open", round=number, cohort=["a", "b"])
            lost = {} if number < 3 else {"lost": to_json(LOST)}
            log.write("round_close", round=number, participants=2 * (number < 3), uplink_bytes=8, **lost)
    view = view_now(folder)
    assert view.run is not None
    assert descriptions.progress(view.run).endswith(f"6 of 8 rounds are done; {TOLD}")
    console = Console(file=io.StringIO(), width=300)
    console.print(table(view))
    assert TOLD in console.file.getvalue()  # type: ignore[attr-defined]
    assert TOLD in render_parts(view)["summary"]
    assert "hushfleet_rounds_lost 4.0" in metrics(view).decode()
    assert view.to_json()["run"]["lost"]["rounds"] == 4


def test_a_round_that_waits_is_told_to_programs_too(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet", boards=2)
    waits = {"round": 1, "able": 1, "min_devices": 2, "min_updates": 2, "spent": 1, "frees": 7200.0, "timezone": "UTC"}
    with EventLog(folder.run / "events.jsonl") as log:
        log.write("run", task="small-1", method="m", unit="device", delta=1e-5, rounds=8, devices=2)
        log.write("waits", **waits)
    view = view_now(folder, 0.0)
    told = "round 1 waits: 1 of 2 needed boards can take part; 1 have spent their period, which ends today 02:00 (UTC)"
    assert told in [problem.what for problem in view.problems]
    assert told in render_parts(view)["attention"]
    said = metrics(view).decode()
    assert "hushfleet_round_able 1.0" in said
    assert "hushfleet_round_needed 2.0" in said
    assert view.to_json()["run"]["waiting"]["frees"] == 7200.0
