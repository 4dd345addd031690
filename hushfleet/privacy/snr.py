"""The signal-to-noise ratio of an update: it shows whether training can work at this noise level."""

from __future__ import annotations

import math

from hushfleet.errors import PrivacyError


def snr_db(signal_norm: float, noise_std: float, count: int) -> float:
    """Returns signal over noise in dB: `signal_norm` against noise of `noise_std` on `count` entries.

    It is inf without noise, -inf without signal. The norm of a real update is private: compute this on
    the device for its owner, or with the clip norm in place of the norm, and do not send it.

    >>> round(snr_db(1.0, 0.1, 100), 6)
    0.0
    """
    if not all(0 <= value < math.inf for value in (signal_norm, noise_std, count)):
        raise PrivacyError(f"norms must be finite, zero or more: {signal_norm}, {noise_std} on {count} entries")
    if noise_std == 0 or count == 0:
        return math.inf
    return 20 * math.log10(signal_norm / (noise_std * math.sqrt(count))) if signal_norm > 0 else -math.inf
