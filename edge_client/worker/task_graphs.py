"""Checks and loads the graphs of a task whose gradient no formula gives: ONNX Runtime is imported only here.

Graphs are programs from the network. Their size and SHA-256 were checked while they were fetched. Their operators, and
the memory and work that the largest batch needs, are checked here, before ONNX Runtime reads a byte: no size may depend
on a label, or be larger for one number of samples than for a larger one, because a failure and the time that training
takes can be seen. Below these rules the process limits what a graph can take (`limits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hushfleet.edge_client.board.accelerator import AcceleratorTrial
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.process import return_small_blocks
from hushfleet.edge_client.storage.kept import ChosenAccelerator
from hushfleet.learning.evaluation import EVALUATION_BATCH
from hushfleet.learning.graph_features import FeatureGraph, check_features
from hushfleet.learning.graph_safety import check_graph, check_masks
from hushfleet.learning.graph_session import GradientGraph, InferenceGraph
from hushfleet.learning.graph_shapes import check_cost
from hushfleet.methods.task_method import TaskMethod
from hushfleet.paths import features_folder
from hushfleet.wire.format.spec import TaskSpec


def open_network(
    graphs: Sequence[bytes],
    spec: TaskSpec,
    method: TaskMethod,
    *,
    digest: bytes,
    config: DeviceConfig,
    threads: int,
    accelerator: ChosenAccelerator | None,
    processor_only: bool,
) -> tuple[AcceleratorTrial, InferenceGraph]:
    """Returns what computes gradients, and the inference. Parameters as of `LoadedTask`; raises `GraphRefused`."""
    layout, (gradient, inference) = spec.model.layout, graphs[:2]
    # The sizes come from the task, because a refused graph must not reveal how many samples this device has.
    facts, memory_bytes = check_graph(gradient), config.memory_mib << 20
    check_masks(facts, spec.model.dropout)
    check_cost(facts, batch=method.config.batch_size, memory_bytes=memory_bytes)
    check_cost(check_graph(inference), batch=EVALUATION_BATCH, memory_bytes=memory_bytes)
    objective = spec.model.targets.objective(method.objective)
    logits_of = InferenceGraph(inference, layout, threads=threads)
    trial = AcceleratorTrial(
        gradient,
        GradientGraph(gradient, layout, objective=objective, threads=threads),
        logits_of,
        task=digest,
        spec=spec,
        threads=threads,
        config=config,
        kept=accelerator,
        wanted="cpu" if config.simulation is not None or processor_only else config.device.accelerator,
    )
    return trial, logits_of


def open_features(graph: bytes, spec: TaskSpec, *, config: DeviceConfig, threads: int) -> FeatureGraph:
    """Returns what computes features of images. Raises `GraphRefused`."""
    features, simulation = spec.model.features, config.simulation
    assert features is not None
    check_features(graph, features, memory_bytes=config.memory_mib << 20)
    shared = None if simulation is None or simulation.common_test is None else Path(simulation.common_test)
    return FeatureGraph(
        lambda: graph,
        features,
        input_shape=spec.model.input_shape,
        threads=threads,
        cache=None if shared is None else features_folder(shared.parent),
        loaded=return_small_blocks,
    )
