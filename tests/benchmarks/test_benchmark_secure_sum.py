"""`benchmarks/secure_sum.py` with few and small cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import secure_sum


@pytest.mark.slow
def test_every_cell_is_measured(monkeypatch: pytest.MonkeyPatch, figures_of: Callable[..., Any]) -> None:
    peer = {"device_s": 1.0, "up": 10_000, "down": 5_000, "server_s": 2.0}
    monkeypatch.setattr(secure_sum, "flower", lambda clients, *rest: {"missing": "n/a"} if clients == 4 else peer)
    shown = figures_of(secure_sum.main, "--clients 4,30 --sizes 300")
    assert len(shown["cells"]) == 2 * len(secure_sum.DROP_OUTS)
    for cell in shown["cells"]:
        own, ratios = cell["ours"], cell["ratios"]
        values = 300 + own["missing"] * -(-300 // own["packed"])
        assert 2 * values < own["up"] < 2 * values + 500
        assert own["member_up"] > own["up"]
        assert 0 < own["device_s"] < own["member_s"]
        assert bool(ratios) == (cell["clients"] == 30)
        if ratios:
            assert ratios["bytes"] == pytest.approx((own["up"] + own["down"]) / 15_000)
