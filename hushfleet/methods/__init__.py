"""The published methods, by name; each is one file in this folder."""

from __future__ import annotations

from typing import Any

from hushfleet.config.schema import from_plain
from hushfleet.config.spec import PrivacySpec
from hushfleet.errors import BadInput
from hushfleet.methods.acdp_pfsd import ACDPpFSD
from hushfleet.methods.apdp_fl import APDPFL
from hushfleet.methods.base import Method
from hushfleet.methods.blur_lus import BlurLus
from hushfleet.methods.ditto import Ditto
from hushfleet.methods.dp_fedavg import DPFedAvg
from hushfleet.methods.dp_fedsam import DPFedSAM
from hushfleet.methods.dp_fedsim import DPFedSim
from hushfleet.methods.fedaddp import FedADDP
from hushfleet.methods.fedavg import FedAvg
from hushfleet.methods.feddpa import FedDPA
from hushfleet.methods.fedglp_adp import FedGLPADP
from hushfleet.methods.fedper import FedPer
from hushfleet.methods.fedprox import FedProx
from hushfleet.methods.fedrep import FedRep
from hushfleet.methods.lg_fedavg import LGFedAvg
from hushfleet.methods.perfreezeclip import PerFreezeClip
from hushfleet.methods.pfedsd import PFedSD
from hushfleet.model.params import ParamLayout

METHODS: dict[str, type[Method]] = {
    m.name: m
    for m in (
        FedAvg,
        DPFedAvg,
        DPFedSim,
        FedADDP,
        FedDPA,
        FedGLPADP,
        FedProx,
        FedPer,
        LGFedAvg,
        FedRep,
        Ditto,
        ACDPpFSD,
        PFedSD,
        PerFreezeClip,
        APDPFL,
        BlurLus,
        DPFedSAM,
    )
}


def method_class(name: str) -> type[Method]:
    if name not in METHODS:
        raise BadInput(f"method.name = {name!r}: must be one of {', '.join(sorted(METHODS))}")
    return METHODS[name]


def make_method(
    name: str, config: dict[str, Any], privacy: PrivacySpec, layout: ParamLayout, *, rounds: int
) -> Method:
    """A method from its plain configuration. Raises `Malformed` for a bad field, `BadInput` for a bad name."""
    cls = method_class(name)
    return cls(from_plain(cls.config_class, config, where="method"), privacy, layout, rounds=rounds)
