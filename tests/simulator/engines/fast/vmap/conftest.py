"""What the tests of cohorts as arrays share."""

from __future__ import annotations

import pytest
import torch

from support.accelerator import TORCH_DEVICES


@pytest.fixture(params=TORCH_DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """PyTorch's name of each device that is here."""
    return str(request.param)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
