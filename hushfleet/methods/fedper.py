"""FedPer: the last layers stay on the device, the others are averaged; both train together.

Arivazhagan, Aggarwal, Singh, Choudhary: "Federated Learning with Personalization Layers", 2019, Algorithm 1. Clip and
noise of `[privacy]` are those of DP-FedAvg, on the backbone alone.

Reading: the paper draws each device's first head on the device; here it is the initial global model's, so that
devices differ by their data alone.
Deviation: every device has the same weight. The paper weighs by sample count, which is a function of private data.
"""

from __future__ import annotations

from hushfleet.methods.heads import HeadMethod


class FedPer(HeadMethod):
    """What `HeadMethod` does: the head is personal."""

    name = "fedper"
    source = "Arivazhagan et al., 2019"
    summary = "the last layers stay on the device; the others are averaged"
