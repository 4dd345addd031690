"""How it travels: an MQTT connection behind a small interface."""
