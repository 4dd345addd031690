"""Defines the traffic between devices and aggregator, byte by byte (docs/wire.md)."""
