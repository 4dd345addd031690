"""Messages of a device to the aggregator, and the answers that it accepts."""
