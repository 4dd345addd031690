"""Scripts that measure, run as `python -m benchmarks.NAME` in the repository's root; results: docs/performance.md."""
