"""The fields of the events that the coordinator and the fast engine both write (docs/result.md)."""

from __future__ import annotations

from typing import Any

from hushfleet.aggregator.ingest.checks import Verdict
from hushfleet.config.spec import TaskSpec
from hushfleet.methods import make_method
from hushfleet.methods.state import RoundTerms


def run_fields(spec: TaskSpec, *, engine: str, devices: int) -> dict[str, Any]:
    """Of `run`: what begins, or goes on."""
    method = make_method(spec.method, spec.method_config, spec.privacy, spec.model.layout, rounds=spec.rounds)
    return {
        "task": spec.task,
        "method": spec.method,
        "engine": engine,
        "unit": spec.privacy.unit,
        "devices": devices,
        "rounds": spec.rounds,
        "raw_values": list(method.cost(RoundTerms()).raw),
        "layers": [[layer.name, layer.size] for layer in spec.model.layout.layers],
    }


def update_fields(verdict: Verdict, *, device: str, round: int, payload_bytes: int) -> dict[str, Any]:
    """Of `update`: what became of one."""
    header = verdict.header
    return {
        "round": round,
        "device": device,
        "bytes": payload_bytes,
        "code": verdict.code,
        "reason": verdict.reason,
        "snr_db": verdict.snr_db,
        "clip_norms": None if header is None else list(header.clip_norms),
        "shared": list(verdict.counts),
        "epsilon_server": None if header is None else header.epsilon_server,
        "multiplier_server": None if header is None else header.multiplier_server,
    }
