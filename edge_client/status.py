"""`hushfleet-edge status`: what a board does, waits for and has spent; it reads the store beside a running client, too.

Nothing of it leaves the board: how right its own model is follows from its own images.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hushfleet.config.schema import to_plain
from hushfleet.config.spec import SecureSpec, TaskSpec
from hushfleet.edge_client.board.certificate import certificate_words
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.notes import read_notes
from hushfleet.edge_client.board.waiting import read_waiting
from hushfleet.edge_client.fleet.freshness import Freshness
from hushfleet.edge_client.fleet.installed import standing_of
from hushfleet.edge_client.predict import own_accuracy
from hushfleet.edge_client.storage.roster_mark import RosterMark
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.storage.store_file import is_in_use
from hushfleet.errors import BadInput
from hushfleet.plain_json import to_json
from hushfleet.privacy.protection import QUESTIONS, worth
from hushfleet.privacy.terms import TRUST, Trust
from hushfleet.secure.secure_round import assumption


def status(config: DeviceConfig, store: DeviceStore) -> dict[str, Any]:
    """As `--json` prints it: standard JSON."""
    delta, ledger = config.limits.delta, store.ledger
    rounds = {entry.task: ledger.rounds_charged(entry.task) for entry in ledger.entries()}
    trust, of_task, assumption = _trust(config, store)
    head = store.own_head()
    model = own_accuracy(store, config.data)
    waiting, chosen = read_waiting(store.path.parent), store.accelerator()
    report: dict[str, Any] = {
        "device": config.device.id,
        "public_key": store.identity.public_key.hex(),
        "running": is_in_use(store.path),
        "waits_for": None if waiting is None else {"words": waiting.words, "since": waiting.since, "who": waiting.kind},
        "certificate": _certificate(config),
        "data": read_notes(store.path.parent),
        "releases": _releases(config),
        "accelerator": chosen and {"used": chosen.used, "words": chosen.failed or chosen.reason},
        "model": model and model._asdict(),
        "stopped_because": store.stopped_because,
        "epsilon_server": ledger.epsilon_server(delta=delta),
        "epsilon_limit": config.limits.epsilon_server,
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


def told(report: dict[str, Any]) -> list[str]:
    """The same for people, a line each."""
    lines = [f"device     {report['device']}   key {report['public_key']}", f"client     {_client(report)}"]
    if report["certificate"] is not None:
        lines.append(f"attention  {report['certificate']}")
    if (releases := report["releases"]) is not None:
        lines.append(f"{'attention' if releases['freeze'] else 'releases':10} {releases['words']}")
    lines += [f"attention  {words}; that stays here" for words in report["data"]]
    if report["stopped_because"] is not None:
        lines.append(f"stopped    {report['stopped_because']}")
    if (chosen := report["accelerator"]) is not None:
        lines.append(f"computes   on the {'GPU' if chosen['used'] == 'cuda' else 'processor'}: {chosen['words']}")
    if (model := report["model"]) is not None:
        lines.append(f"model      {_model(model)}")
    against = "the sums that it is in" if report["trust"] == "secure-sum" else "this device's updates"
    lines.append(
        f"spent      epsilon_server {_figure(report['epsilon_server'])} of {_figure(report['epsilon_limit'])} at delta "
        f"{report['delta']:g}, per {report['unit']}, against whoever sees {against}"
    )
    lines.append(f"means      {worth(report['epsilon_server'], report['delta'], QUESTIONS[report['unit']])}")
    lines.append(f"trust      {report['trust_words']}; this device allows {report['trust_allowed']}")
    if report["assumption"] is not None:
        lines.append(f"sums       {report['assumption']}")
    if report["raw_values"]:
        raw, noised = ", ".join(report["raw_values"]), _figure(report["epsilon_noised"])
        lines.append(f"infinite   without noise have left: {raw}; the noised values alone: {noised}")
    for task in report["tasks"]:
        spent = _figure(task["epsilon_server"])
        lines.append(f"task       {task['task']}: {task['rounds']} rounds, epsilon_server {spent}")
    if (head := report["own_head"]) is not None:
        lines.append(f"own head   {head['task']}: {head['words']}; it never leaves the device")
    for each in report["waiting"]:
        lines.append(f"waiting    the update of round {each['round']} of {each['task']} is not acknowledged yet")
    return lines


def _client(report: dict[str, Any]) -> str:
    if not report["running"]:
        return "does not run; start it: systemctl start hushfleet-client"
    waits = report["waits_for"]
    if waits is None:
        return "runs"
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(waits["since"]))
    what = waits["words"] if waits["who"] == "nothing" else f"waiting for {waits['words']}"
    return f"{what}, since {since}"


def _model(model: dict[str, Any]) -> str:
    which = model["model"] if model["model"] in ("global", "personalised") else "own"
    right = "" if model["images"] is None else f": right on {model['right']} of {model['images']} {model['which']}"
    return f"{which} model of {model['task']}{right}; that stays here"


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


def _trust(config: DeviceConfig, store: DeviceStore) -> tuple[Trust | None, str, str | None]:
    """The trust model of the task that the device has trained in last, the same in words, and what sums rest on."""
    package = store.blob(store.task_digest) if store.task_digest else None
    if package is None:
        return None, "no task yet", None
    spec = TaskSpec.from_bytes(package)
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
