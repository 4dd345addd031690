"""The frameworks that `benchmarks/simulation.py` compares: one module each, run in a separate process."""
