"""Runs a board's guardian without its broker, and its worker process, for `benchmarks/device.py`.

    python -m benchmarks.guardian FOLDER

The guardian has the modules of agent and link in memory. Each round is a job of its worker, which is kept between them.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

from benchmarks.processes import Parent, Reply, memory_mib

DEVICE = "device-0"
_LOOK_S = 0.002


def main(folder: Path) -> None:
    import hushfleet.edge_client.agent
    import hushfleet.wire.link.mqtt  # noqa: F401  # in memory on a board as well
    from hushfleet.edge_client.board.config import load_config
    from hushfleet.edge_client.board.process import return_freed_memory
    from hushfleet.edge_client.storage.state_files import FEATURES
    from hushfleet.edge_client.storage.store import DeviceStore
    from hushfleet.edge_client.worker.allowed import AllowedRound
    from hushfleet.edge_client.worker.handover import Handover
    from hushfleet.edge_client.worker.job import Finished
    from hushfleet.edge_client.worker.process import ChildProcess
    from hushfleet.edge_client.worker.runtime import TaskRuntime
    from hushfleet.methods.public_bytes import public_digest
    from hushfleet.wire.format.messages import RoundPlan
    from hushfleet.wire.format.spec import TaskSpec

    return_freed_memory()  # as `hushfleet-edge` does
    config, package = load_config(folder / "device.toml"), (folder / "package.bin").read_bytes()
    spec, digest = TaskSpec.from_bytes(package), hashlib.sha256(package).digest()
    store = DeviceStore(folder / "guardian.sqlite", device=DEVICE)
    store.put_blob(digest, package)
    for ref in spec.model.graphs:
        store.put_blob(ref.digest, (folder / "graphs" / f"{ref.digest.hex()}.onnx").read_bytes())
    task, workshop = (
        TaskRuntime(digest=digest, spec=spec, config=config, store=store),
        ChildProcess(folder / FEATURES),
    )
    handover, done, size = Handover(config, store, workshop), 0, 4 * spec.model.layout.size
    model = (folder / "initial.npy").read_bytes()[-size:]

    def a_round() -> Reply:
        """Trains a round; the worker's processor time is all that its process has used so far."""
        nonlocal done
        done += 1
        public = task.newcomer_digest
        if (state := store.stored_state(spec.task)) is not None:
            public = public_digest(state.public, size=spec.model.layout.size)
        del state  # it has megabytes
        plan = RoundPlan(spec.task, done, spec.rounds, "open", bytes(32), size, {DEVICE: public}, 1, 600.0)
        round = AllowedRound(task.party, plan)
        _ = round.charge
        handover.begin_round(task, round, model, nominal_s=None, known=None, again=False)
        while (outcome := handover.poll(task)) is None:
            time.sleep(_LOOK_S)
        assert isinstance(outcome, Finished), outcome
        handover.commit(outcome, round, task)
        pid = workshop.pid
        assert pid is not None
        return {
            "worker_cpu_ms": 1e3 * _cpu_s(pid),
            "worker_mib": memory_mib("VmHWM", pid),
            "guardian_mib": memory_mib("VmHWM"),
        }

    if "numpy" in sys.modules:
        raise SystemExit("the guardian has imported NumPy; its figures would mean nothing")
    Parent({"mib": memory_mib("VmRSS")}).serve({"round": a_round})
    handover.give_up()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
