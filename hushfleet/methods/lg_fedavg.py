"""LG-FedAvg: each device has lower layers of its own below a head that all share.

Liang, Liu, Liu, Salakhutdinov, Morency: "Think Locally, Act Globally: Federated Learning with Local and Global
Representations", 2020, Algorithm 1. Clip and noise of `[privacy]` are those of DP-FedAvg, on the head alone.

Deviation: the local part begins as the initial global model's; the paper begins with a model that FedAvg has trained.
Deviation: every device has the same weight. The paper weighs by sample count, which is a function of private data.
Deviation: the paper's auxiliary and adversarial losses on local representations are left out.
"""

from __future__ import annotations

from hushfleet.methods.heads import HeadMethod


class LGFedAvg(HeadMethod):
    """What `HeadMethod` does, the other way round."""

    name = "lg-fedavg"
    source = "Liang et al., 2020"
    summary = "lower layers stay on the device; the last layers are averaged"
    personal = "backbone"
