"""Checks that the owner of a board allows a round: its plan against the task package, and both against `[limits]`.

All of it is known before any training. The reasons depend only on the task and the limits, so they may be sent.
"""

from __future__ import annotations

from hushfleet.edge_client.board.config import LimitsSection
from hushfleet.edge_client.storage.declines import Declined
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.task_method import TaskMethod
from hushfleet.privacy.charge import Charge
from hushfleet.privacy.ledger import LedgerView
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.spec import SecureSpec, TaskSpec


def allowed_charge(
    plan: RoundPlan,
    spec: TaskSpec,
    method: TaskMethod,
    terms: RoundTerms,
    *,
    limits: LimitsSection,
    ledger: LedgerView,
    now: int,
) -> Charge:
    """Returns the charge of the round to the device. Raises `Declined` (`no-privacy`) or `BudgetExceeded`.

    :param now: counted unix seconds.
    """
    charge = method.charge(terms)
    if spec.privacy.secure is not None:
        check_trust(spec.privacy.secure, limits)
    _check_raw(charge, spec.method, limits)
    _check_split(plan, spec, charge.noise_split, limits)
    _check_multiplier(charge, limits)
    limits.budget.check(ledger, charge, now=now)
    return charge


def check_stored(charge: Charge, method: str, limits: LimitsSection) -> None:
    """Checks, before a stored update is sent, that the owner still allows it. Raises `Declined`.

    The update is already charged, so the spent budget is not checked.
    """
    _check_raw(charge, method, limits)
    _check_allowed_split("round", charge.noise_split, limits)
    _check_multiplier(charge, limits)


def _check_raw(charge: Charge, method: str, limits: LimitsSection) -> None:
    if charge.raw and limits.accounting != "as-published":
        raise _no_privacy(
            f"{method} would send without noise: {', '.join(charge.raw)}. This device's limits.accounting is "
            f'"{limits.accounting}": run the task with privacy.accounting = "strict", or let the device\'s owner set '
            f'limits.accounting = "as-published"'
        )


def _check_multiplier(charge: Charge, limits: LimitsSection) -> None:
    if charge.noise_multiplier < limits.min_noise_multiplier:
        raise _no_privacy(
            f"this device would send with a noise multiplier of {charge.noise_multiplier:.4g}; its "
            f"limits.min_noise_multiplier is {limits.min_noise_multiplier:g}"
        )


def _check_split(plan: RoundPlan, spec: TaskSpec, split: int, limits: LimitsSection) -> None:
    """:param split: the number by which the mechanism divides the noise; 1 if it does not, whatever the plan says."""
    if spec.privacy.secure is not None:  # the plan names no device, and divides no noise
        _check_allowed_split("task", split, limits)
        return
    asked = f"the plan divides the noise among {plan.noise_split} devices"
    if split > spec.privacy.noise_split:
        raise _no_privacy(f"{asked}, but the task package names {spec.privacy.noise_split}")
    if plan.noise_split > max(1, len(plan.cohort)):
        raise _no_privacy(f"{asked}, but only {len(plan.cohort)} take part")
    _check_allowed_split("plan", split, limits)


def _check_allowed_split(who: str, split: int, limits: LimitsSection) -> None:
    if 0 < limits.noise_split < split:
        raise _no_privacy(
            f"the {who} divides the noise among {split} devices; this device's limits.noise_split is "
            f"{limits.noise_split}"
        )


def check_trust(secure: SecureSpec, limits: LimitsSection) -> None:
    """Checks that a task assumes no more trust than the owner allows. Raises `Declined`.

    This also applies to committee members, not only to devices that train.
    """
    if limits.accounting == "strict":
        raise _no_privacy(
            "the task counts on secure aggregation, in which this device's own update has a part of the noise only. "
            'This device\'s limits.accounting is "strict", which trusts nobody: run the task with privacy.accounting = '
            '"strict", or let the device\'s owner set limits.accounting = "secure"'
        )
    if secure.min_devices < limits.min_devices:
        raise _no_privacy(
            f"the task opens sums of {secure.min_devices} devices; this device's limits.min_devices is "
            f"{limits.min_devices}"
        )
    if secure.honest_fraction > limits.honest_fraction:
        raise _no_privacy(
            f"the task takes a share of {secure.honest_fraction:g} of the devices to be honest; this device's "
            f"limits.honest_fraction is {limits.honest_fraction:g}"
        )


def _no_privacy(reason: str) -> Declined:
    return Declined("no-privacy", reason)
