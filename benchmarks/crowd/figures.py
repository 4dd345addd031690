"""The figures of a live run, from the aggregator's event log, the devices' diaries and the kernel's accounts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.crowd.run import Live
from hushfleet.aggregator.observe.events import iterate_events
from hushfleet.simulator.run_folder import Simulation


@dataclass(frozen=True)
class RoundTimes:
    """Of one round, in seconds since it was opened at the aggregator.

    :param plan_out_s: the last device had the plan; likewise the others, each for the slowest device.
    :param acks_s: when each update was accepted, rising.
    :param payload_bytes: of all accepted updates.
    """

    round: int
    plan_out_s: float
    model_out_s: float
    trained_s: float
    acked_s: float
    closed_s: float
    acks_s: tuple[float, ...]
    payload_bytes: int

    @property
    def updates_s(self) -> float:
        """Updates a second, from the first one accepted to the last."""
        span = self.acks_s[-1] - self.acks_s[0]
        return (len(self.acks_s) - 1) / span if span else 0.0


@dataclass(frozen=True)
class Figures:
    """:param latencies_s: of each update, from its commit on the device (the offer leaves next) to its ack there.
    :param messages: MQTT PUBLISH packets that devices sent and received, by direction and kind.
    :param traffic_bytes: of the same packets.
    :param usages: of each process; `cpu_ms_per_update` is of the rounds only, without what starting takes.
    """

    devices: int
    present_s: float
    wall_s: float
    rounds: tuple[RoundTimes, ...]
    latencies_s: np.ndarray
    messages: dict[str, int]
    traffic_bytes: dict[str, int]
    duplicates: int
    usages: dict[str, dict[str, float]]

    def to_json(self) -> dict[str, Any]:
        """Every figure, with the acks of each round for whoever wants to draw them again."""
        span = self.wall_s
        return {
            "devices": self.devices,
            "present_s": self.present_s,
            "wall_s": span,
            "updates_per_s": self.updates_per_s,
            "messages_per_s": sum(self.messages.values()) / span,
            "mb_per_s": 1e-6 * sum(self.traffic_bytes.values()) / span,
            "traffic_bytes": self.traffic_bytes,
            "messages": self.messages,
            "duplicates": self.duplicates,
            "latency_s": {f"p{q}": float(np.quantile(self.latencies_s, q / 100)) for q in (50, 95, 99)}
            | {"longest": float(self.latencies_s.max())},
            "usage": self.usages,
            "rounds": [
                {
                    "round": each.round,
                    "plan_out_s": each.plan_out_s,
                    "model_out_s": each.model_out_s,
                    "trained_s": each.trained_s,
                    "acked_s": each.acked_s,
                    "closed_s": each.closed_s,
                    "updates_per_s": each.updates_s,
                    "payload_bytes": each.payload_bytes,
                    "acks_s": [round(at, 3) for at in each.acks_s],
                }
                for each in self.rounds
            ],
        }

    @property
    def updates_per_s(self) -> float:
        """Over whole rounds, opening to closing; the median."""
        return median(len(each.acks_s) / each.closed_s for each in self.rounds)


def figures_of(simulation: Simulation, live: Live) -> Figures:
    """Raises KeyError for a run that did not end well: audit it first."""
    notes, messages, traffic_bytes, imports_mib, shares = _diaries(live.diaries)
    opened: dict[int, float] = {}
    closed: dict[int, float] = {}
    acks: dict[int, list[float]] = {}
    payloads: Counter[int] = Counter()
    duplicates, present, present_at = 0, set[str](), live.began_at
    names = {device.name for device in simulation.fleet.devices}
    for event in iterate_events(simulation.folder.events):
        kind, number, at = event["event"], event.get("round", 0), event["at"]
        if kind == "presence" and event["state"] == "ready" and not names <= present:
            present.add(event["device"])
            present_at = at
        elif kind == "round_open":
            opened.setdefault(number, at)
        elif kind == "round_close":
            closed.setdefault(number, at)
        elif kind == "update" and event["code"] == "accepted":
            acks.setdefault(number, []).append(at)
            payloads[number] += event["bytes"]
        elif kind == "update":
            duplicates += event["code"] == "duplicate"
    rounds = tuple(
        RoundTimes(
            number,
            *(max(note[name] for note in notes[number]) - opened[number] for name in _PHASES),
            closed[number] - opened[number],
            tuple(sorted(at - opened[number] for at in acks[number])),
            payloads[number],
        )
        for number in sorted(closed)
    )
    first, last = opened[1], max(closed.values())
    usages = {}
    for name, usage in live.usages.items():
        devices = shares.get(name, len(names))
        in_rounds_s = usage.at(last).cpu_s - usage.at(first).cpu_s
        usages[name] = {
            "cpu_s": usage.cpu_s,
            "cpu_ms_per_update": 1e3 * in_rounds_s / devices / len(rounds),
            "peak_mib": usage.peak_mib,
            "after_first_round_mib": usage.at(closed[1]).resident_mib,
            "after_last_round_mib": usage.at(last).resident_mib,
        }
        if name in shares:
            usages[name] |= {
                "imports_mib": imports_mib[name],
                "mib_per_device": (usage.peak_mib - imports_mib[name]) / devices,
            }
    latencies = [note["acked_at"] - note["trained_at"] for each in notes.values() for note in each]
    return Figures(
        devices=len(names),
        present_s=present_at - live.began_at,
        wall_s=last - first,
        rounds=rounds,
        latencies_s=np.array(latencies),
        messages=dict(messages),
        traffic_bytes=dict(traffic_bytes),
        duplicates=duplicates,
        usages=usages,
    )


_PHASES = ("plan_at", "model_at", "trained_at", "acked_at")


def _diaries(
    paths: Sequence[Path],
) -> tuple[dict[int, list[dict[str, float]]], Counter[str], Counter[str], dict[str, float], dict[str, int]]:
    """Round -> its devices' notes; messages and their bytes by kind; MiB after imports and devices of each process."""
    notes: dict[int, list[dict[str, float]]] = {}
    messages, traffic = Counter[str](), Counter[str]()
    imports, shares = dict[str, float](), dict[str, int]()
    for number, path in enumerate(paths):
        for line in map(json.loads, path.read_text().splitlines()):
            if "round" in line:
                notes.setdefault(line["round"], []).append(line)
            elif "devices" in line:
                imports[f"generator {number}"] = line["imports_mib"]
                shares[f"generator {number}"] = line["devices"]
            else:
                messages.update(line["messages"])
                traffic.update(line["bytes"])
    return notes, messages, traffic, imports, shares
