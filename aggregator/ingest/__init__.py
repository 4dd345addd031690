"""Processing of an update from its offer to the exact sums."""
