"""Results made by hand for the tests of the report, the schema and the display."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hushfleet.aggregator.report.comparison import comparison
from hushfleet.aggregator.report.verdict import judge
from hushfleet.aggregator.report.words import Words
from hushfleet.aggregator.results.result import (
    Details,
    LocalOnly,
    ModelInfo,
    PrivacyRow,
    Result,
    RoundRow,
    SweepPoint,
    WireInfo,
)

ADJACENCY = "add or remove one device's whole contribution to the round"
QUANTIZED = WireInfo(codec="quantized", step=0.5, step_unit="noise")


def sample(
    devices: int = 2,
    rounds: int = 3,
    *,
    own: float = 0.75,
    alone: float = 0.70,
    own_local: float = 0.90,
    alone_local: float = 0.88,
    epsilon_server: float = 12.2,
    epsilon_release: float = 2.0,
    delta: float = 1e-5,
    sweep: tuple[tuple[float, float], ...] = (),
    layers: int = 2,
    wire: WireInfo = QUANTIZED,
) -> Result:
    """A run in which every device has the same accuracies; `sweep` is (epsilon_server, gain) pairs."""
    ids = [f"board-{n:03d}" for n in range(devices)]
    grown = [(n + 1) / rounds for n in range(rounds)]
    return Result(
        task="digits-fedglp-adp-0001",
        method="fedglp-adp",
        dataset="digits",
        partition="dirichlet-class alpha=1",
        devices=devices,
        seed=7,
        engine="fast",
        model=ModelInfo(name="digits-cnn", parameters=100 * layers, layers=[(f"fc{n}", 100) for n in range(layers)]),
        accounting="strict",
        clip_norm=1.5,
        noise_multiplier=0.5,
        wire=wire,
        boards=dict.fromkeys(ids, "pi-4-4gb"),
        rounds=[
            RoundRow(
                round=n + 1,
                participants=devices,
                accuracy_own_common=own * share,
                accuracy_own_local=own_local * share,
                accuracy_global=0.6 * share,
                loss=2.0 - share,
                uplink_bytes=1000 * devices,
                downlink_bytes=4000 * devices,
                snr_db=-20.0,
                wall_s=2.0,
            )
            for n, share in enumerate(grown)
        ],
        local_only=LocalOnly(accuracy_own_common=alone, accuracy_own_local=alone_local),
        privacy=[
            PrivacyRow(
                device=device,
                unit="device",
                adjacency=ADJACENCY,
                delta=delta,
                epsilon_server=epsilon_server,
                epsilon_release=epsilon_release,
                rounds_charged=rounds,
            )
            for device in ids
        ],
        details=Details(
            devices=ids,
            accuracy_own_common=[[own * share] * devices for share in grown],
            accuracy_own_local=[[own_local * share] * devices for share in grown],
            local_only_common=[alone] * devices,
            local_only_local=[alone_local] * devices,
            personal_share=[[0.3 * share] * layers for share in grown],
            clip_weights=[[1 / layers] * layers for _ in grown],
            label_counts=[[10, 10, 10 + n] for n in range(devices)],
            class_names=["cat", "dog", "<owl & co>"],
            eq20_bytes=[3000.0 * devices] * rounds,
            float32_bytes=[4000.0 * devices] * rounds,
            values_sent=[1000 * devices] * rounds,
            epsilon_server=[[epsilon_server * share] * devices for share in grown],
            epsilon_release=[[epsilon_release * share] * devices for share in grown],
            rounds_accepted=[rounds] * devices,
            uplink_bytes=[1000 * rounds] * devices,
            refusals={ids[0]: {"late": 2}, "stranger": {"unknown-device": 1}},
            declines={ids[-1]: {"memory": 1}},
            privacy_sweep=[
                SweepPoint(
                    noise_multiplier=0.0 if math.isinf(server) else 1.0,
                    epsilon_server=server,
                    epsilon_release=server,
                    accuracy_own_common=alone + gain,
                    gain_over_local_only=gain,
                    gain_standard_error=0.001,
                )
                for server, gain in sweep
            ],
        ),
        versions={"hushfleet": "0.1.0", "numpy": "2.3.1"},
    )


def bare(result: Result) -> Result:
    """The same run as the field leaves it: no accuracies, no ledger, no details."""
    nothing: dict[str, Any] = dict.fromkeys(
        ("accuracy_own_common", "accuracy_own_local", "accuracy_global", "loss", "snr_db", "wall_s")
    )
    return result.but(
        rounds=[row.but(**nothing) for row in result.rounds],
        local_only=LocalOnly(),
        privacy=[],
        details=Details(),
        wire=None,
        seed=None,
        boards={},
    )


def told(result: Result, name: str, **changes: Any) -> str:
    """A sentence on a run, with spaces that may break a line; other numbers of the headline are `changes`."""
    return Words(result, replace(judge(result), **changes)).told(name).replace("\N{NO-BREAK SPACE}", " ")


def rows_of(runs: Mapping[str, Result]) -> list[list[str]]:
    """The rows of a comparison, with its head."""
    table = comparison(runs)
    return [list(table.head), *map(list, table.rows)]
