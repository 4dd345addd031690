"""The traffic between devices and aggregator, to the byte (docs/wire.md)."""
