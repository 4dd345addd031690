"""What a method's own arithmetic costs: a local training step of each method, relative to DP-FedAvg's.

    python benchmarks/local_step.py --model fashion-mnist-cnn --runtime onnx

A step is gradient, the method's part, optimizer, in one thread, as on a device and in a worker of the fast engine. The
methods take turns, so that whatever else the machine does hits all alike; the ratio is that of the quickest steps. Half
of the parameters are personal, as late in training, where FedGLP-ADP's penalties have both parts to look at.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from hushfleet.config.spec import PrivacySpec
from hushfleet.methods import make_method
from hushfleet.methods.state import PublicState, RoundContext, RoundTerms
from hushfleet.models import Model, get_model, model_names
from hushfleet.models.export import export_graphs
from hushfleet.simulator.engines.fast.runtimes import RUNTIMES, make_gradient, make_optimizer
from hushfleet.training.batch import GradientFunction
from hushfleet.training.draws import draw_dropout

CASES = {
    "dp-fedavg": ("dp-fedavg", {}),
    "fedglp-adp": ("fedglp-adp", {}),
    "fedglp-adp sequential": ("fedglp-adp", {"sequential": True}),
}
REFERENCE = "dp-fedavg"
PRIVACY = PrivacySpec(unit="device", accounting="as-published", clip_norm=0.5, noise_multiplier=1.0, delta=0.1)


def step_of(
    method_name: str, settings: dict[str, object], model: Model, gradient: GradientFunction, batch: int
) -> Callable[[], None]:
    """A function that takes one step, on fixed random images."""
    rng = np.random.default_rng(0)
    method = make_method(method_name, {"batch_size": batch, **settings}, PRIVACY, model.layout, rounds=20)
    mask = rng.random(model.layout.size) < (0.5 if method_name == "fedglp-adp" else 0.0)
    state = replace(method.init_state(), public=PublicState(mask, 1))
    start = model.init(0)
    params, buffer = start + 1e-3, np.empty_like(start)
    x = rng.standard_normal((batch, *model.input_shape), dtype=np.float32)
    y = rng.integers(0, model.classes, batch)
    masks = draw_dropout(model.dropout, batch, rng)
    context = RoundContext(method.setting(RoundTerms()), state, start, start)
    parts = [(part, make_optimizer("adam", 1e-3)) for part in method.training.order.masks(context)]

    def step() -> None:
        for part, optimizer in parts:
            _, grad = gradient(params, x, y, masks, out=buffer)
            method.training.add_penalties(context, params, grad)
            if part is not None:
                grad *= part
            optimizer.step(params, grad)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=model_names(), default="fashion-mnist-cnn")
    parser.add_argument("--runtime", choices=RUNTIMES, default="onnx")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--turns", type=int, default=40, help="steps of each method")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    model = get_model(options.model)
    gradient = make_gradient(options.runtime, model.name, model.classes, model.layout, export_graphs(model).gradient)
    steps = {
        name: step_of(method, settings, model, gradient, options.batch) for name, (method, settings) in CASES.items()
    }
    best_s = dict.fromkeys(steps, float("inf"))
    for _ in range(options.turns):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            best_s[name] = min(best_s[name], time.perf_counter() - began)
    print(f"{options.model}, {options.runtime}, batch {options.batch}, one thread, quickest of {options.turns} steps")
    rows = {name: {"step_ms": 1e3 * best, "ratio": best / best_s[REFERENCE]} for name, best in best_s.items()}
    for name, row in rows.items():
        print(f"  {name:24} {row['step_ms']:8.2f} ms   {row['ratio']:.2f} of {REFERENCE}")
    if options.json:
        about = {"model": options.model, "runtime": options.runtime, "batch": options.batch, "turns": options.turns}
        options.json.write_text(json.dumps({**about, "methods": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
