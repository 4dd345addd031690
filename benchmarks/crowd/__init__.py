"""Hundreds of real devices in a few processes, for `benchmarks/fleet.py`."""
