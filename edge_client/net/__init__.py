"""What a device says to the aggregator, and what it believes of the answers."""
