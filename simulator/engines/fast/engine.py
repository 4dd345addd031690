"""Runs the fast engine: the same fleet without a network and without a process per device.

Devices are `Trainer` and the server is `RoundEngine`: method, codec, ledger and round are the field's own code. Only
MQTT and the waiting are left out. With the same seed, the run ends with the same global model as in the live engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.aggregator.results.device_metrics import write_metrics
from hushfleet.aggregator.results.events import EventLog
from hushfleet.aggregator.results.metrics import RoundSummary
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.rounds.round_events import finished_fields, open_fields, run_fields, update_fields
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.learning.evaluation import evaluate
from hushfleet.models.cuda import sees_cuda
from hushfleet.progress import doing
from hushfleet.simulator.closed_round import OnRound, tell
from hushfleet.simulator.cohort_store import CohortStore
from hushfleet.simulator.engines.fast.alike import train
from hushfleet.simulator.engines.fast.chunks import ChunkAnswer, Client, ClientChunk, ClientRow, divided
from hushfleet.simulator.engines.fast.loaded_run import loaded_run
from hushfleet.simulator.engines.fast.partial_sum import SummedUpdates, like_in
from hushfleet.simulator.engines.fast.runtimes import NATIVE, VMAP
from hushfleet.simulator.engines.fast.sums import key_of, write_membership_list
from hushfleet.simulator.engines.fast.workers import WorkerPool
from hushfleet.simulator.fleet import SimulatedDevice
from hushfleet.simulator.run_folder import Simulation
from hushfleet.wire.format.messages import RoundPlan

ALL_SPENT = "too few devices have privacy budget left for another round"


def run_logged(simulation: Simulation, workers: WorkerPool, **how: Any) -> None:
    """Runs the rounds as `run_rounds` does, and writes their events into the run folder."""
    with EventLog(simulation.folder.events) as events:
        run_rounds(simulation, workers, events, **how)


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
    on_round: OnRound | None = None,
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
    :param on_round: a program's function, called after `on_closed`.
    """
    if not simulation.task.round.has_cohort:
        raise BadInput(
            'round.mode = "buffered" is about who comes when, and the fast engine has no time: give the devices boards '
            "(--boards, with the virtual clock), or take --engine live"
        )
    names = [device.name for device in simulation.fleet.devices]
    rounds = doing("rounds", total=simulation.prepared.spec.rounds)
    with rounds as work, AggregatorStore(simulation.folder.aggregator, durable=False) as store:
        fleet = FastFleet(simulation, workers, store, events, runtime=runtime)
        engine = fleet.engine
        membership_list = write_membership_list(simulation, store) if engine.spec.privacy.secure else None
        events.write("run", **run_fields(simulation.prepared.spec, engine="fast", devices=len(names)))
        ready = [{"device": each.name, "state": "ready", "board": each.board} for each in simulation.fleet.devices]
        events.write_many("presence", ready)
        least = simulation.task.round.min_updates
        spent = too_few_can_pay(store, names, least=least)
        work.done = store.last_closed_round
        on_closed(store.last_closed_round)
        while not engine.finished and not spent:
            plan = engine.plan or engine.open_round(names, membership_list=membership_list)
            on_opened(plan)
            events.write("round_open", **open_fields(engine))
            last = engine.spec.last_training_round
            evaluate = plan.round > last - evaluate_last or plan.round % evaluate_every == 0
            summary = fleet.play(engine.cohort, evaluate=evaluate, least=least)
            work.count()
            events.write("round_close", **summary.to_dict())
            on_closed(plan.round)
            tell(on_round, engine, summary.to_dict())
            spent = summary.participants == 0 and too_few_can_pay(store, names, least=least)
    events.write("finished", **({"reason": ALL_SPENT} if spent else finished_fields(engine)))


class FastFleet:
    """The aggregator and the devices of a run without a network.

    Raises `BadInput` for a run whose devices have a database: the live engine, or an earlier version, started it.

    :param workers: train the devices.
    :param store: the aggregator's.
    """

    def __init__(
        self,
        simulation: Simulation,
        workers: WorkerPool,
        store: AggregatorStore,
        events: EventLog,
        *,
        runtime: str = "onnx",
    ) -> None:
        folder = simulation.folder
        check_own(simulation)
        self._simulation, self._workers, self._store, self._events = simulation, workers, store, events
        self._runtime, self._format = runtime, SummedUpdates()
        self._cohort = CohortStore.open(folder.cohort, closed=store.last_closed_round)
        folder.states.mkdir(exist_ok=True)
        prepared = tested_by(simulation, runtime)
        self.engine = RoundEngine(store, prepared, masked=False, update_format=self._format)
        self._known = {row.device for row in store.devices()}

    def play(self, devices: Collection[str], *, evaluate: bool = True, least: int = 1) -> RoundSummary:
        """Trains these devices of the open round and closes it: in the store, all of it is one transaction.

        :param evaluate: whether the devices' personalized models are tested.
        """
        engine, wanted = self.engine, set(devices)
        plan = engine.plan
        assert plan is not None
        chosen = [device for device in self._simulation.fleet.devices if device.name in wanted]
        taken, indices = list[ClientRow](), {device.name: device.index for device in chosen}
        with self._store.transaction():
            for answer in self._answers(chosen, plan, evaluate=evaluate):
                deliver(answer, engine, self._format, self._events, keys=self._new_keys(answer, indices))
                taken += answer.rows
            check_participation(engine, plan, least=least)
            lines = {row.device: row.metrics for row in taken if row.metrics is not None}
            write_metrics(self._simulation.folder.metrics, plan.round, lines)
            self._cohort.append(plan.round, {indices[row.device]: row.state for row in taken if row.state is not None})
            return engine.close()

    def _answers(self, devices: Sequence[SimulatedDevice], plan: RoundPlan, *, evaluate: bool) -> Iterator[ChunkAnswer]:
        simulation, runtime = self._simulation, self._runtime
        spec, server = simulation.prepared.spec, self.engine.progress.server_half
        whole = ClientChunk(
            path=simulation.folder.path.absolute(),
            runtime=runtime,
            plan=plan,
            seed=simulation.seed,
            evaluate=evaluate,
            summed=self.engine.kind.adds_up,
            server=server.state if server.method.server.weighs else {},
            like=like_in(len(devices)),
            clients=[
                Client(each.name, each.index, each.epsilon_limit, each.preference, self._cohort.carried(each.index))
                for each in devices
            ],
        )
        if runtime == VMAP and not spec.asks(plan.round):
            from hushfleet.simulator.engines.fast.vmap.jobs import train_at_once  # imports PyTorch

            return train_at_once(whole, self._workers)
        return self._workers.map(train, divided(whole, self._workers.count))

    def _new_keys(self, answer: ChunkAnswer, indices: Mapping[str, int]) -> dict[str, bytes]:
        """Returns the public keys of devices that the aggregator sees for the first time."""
        new = {row.device for row in answer.rows} - self._known
        self._known |= new
        return {name: key_of(self._simulation.seed, indices[name]).public_key for name in sorted(new)}


def check_own(simulation: Simulation) -> None:
    """Raises `BadInput` for a run of the live engine, or of an earlier version."""
    files = (simulation.folder.device(each.name) for each in simulation.fleet.devices)
    if any(each.store.exists() or (each.path / "state.bin").exists() for each in files):
        raise BadInput(
            f"the run in {simulation.folder.path} was begun by --engine live or by an earlier version; go on with it "
            "there, or choose another --out"
        )


def tested_by(simulation: Simulation, runtime: str) -> PreparedTask:
    """Returns the task with the runtime's own inference for tests of global models, if the runtime has one.

    ONNX Runtime takes two to three times as long as compiled kernels, and longer than a large network's round on CUDA.
    """
    prepared, own = simulation.prepared, runtime == NATIVE or (runtime == VMAP and sees_cuda())
    if prepared.evaluate_global is None or not own:
        return prepared
    run = loaded_run(simulation.folder.path.absolute(), runtime)
    return replace(
        prepared, evaluate_global=lambda params: evaluate(run.inference, params, run.common_test, run.metrics)
    )


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


def deliver(
    answer: ChunkAnswer,
    engine: RoundEngine,
    of_sums: SummedUpdates,
    events: EventLog,
    *,
    keys: Mapping[str, bytes],
) -> None:
    """Passes the answers of a chunk to the aggregator, without a network. Raises `HushfleetError` if an update is
    refused.

    :param keys: the public keys of new devices.
    """
    plan = engine.plan
    assert plan is not None
    if keys:
        engine.store.add_devices((device, key, "", -1) for device, key in keys.items())
    for row in answer.rows:
        if row.refusal is not None:
            code, reason = row.refusal
            engine.decline(row.device, code, reason, round=plan.round)
            events.write("decline", round=plan.round, device=row.device, code=code, reason=reason)
    of_sums.rows = {row.update: row.summed for row in answer.rows if row.summed is not None}
    fields = []
    for update in engine.accept_many([(row.device, row.update) for row in answer.rows if row.refusal is None]):
        if not update.acknowledged:
            raise HushfleetError(
                f"round {plan.round}: the update of {update.device} was refused ({update.code}), since {update.reason}"
            )
        assert update.row is not None
        fields.append(update_fields(update, round=plan.round, payload_bytes=update.row.size))
    events.write_many("update", fields)
    if answer.sum is not None:
        engine.merge(answer.sum)
