"""Builds the fields of the events that the coordinator and the fast engine both write (docs/result.md)."""

from __future__ import annotations

from typing import Any

from hushfleet.aggregator.payloads.checked_update import CheckedUpdate
from hushfleet.aggregator.results.metrics import snr_db
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.losses import ACCURACY
from hushfleet.methods import method_of, title_of
from hushfleet.methods.cost import RoundTerms
from hushfleet.privacy.terms import AS_PUBLISHED
from hushfleet.wire.format.spec import TaskSpec


def run_fields(spec: TaskSpec, *, engine: str, devices: int) -> dict[str, Any]:
    """Returns the fields of `run`: a run begins, or continues."""
    method = method_of(spec)
    return {
        "task": spec.task,
        "method": title_of(spec.method),
        "engine": engine,
        "unit": spec.privacy.unit,
        "accounting": spec.privacy.accounting,
        **({"note": AS_PUBLISHED} if spec.privacy.accounting == "as-published" else {}),
        "delta": spec.privacy.delta,
        "accountant": spec.privacy.accountant,
        "devices": devices,
        "rounds": spec.rounds,
        **({"continues": spec.continues.task} if spec.continues else {}),
        **({"measure": measure} if (measure := spec.model.targets.measure) != ACCURACY else {}),
        "raw_values": list(method.cost(RoundTerms()).raw),
        "layers": [[layer.name, layer.size] for layer in spec.model.layout.layers],
    }


def open_fields(engine: RoundEngine) -> dict[str, Any]:
    """Returns the fields of `round_open`: the cohort, or only its size if the plan names no devices."""
    plan = engine.announcement
    if plan.cohort:
        return {"round": plan.round, "cohort": sorted(plan.cohort)}
    size = engine.prepared.task.round.buffer_size
    return {"round": plan.round, "cohort_size": len(engine.cohort)} | ({"buffer_size": size} if size else {})


def change_fields(engine: RoundEngine) -> dict[str, Any]:
    """Returns the fields of `unmask` and `round_extended`: an open round continues with another plan."""
    return {"round": engine.announcement.round, "accepted": engine.accepted}


def finished_fields(engine: RoundEngine) -> dict[str, Any]:
    """Returns the fields of `finished`: the reason, if it is before the last round."""
    if engine.closed_rounds >= engine.spec.rounds:
        return {}
    if engine.progress.ended:
        return {"reason": engine.progress.ended}
    patience = engine.prepared.task.round.patience
    return {"reason": f"for {patience} rounds the accuracy on the common test set was not above its best (patience)"}


def update_fields(update: CheckedUpdate, *, round: int, payload_bytes: int) -> dict[str, Any]:
    """Returns the fields of `update` or `answer`, with the result of its checks.

    :param round: the round that it was made for; the event names the round whose sum contains it.
    """
    fields = {"round": round, "device": update.device, "bytes": payload_bytes, "code": update.code}
    fields["reason"] = update.reason
    if update.kind == "answer":
        return fields
    if update.staleness:
        fields |= {"round": round + update.staleness, "staleness": update.staleness}
    header, is_new = update.header if update.acknowledged else None, update.code == "accepted"
    return fields | {
        "snr_db": snr_db([update.row]) if is_new and update.row is not None else None,
        "clip_norms": None if header is None else list(header.clip_norms),
        "shared": list(update.counts) if is_new else [],
        "epsilon_server": None if header is None else header.epsilon_server,
        "multiplier_server": None if header is None else header.multiplier_server,
    }
