"""A search over the learning rate and the clip norm with Optuna, which ends trials that are behind after a round.

pip install optuna; python examples/tune_optuna.py
"""

from __future__ import annotations

from pathlib import Path

import optuna

import hushfleet as hf

TASK = Path(__file__).parents[1] / "tasks" / "digits-hush.toml"


def search(trials: int, changes: dict[str, object] | None = None, workers: int = 0) -> optuna.Study:
    """Runs the trials one after the other, each on all cores, with these changes of the task."""
    with hf.Workers(workers) as pool:

        def objective(trial: optuna.Trial) -> float:
            def on_round(round: hf.Round) -> None:
                trial.report(round.accuracy or 0.0, round.number)
                if trial.should_prune():
                    raise optuna.TrialPruned

            tried = {
                "method.learning_rate": trial.suggest_float("learning_rate", 1, 32, log=True),
                "privacy.clip_norm": trial.suggest_float("clip_norm", 0.1, 2, log=True),
            }
            how = {"on_round": on_round, "workers": pool, "keep": False, "local_only": False, "quiet": True}
            return float(hf.simulate(TASK, {**(changes or {}), **tried}, **how).rounds.accuracy_global.iloc[-1])

        study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner(n_startup_trials=3))
        study.optimize(objective, n_trials=trials)
        return study


if __name__ == "__main__":
    print(search(trials=30).best_params)
