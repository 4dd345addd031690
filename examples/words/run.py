"""Makes the clips if there are none, trains and prints the report. `python run.py privacy.epsilon=2` changes a key."""

from pathlib import Path

import make_data

import hushfleet as hf

if __name__ == "__main__":
    here = Path(__file__).parent
    with hf.script() as changes:
        task = hf.task(here / "task.toml", changes)
        make_data.make_once(here / "words", boards=task.data.devices, seed=task.seed)
        run = hf.simulate(task)
        print(run.devices[["accuracy_own_local", "accuracy_alone_local"]].describe().round(3))
        print(run.report())
