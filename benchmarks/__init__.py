"""Scripts that measure: run them in the repository's root as `python -m benchmarks.NAME`. Results: docs/performance.md."""
