"""`hushfleet-edge status`: what a board does, waits for and has spent; it reads the store beside a running client, too.

Nothing of it leaves the board: how right its own model is follows from its own images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hushfleet.config.schema import to_plain
from hushfleet.config.spec import SecureSpec, TaskSpec
from hushfleet.edge_client.board.certificate import certificate_words
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.notes import read_data_use, read_training
from hushfleet.edge_client.board.waiting import read_waiting
from hushfleet.edge_client.fleet.freshness import Freshness
from hushfleet.edge_client.fleet.installed import standing_of
from hushfleet.edge_client.owner_words import sentences
from hushfleet.edge_client.predict import own_accuracy
from hushfleet.edge_client.storage.roster_mark import RosterMark
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.storage.store_file import is_in_use
from hushfleet.errors import BadInput
from hushfleet.plain_json import to_json
from hushfleet.privacy.ledger import LedgerEntry, rounds_left
from hushfleet.privacy.protection import QUESTIONS, worth
from hushfleet.privacy.terms import TRUST, Trust
from hushfleet.secure.secure_round import assumption

MOST_ROUNDS = 1000
"""So many more rounds are counted."""


def status(config: DeviceConfig, store: DeviceStore) -> dict[str, Any]:
    """As `--json` prints it: standard JSON."""
    delta, ledger = config.limits.delta, store.ledger
    rounds = {entry.task: ledger.rounds_charged(entry.task) for entry in ledger.entries()}
    spec, use = _task(store), read_data_use(store.path.parent)
    trust, of_task, assumption = _trust(config, store, spec)
    head = store.own_head()
    model = own_accuracy(store, config.data)
    waiting, chosen = read_waiting(store.path.parent), store.accelerator()
    report: dict[str, Any] = {
        "device": config.device.id,
        "public_key": store.identity.public_key.hex(),
        "running": is_in_use(store.path),
        "waits_for": None if waiting is None else {"words": waiting.words, "since": waiting.since, "who": waiting.kind},
        "certificate": _certificate(config),
        "data": use and asdict(use),
        "data_kind": config.data.kind,
        "classes": [] if spec is None else list(spec.model.class_names),
        "training": read_training(store.path.parent),
        "releases": _releases(config),
        "accelerator": chosen and {"used": chosen.used, "words": chosen.failed or chosen.reason},
        "model": model and model._asdict(),
        "stopped_because": store.stopped_because,
        "epsilon_server": ledger.epsilon_server(delta=delta),
        "epsilon_limit": config.limits.epsilon_server,
        "rounds_left": _rounds_left(ledger.entries(), config),
        "task_rounds_left": None if spec is None else spec.rounds - _last_round(ledger.entries(spec.task)),
        "delta": delta,
        "unit": ledger.unit(),
        "trust": trust,
        "trust_words": of_task,
        "trust_allowed": TRUST[config.limits.accounting],
        "assumption": assumption,
        "raw_values": list(ledger.raw_values()),
        "epsilon_noised": ledger.epsilon_noised(delta=delta),
        "tasks": [
            {"task": task, "rounds": count, "epsilon_server": ledger.epsilon_server(delta=delta, task=task)}
            for task, count in rounds.items()
        ],
        "own_head": head and {"task": head.task, **to_plain(head.choice), "words": head.choice.words},
        "waiting": [{"task": task, "round": number} for task, number in store.waiting()],
    }
    return {name: to_json(value) for name, value in report.items()}


def told(report: dict[str, Any], *, details: bool = False) -> list[str]:
    """The same for people, a line each.

    :param details: what engineers and whoever answers for privacy ask besides.
    """
    lines = [f"device      {report['device']}   key {report['public_key']}"]
    lines += [f"{name:11} {words}" for name, words in sentences(report).items()]
    for words in filter(None, (report["certificate"], report["training"])):
        lines.append(f"attention   {words}")
    if (releases := report["releases"]) is not None and (details or releases["freeze"]):
        lines.append(f"{'attention' if releases['freeze'] else 'releases':11} {releases['words']}")
    if report["raw_values"]:
        raw, noised = ", ".join(report["raw_values"]), _figure(report["epsilon_noised"])
        lines.append(f"infinite    without noise have left: {raw}; the noised values alone: {noised}")
    if details:
        return lines + _details(report)
    return [*lines, "more        with --details"]


def _details(report: dict[str, Any]) -> list[str]:
    lines = []
    if (chosen := report["accelerator"]) is not None:
        lines.append(f"computes    on the {'GPU' if chosen['used'] == 'cuda' else 'processor'}: {chosen['words']}")
    against = "the sums that it is in" if report["trust"] == "secure-sum" else "this device's updates"
    lines.append(
        f"spent       epsilon_server {_figure(report['epsilon_server'])} of {_figure(report['epsilon_limit'])} at "
        f"delta {report['delta']:g}, per {report['unit']}, against whoever sees {against}"
    )
    lines.append(f"means       {worth(report['epsilon_server'], report['delta'], QUESTIONS[report['unit']])}")
    lines.append(f"trust       {report['trust_words']}; this device allows {report['trust_allowed']}")
    if report["assumption"] is not None:
        lines.append(f"sums        {report['assumption']}")
    for task in report["tasks"]:
        spent = _figure(task["epsilon_server"])
        lines.append(f"task        {task['task']}: {task['rounds']} rounds, epsilon_server {spent}")
    if (head := report["own_head"]) is not None:
        lines.append(f"own head    {head['task']}: {head['words']}; it never leaves the device")
    for each in report["waiting"]:
        lines.append(f"waiting     the update of round {each['round']} of {each['task']} is not acknowledged yet")
    return lines


def _rounds_left(entries: Sequence[LedgerEntry], config: DeviceConfig) -> int | None:
    """How many more rounds like the last fit into the owner's limit. None: there is no limit, or was no round."""
    limit, delta = config.limits.epsilon_server, config.limits.delta
    if not entries or math.isinf(limit):
        return None
    charges = [entry.charge for entry in entries]
    return rounds_left(charges, charges[-1], delta=delta, limit=limit, at_most=MOST_ROUNDS)


def _last_round(entries: Sequence[LedgerEntry]) -> int:
    return max((entry.round for entry in entries), default=0)


def _task(store: DeviceStore) -> TaskSpec | None:
    """The task that the device has trained in last."""
    package = store.blob(store.task_digest) if store.task_digest else None
    return None if package is None else TaskSpec.from_bytes(package)


def _certificate(config: DeviceConfig) -> str | None:
    """What a person should know about it. `run` stops where it names another device; this only says so."""
    try:
        return certificate_words(config)
    except BadInput as error:
        return str(error)


def _releases(config: DeviceConfig) -> dict[str, str] | None:
    """What it knows of the newest release. None: this board takes no releases."""
    if standing_of(config).slot == "none":
        return None
    freshness = Freshness(Path(config.device.state_dir))
    return {"newest": freshness.version, "freeze": freshness.freeze, "words": freshness.words()}


def _trust(config: DeviceConfig, store: DeviceStore, spec: TaskSpec | None) -> tuple[Trust | None, str, str | None]:
    """The trust model of the task `spec`, the same in words, and what sums rest on."""
    if spec is None:
        return None, "no task yet", None
    trust, secure = TRUST[spec.privacy.accounting], spec.privacy.secure
    if secure is None:
        return trust, f"{trust}, in {spec.task}", None
    words = (
        f"{trust}, in {spec.task}: sums of {secure.min_devices} devices or more, with the noise of "
        f"{secure.honest_devices} honest ones"
    )
    return trust, words, _assumption(config, store, secure)


def _assumption(config: DeviceConfig, store: DeviceStore, secure: SecureSpec) -> str:
    operator = config.roster_key
    if operator is None:
        return (
            "protected only as long as the aggregator follows the protocol: this device asks for no operator's "
            "signature under the list of boards (device.roster_key)"
        )
    newest = store.newest_roster(RosterMark.scope(config.device.federation, operator))
    if newest is None:
        return "no roster of the operator has come yet"
    return assumption(secure, devices=newest.devices, roster=newest.name)


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3f}"
