"""Makes the data, trains, and prints the accuracies of each device. `python run.py round.rounds=5` changes a key."""

import sys
from pathlib import Path

import make_data

import hushfleet as hf

if __name__ == "__main__":
    here = Path(__file__).parent
    task = hf.task(here / "task.toml", dict(each.split("=", 1) for each in sys.argv[1:]))
    make_data.make(here / "cameras.npz", cameras=task.data.devices)
    run = hf.simulate(task)
    print(run.devices[["accuracy_own_local", "accuracy_alone_local"]].round(3))
    print(run.report())
