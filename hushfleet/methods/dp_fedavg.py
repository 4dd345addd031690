"""DP-FedAvg: each device clips its whole update to C and adds Gaussian noise.

McMahan, Ramage, Talwar, Zhang: "Learning Differentially Private Recurrent Language Models", ICLR 2018, in
the form of Eq. (6) of FedGLP-ADP (Xiao, Jiang, Li, 2026), where each of the |P| participants adds noise of
variance sigma^2 C^2 / |P|.

Deviation: `accounting = "strict"` does not divide by |P|, so that sigma is what the server sees.
"""

from __future__ import annotations

from hushfleet.methods.base import Method


class DPFedAvg(Method):
    """What `Method` does: the whole update clipped and noised."""

    name = "dp-fedavg"
    source = "McMahan et al., ICLR 2018; Eq. (6) of FedGLP-ADP"
    summary = "mean of the updates, each clipped as a whole and noised on the device"
