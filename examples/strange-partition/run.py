"""Makes the data, trains, and prints the accuracies of each device. `python run.py round.rounds=5` changes a key."""

from pathlib import Path

import make_data

import hushfleet as hf

if __name__ == "__main__":
    here = Path(__file__).parent
    with hf.script() as changes:
        task = hf.task(here / "task.toml", changes)
        make_data.make(here / "cameras.npz", cameras=task.data.devices)
        run = hf.simulate(task)
        print(run.devices[["accuracy_own_local", "accuracy_alone_local"]].round(3))
        print(run.report())
