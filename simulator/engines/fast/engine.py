"""Runs the fast engine: the same fleet without a network and without a process per device.

Devices are `Trainer` and the server is `RoundEngine`: method, codec, ledger and round are the field's own code. Only
MQTT and the waiting are left out. With the same seed, the run ends with the same global model as in the live engine.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.aggregator.results.events import EventLog
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.rounds.round_events import finished_fields, open_fields, run_fields, update_fields
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.learning.evaluation import evaluate
from hushfleet.models.cuda import sees_cuda
from hushfleet.progress import doing
from hushfleet.simulator.engines.fast.jobs import Job, JobAnswer, train
from hushfleet.simulator.engines.fast.loaded_run import loaded_run
from hushfleet.simulator.engines.fast.runtimes import NATIVE, VMAP
from hushfleet.simulator.engines.fast.sums import write_membership_list
from hushfleet.simulator.engines.fast.uncoded import UncodedUpdates
from hushfleet.simulator.engines.fast.workers import WorkerPool
from hushfleet.simulator.run_folder import Simulation
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.update_values import SIGNED

ALL_SPENT = "too few devices have privacy budget left for another round"


def run_logged(simulation: Simulation, workers: WorkerPool, *, runtime: str = "onnx", evaluate_every: int = 1) -> None:
    """Runs the rounds as `run_rounds` does, and writes their events into the run folder."""
    with EventLog(simulation.folder.events) as events:
        run_rounds(simulation, workers, events, runtime=runtime, evaluate_every=evaluate_every)


def run_rounds(
    simulation: Simulation,
    workers: WorkerPool,
    events: EventLog,
    *,
    runtime: str = "onnx",
    evaluate_every: int = 1,
    evaluate_last: int = 1,
    on_opened: Callable[[RoundPlan], None] = lambda plan: None,
    on_closed: Callable[[int], None] = lambda round: None,
) -> None:
    """Runs the task's rounds to the end; continues an interrupted run.

    If a device declines a round, the fleet continues. The run ends when so many devices have spent their privacy
    budgets that no round can close any more. Raises `HushfleetError` if too many decline for another reason, or if no
    device has the budget for the first round.

    :param evaluate_every: interval in rounds at which personalized models are tested; the last `evaluate_last` always
        are.
    :param on_opened: called with each round's plan, before any device trains.
    :param on_closed: called after each round, before any device trains again; first with the last round of an earlier
        part of the run, or 0.
    """
    if not simulation.task.round.has_cohort:
        raise BadInput(
            'round.mode = "buffered" is about who comes when, and the fast engine has no time: give the devices boards '
            "(--boards, with the virtual clock), or take --engine live"
        )
    names = [device.name for device in simulation.fleet.devices]
    rounds = doing("rounds", total=simulation.prepared.spec.rounds)
    with rounds as work, AggregatorStore(simulation.folder.aggregator, durable=False) as store:
        engine = open_engine(simulation, store, tested_by(simulation, runtime))
        membership_list = write_membership_list(simulation, store) if engine.spec.privacy.secure else None
        events.write("run", **run_fields(simulation.prepared.spec, engine="fast", devices=len(names)))
        for device in simulation.fleet.devices:
            events.write("presence", device=device.name, state="ready", board=device.board)
        least = simulation.task.round.min_updates
        spent = too_few_can_pay(store, names, least=least)
        work.done = store.last_closed_round
        on_closed(store.last_closed_round)
        while not engine.finished and not spent:
            plan = engine.plan or engine.open_round(names, membership_list=membership_list)
            cohort = sorted(engine.cohort)
            on_opened(plan)
            events.write("round_open", **open_fields(engine))
            last = engine.spec.last_training_round
            evaluate = plan.round > last - evaluate_last or plan.round % evaluate_every == 0
            for answer in train_cohort(simulation, workers, plan, cohort, runtime=runtime, evaluate=evaluate):
                deliver(answer, engine, plan, events)
            check_participation(engine, plan, least=least)
            summary = engine.close()
            work.count()
            events.write("round_close", **summary.to_dict())
            on_closed(plan.round)
            spent = summary.participants == 0 and too_few_can_pay(store, names, least=least)
    close_engine(simulation)
    events.write("finished", **({"reason": ALL_SPENT} if spent else finished_fields(engine)))


def open_engine(simulation: Simulation, store: AggregatorStore, prepared: PreparedTask | None = None) -> RoundEngine:
    """Opens the aggregator's engine for updates without encoding and signature; updates of secure aggregation are
    encoded.

    Raises `BadInput` for a run whose devices have a database: the live engine, or an earlier version, started it.

    :param prepared: used instead of the simulation's own.
    """
    if any(simulation.folder.device(each.name).store.exists() for each in simulation.fleet.devices):
        raise BadInput(
            f"the run in {simulation.folder.path} was begun by --engine live or by an earlier version; go on with it "
            "there, or choose another --out"
        )
    simulation.folder.updates.mkdir(exist_ok=True)
    secure = simulation.prepared.spec.privacy.secure is not None
    update_format = SIGNED if secure else UncodedUpdates(simulation.folder.updates)
    return RoundEngine(store, prepared or simulation.prepared, masked=False, update_format=update_format)


def close_engine(simulation: Simulation) -> None:
    """Removes the files with update values: they may be as large as a cohort of models."""
    shutil.rmtree(simulation.folder.updates, ignore_errors=True)


def tested_by(simulation: Simulation, runtime: str) -> PreparedTask:
    """Returns the task with the runtime's own inference for tests of global models, if the runtime has one.

    ONNX Runtime takes two to three times as long as compiled kernels, and longer than a large network's round on CUDA.
    """
    prepared, own = simulation.prepared, runtime == NATIVE or (runtime == VMAP and sees_cuda())
    if prepared.evaluate_global is None or not own:
        return prepared
    run = loaded_run(simulation.folder.path.absolute(), runtime)
    return replace(prepared, evaluate_global=lambda params: evaluate(run.inference, params, run.common_test))


def check_participation(engine: RoundEngine, plan: RoundPlan, *, least: int = 1) -> None:
    """Raises `HushfleetError` if fewer than `least` of the cohort take part in an open round, unless spent budgets are
    the reason: then a run past its first round ends by itself."""
    why = [
        (code, reason)
        for _, _, code, reason in engine.store.declines(plan.round)
        if code != "budget" or plan.round == 1
    ]
    if engine.accepted < least and why:
        code, reason = why[0]
        few = f"{engine.accepted} of {len(engine.cohort)} devices take part, and round.min_updates = {least}"
        who = few if engine.accepted else "no device takes part"
        key = ", which is privacy.budget in a simulation" * (code == "budget")
        raise HushfleetError(f"round {plan.round}: {who} ({code}), since {reason}{key}")


def too_few_can_pay(store: AggregatorStore, devices: Collection[str], *, least: int) -> bool:
    """Returns whether privacy budgets leave fewer than `least` devices, by the last answer of each device."""
    refused = {device: round for round, device, code, _ in store.declines() if code == "budget"}
    sent = {charge.device: charge.round for charge in store.charges()} if refused else {}
    spent = sum(refused.get(device, 0) > sent.get(device, 0) for device in devices)
    return len(devices) - spent < least


def deliver(answer: JobAnswer, engine: RoundEngine, plan: RoundPlan, events: EventLog) -> None:
    """Passes an answer to the aggregator, without a network. Raises `HushfleetError` if an update is refused."""
    data = answer.update
    engine.store.add_device(answer.device, public_key=answer.public_key, board="")
    if answer.refusal is not None:
        code, reason = answer.refusal
        engine.decline(answer.device, code, reason, round=plan.round)
        events.write("decline", round=plan.round, device=answer.device, code=code, reason=reason)
        return
    update = engine.accept(answer.device, data)
    if not update.acknowledged:
        raise HushfleetError(
            f"round {plan.round}: the update of {answer.device} was refused ({update.code}), since {update.reason}"
        )
    sent_bytes = engine.checks.update_format.sent_bytes(data)
    events.write("update", **update_fields(update, round=plan.round, payload_bytes=sent_bytes))


def train_cohort(
    simulation: Simulation,
    workers: WorkerPool,
    plan: RoundPlan,
    devices: Collection[str],
    *,
    runtime: str = "onnx",
    evaluate: bool = True,
) -> Iterator[JobAnswer]:
    """Trains `devices` of the plan's cohort; yields their answers in the fleet's order.

    :param evaluate: whether the devices' personalized models are tested afterwards.
    """
    wanted, places = set(devices), {name: place for place, name in enumerate(sorted(plan.cohort))}
    chosen = [device for device in simulation.fleet.devices if device.name in wanted]
    jobs = [
        Job(
            path=simulation.folder.path.absolute(),
            runtime=runtime,
            device=device.name,
            index=device.index,
            seed=simulation.seed,
            plan=plan,
            evaluate=evaluate,
            epsilon_limit=device.epsilon_limit,
            preference=device.preference,
            place=places.get(device.name, 0),  # secure aggregation has no files
        )
        for device in chosen
    ]
    if runtime == VMAP and not simulation.prepared.spec.asks(plan.round):
        from hushfleet.simulator.engines.fast.vmap.jobs import train_at_once  # imports PyTorch

        return train_at_once(jobs, workers)
    return workers.map(train, jobs)
