"""What the tests of cohorts as arrays share."""

from __future__ import annotations

import pytest

from support.accelerator import TORCH_DEVICES


@pytest.fixture(params=TORCH_DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """PyTorch's name of each device that is here."""
    return str(request.param)
