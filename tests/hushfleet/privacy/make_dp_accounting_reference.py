"""Makes `dp_accounting_reference.json` again: Google's dp-accounting on the same rows, above and below the truth.

It pins older versions of what the kit uses, so it has an environment of its own, and its figures are kept:

    python -m venv reference && reference/bin/pip install dp-accounting==0.6.0
    reference/bin/python tests/hushfleet/privacy/make_dp_accounting_reference.py        # some ten minutes

A row is: sample rate, noise multiplier, steps, delta, the grid's step, its pessimistic epsilon, its optimistic one.
"""

import json
from pathlib import Path

from dp_accounting.pld import privacy_loss_distribution

PATH = Path(__file__).with_name("dp_accounting_reference.json")


def epsilon(rate: float, multiplier: float, steps: int, delta: float, interval: float, *, pessimistic: bool) -> float:
    one = privacy_loss_distribution.from_gaussian_mechanism(
        multiplier,
        value_discretization_interval=interval,
        pessimistic_estimate=pessimistic,
        sampling_prob=rate,
        use_connect_dots=True,
        log_mass_truncation_bound=-60,
    )
    return one.self_compose(steps).get_epsilon_for_delta(delta)


if __name__ == "__main__":
    rows = []
    for *setting, _, _ in json.loads(PATH.read_text()):
        both = [round(epsilon(*setting, pessimistic=pessimistic), 9) for pessimistic in (True, False)]
        rows.append(json.dumps([*setting, *both]))
    PATH.write_text("[\n" + ",\n".join(rows) + "\n]\n")
