"""A search over the learning rate with Ray Tune, which ends trials that are behind after some rounds (ASHA).

pip install 'ray[tune]'; python examples/tune_ray.py
"""

from __future__ import annotations

from pathlib import Path

from ray import tune
from ray.tune.schedulers import ASHAScheduler

TASK = Path(__file__).parents[1] / "tasks" / "digits-hush.toml"


def trial(config: dict[str, float]) -> None:
    """Runs one trial in one process of Ray; Tune ends it when it asks for the next round."""
    import hushfleet as hf

    def on_round(round: hf.Round) -> None:
        tune.report({"accuracy": round.accuracy or 0.0})

    how = {"on_round": on_round, "workers": 1, "keep": False, "local_only": False, "quiet": True}
    hf.simulate(TASK, config, **how)


def search(trials: int, changes: dict[str, object] | None = None) -> tune.ResultGrid:
    """Runs the trials, as many at a time as there are cores.

    :param changes: of the task, for all trials.
    """
    space = {"method.learning_rate": tune.loguniform(1, 32), **(changes or {})}
    how = tune.TuneConfig(num_samples=trials, metric="accuracy", mode="max", scheduler=ASHAScheduler())
    return tune.Tuner(tune.with_resources(trial, {"cpu": 1}), param_space=space, tune_config=how).fit()


if __name__ == "__main__":
    print(search(trials=30).get_best_result().config)
