"""Evaluates models, and makes a device's own head, its anomaly threshold and a model for other classes."""
