"""The versions that all nodes of a cluster must share."""

from __future__ import annotations

import ast
from pathlib import Path

from hushfleet.simulator.engines.ray.fingerprint import PACKAGES

ROOT = Path(__file__).parents[4]


def test_a_checkout_has_the_digest_of_its_wheel() -> None:
    """In a wheel all of these lie inside `hushfleet`, and so they are digested there."""
    assigned = {
        target.id: node.value
        for node in ast.parse((ROOT / "setup.py").read_text()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    nested = ast.literal_eval(assigned["NESTED"])
    assert sorted(PACKAGES) == sorted(["hushfleet", *(f"hushfleet.{folder}" for folder in nested)])
