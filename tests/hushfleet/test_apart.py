"""A process without NumPy gets the same bits as one with it, and stays without it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from hushfleet.apart import apart
from hushfleet.errors import HushfleetError
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.wire.format.difference import encode_difference

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


def test_a_model_of_differences_has_the_same_bits() -> None:
    base, rng = np.zeros(40, np.float32), np.random.default_rng(1)
    first = encode_difference(base, rng.normal(size=40).astype(np.float32), task="t", round=1, counts=[40], steps=[0.1])
    again = first.result + rng.normal(size=40).astype(np.float32)
    second = encode_difference(first.result, again, task="t", round=2, counts=[40], steps=[0.2])
    found = without_numpy(
        "from hushfleet.apart import apart\n"
        "base, *chain = map(bytes.fromhex, sys.argv[1:])\n"
        "found = apart('hushfleet.wire.format.difference:apply_all', base, chain, 't', [40]).hex()",
        *(data.hex() for data in (base.tobytes(), first.data, second.data)),
    )
    assert bytes.fromhex(found) == second.result.tobytes()


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
