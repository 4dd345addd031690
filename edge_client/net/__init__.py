"""Messages of a device to the aggregator, and checks of the answers."""
