"""Runs the two processes that `benchmarks/device.py` measures; the client only imports modules that a board has.

    python -m benchmarks.board client FOLDER RUNTIME
    python -m benchmarks.board plain FOLDER MODEL

The client is the code of a board without its broker: store, task, trainer, and the modules of agent and link in memory.
RUNTIME computes the gradients: `onnx` as on a board, or `torch` or `native` for comparison. The plain loop is a usual
PyTorch loop: tensors, autograd and `torch.optim.Adam`, without a method, noise or a store.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.processes import Parent, Reply, memory_mib

DEVICE = "device-0"
Clock = tuple[float, float]


def clock() -> Clock:
    """Returns wall-clock seconds, and CPU seconds of this thread."""
    return time.perf_counter(), time.thread_time()


def between(marks: list[Clock]) -> Reply:
    """Returns the medians of the times between neighbouring marks."""
    pairs = list(pairwise(marks))
    wall, cpu = (1e3 * median(after[side] - before[side] for before, after in pairs) for side in (0, 1))
    return {"wall_ms": wall, "cpu_ms": cpu}


def client(folder: Path, runtime: str) -> None:
    import hushfleet.edge_client.agent
    import hushfleet.wire.link.mqtt  # noqa: F401  # in memory on a board as well
    from hushfleet.edge_client.board.config import load_config
    from hushfleet.edge_client.board.process import return_freed_memory
    from hushfleet.edge_client.storage.store import DeviceStore
    from hushfleet.edge_client.worker.job import Job
    from hushfleet.edge_client.worker.trainer import DeviceRound
    from hushfleet.edge_client.worker.work import JobWork
    from hushfleet.methods import method_of
    from hushfleet.wire.format.messages import RoundPlan
    from hushfleet.wire.format.spec import TaskSpec

    return_freed_memory()  # as `hushfleet-edge` does
    os.cpu_count = lambda: 1  # the client gives ONNX Runtime this number of threads
    config, package = load_config(folder / "device.toml"), (folder / "package.bin").read_bytes()
    spec, initial = TaskSpec.from_bytes(package), np.load(folder / "initial.npy")
    graphs = [(folder / "graphs" / f"{ref.digest.hex()}.onnx").read_bytes() for ref in spec.model.graphs]
    gradient = graphs[0]
    store = DeviceStore(folder / f"{runtime}.sqlite", device=DEVICE)
    kept = [ref.digest for ref in spec.model.graphs]
    for each, graph in zip(kept, graphs, strict=True):
        store.put_blob(each, graph)
    newcomer = method_of(spec).init_state().public.digest()
    nothing = RoundPlan(spec.task, 1, spec.rounds, "open", bytes(32), initial.nbytes, {DEVICE: newcomer}, 1, 600.0)
    work = JobWork(lambda told: None)
    work._task(Job(config, package, tuple(graphs), nothing, b"", 0))
    del graphs, graph
    trainer = work.loaded.trainer
    trainer.store = store
    if runtime != "onnx":
        from hushfleet.simulator.engines.fast.runtimes import make_gradient, make_optimizer

        names = spec.model.name, len(spec.model.class_names)
        trainer.gradient = make_gradient(runtime, *names, spec.model.layout, gradient, trainer.method.objective)
        trainer.make_optimizer = make_optimizer
    done, marks, compute = 0, list[Clock](), trainer.gradient

    def marked(*inputs: Any, **options: Any) -> Any:
        marks.append(clock())
        return compute(*inputs, **options)

    marked.takes_part = getattr(compute, "takes_part", False)  # type: ignore[attr-defined]
    trainer.gradient = marked

    def a_round() -> Reply:
        """Runs one round: the global model arrives, is trained, and the update is committed and acknowledged."""
        nonlocal done
        done += 1
        params = initial + np.float32(1e-4 * done)
        state = store.load_state(spec.task)
        public = newcomer if state is None else state.public.digest()
        model = hashlib.sha256(params.tobytes()).digest()
        plan = RoundPlan(spec.task, done, spec.rounds, "open", model, params.nbytes, {DEVICE: public}, 1, 600.0)
        marks.clear()
        began = clock()
        store.put_blob(model, params.tobytes())
        entry = DeviceRound(trainer, plan).run(params)
        store.set_status(spec.task, done, "acked")
        store.drop_blobs({model, *kept})
        total = between([began, clock()])
        return {**total, "step": between(marks), "update_bytes": len(entry.data)}

    def read() -> Reply:
        """Reads the device's images as its network needs them."""
        marks = [clock()]
        count = len(trainer.samples())
        marks.append(clock())
        return {**between(marks), "images": count}

    def personalized_head() -> Reply:
        """Chooses the device's head among the shared one and its own ones, as after a task."""
        from hushfleet.learning.personalized_head import personalized_head_of

        marks = [clock()]
        personalized_head_of(initial, spec.model.layout, trainer.samples(), spec.signal)
        marks.append(clock())
        return between(marks)

    if runtime == "onnx" and "torch" in sys.modules:
        raise SystemExit("the client has imported PyTorch; its figures would mean nothing")
    ready = {"cpu_s": time.process_time(), "mib": memory_mib("VmHWM")}
    handlers = {
        "read": read,
        "round": a_round,
        "own_head": personalized_head,
        "peak": lambda: {"mib": memory_mib("VmHWM")},
    }
    Parent(ready).serve(handlers)


def plain(folder: Path, model_name: str) -> None:
    import torch
    from torch.nn import functional as F

    from hushfleet.models import get_model
    from hushfleet.wire.format.spec import TaskSpec

    torch.set_num_threads(1)
    spec = TaskSpec.from_bytes((folder / "package.bin").read_bytes())
    model = get_model(model_name, classes=len(spec.model.class_names))
    params, batch = torch.from_numpy(np.load(folder / "initial.npy")), spec.method_config["batch_size"]
    with np.load(folder / "devices" / DEVICE / "train.npz") as arrays:
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])

    def a_round() -> Reply:
        """Trains for two epochs."""
        began, marks = clock(), list[Clock]()
        tensors = {name: view.clone().requires_grad_() for name, view in model.layout.unflatten(params).items()}
        optimizer = torch.optim.Adam(tensors.values())
        for rows in (rows for _ in range(2) for rows in torch.randperm(len(labels)).split(batch)):
            marks.append(clock())
            x = (images[rows].float() / 255 - 0.5) / 0.25
            dropout = [F.dropout(torch.ones(len(rows), *drop.shape), drop.rate) for drop in model.dropout]
            optimizer.zero_grad()
            F.cross_entropy(model.forward(tensors, x, dropout), labels[rows]).backward()
            optimizer.step()
        total = between([began, clock()])
        return {**total, "step": between(marks)}

    ready = {"cpu_s": time.process_time(), "mib": memory_mib("VmHWM")}
    Parent(ready).serve({"round": a_round, "peak": lambda: {"mib": memory_mib("VmHWM")}})


if __name__ == "__main__":
    roles: dict[str, Callable[[Path, str], None]] = {"client": client, "plain": plain}
    roles[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
