"""Ends a run in the field: writes its result and its report, and prints the summary."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.aggregator.report.console import Console
from hushfleet.aggregator.report.render import write_report
from hushfleet.aggregator.report.summary import summary_table
from hushfleet.aggregator.results.answers import EvaluationRow
from hushfleet.aggregator.results.record import record
from hushfleet.aggregator.results.result import Lifetime
from hushfleet.aggregator.results.server_sees import SumFacts
from hushfleet.aggregator.storage.store import AggregatorStore


def write_results(
    store: AggregatorStore,
    prepared: PreparedTask,
    console: Console,
    *,
    sums: SumFacts,
    federation: str,
    lifetimes: Mapping[str, Lifetime] | None = None,
    pays: Callable[[EvaluationRow | None], str] = lambda newest: "",
) -> None:
    """Writes result and report, and prints the summary.

    :param sums: who could unmask devices, if the task has secure aggregation.
    :param lifetimes: what a fleet's boards have spent over all tasks.
    :param pays: says whether the fleet pays, given the task's newest evaluation.
    """
    result = record(store, prepared, engine="field", seed=None, sums=sums, lifetimes=lifetimes, federation=federation)
    result = result.but(pay=pays(result.evaluations[-1] if result.evaluations else None))
    result.save(store.folder / "result.json")
    write_report(result, store.folder / "report.html")
    console.print(summary_table(result))
    written = f"report  {store.folder / 'report.html'}\nresult  {store.folder / 'result.json'}"
    console.print(written, highlight=False, markup=False)
