"""The results of a run: `result.json` and its report."""
