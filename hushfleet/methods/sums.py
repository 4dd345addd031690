"""Which methods go with `accounting = "secure"`, where the aggregator sees nothing but sums of whole numbers."""

from __future__ import annotations

from hushfleet.config.spec import PrivacySpec
from hushfleet.errors import PrivacyError
from hushfleet.methods.method import Method
from hushfleet.methods.stages import ClipLayers, ClipWhole, Report, ScaleWhole, Transform


def check_sums(method: Method, privacy: PrivacySpec) -> None:
    """Raises `PrivacyError`, with the reason, for a method whose updates cannot be added unseen."""
    reason = _reason(method, privacy)
    if reason:
        raise PrivacyError(
            f'with privacy.accounting = "secure" {reason}; take another method, or "strict" or "as-published"'
        )


def _reason(method: Method, privacy: PrivacySpec) -> str:
    if privacy.unit != "device":
        return 'noise is drawn on whole numbers that protect a device: privacy.unit must be "device"'
    if not method.personal.same_for_all:
        return "all devices send the same entries, and with this method each has a mask of its own"
    if method.server.weighs:
        return "an update that nobody sees cannot be weighed, and this method's server weighs them"
    if any(isinstance(stage, Report) for stage in method.stages):
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
