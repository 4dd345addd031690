"""The engines: how a simulated fleet is made to work."""
