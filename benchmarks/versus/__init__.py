"""The parts of `benchmarks/simulation.py`: workloads, data, the contest and what is shown of it."""
