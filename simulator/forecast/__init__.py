"""Forecasts the time, bytes, energy and privacy cost of a task, without training."""
