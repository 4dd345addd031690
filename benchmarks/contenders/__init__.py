"""What is compared in `benchmarks/simulation.py`: one module a contender, each run in a process of its own."""
