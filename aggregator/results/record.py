"""Makes the aggregator's part of `result.json` from its store, so that it is the same after any crash.

Only the numbers of devices that were late or lost come from the event log; accepted and declined ones are in the store.
The simulator adds what only a simulation knows (own accuracies, label counts, the local-only baseline).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.aggregator.results.answers import StatisticRow, statistic_of
from hushfleet.aggregator.results.events import iterate_events
from hushfleet.aggregator.results.fleet_state import Outcome
from hushfleet.aggregator.results.metrics import RoundSummary, evaluations, lost_rounds, privacy_tables
from hushfleet.aggregator.results.outcomes import OUTCOMES, Outcomes
from hushfleet.aggregator.results.rerun import rerun, versions
from hushfleet.aggregator.results.result import (
    Details,
    Lifetime,
    LocalOnly,
    ModelInfo,
    PrivacyRow,
    Result,
    RoundRow,
    SumsInfo,
    TimelineRow,
    WireInfo,
)
from hushfleet.aggregator.results.server_sees import SumFacts
from hushfleet.aggregator.storage.store import AggregatorStore, StoredRound
from hushfleet.errors import Malformed
from hushfleet.methods import title_of
from hushfleet.methods.cost import RoundTerms
from hushfleet.privacy.terms import TRUST
from hushfleet.secure.membership_list import MembershipList
from hushfleet.secure.secure_round import assumption
from hushfleet.wire.format.codecs import codec_of
from hushfleet.wire.format.spec import SecureSpec, TaskSpec, WireSpec

EVENTS_NAME = "events.jsonl"


def record(
    store: AggregatorStore,
    prepared: PreparedTask,
    *,
    engine: str,
    seed: int | None,
    fleet: Sequence[str] = (),
    runtime: str = "",
    sums: SumFacts | None = None,
    lifetimes: Mapping[str, Lifetime] | None = None,
    federation: str | None = None,
) -> Result:
    """Returns the result of all closed rounds.

    :param engine: `fast`, `live` or `field`.
    :param seed: None in the field, which has no seed.
    :param fleet: all devices, if they are known beforehand, because some may never have appeared.
    :param runtime: the runtime that computed the gradients, in a simulation.
    :param sums: who could unmask devices, if the task has secure aggregation.
    :param lifetimes: what each board of a fleet has spent over all tasks.
    :param federation: its name on the broker, in the field.
    """
    task, spec = prepared.task, prepared.spec
    closed = [row for row in store.rounds() if row.metrics is not None and row.closed_at is not None]
    summaries = [RoundSummary(**row.metrics) for row in closed if row.metrics is not None]
    began_at = closed[0].opened_at if closed else 0.0
    delta, accountant = spec.privacy.delta, spec.privacy.accountant
    *spent, privacy = privacy_tables(
        store, [*(summary.round for summary in summaries), math.inf], delta=delta, accountant=accountant
    )
    lifetimes = lifetimes or {}
    rows_by_device = [store.updates(row.round) for row in closed]
    accepted_in = {row.round: {u.device for u in rows} for row, rows in zip(closed, rows_by_device, strict=True)}
    uplink, accepted = Counter[str](), Counter[str]()
    for row in chain.from_iterable(rows_by_device):
        uplink[row.device] += row.size
        accepted[row.device] += 1
    declines: dict[str, Counter[str]] = {}
    declined_in: dict[int, set[str]] = {}
    reasons: dict[str, str] = {}
    for round, device, code, reason in store.declines():
        declined_in.setdefault(round, set()).add(device)
        declines.setdefault(device, Counter())[code] += 1
        reasons[code] = reason
    seen = privacy.keys() | {row.device for row in store.devices()}
    names = sorted(seen | declines.keys() | set(fleet))
    outcomes = Outcomes(iterate_events(store.folder / EVENTS_NAME), accepted=accepted_in, declined=declined_in)
    own = {"dataset": task.data.name, "partition": task.partition_label}
    return Result(
        **about(spec, **own, noise_multiplier=prepared.method.noise_multiplier(RoundTerms())),
        recorded_at=_utc(time.time()),
        federation=federation,
        devices=max(len(names), 1),
        seed=seed,
        engine=engine,
        sums=_sums_info(spec.privacy.secure, sums),
        assumption=_assumption(spec, store),
        boards={row.device: row.board for row in store.devices() if row.board},
        rounds=[
            RoundRow.of(summary.but(**(_times(row) if engine == "field" else {})))
            for summary, row in zip(summaries, closed, strict=True)
        ],
        evaluations=evaluations(summaries),
        statistic=_statistic(spec, summaries),
        local_only=LocalOnly(),
        privacy=[row.but(lifetime=lifetimes.get(row.device)) for row in privacy.values()],
        lost_rounds=lost_rounds(store, delta=delta, accountant=accountant),
        details=Details(
            devices=names,
            class_names=list(spec.model.class_names),
            score=spec.model.targets.describe(),
            measure=spec.model.targets.measure,
            eq20_bytes=[summary.eq20_bytes for summary in summaries],
            float32_bytes=[summary.float32_bytes for summary in summaries],
            values_sent=[sum(row.shared for row in rows) for rows in rows_by_device],
            epsilon_server=[_column(table, names, "epsilon_server") for table in spent],
            epsilon_release=[_column(table, names, "epsilon_release") for table in spent],
            rounds_accepted=[accepted[name] for name in names],
            uplink_bytes=[uplink[name] for name in names],
            refusals=store.refusals(),
            declines={device: dict(counts) for device, counts in declines.items()},
            decline_reasons=reasons,
            faults=store.faults(),
            timeline=[
                TimelineRow(
                    round=row.round,
                    opened_s=row.opened_at - began_at,
                    closed_s=row.closed_at - began_at,
                    **_counts(outcomes.of_round.get(row.round)),
                )
                for row in closed
                if row.closed_at is not None
            ],
            in_vain=dict(+outcomes.in_vain),
        ),
        versions=versions(),
        rerun=rerun(prepared, runtime=runtime),
    )


def about(spec: TaskSpec, *, dataset: str, partition: str, noise_multiplier: float) -> dict[str, Any]:
    """Returns the fields of a result that are known before the first round.

    :param partition: its name for people.
    :param noise_multiplier: the method's own, 0 without noise.
    """
    privacy, layout = spec.privacy, spec.model.layout
    layers = [(layer.name, layer.size) for layer in layout.layers]
    return {
        "task": spec.task,
        "method": title_of(spec.method),
        "dataset": dataset,
        "partition": partition,
        "model": ModelInfo(name=spec.model.name, parameters=layout.size, layers=layers),
        "accounting": privacy.accounting,
        "trust": TRUST[privacy.accounting],
        "accountant": privacy.accountant,
        "clip_norm": privacy.clip_norm,
        "noise_multiplier": noise_multiplier,
        "wire": _wire_info(spec.wire, noised=noise_multiplier > 0 and privacy.unit == "device"),
    }


def _counts(outcomes: Mapping[Outcome, int] | None) -> dict[str, int | None]:
    return {} if outcomes is None else {outcome: outcomes[outcome] for outcome in OUTCOMES}


def _statistic(spec: TaskSpec, summaries: Iterable[RoundSummary]) -> StatisticRow | None:
    question, names = spec.question, spec.model.class_names
    if spec.model.targets.are_inputs:  # a label marks a fault, and faults are not counted
        names = ("samples that train",)
    elif not spec.model.targets.are_classes:
        names = tuple(f"samples of {name}" for name in names)
    found = [row for row in summaries if row.asked not in ("", "evaluation") and row.answer]
    if question is None or not found:
        return None
    (row,) = found
    return statistic_of(question, row.answer, row.answer_stds, devices=row.participants, class_names=names)


def _sums_info(spec: SecureSpec | None, facts: SumFacts | None) -> SumsInfo | None:
    if spec is None or facts is None:
        return None
    return SumsInfo(roster_by=facts.roster_by, keys_in_folder=facts.keys_in_folder, min_devices=spec.min_devices)


def _wire_info(wire: WireSpec, *, noised: bool) -> WireInfo:
    """:param noised: whether updates contain noise of their own; then the step is relative to that noise."""
    step = wire.step if noised else wire.relative_step
    quantized = step if codec_of(wire.codec).uses_wire_step else None
    return WireInfo(codec=wire.codec, step=quantized, step_unit="noise" if noised else "rms")


def _column(table: dict[str, PrivacyRow], names: list[str], field: str) -> list[float | None]:
    return [getattr(table[name], field) if name in table else 0.0 for name in names]


def _assumption(spec: TaskSpec, store: AggregatorStore) -> str | None:
    """Returns the assumption of secure aggregation in words; None without secure aggregation, before the first sum, and
    if the run began with a membership list that only an earlier version reads."""
    data = store.get("roster")
    if spec.privacy.secure is None or data is None:
        return None
    try:
        membership_list = MembershipList.from_bytes(data)
    except Malformed:
        return None
    name = membership_list.name if membership_list.signature else None
    return assumption(spec.privacy.secure, devices=len(membership_list.devices), membership_list=name)


def _times(row: StoredRound) -> dict[str, str | None]:
    return {"opened_at": _utc(row.opened_at), "closed_at": None if row.closed_at is None else _utc(row.closed_at)}


def _utc(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
