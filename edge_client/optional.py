"""Names the modules that a guardian imports only if a task or its owner asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hushfleet.at_need import at_need

__all__ = [
    "agreement",
    "drift",
    "membership_lists",
    "new_samples",
    "question",
    "retention",
    "secure_round",
    "unmasking_share",
]  # fmt: skip

if TYPE_CHECKING:
    from hushfleet.edge_client import membership_lists
    from hushfleet.edge_client.board import drift, new_samples, retention
    from hushfleet.methods import question
    from hushfleet.secure import agreement, secure_round, unmasking_share
else:
    drift = at_need("hushfleet.edge_client.board.drift")  # limits.tell_drift, and tasks that hold samples out
    new_samples = at_need("hushfleet.edge_client.board.new_samples")  # limits.tell_new
    retention = at_need("hushfleet.edge_client.board.retention")  # data.keep, data.max_mib
    question = at_need("hushfleet.methods.question")  # rounds that ask
    membership_lists = at_need("hushfleet.edge_client.membership_lists")  # rounds with secure aggregation
    agreement = at_need("hushfleet.secure.agreement")
    unmasking_share = at_need("hushfleet.secure.unmasking_share")
    secure_round = at_need("hushfleet.secure.secure_round")
