"""The way of an update from an offer to the exact sums."""
