"""A process without NumPy gets the same bits as one with it, and stays without it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from hushfleet.apart import apart
from hushfleet.errors import HushfleetError
from hushfleet.privacy.accountant import Step, epsilon

HISTORY = [[0.9, 0.02, 300], [4.0, 1.0, 12]]


def without_numpy(code: str, *arguments: str) -> Any:
    """What `found` is at the end of the code, in a new process."""
    script = f"import json, sys\n{code}\nassert 'numpy' not in sys.modules\nprint(json.dumps(found))"
    command = [sys.executable, "-c", script, *arguments]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_epsilon_of_sampled_steps_has_the_same_bits() -> None:
    found = without_numpy(
        "from hushfleet.privacy.accountant import Step, epsilon\n"
        "found = epsilon([Step(*row) for row in json.loads(sys.argv[1])], delta=1e-6)",
        json.dumps(HISTORY),
    )
    assert found == epsilon([Step(*row) for row in HISTORY], delta=1e-6)


def test_an_error_comes_with_its_text() -> None:
    arguments = ("hushfleet.wire.format.difference:apply_all", bytes(8), [b"HD"], "t", [2])
    with pytest.raises(HushfleetError) as expected:
        apart(*arguments)
    found = without_numpy(
        "from hushfleet.apart import apart\nfrom hushfleet.errors import HushfleetError\n"
        "try:\n    apart('hushfleet.wire.format.difference:apply_all', bytes(8), [b'HD'], 't', [2])\n"
        "except HushfleetError as error:\n    found = str(error)"
    )
    assert found == str(expected.value)
