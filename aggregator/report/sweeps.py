"""Makes the tables of a run's repetitions, with other noise and with other seeds, for the page and the terminal."""

from __future__ import annotations

import math
from statistics import fmean, stdev

from hushfleet.aggregator.report.readable import number, percent
from hushfleet.aggregator.report.tables import PageCell, Table
from hushfleet.aggregator.report.verdict import gain_cell, gain_of, judge, verdict_of
from hushfleet.aggregator.results.gains import Gain
from hushfleet.aggregator.results.result import Repeated, Result, WireInfo
from hushfleet.wire.format.codecs import codec_of

DASH = "\N{EN DASH}"


def noise_table(result: Result) -> Table:
    """Returns a row for each noise level, from the strongest protection to none; the run itself has an asterisk."""
    tests, gain = _heads(result)
    rows = [
        (
            number(run.noise_multiplier) + " *" * (run.noise_multiplier == result.noise_multiplier),
            number(run.epsilon_server),
            number(run.epsilon_release),
            *(percent(getattr(run, name)) for name in tests),
            _gain(result, run),
        )
        for run in sorted(result.details.privacy_sweep, key=lambda run: run.epsilon_server)
    ]
    return Table(("noise multiplier", "epsilon_server", "epsilon_release", *tests.values(), gain), rows)


def seed_table(result: Result) -> Table:
    """Returns a row per seed, then the mean, whose gain has a standard error over seeds, and the standard deviation."""
    runs, (tests, head_of_gain) = result.details.seeds, _heads(result)
    names = {**tests, "local_only_common": "alone, common test", "local_only_local": "alone, own data"}
    columns = {name: [each for run in runs if (each := getattr(run, name)) is not None] for name in names}
    columns = {name: values for name, values in columns.items() if values}
    rows: list[tuple[str, ...]] = [
        (
            f"{run.seed}{' *' * (run.seed == result.seed)}",
            *(percent(getattr(run, name)) for name in columns),
            _gain(result, run),
        )
        for run in runs
    ]
    if rows:
        gain = Gain.of([run.gain_over_local_only for run in runs if run.gain_over_local_only is not None])
        deviations = (f"{100 * stdev(each):.1f}" if len(each) > 1 else "" for each in columns.values())
        rows += [
            ("mean", *map(percent, map(fmean, columns.values())), _mean_gain(result, gain)),
            ("deviation", *deviations, ""),
        ]
    return Table(("seed", *(names[name] for name in columns), head_of_gain), rows)


def _heads(result: Result) -> tuple[dict[str, str], str]:
    """Returns the heads of the columns of accuracies, and of the gain; they say whose, if there are two kinds."""
    headline = judge(result)
    heads, gain = ("common test", "own data", "global"), "gain"
    if headline.own_heads:
        first, second, third = (row.name for row in headline.rows)
        heads, gain = (third, second, first), f"gain, {headline.rows[0].model}"
    return dict(zip(("accuracy_own_common", "accuracy_own_local", "accuracy_global"), heads, strict=True)), gain


def _mean_gain(result: Result, gain: Gain | None) -> PageCell:
    """Returns the mean over the seeds; as in a comparison, there is none if a model has learned nothing."""
    nothing = any(verdict_of(result, run) == "nothing" for run in result.details.seeds)
    return gain_cell(gain, "nothing" if nothing else None if gain is None else gain.outcome)


def cost_db(wire: WireInfo) -> str:
    """Formats by how much a codec reduces the signal-to-noise ratio, in dB."""
    if wire.step is not None and wire.step_unit != "noise":
        return DASH
    added = codec_of(wire.codec).added_variance(wire.step or 0.0, 1.0)
    return number(10 * math.log10(1 + added)) if added else "0"


def _gain(result: Result, run: Repeated) -> PageCell:
    return gain_cell(None if run.gain_over_local_only is None else gain_of(run), verdict_of(result, run))
