"""Trains our own network in a simulated fleet. `python run.py round.rounds=5` changes a key of the task."""

import sys
from pathlib import Path

import hushfleet as hf

if __name__ == "__main__":
    here = Path(__file__).parent
    run = hf.simulate(hf.task(here / "task.toml", dict(each.split("=", 1) for each in sys.argv[1:])))
    print(run.devices[["accuracy_own", "accuracy_alone"]].round(3))
    print(run.report())
