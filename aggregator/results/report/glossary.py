"""What each number of a report means, in short plain sentences."""

from __future__ import annotations

from hushfleet.aggregator.results.report.verdict import MEANINGLESS_EPSILON, MODERATE_EPSILON, STRONG_EPSILON

MEANINGS = (
    (
        "own models, common test",
        "Each device's own model after its local training and before aggregation, on the full common test "
        "set; the mean over devices. The FedGLP-ADP paper prints this one.",
    ),
    (
        "own models, own data",
        "The same models on test images with the device's own mix of labels: what its owner notices.",
    ),
    (
        "global model",
        "The aggregated model on the common test set: what a new device would start with.",
    ),
    (
        "alone",
        "The same network trained by each device on its own images only, with as many local steps. "
        "Federating is worth its cost only above this line.",
    ),
    (
        "point",
        "One percentage point of accuracy. One run has one seed: small differences may be chance.",
    ),
    (
        "epsilon_server",
        "Protection of a device against whoever sees its own updates: the aggregator, the broker, a tap on "
        "the wire. This is what local differential privacy means.",
    ),
    (
        "epsilon_release",
        "Protection against whoever sees only the aggregate models. It may be quoted only if nobody sees the "
        "single updates.",
    ),
    (
        "levels of protection",
        f"Up to {STRONG_EPSILON:g} strong, up to {MODERATE_EPSILON:g} moderate, up to "
        f"{MEANINGLESS_EPSILON:g} weak, above that none that is meaningful: at {MEANINGLESS_EPSILON:g} the "
        "bound on what an observer can tell is a certainty for every purpose.",
    ),
    (
        "delta",
        "The probability with which the promise of epsilon may fail. It should be far below one over the "
        "number of devices (or records, where records are the unit).",
    ),
    ("adjacency", "The two cases that an observer must not tell apart."),
    (
        "signal to noise",
        "The largest norm an update can have, against the norm of the noise added to it, in dB.",
    ),
    (
        "codec, step",
        "How noised values are written for the wire. A step of half the noise's standard deviation makes the noise 2 % "
        "stronger in variance, a step of the whole 8 %, one bit a parameter 57 %. Epsilons do not change.",
    ),
    ("personalised share", "The part of a layer's parameters that stays on the device and is never sent."),
    ("clip weight", "The part of the clip norm that a layer may use."),
    (
        "Eq. (20)",
        "What the FedGLP-ADP paper counts for a round: 32 bits for each shared parameter and a mask of one "
        "bit for each parameter.",
    ),
    (
        "accepted, charged",
        "Updates that reached the global model, and rounds that the device's ledger paid for.",
    ),
)
