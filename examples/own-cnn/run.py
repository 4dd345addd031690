"""Trains our own network in a simulated fleet. `python run.py round.rounds=5` changes a key of the task."""

from pathlib import Path

import hushfleet as hf

if __name__ == "__main__":
    here = Path(__file__).parent
    with hf.script() as changes:
        run = hf.simulate(here / "task.toml", changes)
        print(run.devices[["accuracy_own", "accuracy_alone"]].round(3))
        print(run.report())
