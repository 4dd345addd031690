"""The command `hushfleet` and the sub-commands of the aggregator."""
