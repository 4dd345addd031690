"""Makes the data, sums, and prints what each device's alarms are worth. `run.py privacy.epsilon=8` changes a key."""

from pathlib import Path

import make_data

import hushfleet as hf

if __name__ == "__main__":
    here = Path(__file__).parent
    with hf.script() as changes:
        task = hf.task(here / "task.toml", changes)
        make_data.make(here / "machines.npz", machines=task.data.devices)
        run = hf.simulate(task)
        print(run.devices[["auroc_own_local", "detected_own_local", "false_alarms_own_local"]].round(3))
        print(run.report())
