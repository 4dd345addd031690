"""Checks which methods work with `accounting = "secure"`, which opens updates only as sums of integers."""

from __future__ import annotations

from hushfleet.errors import PrivacyError
from hushfleet.methods.local import GradientRule, PartOrder, Sgd, SharedOnly
from hushfleet.methods.method import Method, TrainingConfig
from hushfleet.methods.stages import ClipLayers, ClipWhole, NumberReport, ScaleWhole, Transform
from hushfleet.wire.format.spec import PrivacySpec


def check_sums(method: Method, privacy: PrivacySpec, config: TrainingConfig) -> None:
    """Raises `PrivacyError`, with the reason, for a method whose updates cannot be added up unseen.

    :param method: as the paper's file lists its parts, for any unit of privacy.
    """
    of_records = privacy.unit == "record"
    reason = _reason_of_records(method.by_record(), privacy, config) if of_records else _reason(method)
    if reason:
        raise PrivacyError(
            f'with privacy.accounting = "secure" {reason}; take another method, or "strict" or "as-published"'
        )


def _reason_of_records(method: Method, privacy: PrivacySpec, config: TrainingConfig) -> str:
    """Returns why a method is refused with the unit `record`; empty if it is accepted.

    A device must send one sum over its records, of vectors that depend on one record each. The training has no noise
    before the sum has it. So nothing may be carried from batch to batch, or from round to round, except values that all
    devices received. Only parts that are known to comply are accepted, but no class derived from them.
    """
    training = method.training
    if privacy.batches != 1 or not config.is_plain:
        return (
            'with privacy.unit = "record" a round is one plain step, and the sum has the noise of its batch: give '
            "method.optimizer = 'sgd' without momentum, weight decay and schedule, and method.local_steps = 1"
        )
    plain = (type(training), type(training.gradient), training.distillation) == (Sgd, GradientRule, None)
    if not plain or training.gradient != GradientRule() or type(training.order) not in (PartOrder, SharedOnly):
        return 'with privacy.unit = "record" a device sends the sum of plain gradients, and this method\'s are others'
    if training.penalties or method.stages:
        return 'with privacy.unit = "record" nothing but gradients goes into a sum, and with this method more does'
    if not vars(type(method.personal)).get("begins_alike", False):
        return 'with privacy.unit = "record" gradients may not see what a device has of its own, and here they do'
    if method.server.weighs or method.max_preference is not None:
        return "all devices count alike and add the same part of the sum's noise, and with this method they do not"
    return ""


def _reason(method: Method) -> str:
    if not method.personal.same_for_all:
        return "all devices send the same entries, and with this method each has a mask of its own"
    if method.remembers_sent:
        return "no later update may contain a device's part of the noise, and here devices remember what they sent"
    if method.server.weighs:
        return "an update that nobody sees cannot be weighed, and this method's server weighs them"
    if any(isinstance(stage, NumberReport) for stage in method.stages):
        return "nothing travels beside the sum, and this method's devices report numbers"
    if any(isinstance(stage, ClipLayers) for stage in method.stages):
        return "the update is clipped as a whole, and this method clips layer by layer"
    transforms = [stage for stage in method.stages if isinstance(stage, Transform)]
    if any(each.adds_noise or type(each).raw is not Transform.raw for each in transforms):
        return "nothing may leave that no noise covers, and with this method it does"
    if not (len(method.stages) > 1 and isinstance(method.stages[-2], (ClipWhole, ScaleWhole)) and method.gaussian):
        return "an update is clipped to the round's clip norm and then noised for it, and this method's is not"
    if method.max_preference is not None:
        return "all devices add the same part of the sum's noise, and with this method each chooses its own"
    return ""
