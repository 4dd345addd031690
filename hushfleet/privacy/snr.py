"""The ratio of signal to noise in what is sent: it tells whether a noise level can work at all."""

from __future__ import annotations

import math

from hushfleet.errors import PrivacyError


def snr_db(signal_norm: float, noise_std: float, count: int) -> float:
    """Signal over noise in dB: `signal_norm` against noise of `noise_std` on `count` entries.

    inf without noise, -inf without signal. The norm of a real update is private: compute this on the
    device for the device's owner, or with the clip norm in its place, and do not send it.
    """
    if not all(0 <= value < math.inf for value in (signal_norm, noise_std, count)):
        raise PrivacyError(f"norms must be finite, zero or more: {signal_norm}, {noise_std} on {count} entries")
    if noise_std == 0 or count == 0:
        return math.inf
    return 20 * math.log10(signal_norm / (noise_std * math.sqrt(count))) if signal_norm > 0 else -math.inf
