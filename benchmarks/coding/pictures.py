"""The figures as one picture: bytes beside the alternatives, distance to the entropy, accuracy against bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.outputs import COLOURS
from hushfleet.config.spec import WireSpec

SHOWN_NETWORK = "mnist-cnn"


def draw(figure: Any, figures: dict[str, Any]) -> None:
    """A panel for each part that was measured."""
    panels = [
        (part, panel)
        for part, panel in (("sizes", _payloads), ("sizes", _entropy), ("speed", _speed), ("accuracy", _accuracy))
        if figures.get(part)
    ]
    columns = min(2, len(panels))
    for number, (part, panel) in enumerate(panels):
        panel(figure.add_subplot(-(-len(panels) // columns), columns, number + 1), figures[part])


def _payloads(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    networks = [row["network"] for row in rows]
    network = SHOWN_NETWORK if SHOWN_NETWORK in networks else networks[0]
    row = next(row for row in rows if row["network"] == network and row["method"] == "dp-fedavg")
    found = {name: one["bytes"] for name, one in row["payloads"].items() if one["bytes"]}
    names = sorted(found, key=found.__getitem__, reverse=True)
    colours = [COLOURS["ours"] if name.startswith("ours") else COLOURS["other"] for name in names]
    axes.barh(names, [8 * found[name] / row["values"] for name in names], color=colours)
    limit = next(bit["entropy_bits"] for bit in row["bits"] if bit["step"] == WireSpec().step)
    words = f"entropy at step {WireSpec().step:g}: {limit:.2f}"
    axes.axvline(limit, color=COLOURS["limit"], linestyle="--", linewidth=1, label=words)
    _doubling(axes)
    axes.set_xlabel("bits a parameter, whole update")
    axes.set_title(f"{network}, DP-FedAvg, first round")
    axes.legend(fontsize=8)


def _entropy(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    for number, network in enumerate(dict.fromkeys(row["network"] for row in rows)):
        bits = [bit for row in rows if row["network"] == network and row["method"] != "fedavg" for bit in row["bits"]]
        axes.plot(
            [bit["step"] for bit in bits],
            [100 * bit["above_entropy"] for bit in bits],
            marker="osv^Dx"[number % 6],
            linestyle="",
            label=network,
            alpha=0.7,
        )
    axes.axhline(3, color=COLOURS["limit"], linestyle="--", linewidth=1)
    _doubling(axes)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step, in units of the noise")
    axes.set_title("coded values above their entropy, %")
    axes.legend(fontsize=8)


def _speed(axes: Any, speed: dict[str, Any]) -> None:
    rows = [row for row in speed["rows"] if row["name"] != "memory copy"]
    places = range(len(rows))
    for side, offset, colour in (("encode", 0.2, "ours"), ("decode", -0.2, "third")):
        values = [row[f"{side}_mb_s"] for row in rows]
        axes.barh([place + offset for place in places], values, 0.38, color=COLOURS[colour], label=side)
    axes.axvline(speed["memory_copy_mb_s"], color=COLOURS["limit"], linestyle="--", linewidth=1, label="memory copy")
    axes.set_yticks(list(places), [row["name"] for row in rows])
    axes.set_xscale("log")
    axes.set_xlabel("MB of float32 a second, one core")
    axes.set_title(f"speed, {speed['network']}")
    axes.legend(fontsize=8, loc="lower right")


def _accuracy(axes: Any, results: Sequence[dict[str, Any]]) -> None:
    for result, colour in zip(results, ("ours", "second", "third", "other"), strict=False):
        codecs = sorted(result["codecs"].items(), key=lambda item: item[1]["bits_per_value"])
        xs = [row["bits_per_value"] for _, row in codecs]
        ys = [100 * row["accuracy"] for _, row in codecs]
        spread = [100 * row["spread"] for _, row in codecs]
        axes.errorbar(xs, ys, yerr=spread, color=COLOURS[colour], marker="o", capsize=2, label=result["case"])
        for (name, _), x, y in zip(codecs, xs, ys, strict=True):
            axes.annotate(name, (x, y), fontsize=7, xytext=(2, 4), textcoords="offset points")
    _doubling(axes)
    axes.set_xlabel("bits a parameter, whole update")
    axes.set_title("accuracy, %, mean and deviation over seeds")
    axes.legend(fontsize=8)


def _doubling(axes: Any) -> None:
    """A logarithmic x axis with plain numbers."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
