"""An MQTT connection behind a small interface."""
