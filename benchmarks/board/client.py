"""The device's side: the real client with its broker cut off, told by the benchmark what an aggregator would tell it.

    python -m benchmarks.board.client CASE

`main` reads the configuration, opens the store and makes the agent and its link, as on a board;
only `Agent.run` is another, which loads the announced task from the store and then obeys. One thread, which a board
would choose by its cores.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.board.case import DEVICE, ROUNDS, Case
from benchmarks.board.steps import timed_steps
from benchmarks.board.stopwatch import OTHER, SECTIONS, Stopwatch
from benchmarks.board.talk import Answer, age_s, peak_mib, serve
from hushfleet.config.spec import BlobRef
from hushfleet.edge_client import __main__ as command
from hushfleet.edge_client.agent import Agent
from hushfleet.methods.state import PublicState
from hushfleet.wire.format.messages import Ack, RoundPlan


class Device:
    """An agent that has its task, and what it is asked to do."""

    def __init__(self, agent: Agent, case: Case) -> None:
        self.agent, self.case = agent, case
        self.round = 0
        self.watch: Stopwatch | None = None

    def steps(self) -> Answer:
        task = self.agent.tasks.runtime
        return timed_steps(task.spec, self.case.initial(), task.gradient, task.inference, task.data.samples())

    def rounds(self) -> Answer:
        """One round: the global model comes, is trained on, and the update is committed and acknowledged."""
        if self.watch is None:
            self.watch = _watched(self.agent)
        self.round += 1
        self.watch.clear()
        began, cpu = time.perf_counter(), time.process_time()
        self.watch.timed(OTHER, self._round)()
        total, cpu = time.perf_counter() - began, time.process_time() - cpu
        update = self.agent.store.outbox(self.agent.tasks.name, self.round)
        parts = {
            each: {"wall_ms": 1e3 * self.watch.wall_s[each], "cpu_ms": 1e3 * self.watch.cpu_s[each]}
            for each in SECTIONS
        }
        return {"wall_ms": 1e3 * total, "cpu_ms": 1e3 * cpu, "parts": parts, "update_bytes": len(update.data)}

    def _round(self) -> None:
        agent = self.agent
        agent.rounds.on_plan(self._announced())
        agent.rounds.advance()
        if agent.rounds.sending is None:
            raise SystemExit(f"the device declined the round: {agent.rounds.decline}")
        agent.rounds.on_answer(Ack(agent.tasks.name, self.round, agent.rounds.sending.offer.digest))

    def _announced(self) -> RoundPlan:
        """The plan of a round with another global model, which has been fetched into the store and nowhere else."""
        task, store = self.agent.tasks.name, self.agent.store
        params = self.case.initial()
        params += params.dtype.type(1e-4 * self.round)
        ref = BlobRef.of(params.tobytes())
        store.put_blob(ref.digest, params.tobytes())
        state = store.load_state(task)
        public = PublicState.initial(params.size) if state is None else state.public
        cohort = {DEVICE: public.digest()}
        return RoundPlan(task, self.round, ROUNDS, "open", ref.digest, ref.size, cohort, 1, 600.0)

    def peak(self) -> Answer:
        return {"mib": peak_mib()}


def _watched(agent: Agent) -> Stopwatch:
    from hushfleet.edge_client import trainer
    from hushfleet.edge_client.storage.store import DeviceStore
    from hushfleet.graphs.session import GradientGraph, InferenceGraph
    from hushfleet.privacy.ledger import Ledger
    from hushfleet.privacy.noise import SecureNoise
    from hushfleet.training import local_round as training
    from hushfleet.training import optim
    from hushfleet.wire.format.identity import Identity

    watch = Stopwatch()
    watch.watch("gradients", GradientGraph, "__call__")
    watch.watch("gradients", InferenceGraph, "__call__")
    watch.watch("batches", training, "drawn_inputs")
    for optimizer in (optim.Adam, optim.SGD):
        watch.watch("optimizer", optimizer, "step")
    method = type(agent.tasks.runtime.trainer().method)
    own = ("begin", "measured", "release", "advance")
    watch.watch("method", method, *own)
    watch.watch("noise", SecureNoise, "normal")
    watch.watch("codec", trainer, "encode_update")
    watch.watch("signature", Identity, "sign")
    watch.watch("ledger", Ledger, "check_budget", "epsilon_server", "rounds_charged")
    stored = ("put_blob", "blob", "drop_blobs", "load_state", "last_round", "commit_round", "outbox", "set_status")
    watch.watch("store", DeviceStore, *stored, "set_current", "count_attempt", "end_attempt")
    return watch


def _obey(case: Case) -> Any:
    def run(agent: Agent, stop: threading.Event | None = None) -> None:
        agent.tasks.on_notice(case.notice())
        agent.tasks.advance()
        if agent.tasks.runtime is None:
            raise SystemExit(f"the task cannot be run: {agent.tasks.refusal}")
        agent.standing.confirmed = True  # nobody is there to be asked
        started = {"start_s": age_s(), "cpu_s": time.process_time(), "mib": peak_mib()}
        if "torch" in sys.modules:
            raise SystemExit("the client has imported PyTorch; its figures would mean nothing")
        device = Device(agent, case)
        serve(started, {"steps": device.steps, "round": device.rounds, "peak": device.peak})

    return run


def main() -> int:
    os.cpu_count = lambda: 1  # what the client gives ONNX Runtime
    case = Case(Path(sys.argv[1]))
    Agent.run = _obey(case)
    return command.main(["run", str(case.config_path)])


if __name__ == "__main__":
    sys.exit(main())
