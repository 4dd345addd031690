"""The aggregator's durable state."""
