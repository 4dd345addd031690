"""Compares buffered rounds with synchronous ones if boards are awake at different hours, on the virtual clock.

    python -m benchmarks.buffered [--seeds 3] [--devices 40] [--awake 1] [--goal 0.8] [--json FILE]

Each board is on for --awake hours of every 24, at its own time of day, drawn from the seed, so two boards are rarely on
at the same time. All policies train the same task from the same first model on the same devices: digits with unequal
classes (Dirichlet, alpha 0.3), a linear head on fixed features, `dp-fedavg` without noise. A training takes 20 minutes
on a Pi Zero 2 W and 7 on a Pi 4; these costs are fixed, at the level of a larger network, so that no figure depends on
this machine. The figures of a policy are the hours until the global model reaches --goal on the common test set, and
the updates of boards by then: with noise, these determine their epsilon.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.common import Figures, make_parser, table, write
from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.results.events import EventLog, iterate_events
from hushfleet.errors import HushfleetError
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.engines.clock.device_time import Costs
from hushfleet.simulator.engines.clock.rounds import VirtualTime, run_clocked_rounds
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import begin

BOARDS = ("raspberry-pi-zero-2-w", "raspberry-pi-4-2gb")
COSTS = Costs(batch_s=30.0, sample_s=0.0, release_s=0.1, start_s=1.0, load_s=1.0, accept_s=0.001, close_s=0.01)
POLICIES: dict[str, dict[str, Any]] = {
    "buffered, 10 updates": {"rounds": 40, "mode": "buffered", "buffer_size": 10, "deadline_s": 3600.0},
    "buffered, 5 updates": {"rounds": 80, "mode": "buffered", "buffer_size": 5, "deadline_s": 3600.0},
    "synchronous, 2 there": {"rounds": 300, "min_devices": 2, "min_updates": 2, "deadline_s": 3600.0},
    "synchronous, 4 there": {"rounds": 300, "min_devices": 4, "min_updates": 4, "deadline_s": 3600.0},
    "synchronous, 10 there": {"rounds": 20, "min_devices": 10, "min_updates": 10, "deadline_s": 3600.0},
}


def measure(rules: Mapping[str, Any], *, seed: int, devices: int, awake_h: float, goal: float, folder: Path) -> Figures:
    """Runs all rounds of one policy; returns its costs up to the goal."""
    task = parse_task({
        "name": "asleep",
        "seed": seed,
        "model": {"name": "linear", "features": "filters"},
        "method": {"name": "dp-fedavg", "learning_rate": 0.05, "local_epochs": 2},
        "privacy": {"clip_norm": 1.0, "noise_multiplier": 0.0},
        "data": {
            "name": "digits", "devices": devices, "limit": 30 * devices, "partition": "dirichlet-class", "alpha": 0.3,
            "test_fraction": 0,
        },
        "round": rules,
        "scenario": {"day": [{"devices": "all", "period_s": 86400.0, "share": awake_h / 24}]},
    })  # fmt: skip
    mix = FleetMix.in_turn(list(BOARDS), devices)
    simulation = begin(task, folder, data_dir=None, mix=mix)
    simulation.folder.clock.write_text(json.dumps(vars(COSTS)))
    time, stuck = VirtualTime(), False
    with Workers(1) as workers, EventLog(simulation.folder.events, clock=time) as events:
        try:
            run_clocked_rounds(simulation, workers, events, time, mix=mix, evaluate_every=task.round.rounds)
        except HushfleetError as error:  # a round that never opens
            if "never" not in str(error):
                raise
            stuck = True
    return reached(list(iterate_events(simulation.folder.events)), goal=goal, devices=devices) | {"stuck": stuck}


def reached(events: Sequence[Mapping[str, Any]], *, goal: float, devices: int) -> Figures:
    """Returns the first round whose model reaches the goal, and its costs; without one, the best accuracy."""
    charged, updates, rounds, best = Counter[str](), 0, 0, 0.0
    for event in events:
        if event["event"] == "update" and event["code"] == "accepted":
            charged[event["device"]] += 1
            updates += 1
        if event["event"] != "round_close":
            continue
        rounds, best = event["round"], max(best, event["accuracy_global"])
        if best >= goal:
            break
    counts = [charged[name] for name in charged] + [0] * (devices - len(charged))
    return {
        "hours": event["at"] / 3600 if best >= goal else None,
        "best": best,
        "rounds": rounds,
        "updates": updates,
        "updates a board": mean(counts),
        "most": max(counts),
    }


def _spread(found: Sequence[Figures], name: str) -> str:
    values = [each[name] for each in found if each[name] is not None]
    if len(values) < len(found):
        return "never" if not values else f"{len(values)} of {len(found)} seeds"
    return f"{mean(values):.3g} +- {stdev(values) if len(values) > 1 else 0:.2g}"


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--devices", type=int, default=40)
    parser.add_argument("--awake", type=float, default=1.0, metavar="HOURS", help="of each day, for each board")
    parser.add_argument("--goal", type=float, default=0.8, help="accuracy on the common test set")
    options = parser.parse_args(arguments)
    figures: Figures = {"goal": options.goal, "devices": options.devices, "awake_h": options.awake, "policies": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, rules in POLICIES.items():
            figures["policies"][name] = [
                measure(
                    rules,
                    seed=seed,
                    devices=options.devices,
                    awake_h=options.awake,
                    goal=options.goal,
                    folder=Path(folder) / f"{name} {seed}",
                )
                for seed in range(options.seeds)
            ]
    table(
        f"until the global model is right in {options.goal:.0%} of the common test set, {options.seeds} seeds",
        [
            {"policy": name} | {key: _spread(found, key) for key in found[0] if key != "stuck"}
            for name, found in figures["policies"].items()
        ],
    )
    write(options, figures)


if __name__ == "__main__":
    main()
