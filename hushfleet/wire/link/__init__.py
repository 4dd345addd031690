"""Provides an MQTT connection with a small interface."""
