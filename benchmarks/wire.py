"""Measures the bytes of an update on the wire against alternatives and the entropy.

    python -m benchmarks.wire [--data-dir DIR] [--quick] [--json F]

Real updates of each compact network, of the first round and of the sixth, from small federations by the product's own
trainer: DP-FedAvg, FedGLP-ADP (whose masks keep parameters private) and FedAvg (no noise). Bits per parameter of the
encoded values against the empirical entropy of the quantised values, layer by layer; bytes of whole signed updates
against Eq. (20) of the FedGLP-ADP paper, float32, float16, zlib, JSON and QSGD.

To measure the accuracy cost of a codec on any task, run `hushfleet simulate --set wire.codec=one-bit`.

Without --data-dir all images are the digits of scikit-learn, upscaled, or random if the digits do not fit.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.common import Figures, make_parser, names_option, table, write
from benchmarks.device import write_images
from benchmarks.simulation import write_digits
from benchmarks.updates import Update, train_update
from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.results.metrics import eq20_bytes
from hushfleet.data.sets import load
from hushfleet.errors import BadInput
from hushfleet.models import get_model
from hushfleet.wire.format import quantized
from hushfleet.wire.format.spec import WireSpec

NETWORKS = {
    "digits-cnn": ("digits",),
    "mnist-cnn": ("mnist",),
    "fashion-mnist-cnn": ("fashion-mnist", "mnist"),
    "svhn-cnn": ("svhn", "cifar10"),
    "cifar10-cnn": ("cifar10",),
    "emnist-cnn": ("emnist", "mnist"),
}
"""The networks, and the data sets that fit them, best first."""
NOISE = {"dp-fedavg": 0.1, "fedglp-adp": 0.1, "fedavg": 0.0}
"""Weak noise, so that updates contain signal: signal needs more bits than noise alone."""
ROUNDS, DEVICES, SAMPLES = 6, 3, 160
QSGD_LEVELS, QSGD_BUCKET = 127, 512


def images_of(network: str, data_dir: Path | None, folder: Path) -> tuple[Figures, Path | None, str]:
    """Returns the keys of `[data]`, the folder of the data sets, and a name of the images."""
    names, model = NETWORKS[network], get_model(network)
    if names == ("digits",):
        return {"name": "digits"}, None, "digits"
    for name in names if data_dir else ():
        with suppress(BadInput):
            load(name, data_dir=data_dir)
            return {"name": name}, data_dir, name
    if tuple(model.input_shape) == (1, 28, 28) and model.classes == 10:
        return {"name": "mnist"}, write_digits(folder / "digits", DEVICES * SAMPLES), "digits, upscaled"
    samples = max(DEVICES * SAMPLES, 2 * model.classes)
    return write_images(folder / "images", model.input_shape, classes=model.classes, samples=samples), None, "random"


def real_update(
    network: str, method: str, rounds: int, samples: int, folder: Path, data_dir: Path | None
) -> tuple[Update, str]:
    """Returns the first device's update of the last of `rounds` rounds, and a name of the images.

    :param samples: training images of each device.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, data_dir, words = images_of(network, data_dir, folder)
    noise = NOISE[method]
    task = {
        "name": f"wire-{network}",
        "seed": 1,
        "model": {"name": network},
        "method": {"name": method, "optimizer": "adam", "learning_rate": 1e-3, "batch_size": 16},
        "privacy": {
            "accounting": "as-published",
            "noise_multiplier": noise,
            **({"clip_norm": 2.0} if noise else {}),
        },
        "data": {"test_fraction": 0.0, **data, "devices": DEVICES, "limit": DEVICES * samples},
        "round": {"rounds": rounds},
        "wire": {"codec": "float32"},
    }
    return train_update(parse_task(task), folder / "run", data_dir=data_dir)[1], words


def steps_of(update: Update) -> dict[float, WireSpec]:
    """Returns steps in units of the noise, or without noise in units of each layer's root mean square."""
    if update.noised:
        return {step: WireSpec(step=step) for step in (0.25, 0.5, 1.0, 2.0)}
    return {step: WireSpec(relative_step=step) for step in (0.01, 0.05, 0.25)}


def ours_of(update: Update) -> dict[str, WireSpec]:
    wires = {f"ours, {form}": WireSpec(codec=form) for form in ("float32", "float16")}
    wires |= {f"ours, step {step:g}": wire for step, wire in steps_of(update).items()}
    return wires | ({"ours, one-bit": WireSpec(codec="one-bit")} if update.noised else {})


def bits_of(update: Update, step: float, wire: WireSpec) -> Figures:
    """Compares the encoded values, without header and signature, with their entropy."""
    header, sent = update.header_for(wire), np.empty_like(update.values)
    key = header.dither_key
    coded = quantized.encode_values(update.values, header.coding(update.counts), sent)
    scale = np.repeat(np.asarray(header.steps, np.float32), update.counts).astype(np.float64)
    levels = np.rint(sent / scale + quantized.dither(key, sent.size)).astype(np.int64)  # back from x' = (q - u) * step
    limit = entropy_bytes(levels, update.counts)
    per_value = 8 / update.values.size
    return {
        "step": step,
        "bits": per_value * len(coded),
        "entropy_bits": per_value * limit,
        "above_entropy": len(coded) / limit - 1,
    }


def entropy_bytes(levels: np.ndarray, counts: Sequence[int]) -> float:
    """Returns the empirical entropy of integers `[k]`, layer by layer. It is a lower limit for codes of single values,
    even if a code fits each layer's own frequencies, which would also have to be sent."""
    bits = 0.0
    for layer in np.split(levels, np.cumsum(counts)[:-1]):
        _, often = np.unique(layer, return_counts=True)
        bits -= float((often * np.log2(often / max(layer.size, 1))).sum())
    return bits / 8


def to_json(values: np.ndarray) -> bytes:
    """Returns a list of the shortest decimals that restore the same float32 values."""
    return json.dumps([float(text) for text in values.astype("U16")], separators=(",", ":")).encode()


LOSSLESS: dict[str, Callable[[np.ndarray], bytes]] = {
    "zlib 6 on float32": lambda values: zlib.compress(values.tobytes(), 6),
    "JSON": to_json,
}
"""Lossless codings."""


def qsgd(values: np.ndarray, rng: np.random.Generator) -> tuple[int, int, np.ndarray]:
    """Applies QSGD (Alistarh et al., NeurIPS 2017) with 127 levels and a sign, and buckets of 512 values with L2 norms.

    :return: bytes with 8 bits per value; bytes with the paper's code (for each nonzero value, the gap before it and its
        level in Elias' recursive code, and a sign bit); float32 `[k]`, the values at the receiver. They are unbiased:
        each value is rounded up or down at random.
    """
    buckets = -(-values.size // QSGD_BUCKET)
    padded = np.zeros((buckets, QSGD_BUCKET))
    padded.reshape(-1)[: values.size] = values
    unit = np.linalg.norm(padded, axis=1, keepdims=True) / QSGD_LEVELS
    scaled = np.divide(np.abs(padded), unit, out=np.zeros_like(padded), where=unit > 0)
    levels = np.floor(scaled + rng.random(scaled.shape)).astype(np.int64)
    restored = (np.sign(padded) * levels * unit).reshape(-1)[: values.size].astype(np.float32)
    bits = 32 * buckets
    for bucket in levels:
        places = np.flatnonzero(bucket)
        gaps = np.diff(places, prepend=-1)
        bits += sum(elias_bits(int(number)) for number in (*gaps, *bucket[places])) + places.size
    return values.size + 4 * buckets, -(-bits // 8), restored


def elias_bits(number: int) -> int:
    """Returns the length of Elias' recursive (omega) code of a positive number."""
    bits = 1
    while number > 1:
        bits += number.bit_length()
        number = number.bit_length() - 1
    return bits


def payloads_of(update: Update) -> dict[str, Figures]:
    """Returns the bytes of one whole update in each coding; for lossy codings also the added variance."""

    def added(sent: np.ndarray) -> float:
        """Returns the added variance in units of the noise's variance, or without noise of the mean square."""
        scale = np.repeat(np.square(update.header.noise_stds if update.noised else update.rms), update.counts)
        error = np.square((sent - update.values).astype(np.float64))
        return float((error[scale > 0] / scale[scale > 0]).mean())

    eq20 = eq20_bytes([update.values.size], update.size)
    rows: dict[str, Figures] = {"Eq. (20)": {"bytes": eq20}, "float32, all parameters": {"bytes": 4 * update.size}}
    for name, wire in ours_of(update).items():
        encoded = update.encoded(wire)
        rows[name] = {"bytes": len(encoded.data), "added_variance": added(encoded.sent)}
    rows |= {name: {"bytes": len(encode(update.values))} for name, encode in LOSSLESS.items()}
    fixed, elias, restored = qsgd(update.values, np.random.default_rng(0))
    rows["QSGD-8, fixed length"] = {"bytes": fixed, "added_variance": added(restored)}
    rows["QSGD-8, Elias code"] = {"bytes": elias, "added_variance": added(restored)}
    return {name: {**row, "times_below_eq20": eq20 / row["bytes"]} for name, row in rows.items()}


def measure_sizes(options: Any, folder: Path) -> list[Figures]:
    rows = []
    for network in options.networks:
        for method in NOISE:
            for rounds in (1, 2 if options.quick else ROUNDS):
                place = folder / network / f"{method}-{rounds}"
                samples = 40 if options.quick else SAMPLES
                update, words = real_update(network, method, rounds, samples, place, options.data_dir)
                bits = [bits_of(update, step, wire) for step, wire in steps_of(update).items()]
                about = {"network": network, "images": words, "method": method, "round": rounds}
                sizes = {"parameters": update.size, "values": update.values.size}
                rows.append({**about, **sizes, "bits": bits, "payloads": payloads_of(update)})
    return rows


def show(figures: Figures) -> None:
    sizes = figures["sizes"]
    noised = [row for row in sizes if row["method"] != "fedavg"]
    for unit, rows in (("the noise", noised), ("a layer's root mean square", [r for r in sizes if r not in noised])):
        lines = []
        for row in rows:
            bits = {f"{bit['step']:g}": f"{bit['bits']:.2f} {bit['above_entropy']:+.1%}" for bit in row["bits"]}
            lines.append({"update": f"{row['network']}, {row['method']}, round {row['round']}", **bits})
        table(f"Bits a parameter of the coded values, and above their entropy; steps of {unit}", lines)
    last = {row["network"]: row["payloads"] for row in noised if row["method"] == "dp-fedavg"}
    lines = []
    for way in dict.fromkeys(way for payloads in last.values() for way in payloads):
        found = {network: payloads[way] for network, payloads in last.items() if payloads.get(way, {}).get("bytes")}
        lines.append({"way": way} | {n: f"{f['bytes']:,.0f} ({f['times_below_eq20']:.1f})" for n, f in found.items()})
    table("Bytes of a whole update (times below Eq. (20)), DP-FedAvg, last round", lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--networks", type=names_option(NETWORKS), default=tuple(NETWORKS), metavar="NAME,...")
    parser.add_argument("--data-dir", type=Path, help="folder with mnist/, cifar10/, ...")
    parser.add_argument("--quick", action="store_true", help="few rounds and images: shows that it runs, says little")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        figures = {"sizes": measure_sizes(options, Path(folder))}
    show(figures)
    write(options, {**figures, "default_step": WireSpec().step, "quick": options.quick})


if __name__ == "__main__":
    main()
