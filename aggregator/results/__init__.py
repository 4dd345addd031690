"""What a run is worth afterwards: `result.json` and its report."""
