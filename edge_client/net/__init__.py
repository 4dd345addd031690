"""What a device says to the aggregator, and what it accepts in answer."""
