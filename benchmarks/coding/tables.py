"""The figures on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from benchmarks.coding.sizes import ours_at
from hushfleet.config.spec import WireSpec

MOST_ABOVE_ENTROPY = 0.03
LEAST_BELOW_EQ20 = {ours_at(WireSpec().step): 14.0, "ours, one-bit": 28.0}

LEAST_MB_S = 100.0
NOISED = ("dp-fedavg", "fedglp-adp")

Rows = Sequence[dict[str, Any]]


def entropy(rows: Rows) -> Iterator[Table]:
    """One for steps of the noise, one for steps of a layer's root mean square."""
    for method, unit in ((NOISED, "the noise"), (("fedavg",), "a layer's root mean square, without noise")):
        shown = [row for row in rows if row["method"] in method]
        if not shown:
            continue
        table = _table(f"bits a parameter of the coded values, and above their entropy; steps of {unit}", "update")
        for bit in shown[0]["bits"]:
            table.add_column(f"{bit['step']:g}", justify="right")
        for row in shown:
            cells = [f"{bit['bits']:.2f} {100 * bit['above_entropy']:+.1f} %" for bit in row["bits"]]
            table.add_row(_place(row), *cells)
        yield table


def payload(rows: Rows) -> Table:
    """A column for each way would not fit a terminal; the ways are lines, and updates of the last round columns."""
    last = [row for row in rows if row["round"] == max(r["round"] for r in rows) and row["method"] == "dp-fedavg"]
    table = _table("bytes of a whole update (times below Eq. (20)), DP-FedAvg, last round", "way")
    for row in last:
        table.add_column(row["network"], justify="right")
    names = list(dict.fromkeys(name for row in rows for name in row["payloads"] if row["method"] == "dp-fedavg"))
    for name in names:
        table.add_row(name, *(_payload(_found(rows, row, name)) for row in last))
    limits = [_bits(row, WireSpec().step)["entropy_bits"] * row["values"] / 8 for row in last]
    table.add_row(f"entropy at step {WireSpec().step:g}", *(f"{limit:,.0f}" for limit in limits))
    return table


def goals(rows: Rows) -> Iterator[str]:
    """The issue's goals, one line each, with the networks that miss them."""
    noised = [row for row in rows if row["method"] in NOISED]
    above: dict[str, float] = {}
    for row in noised:
        worst = max(bit["above_entropy"] for bit in row["bits"])
        above[row["network"]] = max(above.get(row["network"], 0.0), worst)
    yield _goal(
        f"within {100 * MOST_ABOVE_ENTROPY:g} % of the entropy",
        {name: f"{100 * worst:+.1f} %" for name, worst in above.items()},
        [name for name, worst in above.items() if worst > MOST_ABOVE_ENTROPY],
    )
    for way, least in LEAST_BELOW_EQ20.items():
        below: dict[str, float] = {}
        for row in noised:
            times = row["payloads"][way]["times_below_eq20"]
            below[row["network"]] = min(below.get(row["network"], times), times)
        yield _goal(
            f"{way}: at most 1/{least:g} of Eq. (20)",
            {name: f"1/{times:.1f}" for name, times in below.items()},
            [name for name, times in below.items() if times < least],
        )


def _goal(words: str, worst: dict[str, str], missed: Sequence[str]) -> str:
    told = ", ".join(f"{name} {value}" for name, value in worst.items())
    return f"{words}: {'missed by ' + ', '.join(missed) if missed else 'met'}. Worst of each: {told}."


def speed(rows: Rows, *, network: str, values: int) -> Table:
    table = _table(f"10^6 bytes of float32 a second, one core, an update of {network}, {values:,} values", "way")
    for name in ("encode", "decode", "encode memory", "decode memory"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['encode_mb_s']:,.0f}",
            f"{row['decode_mb_s']:,.0f}",
            f"{row['encode_extra_memory']:.2f} vectors",
            f"{row['decode_extra_memory']:.2f} vectors",
        )
    return table


def speed_goal(rows: Rows) -> str:
    """Of the quantised forms, in both directions."""
    worst = {
        row["name"]: min(row["encode_mb_s"], row["decode_mb_s"])
        for row in rows
        if row["name"].startswith("ours, step")
    }
    slow = [name for name, rate in worst.items() if rate < LEAST_MB_S]
    return _goal(
        f"at least {LEAST_MB_S:g} MB of float32 a second", {name: f"{rate:.0f}" for name, rate in worst.items()}, slow
    )


def accuracy(result: dict[str, Any]) -> Table:
    about = f"{result['case']} on {result['images']}, {len(result['seeds'])} seeds"
    table = _table(f"{about}: the global model on the common test", "codec")
    for name in ("accuracy", "over seeds", "to float32, seed by seed", "bits a value", "bytes", "inside the spread"):
        table.add_column(name, justify="right")
    for choice, row in result["codecs"].items():
        table.add_row(
            choice,
            f"{100 * row['accuracy']:.1f} %",
            f"± {100 * row['spread']:.1f}",
            f"{100 * row['difference']:+.1f} ({', '.join(f'{100 * one:+.1f}' for one in row['differences'])})",
            f"{row['bits_per_value']:.2f}",
            f"{row['uplink_bytes']:,.0f}",
            "yes" if row["inside_seed_spread"] else "no",
        )
    return table


def _table(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    return table


def _place(row: dict[str, Any]) -> str:
    return f"{row['network']}, {row['method']}, {row['round']}"


def _found(rows: Rows, row: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Of this update, or of another one of the same federation where only that was measured."""
    for other in (row, *rows):
        if (other["network"], other["method"]) == (row["network"], row["method"]) and name in other["payloads"]:
            return other["payloads"][name]
    return None


def _payload(found: dict[str, Any] | None) -> str:
    if found is None or found["bytes"] is None:
        return "not installed"
    return f"{found['bytes']:,.0f} ({found['times_below_eq20']:.1f})"


def _bits(row: dict[str, Any], step: float) -> dict[str, Any]:
    return next(bit for bit in row["bits"] if bit["step"] == step)
