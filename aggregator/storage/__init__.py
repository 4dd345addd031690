"""What the aggregator must not forget."""
