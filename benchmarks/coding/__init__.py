"""What the update codec costs and gives: real updates, other ways to send them, the parts of `benchmarks/wire.py`."""
