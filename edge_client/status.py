"""`hushfleet-edge status`: shows what a board does, waits for and has spent, also while the client runs.

Nothing of it leaves the board, because the accuracy of its personalized model depends on its own images.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hushfleet.data.form import FOLDERS
from hushfleet.durations import describe_duration
from hushfleet.edge_client.board.certificate import describe_certificate
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.drift import HeldOutTest, describe_drift, read_tests
from hushfleet.edge_client.board.notes import read_data_use, read_training, read_waiting
from hushfleet.edge_client.board.state_place import volatile_place
from hushfleet.edge_client.fleet.installed import standing_of
from hushfleet.edge_client.fleet.newest import Freshness
from hushfleet.edge_client.fleet.second_place import SecondPlace
from hushfleet.edge_client.storage.kept import MembershipListMark
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.storage.store_file import is_in_use
from hushfleet.edge_client.worker.own_accuracy import own_accuracy
from hushfleet.errors import BadInput
from hushfleet.methods import method_of
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.question import rules_of
from hushfleet.plain_json import to_json
from hushfleet.privacy.budget import Budget
from hushfleet.privacy.charge import Charge
from hushfleet.privacy.ledger import LedgerEntry, epsilon_server_of
from hushfleet.privacy.protection import QUESTIONS, protection, worth
from hushfleet.privacy.spending import charges_on, describe_period, describe_since, rounds_that_fit, windows_of
from hushfleet.privacy.terms import TRUST, TrustModel
from hushfleet.schema import to_plain
from hushfleet.secure.secure_round import assumption
from hushfleet.wire.format.spec import SecureSpec, TaskSpec

MOST_ROUNDS = 1000
"""The count of the rounds that are left stops at this number."""
SHOWN_CLASSES = 6
DELETING = (
    "takes a photograph or sample out of the next round. It gives no epsilon back, and models that it has trained stay "
    "as they are; its digest stays, so that it keeps its window if it comes back"
)
WELL = ("round", "nothing")
"""Kinds of `board.notes.Waiting` in which nothing is wrong."""


def status(config: DeviceConfig, store: DeviceStore) -> dict[str, Any]:
    """Returns the report in the form that `--json` prints: standard JSON."""
    delta, ledger = config.limits.delta, store.ledger
    rounds = {entry.task: ledger.rounds_charged(entry.task) for entry in ledger.entries()}
    spec, use = _task(store), read_data_use(store.path.parent)
    trust, of_task, assumption = _trust(config, store, spec)
    head = store.personalized_head()
    model = own_accuracy(store, config.data)
    waiting, chosen = read_waiting(store.path.parent), store.accelerator()
    report: dict[str, Any] = {
        "device": config.device.id,
        "public_key": store.identity.public_key.hex(),
        "running": is_in_use(store.path),
        "waits_for": None if waiting is None else {"words": waiting.words, "since": waiting.since, "who": waiting.kind},
        "certificate": _certificate(config),
        "second_place": None if config.fleet is None else SecondPlace(config.fleet, store, now=0.0).problem(),
        "state_place": volatile_place(config).words or None,
        "data": use and asdict(use),
        "data_kind": config.data.kind,
        "classes": [] if spec is None else list(spec.model.class_names),
        "training": read_training(store.path.parent),
        "releases": _releases(config),
        "accelerator": chosen and {"used": chosen.used, "words": chosen.failed or chosen.reason},
        "model": model and model._asdict(),
        "awaited": store.awaited,
        "held_out": [asdict(test) for test in read_tests(store.path.parent)],
        "stopped_because": store.stopped_because,
        "epsilon_server": ledger.epsilon_server(delta=delta),
        "epsilon_limit": config.limits.budget.lifetime,
        "since": next((entry.at for entry in ledger.entries()), 0),
        "period": _period(store, config.limits.budget),
        "rounds_left": _rounds_left(store, config.limits.budget, spec),
        "task_rounds_left": None if spec is None else spec.rounds - _last_round(ledger.entries(spec.task)),
        "delta": delta,
        "unit": ledger.unit(),
        "trust": trust,
        "trust_words": of_task,
        "trust_allowed": TRUST[config.limits.accounting],
        "assumption": assumption,
        "raw_values": list(ledger.raw_values()),
        "epsilon_noised": ledger.epsilon_noised(delta=delta),
        "windows": _windows(ledger.entries(), delta),
        "tasks": [
            {"task": task, "rounds": count, "epsilon_server": ledger.epsilon_server(delta=delta, task=task)}
            for task, count in rounds.items()
        ],
        "own_head": head
        and head.choice
        and {"task": head.task, "round": head.round, **to_plain(head.choice), "words": head.choice.text},
        "waiting": [{"task": task, "round": number} for task, number in store.waiting()],
    }
    return {name: to_json(value) for name, value in report.items()}


def format_status(report: dict[str, Any], *, details: bool = False) -> list[str]:
    """Returns the report for people, line by line.

    :param details: adds what engineers and the people responsible for privacy need.
    """
    lines = [f"device      {report['device']}   key {report['public_key']}"]
    lines += [f"{name:11} {words}" for name, words in sentences(report).items()]
    for words in filter(None, (report[name] for name in ("state_place", "second_place", "certificate", "training"))):
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
    if report["windows"]:
        lines.append(f"windows     {_describe_windows(report)}")
    lines.append(f"deleting    {DELETING}")
    for task in report["tasks"]:
        spent = _figure(task["epsilon_server"])
        lines.append(f"task        {task['task']}: {task['rounds']} rounds, epsilon_server {spent}")
    if (head := report["own_head"]) is not None:
        lines.append(f"personalized head    {head['task']}: {head['words']}; it never leaves the device")
    for each in report["waiting"]:
        lines.append(f"waiting     the update of round {each['round']} of {each['task']} is not acknowledged yet")
    return lines


def _counted(store: DeviceStore) -> tuple[int, bool, int]:
    """Returns the counted time, whether its lag is known, and the seconds in which a client spends nothing."""
    counted = store.ledger.counted()
    if counted is None:
        return int(time.time()), True, 0
    return counted.now, counted.lag is not None, max(0, counted.waits_until - counted.now)


def _period(store: DeviceStore, budget: Budget) -> dict[str, Any] | None:
    """Returns how much of the present period's limit is spent; None if the owner has set no period."""
    if not budget.period_s:
        return None
    ledger, (now, sure, waits_s) = store.ledger, _counted(store)
    spent = epsilon_server_of(budget.charged_in_period(ledger, now, sure=sure), delta=budget.delta)
    left_s = budget.free_at(ledger, now, sure=sure) - now
    return {
        "epsilon": spent,
        "limit": budget.in_period,
        "seconds": budget.period_s,
        "left_s": left_s,
        "waits_s": waits_s,
        "words": describe_period(spent, budget, left_s=left_s, sure=sure),
    }


def _windows(entries: Sequence[LedgerEntry], delta: float) -> list[dict[str, Any]]:
    """Returns, for each window of data that was trained on, what was spent on people who appear in that window only."""
    return [
        {
            "start": window.start,
            "stop": window.stop,
            "rounds": sum(entry.window == window for entry in entries),
            "epsilon_server": epsilon_server_of(charges_on(window, entries), delta=delta),
        }
        for window in windows_of(entries)
    ]


def _rounds_left(store: DeviceStore, budget: Budget, spec: TaskSpec | None) -> int | None:
    """Returns how many of the task's next rounds fit into the owner's limits, in this period and in total; after the
    task, how many more rounds like its last one.

    Returns None if there is no limit, or no round yet.

    :param spec: the present task. Its last training round gives the charge of others; questions have their own. Before
        its first training round, the last round of all tasks gives it.
    """
    entries = store.ledger.entries()
    if not entries:
        return None
    trained = [
        entry for entry in entries if spec is not None and entry.task == spec.task and not spec.asks(entry.round)
    ]
    limits = [(store.ledger.totals().charges, budget.lifetime)]
    if budget.period_s:
        now, sure, _ = _counted(store)
        limits.append((budget.charged_in_period(store.ledger, now, sure=sure), budget.in_period))
    last, delta = (trained or entries)[-1].charge, budget.delta
    following = [last] * MOST_ROUNDS
    if spec is not None and (numbers := range(_last_round(store.ledger.entries(spec.task)) + 1, spec.rounds + 1)):
        following = [_question_charge(spec, each) if spec.asks(each) else last for each in numbers]
    counts = [
        rounds_that_fit(charges, following, delta=delta, limit=limit)
        for charges, limit in limits
        if not math.isinf(limit)
    ]
    return min(counts, default=None)


def _question_charge(spec: TaskSpec, round: int) -> Charge:
    method = rules_of(spec, method_of(spec), round).method
    return method.charge(RoundTerms(spec.privacy.noise_split))


def _last_round(entries: Sequence[LedgerEntry]) -> int:
    return max((entry.round for entry in entries), default=0)


def _task(store: DeviceStore) -> TaskSpec | None:
    """Returns the task that the device has trained in last."""
    package = store.blob(store.task_digest) if store.task_digest else None
    return None if package is None else TaskSpec.from_bytes(package)


def _certificate(config: DeviceConfig) -> str | None:
    """Describes a problem of the certificate. `run` stops if it names another device; this only reports it."""
    try:
        return describe_certificate(config)
    except BadInput as error:
        return str(error)


def _releases(config: DeviceConfig) -> dict[str, str] | None:
    """Returns what the board knows about the newest release; None if it takes no releases."""
    if standing_of(config).slot == "none":
        return None
    freshness = Freshness(Path(config.device.state_dir))
    return {"newest": freshness.version, "freeze": freshness.freeze, "words": freshness.describe()}


def _trust(
    config: DeviceConfig, store: DeviceStore, spec: TaskSpec | None
) -> tuple[TrustModel | None, str, str | None]:
    """Returns the trust model of the task `spec`, its description, and the assumption of its sums."""
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
    newest = store.newest_membership_list(MembershipListMark.scope(config.device.federation, operator))
    if newest is None:
        return "no membership list of the operator has come yet"
    return assumption(secure, devices=newest.devices, membership_list=newest.name)


def _describe_windows(report: dict[str, Any]) -> str:
    dearest = max(report["windows"], key=lambda window: float(window["epsilon_server"]))
    day, stop = (time.strftime("%Y-%m-%d", time.gmtime(dearest[name])) for name in ("start", "stop"))
    return (
        f"samples of {len(report['windows'])} windows of time have been trained on. Whoever appears in the samples of "
        f"one window alone has spent epsilon_server {_figure(dearest['epsilon_server'])} at most ({day} to {stop}); "
        f"whoever appears in all of them, {_figure(report['epsilon_server'])}"
    )


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3f}"


_PAYS = "Whether the fleet pays on average is told where it is run: hushfleet fleet status"


def sentences(report: dict[str, Any]) -> dict[str, str]:
    """Answers the four questions of the board's owner, by name.

    `client`, `photographs` (or `samples`), `model` and `privacy`: is the board well; how many of its photographs are
    used; is the fleet's model better here than its own; how much privacy is left, and for how many rounds.
    """
    what = "photographs" if report["data_kind"] == "folder" else "samples"
    drift = describe_drift([HeldOutTest(**test) for test in report["held_out"]])
    return {
        "client": client(report),
        what: data(report, what),
        "model": f"{model(report['model'], what, report.get('awaited', ''))}{drift and f'. {drift}'}. {_PAYS}",
        "privacy": privacy(report),
    }


def client(report: dict[str, Any]) -> str:
    if report["stopped_because"] is not None:
        return f"has stopped for good: {report['stopped_because']}"
    if not report["running"]:
        return "does not run; start it: systemctl start hushfleet-client"
    waits = report["waits_for"]
    if waits is None:
        return "runs"
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(waits["since"]))
    words = waits["words"] if waits["who"] == "nothing" else f"waiting for {waits['words']}"
    return f"{'well, ' if waits['who'] in WELL else ''}{words}, since {since}"


def data(report: dict[str, Any], what: str) -> str:
    use = report["data"]
    if use is None and report.get("tasks"):
        return f"not counted: no round so far has left a count of {what}; a simulated one leaves none"
    if use is None:
        return f"not counted yet: {what} are counted in the first round of a task"
    kept = f"{use['held_out']} are kept for evaluations, " if use.get("held_out") else ""
    text = f"{use['used']} {what} are used, {kept}{use['left_out'] or 'none'} left out"
    if use.get("other_windows"):
        text += f", {use['other_windows']} came in another window of time than the task's"
    if not use["used"]:
        text = f"none of its {use['left_out']} {what} can be used" if use["left_out"] else f"there are no {what}"
        text += ", and it takes part with noise alone" * use["noise_alone"]
    if not use["why"]:
        return text
    return f"{text} ({use['why']}). {_cure(report)} These figures stay here"


def _cure(report: dict[str, Any]) -> str:
    names = report["classes"]
    if report["data_kind"] not in FOLDERS:
        return "Correct the file that data.path names."
    shown = ", ".join(names[:SHOWN_CLASSES]) + (" and so on" if len(names) > SHOWN_CLASSES else "")
    return f"Put each into the sub-folder of data.path with the name of its class ({shown}), or replace it."


def describe_model(kind: str) -> str:
    """Names a model.

    :param kind: as in `PersonalizedModel`.
    """
    known = {"global": "the fleet's model", "personalised": "the board's personalized model"}
    return known.get(kind) or (kind if kind in known.values() else f"the board's personalized head ({kind})")


def model(found: dict[str, Any] | None, what: str, awaited: str = "") -> str:
    """Says which model answers, why no newer one does, and how right it is."""
    if found is None:
        return f"none yet: {awaited or 'it comes with the first round'}"
    name = f"{describe_model(found['model'])}, of {found['task']}"
    if found.get("round"):
        name += f", round {found['round']}"
    if awaited:
        name += f"; {awaited}"
    if found["right"] is None and found.get("why"):
        return f"{name}. How right it is cannot be measured: {found['why']}"
    if found["right"] is None:
        return (
            f"{name}. Whether the fleet's is better here than the board's own is not measured: put "
            f"{what} that are never to be trained on into a place of their own, and name it in data.held_out"
        )
    fleet, own = found["fleet_right"], found["alone_right"]
    whose = "one that was trained on this board alone"
    if own is None and found["model"] != "global":
        own, whose = found["right"], "the board's own"
    text = f"{name}: right on {found['right']} of {found['images']} {found['which']}"
    if fleet is None or own is None:
        return f"{text}; that stays here"
    verdict = "better here than" if fleet > own else "worse here than" if fleet < own else "as good here as"
    return f"{text}. The fleet's is {verdict} {whose}: {fleet} against {own}; that stays here"


def privacy(report: dict[str, Any]) -> str:
    text, waits_s = _spending(report), (report.get("period") or {}).get("waits_s")
    if not waits_s:
        return text
    return (
        f"{text}. It may have been off for long: after a start it spends nothing until it hears from its fleet what "
        f"time it is, or for another {describe_duration(waits_s)}"
    )


def _spending(report: dict[str, Any]) -> str:
    spent, limit, rounds = report["epsilon_server"], report["epsilon_limit"], report["rounds_left"]
    if isinstance(spent, str):
        return "no limit holds any more: values without noise have left this board"
    of_limit = f"{spent:.3g}" if isinstance(limit, str) else f"{spent:.3g} of {limit:.3g}"
    text = f"{of_limit} is spent (epsilon; {protection(spent)})"
    if (period := report.get("period")) is not None:
        text = f"{period['words']}; {of_limit} in all{describe_since(report['since'])} (epsilon; {protection(spent)})"
    elif isinstance(limit, str):
        return f"{text}, and its owner has set no limit"
    if rounds is None:
        return f"{text}; for how many rounds the rest is enough shows after the first one"
    task = report["task_rounds_left"]
    of_task = "" if task is None else f"; this task has {task} more" if task else "; this task is over"
    if not rounds:
        return f"{text}; the rest is not enough for another round{of_task}"
    if task and rounds >= task:
        come = f"all {task} rounds" if task > 1 else "the round"
        return f"{text}; the rest is enough for {come} that this task has to come"
    like = "" if task else " like the last"
    return f"{text}; the rest is enough for {rounds} more round{'s' * (rounds > 1)}{like}{of_task}"
