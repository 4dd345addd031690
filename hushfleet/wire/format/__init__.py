"""Encodes messages, chunks, updates and model differences as bytes."""
