"""The worker: it trains for a board's guardian in a process of its own, without keys and without a network."""
